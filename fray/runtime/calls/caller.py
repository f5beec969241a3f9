"""Makes calls: one channel per host incarnation, calls in order, every call answered or explained.

See `fray.runtime.calls.route` for the law.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import trio
from attrs import define, field, frozen

from fray.errors import ChannelClosed, ChannelFull, FrayError
from fray.model.ids import SessionId, split_actor_id
from fray.model.messages.calls import ActorMetrics, ActorNumber, GetMetrics, LookUpActor
from fray.model.messages.client import ActorEndpoint
from fray.net.buffers.chunks import TRANSFER_LIMIT_BYTES, check_transfer
from fray.net.transport import Network
from fray.runtime.calls.call_future import CallFuture
from fray.runtime.calls.duplex_stream import DuplexStream
from fray.runtime.calls.host_connection import HostConnection
from fray.runtime.calls.item_stream import FIRST_CREDIT, CallStream
from fray.runtime.calls.route import NameDirectory, Route
from fray.runtime.calls.wire import KEYWORDS, call_head
from fray.runtime.current_call import CurrentCall, current_actor_var
from fray.runtime.deadlock import link
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PickledObject, detach_buffers

__all__ = ["CallFuture", "CallOptions", "CallStream", "Caller", "NameDirectory", "Route"]

NO_DIRECTORY_GIVE_UP_S = 30.0
"""How long an endpoint that no directory speaks for may be unreachable."""
BULK_LIMIT_BYTES = TRANSFER_LIMIT_BYTES
"""Of large buffers in unanswered calls of one caller."""
_HEADS_LIMIT = 10_000


@frozen
class CallOptions:
    """``timeout_s``: DeadlineExceeded after that long. ``idempotent``: the call may be delivered again and again to
    later incarnations when its host dies. ``retry``: the same, at most so many times."""

    timeout_s: float | None = None
    idempotent: bool = False
    retry: int = 0


@define(eq=False)
class BulkRoom:
    """The large buffers of all unanswered calls of one caller: at most `BULK_LIMIT_BYTES`, or one call."""

    held_bytes: int = 0
    _lot: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def check(self, more_bytes: int, what: str) -> None:
        """Raises: ChannelFull. On any thread."""
        if not self.has_room(more_bytes):
            text = (
                f"{what} has {more_bytes} bytes in large buffers, and {self.held_bytes} of unanswered calls are held "
                f"already (limit {BULK_LIMIT_BYTES}): await some of those first"
            )
            raise ChannelFull(text, held_bytes=self.held_bytes, limit_bytes=BULK_LIMIT_BYTES)

    def has_room(self, more_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + more_bytes <= BULK_LIMIT_BYTES

    def take(self, parcel: PickledObject) -> None:
        """A call is on its way."""
        parcel.counted_bytes = parcel.bulk_bytes
        self.held_bytes += parcel.counted_bytes

    def ended(self, parcel: PickledObject) -> None:
        """A call has been answered."""
        self.held_bytes -= parcel.counted_bytes
        self._lot.unpark_all()

    async def wait(self) -> None:
        """Until some of it has gone."""
        await self._lot.park()


S = TypeVar("S", bound=CallStream)
DEFAULT_OPTIONS = CallOptions()
_NO_KWARGS: Mapping[str, Any] = {}
_ALWAYS = 1 << 30


class Caller:
    """All calls of one session. ``run`` must be running (in a nursery of the owner) for calls to go out."""

    def __init__(
        self, network: Network, directory: NameDirectory | None, *, session: SessionId, rng: random.Random
    ) -> None:
        self.network = network
        self.directory = directory
        self.session = session
        self.rng = rng
        self._conversations = count(1)
        self._marks = count(1)
        self._routes: WeakValueDictionary[str | tuple[str, int], Route] = WeakValueDictionary()
        """Held by handles, by calls, by the directory as long as the actor may live, and by the peer it leads to."""
        self._peers: dict[tuple[str | tuple[str, ...], bool], HostConnection] = {}
        self._heads: dict[str, bytes] = {}
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[Callable[..., Coroutine[Any, Any, None]], tuple[Any, ...]]] = []
        self._closed: FrayError | None = None
        self._scope = trio.CancelScope()
        self.bulk = BulkRoom()

    # Life ------------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the channels until cancelled; they say goodbye then (at most 1 s), and what is open fails."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    for task, args in self._early:
                        self._nursery.start_soon(task, *args)
                    self._early = []
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self._nursery = None
            self._fail_all()

    def end(self, error: FrayError) -> None:
        """Answer everything that is open with this error, and whatever comes; then say goodbye to the peers."""
        self._closed = self._closed or error
        self._fail_all()
        self._scope.cancel()

    def _fail_all(self) -> None:
        self._closed = self._closed or ChannelClosed("the caller has ended", reason="caller ended")
        for peer in list(self._peers.values()):
            peer.fail_all(self._closed)
        for route in list(self._routes.values()):
            route.close()
            route.fail_all(self._closed)

    def spawn(self, task: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run a task as long as this caller lives."""
        if self._nursery is not None:
            self._nursery.start_soon(task, *args)
        elif self._closed is None:
            self._early.append((task, args))

    @property
    def is_closed(self) -> bool:
        """It has ended: calls fail at once."""
        return self._closed is not None

    # Calls -----------------------------------------------------------------------------------------------------------

    def route(self, key: str, label: str = "") -> Route:
        """The route to the actor under a directory key ``actor:{actor_id}``; the same one each time."""
        route = self._routes.get(key)
        if route is None:
            home, number = split_actor_id(key)
            route = self._routes[key] = Route(self, label or key.partition(":")[2], home, number)
            if self.directory is not None:
                route.follow(self.directory)
        return route

    def route_to(self, endpoint: ActorEndpoint) -> Route:
        """The route to this very incarnation of an actor: when that is gone, so is the route."""
        key = (endpoint.incarnation, endpoint.number)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(self, endpoint.name or endpoint.actor_id)
            route.endpoint = endpoint
        return route

    def forget(self, route: Route) -> None:
        """The route is not needed any more; what is under way goes on."""
        route.close()
        binding = route.binding
        if binding is not None and not binding.peer.has_calls(binding):
            route.binding = None
            binding.peer.release(binding)
        for key in [key for key, known in list(self._routes.items()) if known is route]:
            del self._routes[key]

    def start(
        self,
        route: Route,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> CallFuture:
        """Make a call now, without a checkpoint; calls on one route start in the order they are made.

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot travel.
            ChannelFull: too many calls are unanswered; `call` waits instead.
        """
        route.check_room()
        call = self.make(route, method, args, kwargs)
        self.send(call, options, current_actor_var.get())
        return call

    def make(
        self, route: Route, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KWARGS
    ) -> CallFuture:
        """The call, its arguments pickled, not sent: on any thread. Raises as `start`."""
        body = self._settled(route, method, args, kwargs)
        return CallFuture(route, method, body, KEYWORDS if kwargs else 0)

    def stream(
        self,
        route: Route,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> CallStream:
        """Call a generator method; see `CallStream`. Options to repeat it do nothing. Raises as `start`."""
        return self._begin(CallStream, route, method, args, kwargs, options)

    def open(
        self,
        route: Route,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> DuplexStream:
        """Call a method that takes a stream; see `Conversation`. Options to repeat it do nothing. Raises as `start`."""
        return self._begin(DuplexStream, route, method, args, kwargs, options)

    def _begin(
        self,
        kind: type[S],
        route: Route,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: CallOptions,
    ) -> S:
        """Make and send the call of a stream; what it has sent cannot be repeated."""
        route.check_room()
        call = kind(route, method, self._settled(route, method, args, kwargs, FIRST_CREDIT), KEYWORDS if kwargs else 0)
        self.send(call, options, current_actor_var.get())
        call.repeats = 0
        return call

    def _body(
        self, route: Route, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], before: bytes = b""
    ) -> bytes | PickledObject:
        """What the call's frame holds; a parcel, whose buffers are the arguments' own, where some are large."""
        if self._closed is not None:
            raise self._closed
        packed = pickling.pack_call(method, args, kwargs)
        head = (self._heads.get(method) or self._head(method)) + before
        if type(packed) is bytes:
            return head + packed
        assert isinstance(packed, PickledObject)
        check_transfer(packed.bulk_bytes, f"the call of {route.label}.{method}()")
        packed.pickle = head + packed.pickle
        return packed

    def _settled(
        self, route: Route, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], before: bytes = b""
    ) -> bytes | PickledObject:
        """The same where nobody waits for the answer: the arguments may change before they are sent."""
        body = self._body(route, method, args, kwargs, before)
        if type(body) is PickledObject:
            self.bulk.check(body.bulk_bytes, f"the call of {route.label}.{method}()")
            detach_buffers(body, route.terms)
        return body

    def send(self, call: CallFuture, options: CallOptions, inside: CurrentCall | None) -> None:
        """Send a call that was made; ``inside``: the actor call that it is part of."""
        if self._closed is not None:
            call.fail(self._closed)
            return
        if call.parcel is not None:
            self.bulk.take(call.parcel)
        if options is not DEFAULT_OPTIONS:
            call.repeats = _ALWAYS if options.idempotent else options.retry
            if options.timeout_s is not None:
                call.deadline = trio.current_time() + options.timeout_s
        if inside is not None:
            call.mark = f"{self.session}/{next(self._marks):x}"
            call.chain = (*inside.links, link(inside.actor_id, f"{inside.name}.{inside.method}()", call.mark))
            if inside.deadline is not None and (call.deadline is None or inside.deadline < call.deadline):
                call.deadline = inside.deadline
        call.route.dispatch(call)

    async def call(
        self,
        route: Route,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Any:
        """Make a call and await its result; waits for room first when the host does not keep up."""
        if route.is_full:
            await route.wait_room()
        route.check_room()
        body = self._body(route, method, args, kwargs)
        if type(body) is PickledObject:
            await self._prepare(route, body)
        call = CallFuture(route, method, body, KEYWORDS if kwargs else 0)
        self.send(call, options, current_actor_var.get())
        return await call.wait()

    async def _prepare(self, route: Route, parcel: PickledObject) -> None:
        """Large buffers: wait for room, and copy into segments while others run."""
        while not self.bulk.has_room(parcel.bulk_bytes):
            await self.bulk.wait()
        binding = route.binding
        if binding is not None and binding.peer.exchange.may_place(parcel):
            await binding.peer.exchange.place(parcel)

    async def metrics(self, route: Route) -> ActorMetrics:
        """Ask the actor's process what it has counted. Raises: why the actor cannot be asked, as for a call."""
        binding = await route.wait_bound()
        answer = await binding.peer.request(GetMetrics(number=binding.target))
        assert isinstance(answer, ActorMetrics)
        return answer

    async def bind(
        self, addresses: Sequence[str], name: str, *, key: str = "", timeout_s: float | None = None
    ) -> ActorEndpoint:
        """Ask the host at ``addresses`` for the actor ``name``, without a directory.

        Raises:
            NoSuchActor: it has none of this name.
            ConnectionFailed: it cannot be reached, or refuses the key.
        """
        endpoint = ActorEndpoint(actor_id="", name=name, job_id="", namespace="", addresses=tuple(addresses), key=key)
        peer = self.peer(endpoint, keyed=False)
        bound = await peer.request(LookUpActor(name=name), timeout_s=timeout_s)
        assert isinstance(bound, ActorNumber)
        self._peers.setdefault((bound.incarnation, False), peer)
        return ActorEndpoint(
            actor_id=bound.actor_id,
            name=name,
            job_id="",
            namespace="",
            incarnation=bound.incarnation,
            number=bound.number,
            addresses=tuple(addresses),
            key=key,
        )

    def _head(self, method: str) -> bytes:
        if len(self._heads) >= _HEADS_LIMIT:
            self._heads.clear()
        head = self._heads[method] = call_head(method)
        return head

    # Hosts -----------------------------------------------------------------------------------------------------------

    def peer(self, endpoint: ActorEndpoint, *, keyed: bool) -> HostConnection:
        """The conversation with the endpoint's host, begun if there is none."""
        key = (endpoint.incarnation or (*endpoint.addresses, endpoint.key), keyed)
        peer = self._peers.get(key)
        if peer is None or peer.ended is not None:
            give_up_s = None if keyed else NO_DIRECTORY_GIVE_UP_S
            name = f"{self.session}/{next(self._conversations)}"
            peer = self._peers[key] = HostConnection(self, name, endpoint, give_up_s)
            self.spawn(peer.run)
        return peer

    def peer_over(self, peer: HostConnection) -> None:
        """The conversation has ended: the next call begins another."""
        for key in [key for key, known in self._peers.items() if known is peer]:
            del self._peers[key]
