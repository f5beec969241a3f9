"""ActorPool: all actors with one name, called as one.

Each member is one incarnation, with a route of its own. A member that dies is left out as soon as this process detects
it; the registry reports its successor. A call that was certainly not delivered to a dying member is sent to another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, cast, get_args

import trio
from attrs import define, evolve, field, frozen

from fray.api.actors.handle import ActorCall, ActorHandle, ActorMethod
from fray.errors import ActorDied, DeadlineExceeded, FrayError, InvalidRequest, NoSuchActor
from fray.model.ids import Namespace
from fray.model.messages.client import ActorEndpoint, Names
from fray.runtime import waits
from fray.runtime.calls.caller import Caller
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import DEFAULT_OPTIONS, CallOptions, Route
from fray.runtime.calls.streams import CallStream, DuplexStream
from fray.runtime.runtime import Runtime, current
from fray.type_variables import A_co, P, T_co

log = logging.getLogger("fray.api.resolver")

Policy: TypeAlias = Literal["round_robin", "least_loaded", "power_of_two"]
Notify: TypeAlias = Callable[[Sequence[ActorEndpoint]], None]
EMPTY_WAIT_S = 5.0
"""Seconds that an awaited call waits for a first member, which may be starting or restarting, and that a query waits
for the first answer of the registry.
"""
BIND_WITHIN_S = 30.0
BIND_AGAIN_S = (0.1, 5.0)
"""Seconds between attempts to find an actor at a fixed address: the first wait, and the longest."""


@define(eq=False)
class PoolMember:
    """Member of a pool: one incarnation of an actor."""

    endpoint: ActorEndpoint
    route: Route
    in_flight: dict[CallFuture, None] = field(factory=dict)
    """Unanswered calls of this pool."""


class MemberSource(Protocol):
    """Source of a pool's members; picklable."""

    def follow(self, runtime: Runtime, name: str, notify: Notify) -> Callable[[], None]:
        """Call ``notify`` with all members now and at each change; return a function that stops it."""


@frozen
class RegistrySource:
    """Members that the cluster's registry has under the pool's name."""

    namespace: Namespace

    def follow(self, runtime: Runtime, name: str, notify: Notify) -> Callable[[], None]:
        def on_names(names: Names, blobs: Sequence[Any]) -> None:
            notify(names.endpoints)

        return runtime.client.names.watch(f"name:{self.namespace}/{name}", on_names)


@frozen
class AddressSource:
    """Members at known addresses, which are tried repeatedly."""

    addresses: tuple[str, ...]
    token: str

    def follow(self, runtime: Runtime, name: str, notify: Notify) -> Callable[[], None]:
        found: dict[str, ActorEndpoint] = {}
        scope = trio.CancelScope()

        async def hold_all() -> None:
            with scope:
                async with trio.open_nursery() as nursery:
                    for address in self.addresses:
                        nursery.start_soon(self._hold, runtime.caller, name, address, found, notify)

        runtime.nursery.start_soon(hold_all)
        return scope.cancel

    async def _hold(
        self,
        caller: Caller,
        name: str,
        address: str,
        found: dict[str, ActorEndpoint],
        notify: Notify,
    ) -> None:
        """Bind to the actor at this address; when it is lost, or not there, try again later."""
        wait_s, longest_s = BIND_AGAIN_S
        while True:
            try:
                # Servers beyond their machine have TLS, and the fingerprint of their certificate in the address.
                scheme = "tls" if "#" in address else "tcp"
                endpoint = await caller.bind([f"{scheme}:{address}"], name, key=self.token, timeout_s=BIND_WITHIN_S)
            except FrayError as error:
                log.warning("%s at %s: %s", name, address, error)
            else:
                found[address] = endpoint
                notify(list(found.values()))
                await _wait_gone(caller, endpoint)
                del found[address]
                notify(list(found.values()))
                wait_s = BIND_AGAIN_S[0]
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)


async def _wait_gone(caller: Caller, endpoint: ActorEndpoint) -> None:
    """Wait until its process has ended or is unreachable, or reports that it no longer serves the actor."""
    route, lost = caller.route_to(endpoint), trio.Event()
    route.on_lost.append(lost.set)

    async def wait_peer() -> None:
        await caller.connect(endpoint, keyed=False).closed.wait()
        lost.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_peer)
        await lost.wait()
        nursery.cancel_scope.cancel()


class ActorPool(Generic[A_co]):
    """All actors registered under one name, now and later; ``A_co``, for type checkers, is their class.

    A pool follows the registry until the cluster connection ends; `close` stops it earlier. It can be pickled: where it
    arrives, it follows the same name in the namespace in which it was made.
    """

    def __init__(self, name: str, source: MemberSource, runtime: Runtime | None = None) -> None:
        self.name = name
        self._source = source
        self._runtime = runtime
        self._members: dict[tuple[str, int], PoolMember] = {}
        self._known = trio.Event()
        self._changed = trio.Event()
        self._listeners: list[Callable[[int], object]] = []
        self._turn = 0
        self._unfollow: Callable[[], None] | None = None
        if runtime is not None:
            self._follow()

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorPool, (self.name, self._source))

    def _follow(self) -> Runtime:
        """Return the runtime, and follow the members from now on: an unpickled pool belongs to the cluster of its
        user.
        """
        if self._runtime is None:
            self._runtime = current()
        if self._unfollow is None:
            self._unfollow = lambda: None
            self._unfollow = self._source.follow(self._runtime, self.name, self._set)
        return self._runtime

    # Members ---------------------------------------------------------------------------------------------------------

    def _set(self, endpoints: Sequence[ActorEndpoint]) -> None:
        assert self._runtime is not None
        caller, previous = self._runtime.caller, self._members
        self._members = {}
        for endpoint in endpoints:
            key = (endpoint.incarnation, endpoint.number)
            member = previous.pop(key, None)
            if member is None:
                member = PoolMember(endpoint, caller.route_to(endpoint))
                member.route.on_lost.append(self._notify)
            elif endpoint != member.endpoint:
                # The same process, at other addresses.
                member.endpoint = endpoint
                member.route.move(endpoint)
            self._members[key] = member
        for member in previous.values():
            if self._notify in member.route.on_lost:
                member.route.on_lost.remove(self._notify)
            if not member.in_flight:
                caller.forget(member.route)
        self._known.set()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        for listener in list(self._listeners):
            listener(self.size)

    def _living(self) -> list[PoolMember]:
        self._follow()
        return [member for member in self._members.values() if member.route.loss is None]

    @property
    def size(self) -> int:
        """Number of actors at present, as far as is known here."""
        return len(self._living())

    @property
    def endpoints(self) -> list[ActorEndpoint]:
        """Snapshot of the actors, oldest first."""
        return [member.endpoint for member in self._living()]

    async def wait_for_size(self, min_size: int, timeout: float = 60.0) -> None:
        """Wait until the pool has at least ``min_size`` actors.

        Raises:
            DeadlineExceeded: (a TimeoutError) not within ``timeout`` seconds.
        """
        with trio.move_on_after(timeout), waits.waiting():
            while self.size < min_size:
                await self._changed.wait()
            return
        raise DeadlineExceeded(
            f"pool {self.name!r} has {self.size} of {min_size} actors after {timeout:g} s", size=self.size
        )

    async def wait_known(self) -> None:
        """Wait until the registry has answered, even if with no actors; at most 5 s."""
        with trio.move_on_after(EMPTY_WAIT_S):
            await self._known.wait()

    async def sizes(self) -> AsyncIterator[int]:
        """Yield the size now, and again whenever it has changed; intermediate sizes may be skipped."""
        seen = -1
        while True:
            while self.size == seen:
                await self._changed.wait()
            seen = self.size
            yield seen

    def on_size(self, callback: Callable[[int], object]) -> Callable[[], None]:
        """Call ``callback(size)`` in the loop whenever a member comes or goes; return a function that stops it."""
        self._follow()
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback) if callback in self._listeners else None

    def close(self) -> None:
        """Stop following the registry."""
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = lambda: None

    # Calls -----------------------------------------------------------------------------------------------------------

    def call(self, policy: Policy = "round_robin") -> ActorHandle[A_co]:
        """Return a proxy with the actors' methods: ``await pool.call().method(...)``; also ``.start``, ``.stream`` and
        ``.options``. Each call goes to one member.

        Args:
            policy: ``round_robin``: the next in turn. ``least_loaded``: the member with the fewest calls of this pool
                in flight. ``power_of_two``: the less loaded of two random members.

        An awaited call waits up to 5 s for a member if there is none. A call that certainly was not delivered when its
        member died goes to another member; with ``options(retry=1)`` or ``idempotent=True`` any call does.

        Raises:
            InvalidRequest: no such policy.
            NoSuchActor: (when calling) the pool has no member.
        """
        if policy not in get_args(Policy):
            raise InvalidRequest(f"policy={policy!r} must be one of {', '.join(get_args(Policy))}")
        return cast(ActorHandle[A_co], _RoundRobinHandle(self, policy))

    def broadcast(self) -> _Broadcast[A_co]:
        """Return a proxy: ``proxy.method(...)`` calls every actor and returns one future each, in the order of
        `endpoints`; ``await proxy.method.gather(...)`` returns each one's result or exception.
        """
        return _Broadcast(self, DEFAULT_OPTIONS)

    async def _wait_member(self, timeout_s: float | None) -> None:
        with trio.move_on_after(EMPTY_WAIT_S if timeout_s is None else min(timeout_s, EMPTY_WAIT_S)), waits.waiting():
            while not self._living():
                await self._changed.wait()

    def _choose(self, policy: Policy, members: Sequence[PoolMember]) -> PoolMember:
        if not members:
            raise NoSuchActor(
                f"no actor named {self.name!r} is registered, or the machines of all are silent; use wait_for_size to "
                "wait for one"
            )
        self._turn += 1
        begin = (self._turn - 1) % len(members)
        if policy == "round_robin":
            return members[begin]
        if policy == "power_of_two" and len(members) > 2:
            members, begin = self._follow().rng.sample(members, 2), 0
        return min([*members[begin:], *members[:begin]], key=lambda member: len(member.in_flight))

    def _track(self, member: PoolMember, call: CallFuture, policy: Policy | None) -> None:
        """Count the call as in flight, and set its fallback: the member that gets it if it cannot be delivered."""
        at = member

        def release(_: CallFuture) -> None:
            at.in_flight.pop(call, None)

        def next_route(_: CallFuture) -> Route | None:
            nonlocal at
            release(call)
            others = [other for other in self._living() if other is not at]
            if not others or policy is None:
                return None
            at = self._choose(policy, others)
            at.in_flight[call] = None
            return at.route

        member.in_flight[call] = None
        call.fallback = next_route
        call.add_done_callback(release)

    def __repr__(self) -> str:
        return f"<ActorPool {self.name!r} of {self.size}>"


class _PoolRoute:
    """Route that chooses a member for each call; `ActorMethod` takes it in place of the route to one actor."""

    def __init__(self, pool: ActorPool, policy: Policy) -> None:
        self._pool, self._policy = pool, policy

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> Any:
        until = math.inf if options.timeout_s is None else trio.current_time() + options.timeout_s
        while True:
            await self._pool._wait_member(options.timeout_s)
            future = self.start(method, args, kwargs, options)
            try:
                return await future.wait()
            except ActorDied:
                if not future.not_delivered or trio.current_time() >= until:
                    raise
            if options.timeout_s is not None:
                options = evolve(options, timeout_s=max(0.0, until - trio.current_time()))

    def start(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> CallFuture:
        member = self._pool._choose(self._policy, self._pool._living())
        future = member.route.start(method, args, kwargs, options)
        self._pool._track(member, future, self._policy)
        return future

    def stream(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> CallStream:
        member = self._pool._choose(self._policy, self._pool._living())
        stream = member.route.stream(method, args, kwargs, options)
        self._pool._track(member, stream, self._policy)
        return stream

    def open(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> DuplexStream:
        member = self._pool._choose(self._policy, self._pool._living())
        stream = member.route.open(method, args, kwargs, options)
        self._pool._track(member, stream, None)  # counts, and stays with its member
        return stream


class _RoundRobinHandle:
    """Proxy that `ActorPool.call` returns."""

    def __init__(self, pool: ActorPool, policy: Policy) -> None:
        self._pool, self._policy = pool, policy

    def _connection_route(self) -> _PoolRoute:
        return _PoolRoute(self._pool, self._policy)

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} begins with an underscore: only public methods of an actor can be called")
        return ActorMethod(cast(ActorHandle, self), name, DEFAULT_OPTIONS)

    @property
    def call(self) -> ActorCall[Any]:
        return ActorCall(cast(ActorHandle, self), DEFAULT_OPTIONS)

    def __repr__(self) -> str:
        return f"<member of {self._pool!r}>"


class _Broadcast(Generic[A_co]):
    """Proxy that `ActorPool.broadcast` returns."""

    def __init__(self, pool: ActorPool[A_co], options: CallOptions) -> None:
        self._pool, self._options = pool, options

    def options(self, *, timeout_s: float | None = None) -> _Broadcast[A_co]:
        """Return the same proxy with a deadline for every call."""
        return _Broadcast(self._pool, CallOptions(timeout_s=timeout_s))

    def __getattr__(self, method: str) -> BroadcastMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return BroadcastMethod(self._pool, method, self._options)


class BroadcastMethod(Generic[P, T_co]):
    """Method of every member of a pool."""

    def __init__(self, pool: ActorPool, name: str, options: CallOptions) -> None:
        self._pool, self._name, self._options = pool, name, options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> list[CallFuture[T_co]]:
        """Call every member; return one future each, in the order of `ActorPool.endpoints`. Raises NotPicklable,
        MessageTooLarge.
        """
        self._pool._follow()
        futures = []
        for member in self._pool._living():
            future = member.route.start(self._name, args, kwargs, self._options)
            self._pool._track(member, future, None)
            futures.append(future)
        return futures

    async def gather(self, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        """Return each member's result, or the exception it raised, in the order of `ActorPool.endpoints`.

        Cancelling it cancels all calls. Raises NotPicklable, MessageTooLarge.
        """
        if not self._pool._living():
            await self._pool.wait_known()
        futures = self(*args, **kwargs)
        try:
            return [await _outcome(future) for future in futures]
        except trio.Cancelled:
            for future in futures:
                future.cancel()
            raise


async def _outcome(future: CallFuture) -> Any:
    try:
        return await future.wait()
    except Exception as error:  # noqa: BLE001 - it is this member's result
        return error
