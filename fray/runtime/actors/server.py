"""Server of the actors of this process: listeners, sessions of callers, and the registered actors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import partial
from itertools import count, islice
from typing import Any

import trio

from fray.errors import ActorDied, ChannelClosed, FrayError, NoSuchActor, ProtocolMismatch
from fray.model.ids import ActorId, SessionId, mint
from fray.model.messages.calls import CallerHello, HostHello
from fray.model.monitoring.served_calls import ACTORS_LIMIT, CALLERS_LIMIT, ActorCalls, CallingProcess, ServedCalls
from fray.model.service_key import ServiceKey
from fray.net.channel.channel import HandlerFactory
from fray.net.channel.public import Acceptor
from fray.net.codec import decode_message, encode_message
from fray.net.controller_address import is_loopback
from fray.net.transport import RELAY_SCHEME, Network, PeerIdentity, is_relayed
from fray.runtime.actors.async_actor import AsyncActor
from fray.runtime.actors.caller_session import CallerSession
from fray.runtime.actors.incoming_call import IncomingCall
from fray.runtime.actors.lifecycle import ActorLifecycle, lifecycle_var
from fray.runtime.actors.methods import NO_GROUP, check_concurrency, has_async_methods
from fray.runtime.actors.pending_calls import PendingLightCalls
from fray.runtime.actors.served_actor import ServedActor
from fray.runtime.actors.threaded_actor import ThreadedActor
from fray.runtime.calls.wire import CALLER_KEY_ID, HOST_LEFT
from fray.runtime.runtime import Runtime
from fray.runtime.threads.executor import SerialExecutor, ThreadExecutor
from fray.runtime.threads.shared_pool import SharedThreadPool

# Long enough for a caller to redial after a short network failure; after that its calls have no one to answer to.
KEEP_S = 60.0
"""Seconds for which a caller without a connection is retained; then its calls are cancelled."""
EVERYWHERE = ("0.0.0.0", "[::]")
"""Places of listeners on all addresses of this machine, of both versions of IP."""
LOOKED_AT = 200
"""Actors of one process whose calls are looked at for a report."""
CLOSE_S = 3.0
"""Longest time that `ActorHostServer.shutdown` takes after its grace, in seconds."""


class ActorHostServer:
    """Server of the actors of one process incarnation. `run` must be running; `listen` opens the default addresses.

    Args:
        network: where to listen.
        incarnation: attempt id, or session id of a driver; callers that look for another one are refused.
        rng: for the key and the channels.
        directory: returns the directory of the Unix socket, or a ``memory:`` or ``tcp:`` address to listen on
            instead. None or empty: ``memory:{incarnation}``.
        key: secret that callers must prove to know. Default: random.
        clock: measures how long user code holds the loop, in seconds; the simulation gives a constant.
        make_executor: makes the started threads of an all-sync actor; the simulation gives `InlineExecutor`.
    """

    def __init__(
        self,
        network: Network,
        *,
        incarnation: str,
        rng: random.Random,
        directory: Callable[[], str] | None = None,
        key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        make_executor: Callable[[str, int], SerialExecutor] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.key = mint(rng, 26) if key is None else key
        self.advertise: Callable[[], str] = lambda: ""
        """Returns the host name or IP address under which other machines reach this process now; empty: none do, and
        `listen` opens no TCP listener."""
        self.is_networked = False
        """True if callers may be on other machines: addresses of loopback are not registered then."""
        self.has_tls = True
        """False if that listener is without TLS, as in a cluster that was started with ``--insecure``."""
        self.relayed = False
        """True if it listens on ``relay:``, too, for callers that cannot dial its other addresses."""
        self.make_context: Callable[[IncomingCall], Any] = lambda call: call
        """Function that makes the context for a method with a ``ctx`` parameter."""
        self.actors: dict[int, ServedActor] = {}
        self.pending = PendingLightCalls(self.actors, self.spawn)
        """Calls of light actors that are not there now."""
        self._network = network
        self._directory = directory
        self.clock = clock
        self._make_executor = make_executor or _start_executor
        self._sessions: dict[SessionId, CallerSession] = {}
        self.in_doubt: Callable[[], bool] = lambda: False
        """True while this incarnation may have been replaced, because its process was stopped for minutes.

        It accepts no callers until the controller has confirmed it. So a machine that wakes after its lease does not
        run the calls that wait in its sockets.
        """
        self._acceptor = Acceptor(
            incarnation,
            self._on_greeting,
            keep_s=KEEP_S,
            ends_with_process=True,
            # Read at each dial, as the owner replaces `in_doubt` after this constructor.
            is_closed=lambda: self.in_doubt(),
            rng=rng,
        )
        self._numbers = count(1)
        self._light_pool: SharedThreadPool | None = None
        self._addresses: list[str] = []
        """Addresses with the place of each listener, also of those that are bound to `EVERYWHERE`."""
        self._public = ""
        """Address of the listener for other machines, as it is bound."""
        self._local = ""
        """Address within this machine or process, once it is open."""
        self._opening = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._ready = trio.Event()
        self._closed: FrayError | None = None
        self._stopped = trio.Event()
        # The owner's cancellation must not end calls and connections before `shutdown` has answered and said goodbye.
        self._scope = trio.CancelScope(shield=True)

    def __repr__(self) -> str:
        return f"<Host {self.incarnation}: {len(self.actors)} actors, {len(self._sessions)} callers>"

    # Listening and shutdown ------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `shutdown`, or until cancelled, which shuts down without grace."""
        async with trio.open_nursery() as frame:
            # The tasks run in a child of this nursery, so that they outlive its cancellation until `shutdown` below has
            # run.
            frame.start_soon(self._run_tasks)
            try:
                await self._ready.wait()
                task_status.started()
                await self._stopped.wait()
            finally:
                with trio.CancelScope(shield=True):
                    await self.shutdown(0)

    async def _run_tasks(self) -> None:
        """Hold the nursery of all tasks, shielded from cancellation until `shutdown` has ended the conversations."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._ready.set()
                    await trio.sleep_forever()
        finally:  # no task is left that would remove the sessions, and with them the buffers lent to them
            for session in self._sessions.values():
                session.cancel_all()
            self._sessions.clear()

    async def listen(self) -> tuple[str, ...]:
        """Open the default addresses, once, and return all addresses."""
        # Two actors may be registered at once, and both need the addresses.
        async with self._opening:
            await self._open_local()
            own = self.advertise()
            if own and not self._public:
                # Any free port: the directory tells callers which one it is.
                self._public = await self._open(f"{'tls' if self.has_tls else 'tcp'}:{EVERYWHERE[':' in own]}:0")
        return self.addresses

    @property
    def public_address(self) -> str:
        """Address, after `listen`, under which other machines reach this process; empty: none do."""
        return self._advertised(self._public) if self._public and self.advertise() else ""

    async def listen_local(self) -> str:
        """Listen on the address within this machine or process only, and return it."""
        async with self._opening:
            return await self._open_local()

    async def _open_local(self) -> str:
        if not self._local:
            self._local = await self._open(self._local_address())
        return self._local

    async def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen on another TCP address and return it as ``host:port``, or beyond this machine, with TLS, as
        ``host:port#fingerprint``. For ``0.0.0.0`` that is the address under which other machines reach this process.

        Raises:
            OSError: it is in use.
        """
        scheme = "tls" if self.has_tls and not is_loopback(host) else "tcp"
        return self._advertised(await self._open(f"{scheme}:{host}:{port}")).partition(":")[2]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses it listens on, in order of preference; the relay comes last."""
        # The relay passes each frame through the controller, so callers try the direct addresses first.
        found = map(self._advertised, sorted(self._addresses, key=is_relayed))
        # Loopback is another machine for callers elsewhere, and those of this machine have a socket file.
        return tuple(each for each in found if not (self.is_networked and _is_loopback_address(each)))

    def _advertised(self, bound: str) -> str:
        """Return the address as others dial it."""
        # A socket that is bound to all addresses has none of its own, and the machine's may change.
        scheme, _, place = bound.partition(":")
        host, _, rest = place.rpartition(":")
        if host not in EVERYWHERE or scheme not in ("tcp", "tls"):
            return bound
        own = self.advertise() or "127.0.0.1"
        return f"{scheme}:[{own}]:{rest}" if ":" in own else f"{scheme}:{own}:{rest}"

    def _local_address(self) -> str:
        place = self._directory() if self._directory is not None else ""
        if place.startswith(("memory:", "tcp:")):
            return place
        return f"unix:{place}/calls.sock" if place else f"memory:{self.incarnation}"

    async def _open(self, address: str) -> str:
        # Listeners live in the nursery, which exists once `run` has begun.
        if self._closed is None:
            await self._ready.wait()
        if self._closed is not None or self._nursery is None:
            raise self._closed or ChannelClosed("this host has been shut down", reason="closed")
        if self.relayed:
            # First, as the call below comes through here again.
            self.relayed = False
            await self._open(f"{RELAY_SCHEME}{self.incarnation}")
        listen = partial(self._network.listen, address, self._authorize, self._acceptor.handle)
        bound: str = await self._nursery.start(listen)
        self._addresses.append(bound)
        return bound

    def _authorize(self, key_id: str) -> str | None:
        # The key is in the directory, so it proves that the caller could read the endpoint; it is never sent itself.
        return self.key if key_id == CALLER_KEY_ID else None

    async def shutdown(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, let those under way end for ``grace_s``, cancel and answer the rest, close the channels.

        Takes at most 3 s longer than the grace, unless user code that is cancelled does not end.
        """
        # The order matters: no new calls, then the running ones end and are answered, then the goodbye names the last
        # call received, and only then the channels close.
        self._close()
        async with trio.open_nursery() as nursery:
            # At once: the grace is for all actors together.
            for actor in self.actors.values():
                nursery.start_soon(actor.drain, grace_s)
        for session in self._sessions.values():
            session.announce_close()
        with trio.move_on_after(CLOSE_S):
            await self._acceptor.close(HOST_LEFT)
        for number in list(self.actors):
            self._remove(number)
        if self._light_pool is not None:
            self._light_pool.stop()
        # Last: the tasks that carried the answers above run in this scope.
        self._scope.cancel()
        self._stopped.set()

    def _close(self) -> None:
        if self._closed is None:
            self._closed = ActorDied("the process of this actor is shutting down")
            for actor in self.actors.values():
                actor.close(self._closed)
            self.pending.close(self._closed)

    def end_calls(self) -> None:
        """Refuse new calls, and cancel and answer those under way: the first step of `shutdown` without grace."""
        self._close()
        for actor in self.actors.values():
            actor.end_calls(None)

    # Actors ----------------------------------------------------------------------------------------------------------

    def register(
        self,
        instance: Any,
        name: str,
        *,
        actor_id: ActorId | None = None,
        max_concurrency: int | None = None,
        concurrency_groups: Mapping[str, int] | None = None,
        executor: SerialExecutor | None = None,
        lifecycle: ActorLifecycle | None = None,
        kill_after_s: float | None = None,
        number: int | None = None,
    ) -> int:
        """Serve ``instance`` and return its number on this host.

        Args:
            actor_id: default: the name and the number.
            max_concurrency: calls under way at once. Default: any number for a class with an async method, else 1.
            concurrency_groups: limits of the groups that methods name with `fray.method`, apart from the others.
            executor: threads for the calls of an all-sync class that are of no group; the host neither starts nor
                stops it. Default: one of its own.
            lifecycle: of this incarnation. Default: a new one, of an object that its owner ends.
            kill_after_s: see `ActorConfig.kill_after_s`.
            number: of a light actor, from `FIRST_LIGHT` on; calls that waited for it are delivered.

        Raises:
            InvalidRequest: a limit is below 1, or a method names a group that has none.
        """
        groups = concurrency_groups or {}
        if number is None:  # the owner of light actors has checked this already, once for all of them
            check_concurrency(type(instance), max_concurrency, groups)
        number = next(self._numbers) if number is None else number
        actor_id = actor_id or f"{name}#{number}"
        lifecycle = lifecycle or ActorLifecycle(
            actor_id, name, type(instance), incarnation=self.incarnation, can_shut_down=False
        )
        token = lifecycle_var.set(lifecycle)  # code that runs in the actor inherits it
        try:
            about = (instance, name, actor_id, number)
            actor = self._make_hosted(*about, max_concurrency, groups, executor, lifecycle.context, kill_after_s)
        finally:
            lifecycle_var.reset(token)
        actor.lifecycle = lifecycle
        actor.make_context = self._context_for
        self.actors[number] = actor
        # After it is in `actors`, where the waiting calls are delivered to.
        self.pending.release(number)
        return number

    def _make_hosted(
        self,
        instance: Any,
        name: str,
        actor_id: ActorId,
        number: int,
        max_concurrency: int | None,
        groups: Mapping[str, int],
        executor: SerialExecutor | None,
        context: Context | None,
        kill_after_s: float | None,
    ) -> ServedActor:
        about = (instance, name, actor_id, number)
        # An executor means that the object was made on its thread, and its calls must run there as well.
        if executor is None and has_async_methods(type(instance)):
            return AsyncActor(
                *about,
                spawn=self.spawn,
                max_concurrency=max_concurrency,
                groups=groups,
                context=context,
                clock=self.clock,
            )
        # Groups have threads of their own, so that a full group never delays the calls of another.
        executors = {group: self.make_executor(f"{name}-{group}", limit) for group, limit in groups.items()}
        executors[NO_GROUP] = executor or self.make_executor(name, max_concurrency or 1)
        # An executor that was passed in belongs to its giver, which also runs constructor and cleanup on it.
        owned = tuple(each for each in executors.values() if each is not executor)
        return ThreadedActor(
            *about,
            spawn=self.spawn,
            executors=executors,
            limits={NO_GROUP: max_concurrency or 1, **groups},
            kill_after_s=kill_after_s,
            owned=owned,
            context=context,
            clock=self.clock,
        )

    def make_executor(self, name: str, threads: int) -> SerialExecutor:
        """Make threads for an all-sync actor and start them; the caller stops them."""
        return self._make_executor(f"fray-{name}", threads)

    def make_light_executor(self, name: str, threads: int) -> SerialExecutor:
        """Return the executor of a light all-sync actor; all of these share one pool of threads."""
        # In the simulation everything runs in one thread.
        if self._make_executor is not _start_executor:
            return self.make_executor(name, threads)
        # Thousands of light actors cannot have a thread each.
        if self._light_pool is None:
            self._light_pool = SharedThreadPool("fray-light", self.spawn)
        return self._light_pool.make_queue(name, threads)

    def calls(self) -> ServedCalls:
        """Return the calls of the busiest actors and callers: a look at counters that are there anyway."""
        # Of thousands of light actors only the first are looked at: the loop must not stop for this.
        looked_at = [
            ActorCalls(actor_id=actor.actor_id, name=actor.name, metrics=actor.metrics())
            for actor in islice(self.actors.values(), LOOKED_AT)
        ]
        looked_at.sort(key=lambda each: (-each.metrics.running - each.metrics.queued, -each.metrics.calls))
        callers = self._callers()
        return ServedCalls(
            actors=tuple(looked_at[:ACTORS_LIMIT]),
            callers=tuple(callers[:CALLERS_LIMIT]),
            more_actors=max(0, len(self.actors) - ACTORS_LIMIT),
            more_callers=max(0, len(callers) - CALLERS_LIMIT),
        )

    def _callers(self) -> list[CallingProcess]:
        """Return the connected processes that have called, those with the most calls under way first."""
        found: dict[str, CallingProcess] = {}
        for session in self._sessions.values():
            if session.dedup.highest:
                # A process may have several connections, named with numbers behind its own name.
                caller = session.session.rpartition("/")[0] or session.session
                known = found.get(caller, CallingProcess(incarnation=caller, calls=0, running=0))
                found[caller] = CallingProcess(
                    incarnation=caller,
                    calls=known.calls + session.dedup.highest,
                    running=known.running + session.under_way,
                )
        return sorted(found.values(), key=lambda each: (-each.running, -each.calls))

    def _context_for(self, call: IncomingCall) -> Any:
        return self.make_context(call)

    def spawn(self, task: Callable[[], Any]) -> None:
        """Run a task, at most as long as this host lives."""
        # After the end there is nothing to run it in, and nothing left that it could serve.
        if self._nursery is not None:
            self._nursery.start_soon(task)

    def unregister(self, number: int) -> None:
        """Refuse new calls for it; those under way continue and are answered (see `drain`)."""
        actor = self.actors.get(number)
        if actor is not None:
            # Closed before it is removed: calls that are queued get this error, later ones find no actor.
            actor.close(NoSuchActor(f"actor {actor.name} is no longer served", actor=actor.name))
            self._remove(number)

    async def drain(self, number: int, grace_s: float) -> None:
        """`unregister`, then wait up to ``grace_s`` for what is under way; cancel and answer what is left."""
        actor = self.actors.get(number)
        self.unregister(number)
        if actor is not None:
            await actor.drain(grace_s)

    def _remove(self, number: int) -> None:
        actor = self.actors.pop(number, None)
        if actor is not None:
            actor.stop()

    # Callers ---------------------------------------------------------------------------------------------------------

    def _on_greeting(self, claim: PeerIdentity, greeting: bytes) -> tuple[bytes, HandlerFactory]:
        hello, _ = decode_message(greeting)
        if not isinstance(hello, CallerHello):
            raise ProtocolMismatch("expected CallerHello")
        # The address outlived its process, and the caller's actor is not here. With this answer it stops dialing.
        if hello.expects is not None and hello.expects != self.incarnation:
            raise ActorDied(f"{hello.expects} is gone: {self.incarnation} listens at its address now")
        session = self._sessions.get(hello.caller)
        if session is None:
            # Keyed by the caller's conversation, not by the connection: the record of its calls must survive a redial.
            session = self._sessions[hello.caller] = CallerSession(
                hello.caller,
                unbroken=not hello.known,
                incarnation=self.incarnation,
                actors=self.actors,
                pending=self.pending,
                spawn=self.spawn,
                on_left=self._on_session_left,
            )
        return encode_message(HostHello(incarnation=self.incarnation)), session.attach

    def _on_session_left(self, session: CallerSession) -> None:
        """Forget a session soon. The channel that succeeds its last one, if any, begins before the next task runs."""
        self.spawn(partial(self._forget, session))

    async def _forget(self, session: CallerSession) -> None:
        await trio.lowlevel.checkpoint()
        if session.channel is None and self._sessions.get(session.session) is session:
            del self._sessions[session.session]
            session.cancel_all()


def _is_loopback_address(address: str) -> bool:
    scheme, _, place = address.partition(":")
    return scheme == "tcp" and is_loopback(place.rpartition(":")[0])


def _start_executor(name: str, threads: int) -> SerialExecutor:
    executor = ThreadExecutor(name)
    executor.start(threads)
    return executor


ACTOR_HOST: ServiceKey[ActorHostServer] = ServiceKey("actor host")


def host_of(runtime: Runtime) -> ActorHostServer:
    """Return the actor host of a runtime, made with the first use: few jobs serve actors. From any thread."""
    return runtime.services[ACTOR_HOST]
