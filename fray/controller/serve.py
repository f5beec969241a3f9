"""The controller as a task: opens a store, assembles all parts over it and listens."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import field, frozen

from fray.controller.accepted_tokens import AcceptedTokens
from fray.controller.connections.gateway import Gateway
from fray.controller.context import ControllerContext
from fray.controller.history.capacity import record_capacity
from fray.controller.join_tokens import JoinTokens
from fray.controller.loop import Loop, anchored_clock
from fray.controller.metrics.job_counts import JobCounts
from fray.controller.people import People
from fray.controller.provider_driver import ProviderDriver, ProviderFactory, node_address
from fray.controller.restore import restore_state
from fray.controller.store import RELEASE, Store
from fray.controller.workspaces.bundles import BundleRetention, BundleStore
from fray.model.ids import mint
from fray.model.messages.node import NodeHello
from fray.model.messages.session import VERSION
from fray.model.policy.policy import Policy
from fray.net.process_identity import pid_namespace_id
from fray.net.transport import Network
from fray.scheduler.effects import ControllerStarted
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State

if TYPE_CHECKING:
    from fray.controller.certificate_authority import CertificateAuthority

CLOCK_BEHIND_S = 1.0
"""Difference of clocks that is logged at the start; in a restart at once it is milliseconds, or nothing."""

_log = logging.getLogger("fray.controller")


@frozen
class RunningController:
    """A controller that has started. To crash it, cancel its task: nothing but the store survives it."""

    addresses: tuple[str, ...]
    epoch: int
    cluster_id: str
    state: State = field(repr=False)
    """The live state, to inspect."""
    gateway: Gateway
    loop: Loop
    join_tokens: JoinTokens
    """Issuer of the tokens with which new machines join."""


async def run_controller(
    store: Store,
    network: Network,
    addresses: Sequence[str],
    token: str | AcceptedTokens,
    *,
    clock: Callable[[], float] | None = None,
    rng: random.Random | None = None,
    declared: Sequence[NodeHello] = (),
    declares_all_nodes: bool = False,
    rules: SchedulerConfig | None = None,
    policy: Policy | None = None,
    retention: BundleRetention | None = None,
    in_place: bool = False,
    env_vars: Mapping[str, str] | None = None,
    provider_factories: Mapping[str, ProviderFactory] | None = None,
    machines_directory: Path | None = None,
    authority: CertificateAuthority | None = None,
    task_status: trio.TaskStatus[RunningController] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the controller of the cluster in ``store`` until cancelled.

    Args:
        token: of the cluster; as `AcceptedTokens` it may be replaced while this runs.
        clock: seconds since the epoch. Default: anchored at the start, then as the monotonic clock; the loop is that
            of this controller alone then, and its delay is measured.
        rng: source of ids and keys; default: the system's.
        declared, declares_all_nodes: the nodes that will join; a request that fits none of them is refused as never
            schedulable.
        rules: times and limits of the scheduler.
        policy: shares, quotas and priorities. Default: all users alike.
        retention: how many workspaces are kept, and for how long.
        in_place: jobs run in the processes of their drivers, so workspaces are not uploaded.
        env_vars: variables of every job; they override those of its node.
        provider_factories: makers of machine providers, by kind. Default: the real ones.
        machines_directory: of machines that are processes. Default: below the store, else the temporary directory.

        authority: issues certificates of nodes; ``network`` shows those of the controller. None: no TLS listener.

    Raises:
        StoreError: the store is damaged, or a save has failed.
        OSError, FrayError: cannot listen on an address.
    """
    rng = rng or random.SystemRandom()
    has_own_loop = clock is None
    clock = clock or anchored_clock()
    context = _open_context(store, clock(), rng, rules, retention)
    clock = continued_clock(clock, context.state.now)
    context.in_place = in_place
    context.env_vars = dict(env_vars or {})
    context.authority = authority
    if authority is not None:
        context.join_tokens.pins = context.people.pins = lambda: authority.pins
    # Makes itself the context's inbox, which the gateway's connections post to.
    loop = Loop(context, clock)
    # In simulations, and in the loop of a driver, it would show what others do there.
    with unwrap_single_error(), context.loop_delay.measuring() if has_own_loop else nullcontext():
        async with trio.open_nursery() as nursery:
            tokens = AcceptedTokens(lambda: (token,)) if isinstance(token, str) else token
            gateway = Gateway(context, tokens, nursery, rng)
            if authority is not None:
                authority.on_replaced = gateway.on_authority_replaced
            started = ControllerStarted(
                epoch=context.epoch,
                declared=tuple(declared),
                declares_all_nodes=declares_all_nodes,
                policy=policy or Policy(),
                cluster=context.cluster_id,
            )
            # Before the first listener: phases of nodes and sessions are still those of the previous controller's
            # connections, and this step marks all of them as silent and restarts their timers in full.
            loop.start(started, gateway.carry_out)
            # After that step, which sets the phases it reads.
            gateway.watch_absent_processes()
            bound: list[str] = []
            for address in addresses:
                serve = gateway.acceptor.handle
                # One after the other, so that an address that is in use fails the start before the loop runs.
                bound.append(await nursery.start(network.listen, address, gateway.keys, serve))
            # After the listeners: new machines are given an address, and port 0 gets its number by listening.
            driver = ProviderDriver(
                context,
                node_address(bound),
                _machines_directory(store, context, machines_directory),
                provider_factories=provider_factories,
            )
            loop.observe(ProviderDriver.CONCERNS, driver.carry_out)
            nursery.start_soon(driver.run)
            loop.observe(JobCounts.CONCERNS, context.job_counts.observe)
            # Last: peers that have connected already wait in the inbox, and find everything set up when the first batch
            # is carried out.
            nursery.start_soon(loop.run)
            nursery.start_soon(context.bundles.run)
            nursery.start_soon(
                record_capacity, context.state, loop.current_time, lambda samples: store.save(capacity=samples)
            )
            if authority is not None:
                nursery.start_soon(authority.run)
            if isinstance(token, AcceptedTokens):
                nursery.start_soon(token.run)
            running = RunningController(
                tuple(bound),
                context.epoch,
                context.cluster_id,
                state=context.state,
                gateway=gateway,
                loop=loop,
                join_tokens=context.join_tokens,
            )
            _log.info(
                "controller started",
                extra={"addresses": bound, "epoch": context.epoch, "jobs": len(context.state.jobs)},
            )
            task_status.started(running)


def continued_clock(clock: Callable[[], float], saved: float) -> Callable[[], float]:
    """Return a clock that advances from ``saved``, the time in the store, if ``clock`` is behind it.

    The scheduler's time never steps back: with a clock that is an hour behind that of the last controller's machine it
    would stand still for this hour, and with it all timers.
    """
    behind_s = max(0.0, saved - clock())
    if behind_s > CLOCK_BEHIND_S:
        _log.warning("the clock of this machine is %.0f s behind the times in the store, which count", behind_s)
    return (lambda: clock() + behind_s) if behind_s else clock


def _machines_directory(store: Store, context: ControllerContext, directory: Path | None) -> Path:
    if directory is not None:
        return directory
    return (
        store.path / "machines"
        if store.path
        # By the cluster's id, so that two clusters in memory do not list each other's machines.
        else Path(tempfile.gettempdir(), f"fray-machines-{context.cluster_id[:8]}")
    )


def _open_context(
    store: Store, now: float, rng: random.Random, rules: SchedulerConfig | None, retention: BundleRetention | None
) -> ControllerContext:
    """Restore everything from the store. The new epoch is saved before any peer can learn it."""
    loaded = store.load()
    meta = loaded.meta
    state = restore_state(store, loaded, now, rules)
    # Cluster id and secret stay for the life of the store: names of machines and all keys are derived from them.
    identity = {
        "cluster_id": meta.get("cluster_id") or mint(rng),
        "secret": meta.get("secret") or rng.randbytes(32).hex(),
        # Nodes ignore desired states of a lower epoch, so that what an old controller still had in its sockets changes
        # nothing.
        "epoch": meta.get("epoch", 0) + 1,
        "pid_namespace": pid_namespace_id(),
        RELEASE: VERSION,
    }
    store.save(meta=identity)
    # Left by a controller that ended between a blob and the transaction that was to refer to it.
    store.delete_blobs([blob for blob in store.blobs() if not state.is_blob_used(blob)])
    secret = bytes.fromhex(identity["secret"])
    # A function and not a set: a sweep asks for what is needed at that moment.
    bundles = BundleStore(store.chunks, lambda: _bundles_needed(state), retention)
    return ControllerContext(
        state,
        store,
        cluster_id=identity["cluster_id"],
        epoch=identity["epoch"],
        secret=secret,
        bundles=bundles,
        join_tokens=JoinTokens(secret, store, JoinTokens.load_units(meta)),
        people=People.load(meta, store, rng),
        # After a reboot, or in another container, the same pid is another process: marks in the store then prove
        # nothing.
        same_pid_namespace=meta.get("pid_namespace") == identity["pid_namespace"] != "",
    )


def _bundles_needed(state: State) -> set[str]:
    """Return the workspaces of jobs that have not ended, and all payloads and values that rows name."""
    found = (job.spec.environment.bundle for job in state.jobs.values() if state.needs_payload(job))
    return {*state.blob_refs, *(bundle for bundle in found if bundle is not None)}


@contextmanager
def unwrap_single_error() -> Iterator[None]:
    """Raise the only error of an exception group by itself; a group with several errors stays a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = [error for error in _flatten(group) if not isinstance(error, trio.Cancelled)]
        if len(errors) == 1:
            # `from` its own cause, so that the group around it is not shown as context.
            raise errors[0] from errors[0].__cause__
        raise


def _flatten(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error
