"""Composition root of a `Runtime`: connects to the controller and opens every part of the runtime.

It is the only module of `fray.runtime` that imports all the parts; they do not import it.
"""

from __future__ import annotations

import importlib
import os
import pwd
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio
from attrs import Factory, frozen

from fray.errors import ChannelClosed, FrayError, Refused, Unauthorized, Unreachable
from fray.model.environment import EnvironmentSpec
from fray.model.ids import AttemptId, BlobId, Namespace, SessionId, mint, split_attempt
from fray.model.messages.client import ClientHello, ProcessMark, Role
from fray.net.channel.public import RedialPolicy
from fray.net.controller_address import is_insecure
from fray.net.own_address import own_address
from fray.net.transport import AnyCredential, Network, current_credential, has_other_credential, is_relayed
from fray.net.transports.routed_network import RoutedNetwork
from fray.net.transports.tls_listener import TlsServer
from fray.net.tunnels.transport import Tunnels
from fray.runtime import tracing
from fray.runtime.actors.server import ACTOR_HOST, ActorHostServer
from fray.runtime.actors.threaded_actor import ThreadedActor
from fray.runtime.background import open_background_nursery
from fray.runtime.calls.caller import Caller
from fray.runtime.controller_client.client import ControllerClient
from fray.runtime.controller_client.logs import OnLog
from fray.runtime.objects import imported_future as imported_future  # makes futures picklable
from fray.runtime.runtime import CONNECTIONS, Connections, Runtime, notify_opened, runtime_var

CONNECT_WITHIN_S = 5.0
"""Seconds until the first answer of the controller is overdue."""
REFUSED_FOR_S = 0.5
"""Seconds for which a refused address is retried before a driver gives up: the controller may be just starting."""
# A node ends its attempts by then as well, so that the cluster may place them elsewhere after the lease (600 s).
CONTROLLER_ABSENT_S = 590.0
"""Seconds without the controller until this side gives the connection up: the lease less a margin."""
# Errors of single waits say more than the cancellation of the block; 0.1 s lets them arrive first.
WAITERS_FIRST_S = 0.1
"""Seconds that tasks waiting in the block have, once the session has ended, before the block is cancelled."""
GOODBYE_WITHIN_S = 10.0
"""Seconds that a driver's goodbye waits for the end of everything the session owns."""


def local_user() -> str:
    """Return the user of this process: ``FRAY_USER``, else ``USER``, else the system's name of its user.

    Services, cron and containers set no ``USER``; without the last resort all of them would share one nameless account.
    """
    named = os.environ.get("FRAY_USER") or os.environ.get("USER")
    try:
        return valid_text(named or pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:  # a container whose user has no name
        return ""


def valid_text(name: str) -> str:
    """Return a name that this process was given by the system; one that is not UTF-8 is read as Latin-1."""
    try:
        name.encode()
    except UnicodeEncodeError:
        # Old systems have login names in Latin-1, in which every byte is a character: the name as its owner knows it.
        return os.fsencode(name).decode("latin-1")
    return name


@frozen(kw_only=True)
class RuntimeConfig:
    """Identity and settings of a runtime to open."""

    role: Role
    attempt_id: AttemptId | None = None
    """Attempt of a job, which names its session. None: a driver; its session gets a name of its own."""
    job_name: str = ""
    namespace: Namespace | None = None
    """Namespace of the session; None: the controller chooses one."""
    user: str = Factory(local_user)
    node: str = ""
    bundle: BlobId = ""
    workspace: str = ""
    environment: EnvironmentSpec = Factory(EnvironmentSpec)
    host_directory: Callable[[], str] | None = None
    """Directory for the sockets of actors; see `ActorHostServer`."""
    advertise: str = ""
    """Host name or IP address under which other machines reach the actors of this process, if it is networked."""
    finds_address: bool = False
    """Flag: the address from which the controller sees this process, if it is its own, replaces ``advertise``."""
    networked: bool = False
    """Flag: actors of this process may listen for other machines."""
    grace_s: float | None = None
    """Seconds the controller waits for a driver lost without a goodbye. None: the controller's default (30 s)."""
    process: ProcessMark | None = None
    """Identity of a driver's process; proves its death to a controller on the same machine."""

    @property
    def waits_for_controller(self) -> bool:
        """Return whether opening waits for the controller. The code of a job may not need the controller at all."""
        return self.role is not Role.JOB

    @property
    def give_up_s(self) -> float:
        """Seconds without the controller until this side gives up: not before the controller gives up the session."""
        # Otherwise the driver could give up while the controller still keeps its jobs for it.
        return max(CONTROLLER_ABSENT_S, self.grace_s or 0.0)

    def hello(self, rng: random.Random) -> ClientHello:
        """Return the first message to the controller."""
        return ClientHello(
            # A job's session is its attempt, so that two processes of one attempt can never both have a session.
            session=self.attempt_id or f"session-{mint(rng)}",
            role=self.role,
            attempt_id=self.attempt_id,
            namespace=self.namespace,
            grace_s=self.grace_s,
            process=self.process,
            user=self.user,
        )


@asynccontextmanager
async def open_runtime(
    network: Network,
    addresses: Sequence[str],
    credential: AnyCredential,
    config: RuntimeConfig,
    *,
    rng: random.Random,
    on_log: OnLog | None = None,
) -> AsyncIterator[Runtime]:
    """Connect to the controller and hold the connection; on exit say goodbye, which ends all this session owns.

    Args:
        addresses: addresses of the controller, in order of preference.
        on_log: receives the output of the jobs of this session.

    Raises:
        Unreachable, Refused, Unauthorized, ProtocolMismatch: the controller cannot be reached or refuses us.
    """
    if config.role is Role.DRIVER:  # jobs do so when they start, and tools record nothing
        tracing.configure()
    # Outside of the nursery: only there is it known what left the block.
    async with _single_error() as ending, open_background_nursery() as nursery:
        if config.waits_for_controller:
            # Only for drivers: the address that a job gets from its node is right, so the extra dial would be wasted.
            await _check_reachable(network, addresses[0], credential)
        hello = config.hello(rng)
        runtime = _make_runtime(addresses[0], config, hello.session, nursery, rng)
        token = runtime_var.set(runtime)  # before any task starts: the code of actors must find it

        # Called with the first use: a job that only computes never opens a connection.
        def connect() -> Connections:
            tunnels = Tunnels(rng)
            # The relay is trusted no more than other routers: tunnels have TLS as soon as the way to it has.
            if addresses[0].startswith("tls:"):
                tunnels.tls = _tls_server(network)
            client = ControllerClient(hello, on_log=on_log, tunnels=tunnels)
            # The controller may be restarting: its jobs continue, and their session is resumed.
            policy = RedialPolicy(refused_is_final=False, give_up_s=config.give_up_s)
            run_client = partial(client.run, network, addresses, credential, policy=policy, rng=rng)
            routed = RoutedNetwork(network, tunnels, is_relayed)
            caller = Caller(routed, client.names, session=hello.session, rng=rng)
            # A job whose session has ended is ended by its node, or finishes its work.
            if config.waits_for_controller:
                client.on_session_end = caller.end
            _start(runtime, [run_client, caller.run], lambda: _end_connections(client, caller))
            return Connections(routed, client, caller)

        runtime.services.provide(CONNECTIONS, connect)
        runtime.services.provide(ACTOR_HOST, lambda: _make_actor_host(runtime, config))
        try:
            if on_log is not None:
                # Before the first welcome: it is then among the first subscriptions.
                runtime.client.logs.follow(None)
            # A driver should fail at once with a clear error. Code of a job need not wait, nor fail while the
            # controller is away.
            if config.waits_for_controller:
                welcome = await runtime.client.wait_ready(CONNECT_WITHIN_S)
                runtime.namespace, runtime.user = welcome.namespace, welcome.user or runtime.user
                # Only for drivers: a job whose session has ended is ended by its node, or finishes its work.
                nursery.start_soon(_end_with_session, runtime, ending)
            if on_log is not None:
                # Before the first launch: a short job may end before the subscription arrives, and its output would
                # arrive after its end, or never.
                await runtime.client.wait_subscribed(CONNECT_WITHIN_S)
            # After the namespace is known, which the callbacks may use.
            notify_opened(runtime)
            yield runtime
        finally:
            runtime_var.reset(token)
            # A goodbye also when cancelled: otherwise the controller would keep this session's jobs for its grace
            # period.
            with trio.CancelScope(shield=True):
                await _leave(runtime)


async def _end_with_session(runtime: Runtime, ending: list[FrayError]) -> None:
    """End the block when the session of a driver ends: fail everything that waits, then raise."""
    await runtime.client.closed.wait()
    error = runtime.client.ended
    if error is None or runtime.client.is_closing:
        return
    # First: the waits that are failed below raise the same error, which `_single_error` then merges.
    ending.append(error)
    runtime.caller.end(error)
    await trio.sleep(WAITERS_FIRST_S)
    raise error


@asynccontextmanager
async def _single_error() -> AsyncIterator[list[FrayError]]:
    """Let the end of the session leave the block once, as a bare error, however many waits in the block it has ended.

    Other errors raised on the way out stay beside it.
    """
    ending: list[FrayError] = []
    try:
        yield ending
        if not ending:
            return
    # Each failed wait in the block raises its copy, in groups of any depth. Anything else among them is a real error.
    except (BaseExceptionGroup, FrayError) as error:
        if not ending or not _is_only(error, ending[0]):
            raise
    raise ending[0]


def _is_only(error: BaseException, end: FrayError) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_only(each, end) for each in error.exceptions)
    # By type and text, since each waiter gets a copy (with a traceback of its own).
    return type(error) is type(end) and str(error) == str(end)


def _make_runtime(
    address: str, config: RuntimeConfig, session: SessionId, nursery: trio.Nursery, rng: random.Random
) -> Runtime:
    return Runtime(
        session=session,
        role=config.role,
        rng=rng,
        nursery=nursery,
        job_id=split_attempt(config.attempt_id)[0] if config.attempt_id is not None else None,
        job_name=config.job_name,
        attempt_id=config.attempt_id,
        node=config.node,
        namespace=config.namespace or "",
        user=config.user,
        address=address,
        bundle=config.bundle,
        environment=config.environment,
        workspace=config.workspace,
    )


def _tls_server(network: Network) -> TlsServer:
    """Return the certificate that hosts of this process show, the same at all their listeners."""
    found = getattr(network, "tls_server", None)
    return found if isinstance(found, TlsServer) else TlsServer()


def _make_actor_host(runtime: Runtime, config: RuntimeConfig) -> ActorHostServer:
    client = runtime.client
    host = ActorHostServer(
        runtime.network, incarnation=runtime.session, rng=runtime.rng, directory=config.host_directory
    )
    host.relayed, host.is_networked = True, config.networked

    def advertise() -> str:
        # Each time: the address of a machine may change while it runs.
        found = own_address(client.seen_from) if config.finds_address else ""
        return (found or config.advertise) if config.networked else ""

    host.advertise = advertise
    host.has_tls = not is_insecure(runtime.address)
    host.in_doubt = lambda: client.in_doubt
    host.make_context = lambda call: _actor_context(runtime, isinstance(call.actor, ThreadedActor))
    _start(runtime, [host.run], host.end_calls)
    return host


def _start(runtime: Runtime, tasks: Sequence[Callable[[], Awaitable[None]]], end: Callable[[], None]) -> None:
    """Start background tasks of ``runtime``, from any thread; call ``end`` instead if it has left the cluster."""

    def start() -> None:
        # Between the request of a thread and this call the runtime may have been closed.
        if runtime.has_left:
            end()
            return
        for task in tasks:
            runtime.nursery.start_soon(task)

    # Directly where possible: the caller uses the service in the same step.
    if _is_in_loop_of(runtime):
        start()
        return
    try:
        runtime.token.run_sync_soon(start)
    except trio.RunFinishedError:
        end()


def _is_in_loop_of(runtime: Runtime) -> bool:
    try:
        return trio.lowlevel.current_trio_token() is runtime.token
    except RuntimeError:  # no loop on this thread
        return False


def _end_connections(client: ControllerClient, caller: Caller) -> None:
    error = ChannelClosed("this job has left the cluster", reason="closed")
    client.on_end(error)
    caller.end(error)


async def _leave(runtime: Runtime) -> None:
    # First: from now on `_start` ends new services instead of starting them.
    runtime.has_left = True
    host, connections = runtime.services.get(ACTOR_HOST), runtime.services.get(CONNECTIONS)
    # Before the connection to the controller: cleanup hooks may still call other actors and use names.
    if host is not None:
        await host.shutdown(0)
    if connections is None:
        return
    # A driver waits until all it owns has ended (P1). What a job owns ends with the job; its node reports that.
    if runtime.role is not Role.JOB:
        await connections.client.close("driver left", GOODBYE_WITHIN_S)
    else:
        await connections.client.close("job ended", 0.0)


def _actor_context(runtime: Runtime, on_thread: bool) -> object:
    """Return what a method with a ``ctx`` parameter gets: an `ActorContext`, in blocking form on threads.

    The APIs are layers above this package, and a job may never need them: one is imported when the first such method is
    called. Always a package as a whole, since several threads may do this at once: a thread that imports one module of
    a package which another thread is still importing takes the import locks in another order, and Python then returns a
    module that is only half initialised.
    """
    if on_thread:
        return importlib.import_module("fray.blocking").actor_context.context_of(runtime)
    fray = importlib.import_module("fray")
    fray.load()
    return fray.api.actor_context.context_of(runtime)


async def _check_reachable(network: Network, address: str, credential: AnyCredential) -> None:
    """Dial once, so that a wrong address or token is reported at once and not after the channel's timeout."""
    give_up_at = trio.current_time() + REFUSED_FOR_S
    while True:
        try:
            transport = await network.dial(address, current_credential(credential), timeout_s=CONNECT_WITHIN_S)
        except Refused as error:
            if trio.current_time() >= give_up_at:
                raise Unreachable(
                    f"no controller listens at {address.partition(':')[2]}: start fray-controller there, "
                    "or correct FRAY_CLUSTER_SPEC",
                    address=address,
                ) from error
            await trio.sleep(0.05)
        except Unauthorized as error:
            if not has_other_credential(credential, error):
                raise
        else:
            # Without a goodbye: nothing was said on this connection.
            transport.abort()
            return
