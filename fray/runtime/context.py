"""Where the running code stands: which cluster, which job, which connection.

A `Runtime` is one process's (in `local`: one job's) place in a cluster. `current()` finds it through a context
variable, and in a job's own process from any thread.
"""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial

import trio
from attrs import define, field

from fray.errors import FrayError, Refused, Unreachable
from fray.model.ids import AttemptId, JobId, Namespace, SessionId, mint
from fray.model.messages.client import ClientHello, LogLines, ProcessMark, Role
from fray.net.channel import RedialPolicy
from fray.net.transport import Credential, Network
from fray.net.tunnel import RelayedNetwork, Tunnels
from fray.runtime.caller import Caller
from fray.runtime.host import Host
from fray.runtime.links import ControllerLink
from fray.runtime.services import open_services
from fray.runtime.thread_actor import ThreadActor

CONNECT_WITHIN_S = 5.0
"""How long the first answer of the controller may take."""
REFUSED_FOR_S = 0.5
"""How long a refused address is tried before a driver gives up: a controller that is just starting."""
CONTROLLER_ABSENT_S = 590.0
"""How long the controller may be away before this side gives its conversation up: the lease less a margin."""
GOODBYE_WITHIN_S = 10.0
"""How long a driver's goodbye waits for the end of all it owns."""


@define(eq=False)
class Runtime:
    """One place in a cluster, open between `open_runtime`'s enter and exit."""

    session: SessionId
    role: Role
    network: Network
    link: ControllerLink
    caller: Caller
    host: Host
    rng: random.Random
    nursery: trio.Nursery
    job_id: JobId | None = None
    job_name: str = ""
    attempt_id: AttemptId | None = None
    node: str = ""
    namespace: Namespace = ""
    address: str = ""
    """Where the controller is, as `FRAY_CLUSTER_ADDRESS` says it."""
    token: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token)
    """Of the loop it lives in: how other threads reach it."""
    extras: dict[str, object] = field(factory=dict)
    """Objects of the public API that belong to this runtime (its `Cluster`)."""


_current: ContextVar[Runtime | None] = ContextVar("fray_runtime", default=None)
_of_process: Callable[[], Runtime] | None = None


def current() -> Runtime:
    """The runtime of the running code.

    Raises:
        FrayError: neither in `open_cluster` nor in a job.
    """
    runtime = _current.get()
    if runtime is not None:
        return runtime
    if _of_process is not None:
        return _of_process()
    raise FrayError(
        "no cluster here: run inside `async with fray.open_cluster()`, or in a job that Fray started",
        reason="no cluster",
    )


def current_or_none() -> Runtime | None:
    """The runtime of the running code, without starting anything."""
    return _current.get()


def find() -> Runtime | None:
    """The runtime of the running code, or of the job whose process this is (it is started then); None in neither."""
    runtime = _current.get()
    return runtime if runtime is not None or _of_process is None else _of_process()


def set_current(runtime: Runtime) -> None:
    """For a task that works for another thread: from here on `current` gives this runtime."""
    _current.set(runtime)


def set_process_runtime(provider: Callable[[], Runtime] | None) -> None:
    """In a job's process: how threads and code outside Fray's tasks find the runtime."""
    global _of_process
    _of_process = provider


@asynccontextmanager
async def open_runtime(
    network: Network,
    addresses: Sequence[str],
    credential: Credential | None,
    *,
    role: Role,
    rng: random.Random,
    host_directory: Callable[[], str] | None = None,
    attempt_id: AttemptId | None = None,
    job_id: JobId | None = None,
    job_name: str = "",
    namespace: Namespace | None = None,
    node: str = "",
    advertise: str = "127.0.0.1",
    networked: bool = False,
    grace_s: float = 30.0,
    process: ProcessMark | None = None,
    wait_connected: bool = True,
    on_log: Callable[[LogLines], None] | None = None,
) -> AsyncIterator[Runtime]:
    """Connect to the controller and hold the connection; on exit say goodbye, which ends all this session owns.

    ``on_log`` is told what the jobs of this session write.

    Raises:
        Unreachable, Refused, Unauthorized, ProtocolMismatch: the controller cannot be reached or refuses us.
    """
    session = attempt_id or f"session-{mint(rng)}"
    hello = ClientHello(
        session=session,
        role=role,
        attempt_id=attempt_id,
        namespace=namespace,
        grace_s=grace_s,
        process=process,
        user=os.environ.get("USER", ""),
    )
    tunnels = Tunnels(rng)
    direct, network = network, RelayedNetwork(network, tunnels)
    link = ControllerLink(hello, on_log=on_log, tunnels=tunnels)
    async with open_services() as nursery:
        if wait_connected:
            await _reach(direct, addresses[0], credential)
        caller = Caller(network, link, session=session, rng=rng)
        host = Host(network, incarnation=session, rng=rng, directory=host_directory)
        host.advertise, host.networked, host.relayed = advertise, networked, True
        runtime = Runtime(
            session=session,
            role=role,
            network=network,
            link=link,
            caller=caller,
            host=host,
            rng=rng,
            nursery=nursery,
            job_id=job_id,
            job_name=job_name,
            attempt_id=attempt_id,
            node=node,
            namespace=namespace or "",
            address=addresses[0],
        )
        host.make_context = lambda call: _context_of(runtime, isinstance(call.actor, ThreadActor))
        token = _current.set(runtime)  # before any task of ours starts: what actors run must see it
        try:
            policy = RedialPolicy(refused_ends=False, give_up_s=CONTROLLER_ABSENT_S)
            nursery.start_soon(partial(link.run, direct, addresses, credential, policy=policy, rng=rng))
            nursery.start_soon(caller.run)
            nursery.start_soon(host.run)
            if wait_connected:
                runtime.namespace = (await link.wait_ready(CONNECT_WITHIN_S)).namespace
            if on_log is not None:
                link.follow_logs(None)
            yield runtime
        finally:
            _current.reset(token)
            with trio.CancelScope(shield=True):
                await host.shutdown(0)
                await link.close("driver left" if role is Role.DRIVER else "job ended", _goodbye_within_s(role))


def _goodbye_within_s(role: Role) -> float:
    return GOODBYE_WITHIN_S if role is Role.DRIVER else 0.0


def _context_of(runtime: Runtime, on_thread: bool) -> object:
    """What a method with a ``ctx`` parameter gets: on a thread, that of the blocking face. It is a word of the public
    faces, which this layer does not know: hence found by name, when the first method asks for it."""
    return importlib.import_module("fray.blocking.actors" if on_thread else "fray.actors").context_of(runtime)


async def _reach(network: Network, address: str, credential: Credential | None) -> None:
    """Dial once, so that a wrong address or token is said at once and not after the channel's patience."""
    give_up_at = trio.current_time() + REFUSED_FOR_S
    while True:
        try:
            transport = await network.dial(address, credential, timeout_s=CONNECT_WITHIN_S)
        except Refused as error:
            if trio.current_time() >= give_up_at:
                raise Unreachable(
                    f"no controller listens at {address.partition(':')[2]}: start fray-controller there, "
                    "or correct FRAY_CLUSTER_SPEC",
                    address=address,
                ) from error
            await trio.sleep(0.05)
        else:
            transport.abort()
            return
