"""Where the running code stands: which cluster, which job, which connection.

A `Runtime` is one process's (in `local`: one job's) place in a cluster. `current()` finds it through a context
variable, and in a job's own process from any thread.
"""

from __future__ import annotations

import importlib
import os
import pwd
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import trio
from attrs import Factory, define, field, frozen

from fray.errors import FrayError, Refused, Unreachable
from fray.model.environment import EnvironmentSpec
from fray.model.ids import AttemptId, BlobId, JobId, Namespace, SessionId, mint, split_attempt
from fray.model.messages.client import ClientHello, ProcessMark, Role
from fray.net.channel.public import RedialPolicy
from fray.net.transport import Credential, Network, is_relayed
from fray.net.transports.routed_network import RoutedNetwork
from fray.net.tunnels.transport import Tunnels
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.actors.threaded_actor import ThreadedActor
from fray.runtime.background import open_background_nursery
from fray.runtime.calls.caller import Caller
from fray.runtime.controller_client.client import ControllerClient
from fray.runtime.controller_client.logs import OnLog

CONNECT_WITHIN_S = 5.0
"""How long the first answer of the controller may take."""
REFUSED_FOR_S = 0.5
"""How long a refused address is tried before a driver gives up: a controller that is just starting."""
CONTROLLER_ABSENT_S = 590.0
"""How long the controller may be away before this side gives its conversation up: the lease less a margin."""
WAITERS_FIRST_S = 0.1
"""When the session has ended: how long those who waited in the block have before it is cancelled."""
GOODBYE_WITHIN_S = 10.0
"""How long a driver's goodbye waits for the end of all it owns."""


@define(eq=False)
class Runtime:
    """One place in a cluster, open between `open_runtime`'s enter and exit."""

    session: SessionId
    role: Role
    network: Network
    link: ControllerClient
    caller: Caller
    host: ActorHostServer
    rng: random.Random
    nursery: trio.Nursery
    job_id: JobId | None = None
    job_name: str = ""
    attempt_id: AttemptId | None = None
    node: str = ""
    namespace: Namespace = ""
    user: str = ""
    """At whose hands it is here: of a driver, who runs it; of a job, who ran the driver."""
    address: str = ""
    """Where the controller is, as `FRAY_CLUSTER_ADDRESS` says it."""
    bundle: BlobId = ""
    """Of the workspace this job runs in; its children that name none run in it, too."""
    workspace: str = ""
    """Where that is."""
    environment: EnvironmentSpec = field(factory=EnvironmentSpec)
    """This job's own; its children have its packages unless they name others."""
    find_workspace: Callable[[str], Awaitable[Any]] | None = None
    """How a directory becomes a bundle; None: by reading it (`fray.runtime.workspaces.upload`)."""
    token: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token)
    """Of the loop it lives in: how other threads reach it."""
    extras: dict[str, object] = field(factory=dict)
    """Objects of the public API that belong to this runtime (its `Cluster`)."""
    voice: Any = None
    """`fray.runtime.process.progress.Voice` of a job that shares this process with others; else the process has one."""


def user_here() -> str:
    """At whose hands this process is: ``FRAY_USER``, else ``USER``, else the system's name of its user.

    Services, cron and containers set no ``USER``; without the last resort all of them would share as one nobody.
    """
    named = os.environ.get("FRAY_USER") or os.environ.get("USER")
    if named:
        return named
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container whose user has no name
        return ""


@frozen(kw_only=True)
class RuntimeConfig:
    """Who is to have a place in a cluster."""

    role: Role
    attempt_id: AttemptId | None = None
    """Of a job; it names its session. A driver's session gets a name of its own."""
    job_name: str = ""
    namespace: Namespace | None = None
    """None: the controller gives one."""
    user: str = Factory(user_here)
    node: str = ""
    bundle: BlobId = ""
    workspace: str = ""
    environment: EnvironmentSpec = Factory(EnvironmentSpec)
    host_directory: Callable[[], str] | None = None
    """See `Host`."""
    advertise: str = "127.0.0.1"
    """Host or IP under which peers reach what listens here."""
    networked: bool = False
    """Actors here may listen for other machines."""
    grace_s: float | None = None
    """How long the controller waits for a driver that is lost without a goodbye. None: as long as it likes (30 s)."""
    process: ProcessMark | None = None
    """Proves a driver's death to a controller on its machine."""

    @property
    def waits_for_controller(self) -> bool:
        """User code of a job does not: it may not need the controller at all."""
        return self.role is not Role.JOB

    @property
    def patience_s(self) -> float:
        """How long the controller may be away before this side gives up: not before it gives us up."""
        return max(CONTROLLER_ABSENT_S, self.grace_s or 0.0)

    def hello(self, rng: random.Random) -> ClientHello:
        """What the controller is told."""
        return ClientHello(
            session=self.attempt_id or f"session-{mint(rng)}",
            role=self.role,
            attempt_id=self.attempt_id,
            namespace=self.namespace,
            grace_s=self.grace_s,
            process=self.process,
            user=self.user,
        )


_current: ContextVar[Runtime | None] = ContextVar("fray_runtime", default=None)
_of_process: Callable[[], Runtime] | None = None
_to_tell: deque[Callable[[Runtime], object]] = deque()


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


def when_open(tell: Callable[[Runtime], object]) -> None:
    """For what was unpickled before the runtime was there: ``tell`` is called with the next one, in its loop."""
    _to_tell.append(tell)


def set_process_runtime(provider: Callable[[], Runtime] | None) -> None:
    """In a job's process: how threads and code outside Fray's tasks find the runtime."""
    global _of_process
    _of_process = provider


@asynccontextmanager
async def open_runtime(
    network: Network,
    addresses: Sequence[str],
    credential: Credential | None,
    place: RuntimeConfig,
    *,
    rng: random.Random,
    on_log: OnLog | None = None,
) -> AsyncIterator[Runtime]:
    """Connect to the controller and hold the connection; on exit say goodbye, which ends all this session owns.

    Args:
        addresses: of the controller, in order of preference.
        on_log: is told what the jobs of this session write.

    Raises:
        Unreachable, Refused, Unauthorized, ProtocolMismatch: the controller cannot be reached or refuses us.
    """
    async with _one_end() as ending, open_background_nursery() as nursery:
        if place.waits_for_controller:
            await _reach(network, addresses[0], credential)
        tunnels = Tunnels(rng)
        link = ControllerClient(place.hello(rng), on_log=on_log, tunnels=tunnels)
        runtime = _make_runtime(RoutedNetwork(network, tunnels, is_relayed), addresses[0], place, link, nursery, rng)
        token = _current.set(runtime)  # before any task of ours starts: what actors run must see it
        try:
            policy = RedialPolicy(refused_is_final=False, give_up_s=place.patience_s)
            nursery.start_soon(partial(link.run, network, addresses, credential, policy=policy, rng=rng))
            nursery.start_soon(runtime.caller.run)
            nursery.start_soon(runtime.host.run)
            if place.waits_for_controller:
                runtime.namespace = (await link.wait_ready(CONNECT_WITHIN_S)).namespace
                nursery.start_soon(_end_with_session, runtime, ending)
            if on_log is not None:
                link.logs.follow(None)
            while _to_tell:
                _to_tell.popleft()(runtime)
            yield runtime
        finally:
            _current.reset(token)
            with trio.CancelScope(shield=True):
                await _leave(runtime)


async def _end_with_session(runtime: Runtime, ending: list[FrayError]) -> None:
    """A driver whose session has ended has nothing left here: everything that waits is told, and the block ends."""
    await runtime.link.closed.wait()
    error = runtime.link.ended
    if error is None or runtime.link.is_closing:
        return
    ending.append(error)
    runtime.caller.end(error)
    await trio.sleep(WAITERS_FIRST_S)
    raise error


@asynccontextmanager
async def _one_end() -> AsyncIterator[list[FrayError]]:
    """However many waits the end of the session has ended in the block: it comes out of it once, as it is.

    What else was raised on the way out stays, beside it.
    """
    ending: list[FrayError] = []
    try:
        yield ending
        if not ending:
            return
    except (BaseExceptionGroup, FrayError) as error:
        if not ending or not _is_only(error, ending[0]):
            raise
    raise ending[0]


def _is_only(error: BaseException, end: FrayError) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_only(each, end) for each in error.exceptions)
    return type(error) is type(end) and str(error) == str(end)


def _make_runtime(
    network: Network,
    address: str,
    place: RuntimeConfig,
    link: ControllerClient,
    nursery: trio.Nursery,
    rng: random.Random,
) -> Runtime:
    session = link.hello.session
    host = ActorHostServer(network, incarnation=session, rng=rng, directory=place.host_directory)
    host.advertise, host.networked, host.relayed = place.advertise, place.networked, True
    host.in_doubt = lambda: link.in_doubt
    runtime = Runtime(
        session=session,
        role=place.role,
        network=network,
        link=link,
        caller=Caller(network, link.names, session=session, rng=rng),
        host=host,
        rng=rng,
        nursery=nursery,
        job_id=split_attempt(place.attempt_id)[0] if place.attempt_id is not None else None,
        job_name=place.job_name,
        attempt_id=place.attempt_id,
        node=place.node,
        namespace=place.namespace or "",
        user=place.user,
        address=address,
        bundle=place.bundle,
        environment=place.environment,
        workspace=place.workspace,
    )
    host.make_context = lambda call: _context_of(runtime, isinstance(call.actor, ThreadedActor))
    return runtime


async def _leave(runtime: Runtime) -> None:
    await runtime.host.shutdown(0)
    if runtime.role is not Role.JOB:
        await runtime.link.close("driver left", GOODBYE_WITHIN_S)
    else:
        await runtime.link.close("job ended", 0.0)


def _context_of(runtime: Runtime, on_thread: bool) -> object:
    """What a method with a ``ctx`` parameter gets: on a thread, that of the blocking face. It is a word of the public
    faces, which this layer does not know: hence found by name, when the first method asks for it.

    The package as a whole, since several threads may ask at once: one that takes a module out of a package that another
    is still importing meets that other's locks in another order, and Python then hands out half a module.
    """
    return importlib.import_module("fray.blocking" if on_thread else "fray").actors.context_of(runtime)


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
