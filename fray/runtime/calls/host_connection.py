"""Client side of one connection to an actor host: sends calls, receives answers, repeats what a reset has lost."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import trio
from attrs import define, evolve, field

from fray.errors import ActorDied, ChannelClosed, ChannelFull, FrayError, Refused
from fray.model.ids import SessionId
from fray.model.messages.calls import CallerHello, CallMeta
from fray.model.messages.client import ActorEndpoint
from fray.net.channel.public import Channel, RedialPolicy, run_dialed
from fray.net.channel.requests import Requests
from fray.net.channel.session import HIGH_WATER_BYTES
from fray.net.codec import META, Bytes, Kind, encode_message
from fray.net.transport import Credential, Network
from fray.runtime.calls.flow_control import unpack_count
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.streams import CallStream, DuplexStream
from fray.runtime.calls.wire import (
    AGAIN,
    BUFFERS,
    CALLER_KEY_ID,
    CREDIT,
    HOST_LEFT,
    INPUT,
    INTERRUPTED,
    ITEM,
    NOT_RUN,
    ONLY,
    OPEN_BYTES_LIMIT,
    OPEN_CALLS_LIMIT,
    SETTLE_EVERY_BYTES,
    SETTLE_EVERY_CALLS,
    TRACE,
    TRACES,
    TWO_WAY,
    pack_meta,
)
from fray.runtime.serialization import errors
from fray.runtime.serialization.buffer_transfer import SEGMENTS_REMOVED, SHARE, BufferTransfer
from fray.runtime.serialization.buffers import ReceivedObject, is_large
from fray.runtime.serialization.number_list import pack_numbers

# Plain integers: an enum member would be looked up for every frame.
_CALL, _RESULT, _FAULT = int(Kind.CALL), int(Kind.RESULT), int(Kind.FAULT)
_CANCEL, _SETTLED = int(Kind.CANCEL), int(Kind.SETTLED)


class PendingCall(Protocol):
    """Fields of a call that the table uses."""

    number: int
    """Number on the connection; 0 until the call is sent."""
    size: int
    """Bytes held for it."""


T = TypeVar("T", bound=PendingCall)


@define(eq=False)
class PendingCalls(Generic[T]):
    """All unanswered calls of one caller to one host incarnation. Pure.

    A call is queued (surely not delivered) or open (sent, maybe delivered). It gets its number when it is sent, so
    numbers arrive at the host in rising order; the host's counterpart is `fray.runtime.calls.dedup`.
    """

    numbers: Callable[[], int] = field(factory=lambda: count(1).__next__)
    open: dict[int, T] = field(factory=dict, init=False)
    queued: deque[T] = field(factory=deque, init=False)
    held_bytes: int = 0
    _settled: list[int] = field(factory=list, init=False)
    """Numbers of answers that the host may forget and does not know of yet."""
    _settled_bytes: int = 0

    @property
    def is_full(self) -> bool:
        # Queued calls count: while the host is out of reach nothing else bounds what a caller may pile up.
        return len(self.open) + len(self.queued) >= OPEN_CALLS_LIMIT or self.held_bytes >= OPEN_BYTES_LIMIT

    def queue(self, call: T) -> None:
        """Add a call that cannot be sent yet."""
        self.queued.append(call)
        self.held_bytes += call.size

    def sent(self, call: T) -> int:
        """Number a call that is sent now without having been queued; return the number."""
        # Numbered when it is sent and not when it is made: the host requires rising numbers, and queued calls may be
        # withdrawn.
        call.number = number = self.numbers()
        self.open[number] = call
        self.held_bytes += call.size
        return number

    def sent_queued(self) -> T:
        """Number the first queued call, which is sent now, and return it."""
        call = self.queued.popleft()
        self.held_bytes -= call.size
        self.sent(call)
        return call

    def unsend(self, call: T) -> None:
        """Put a call whose frame could not be handed over back to the front of the queue."""
        # Its number is skipped. The host requires rising numbers, not consecutive ones.
        del self.open[call.number]
        call.number = 0
        self.queued.appendleft(call)

    def withdraw(self, call: T) -> bool:
        """Forget a call that is still queued; return False if it has been sent."""
        try:
            self.queued.remove(call)
        except ValueError:
            return False
        self.held_bytes -= call.size
        return True

    def answered(self, number: int, size: int) -> T | None:
        """Return the call that an answer of ``size`` bytes ends; None if it was answered before."""
        call = self.open.pop(number, None)
        # Also for a call that is not in the table: the host stores its answer until it is settled.
        self._settled.append(number)
        self._settled_bytes += size
        if call is not None:
            self.held_bytes -= call.size
        return call

    def take_settled(self, force: bool = False) -> bytes | None:
        """Return the body of a SETTLED frame once enough answers have come to be worth one."""
        # In batches: a SETTLED frame for each answer would double the frames of a sequential caller.
        due = len(self._settled) >= SETTLE_EVERY_CALLS or self._settled_bytes >= SETTLE_EVERY_BYTES
        if not due and not (force and self._settled):
            return None
        body = pack_numbers(self._settled)
        self._settled, self._settled_bytes = [], 0
        return body

    def reset(self) -> tuple[bytes, list[T]]:
        """Start over with a host that has forgotten the conversation.

        Returns:
            The body of the first frame, SETTLED flagged ONLY, and the calls to send again, in order, flagged AGAIN.
        """
        # The list of open calls implies them: the host drops every stored answer that is not in it.
        self._settled, self._settled_bytes = [], 0
        return pack_numbers(self.open), list(self.open.values())

    def take(self, mine: Callable[[T], bool] = lambda call: True) -> tuple[list[T], list[T]]:
        """Remove the calls for which ``mine`` is true and return (queued ones, open ones), each in order."""
        queued = [call for call in self.queued if mine(call)]
        opened = [call for call in self.open.values() if mine(call)]
        self.queued = deque(call for call in self.queued if not mine(call))
        for call in opened:
            # Late answers to these numbers find no call and are only settled.
            del self.open[call.number]
        self.held_bytes -= sum(call.size for call in queued) + sum(call.size for call in opened)
        return queued, opened


class HostConnectionOwner(Protocol):
    """Part of a session that connections use (`fray.runtime.calls.caller.Caller`)."""

    @property
    def network(self) -> Network: ...

    @property
    def session(self) -> SessionId: ...

    @property
    def rng(self) -> random.Random: ...

    def spawn(self, task: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...

    def on_connection_end(self, connection: HostConnection) -> None: ...


class BindingOwner(Protocol):
    """Part of a route that bindings use (`fray.runtime.calls.route.Route`)."""

    def on_connection_end(self, binding: RouteBinding, error: FrayError, is_proof: bool) -> None: ...


class RouteBinding:
    """One actor on one host: what a route uses until it learns of another."""

    __slots__ = ("connection", "route", "target")

    def __init__(self, route: BindingOwner, connection: HostConnection, target: int) -> None:
        self.route = route
        self.connection = connection
        self.target = target


class HostConnection:
    """Connection to one host incarnation, and the handler of its channel.

    The channel redials and resends by itself; an answer can get lost only when the host has forgotten the conversation
    (`on_reset`). Calls that are unanswered then are sent again, flagged AGAIN, so that the host runs none twice.
    """

    def __init__(self, owner: HostConnectionOwner, name: str, endpoint: ActorEndpoint, give_up_s: float | None) -> None:
        self._owner = owner
        self.name = name
        """Name of the conversation: (name, number) is the id of a call."""
        self.incarnation = endpoint.incarnation
        self.table: PendingCalls[CallFuture] = PendingCalls()
        self.bindings: dict[RouteBinding, None] = {}
        self.connected = False
        self.ended: FrayError | None = None
        self.last_received: int | None = None
        """Number of the last call that the host has received; set by its goodbye."""
        self.disconnected = trio.Event()
        """Set while there is no transport, or its peer does not answer."""
        self.closed = trio.Event()
        """Set when the connection has ended for good."""
        self.disconnected.set()
        self._ready = trio.Event()
        self._endpoint = endpoint
        # A listener lives as long as its process, so a refused connection proves the death of this incarnation.
        self._policy = RedialPolicy(refused_is_final=True, give_up_s=give_up_s)
        self._channel: Channel | None = None
        self._requests: Requests | None = None
        self._was_accepted = False
        self._resend: list[CallFuture] = []
        self._pumping = False
        self._has_room: trio.Event | None = None
        self._scope = trio.CancelScope()
        self.transfers = BufferTransfer(owner.spawn)
        self.transfers.on_peer_reply = self._flush
        self._buffered_streams: set[int] = set()
        """Numbers of streams whose items have buffers."""

    def __repr__(self) -> str:
        where = f"connected at {self._channel.remote}" if self._channel is not None else "connected"
        state = "ended" if self.ended else where if self.connected else "connecting"
        host = self.incarnation or self._endpoint.addresses
        return f"<HostConnection {host}: {state}, {len(self.table.open)} calls open>"

    # Lifetime --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Hold the connection until it ends."""
        endpoint = self._endpoint
        credential = Credential(CALLER_KEY_ID, endpoint.key) if endpoint.key else None
        try:
            with self._scope:
                await run_dialed(
                    self._owner.network,
                    lambda: self._endpoint.addresses,
                    credential,
                    greeting=self._greeting,
                    handler=self._attach,
                    incarnation=self._owner.session,
                    # Another process that listens at the same address now must end this connection, not take over its
                    # calls.
                    expects=endpoint.incarnation or None,
                    policy=self._policy,
                    rng=self._owner.rng,
                )
        except FrayError as error:
            # The first reason counts; the call in the `finally` has an effect only if the task was cancelled.
            self.on_end(error)
        finally:
            self.on_end(ChannelClosed("the connection was closed", reason="cancelled"))

    def _greeting(self) -> bytes:
        expects = self._endpoint.incarnation or None
        # A host without a record of this conversation may have lost one: it must not run repeated calls then.
        return encode_message(CallerHello(caller=self.name, expects=expects, known=self._was_accepted))

    def _attach(self, channel: Channel) -> HostConnection:
        self._channel = channel
        # An idle connection is pinged rarely: a caller may have thousands.
        channel.is_waiting = lambda: bool(self.table.open)
        channel.silence_changed = self._on_silence
        self._requests = Requests(channel)
        self.transfers.attach(channel)
        return self

    def serves(self, endpoint: ActorEndpoint, target: int) -> bool:
        """Return whether a binding to ``target`` here is a binding to ``endpoint``."""
        return self.ended is None and self.incarnation == endpoint.incarnation and target == endpoint.number

    def move(self, endpoint: ActorEndpoint) -> None:
        """Dial the addresses of ``endpoint``, a newer one of the same host, from the next dial on."""
        self._endpoint = evolve(self._endpoint, addresses=endpoint.addresses)

    def may_have_received(self, call: CallFuture) -> bool:
        """Return whether the host may have received a call that was sent."""
        # Only an orderly goodbye states what was received. After a crash every call that was sent may have taken
        # effect.
        return self.last_received is None or call.number <= self.last_received

    def has_calls(self, binding: RouteBinding) -> bool:
        """Return whether calls of ``binding`` are unanswered."""
        calls = (*self.table.open.values(), *self.table.queued)
        return any(call.binding is binding for call in calls)

    def release(self, binding: RouteBinding) -> None:
        """Drop a binding that is not needed any longer; the last one ends the connection."""
        self.bindings.pop(binding, None)
        # The host keeps a session for each caller; an idle connection costs about 24 KiB.
        if not self.bindings and self.ended is None:
            # Before its task has seen the cancellation: a route that finds the host again in this moment must not use
            # it.
            self._owner.on_connection_end(self)
            self._scope.cancel()

    # Calls -----------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        channel = self._channel
        # Two limits: calls the host has not answered, and bytes that the network has not taken (one slow link).
        return self.table.is_full or (channel is not None and channel.outbox.size_bytes > HIGH_WATER_BYTES)

    async def wait_room(self) -> None:
        """Wait until `is_full` may have become false."""
        if self.table.is_full and self.ended is None:
            if self._has_room is None:
                self._has_room = trio.Event()
            await self._has_room.wait()
        elif self._channel is not None:
            try:
                await self._channel.wait_room()
            except ChannelClosed:
                pass  # the route finds out and says why

    def send(self, call: CallFuture) -> None:
        """Send the call, or queue it behind others or until there is a transport."""
        # Calls of one caller start in the order they were made, so none may overtake a queued one.
        if self.connected and not self.table.queued and (call.pickled is None or not self._must_wait(call)):
            self._transmit(call, self.table.sent(call))
        else:
            self.table.queue(call)

    def cancel(self, call: CallFuture) -> None:
        """Cancel the call at the host, if the host may know of it."""
        # A queued call was certainly not delivered, so no acknowledgement is needed.
        if self.table.withdraw(call) or self.ended is not None:
            call.answer_cancelled()
        elif call.number in self.table.open and self._channel is not None:
            # The buffers still on their way are of no use any more, and gigabytes of them would delay other calls.
            if call.transfer is not None:
                self.transfers.cancel(call.transfer)
            try:
                self._channel.send_nowait(_CANCEL, call.number)
            except (ChannelClosed, ChannelFull):
                pass  # sent again after a reset; with a full channel the deadline ends the call

    def send_credit(self, call: CallFuture, credit: bytes) -> None:
        """Let a stream send more items."""
        if self._channel is not None and self.ended is None and call.number in self.table.open:
            try:
                self._channel.send_nowait(CREDIT, call.number, credit)
            except (ChannelClosed, ChannelFull) as error:
                # The host would wait for this credit for ever.
                call.fail(error)

    def send_input(self, call: CallFuture, flags: int, item: bytes) -> None:
        """Send one item for the method, or the end of all items."""
        # After the end of the connection the route decides how the call ends, and says why.
        if self._channel is not None and self.ended is None and call.number in self.table.open:
            try:
                self._channel.send_nowait(INPUT, call.number, item, flags=flags)
            except (ChannelClosed, ChannelFull) as error:
                # A gap in the stream must not pass unnoticed.
                call.fail(error)

    async def request(self, message: object, *, timeout_s: float | None = None) -> Any:
        """Send a request to the host itself and return the reply. Raises its error, or the error of the connection."""
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            await self._ready.wait()
        if self.ended is not None:
            raise self.ended
        if self._requests is None:
            raise FrayError(f"no answer from {self._endpoint.addresses} within {timeout_s} s")
        reply, _ = await self._requests.request(message, timeout_s=timeout_s)
        return reply

    def _transmit(self, call: CallFuture, number: int, again: int = 0) -> bool:
        channel, binding = self._channel, call.binding
        assert channel is not None
        assert binding is not None
        try:
            if call.trace and TRACES in channel.peer_release.capabilities:
                channel.send_nowait(TRACE, number, call.trace)
            # Three forms of the frame, the cheapest for the common case: no buffers, no deadline, not made inside an
            # actor call.
            if call.pickled is not None:
                self._transmit_buffers(channel, call, binding.target, number, again)
            elif call.deadline is None and not call.chain:
                channel.send_nowait(_CALL, number, call.body, target=binding.target, flags=call.flags | again)
            else:
                body = _meta_of(call) + call.body
                channel.send_nowait(_CALL, number, body, target=binding.target, flags=call.flags | again | META)
        except (ChannelFull, ChannelClosed):
            # A repeated call keeps its number and its place in `_resend`.
            if not again:
                self.table.unsend(call)
            self._start_pump()
            return False
        if call.flags & TWO_WAY and isinstance(call, DuplexStream):
            # Items may have been sent before the call itself had an incarnation to go to.
            call.on_sent()
        return True

    def _transmit_buffers(self, channel: Channel, call: CallFuture, target: int, number: int, again: int) -> None:
        assert call.pickled is not None
        # Registered before the frame, which lists it, and released for sending after it: chunks of a buffer that was
        # not announced would be a protocol error.
        transfer = call.transfer = self.transfers.send(call.pickled, ("to", target))
        # The table of buffers precedes everything else: the host has to receive the buffers even if it will not run the
        # call.
        flags, meta = call.flags | again | BUFFERS, b""
        if call.deadline is not None or call.chain:
            flags, meta = flags | META, _meta_of(call)
        try:
            channel.send_nowait(_CALL, number, transfer.table + meta + call.body, target=target, flags=flags)
        except (ChannelFull, ChannelClosed):
            self.transfers.abort(transfer)
            raise
        self.transfers.commit(transfer)

    def _must_wait(self, call: CallFuture) -> bool:
        """Return whether a large call must wait until the host has replied whether it reads our segments."""
        return call.pickled is not None and is_large(call.pickled) and self.transfers.must_wait()

    def _flush(self) -> None:
        """Send what is queued, as far as the channel takes it."""
        # Repeated calls first and in their order: they are older than everything queued.
        while self._resend and self.connected:
            call = self._resend[0]
            # Answered or failed since the reset: nothing to repeat.
            if call.number in self.table.open:
                if self._must_wait(call) or not self._transmit(call, call.number, AGAIN):
                    return
                # The CANCEL frame may have been lost with the old conversation.
                if call.cancelled:
                    self.cancel(call)
            self._resend.pop(0)
        while self.table.queued and self.connected and not self._must_wait(self.table.queued[0]):
            call = self.table.sent_queued()
            if not self._transmit(call, call.number):
                return

    def _start_pump(self) -> None:
        # One task at a time: `_flush` continues where it stopped, and two would only wait for the same room.
        if not self._pumping and self.ended is None:
            self._pumping = True
            self._owner.spawn(self._pump)

    async def _pump(self) -> None:
        """Continue with the queued calls once a full channel has room."""
        try:
            if self._channel is not None:
                await self._channel.wait_room()
        except ChannelClosed:
            return  # `on_end` hands on the calls
        finally:
            self._pumping = False
        self._flush()

    # The channel's handler -------------------------------------------------------------------------------------------

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == _RESULT or kind == _FAULT:  # noqa: SIM109 - a tuple is slower, and this is the hot path
            # The answer to a stream whose items have buffers may arrive before those: it takes the slow path, too.
            if flags & BUFFERS or ref in self._buffered_streams:
                self._answer_with_buffers(kind, flags, ref, body)
                return
            call = self.table.answered(ref, len(body))
            if call is None:
                return
            # Not an answer to the caller: the route may send the call to the next incarnation.
            if kind == _FAULT and flags & NOT_RUN:
                call.route.on_refused(call, errors.load_error(body))
            elif kind == _FAULT and flags & INTERRUPTED and call.repeats > 0:
                call.route.on_interrupted(call, errors.load_error(body))
            else:
                call.answer(kind, flags, body)
        elif kind == _SETTLED:
            self.last_received = ref
        elif kind == ITEM:
            stream = self.table.open.get(ref)
            if isinstance(stream, CallStream):
                if flags & BUFFERS:
                    self._buffered_streams.add(ref)
                    stream.add_item(ReceivedObject(*self.transfers.receive(body)))
                else:
                    stream.add_item(body)
        elif kind == CREDIT:
            duplex = self.table.open.get(ref)
            if isinstance(duplex, DuplexStream):
                duplex.on_credit(unpack_count(body))
        elif SHARE <= kind <= SEGMENTS_REMOVED:
            self.transfers.on_frame(kind, flags, body)
        elif self._requests is not None:
            self._requests.on_frame(kind, flags, target, ref, body)

    def _answer_with_buffers(self, kind: int, flags: int, number: int, body: Bytes) -> None:
        """Handle an answer that may have to wait for its own buffers, or for those of the items before it."""
        call = self.table.open.get(number)
        received: Bytes | ReceivedObject = ReceivedObject(*self.transfers.receive(body)) if flags & BUFFERS else body
        # No task waits for it. The transfer must still be given back, or its segment would stay lent, and settled, or
        # the host would store the answer.
        if call is None:
            if isinstance(received, ReceivedObject):
                self.transfers.forget(received.transfer)
            self.table.answered(number, len(body))
            return

        def end() -> None:
            # Meanwhile the call may have been taken by `_redispatch` or answered after a reset.
            if self.table.open.get(number) is call:
                self._buffered_streams.discard(number)
                # Counted as a full batch, so that the host is sent SETTLED at once and releases the buffers.
                self.table.answered(number, SETTLE_EVERY_BYTES)
                call.answer(kind, flags, received)

        if isinstance(call, CallStream) and call.has_missing_buffers():
            call.defer_answer(end)
        elif isinstance(received, ReceivedObject) and not received.transfer.is_ready:
            received.transfer.on_ready = end
        else:
            end()

    def on_batch(self) -> None:
        settled = self.table.take_settled()
        # Once for each batch of frames, not for each answer.
        if settled is not None and self._channel is not None:
            try:
                if self.table.open:
                    self._channel.send_nowait(_SETTLED, 0, settled)
                else:  # one call at a time: this would cost every 64th of them the time of another
                    self._channel.send_later(_SETTLED, 0, settled)
            except ChannelFull:
                pass  # the host keeps these answers a little longer: until the next reset, at most
        if self._has_room is not None and not self.table.is_full:
            self._has_room.set()
            self._has_room = None

    def on_reset(self, greeting: Bytes) -> None:
        assert self._channel is not None
        found = self._channel.incarnation
        # The first dial of `bind` expects no incarnation, so the dialer cannot notice that the process has changed.
        if self._was_accepted and found != self.incarnation:
            raise ActorDied(f"{self.incarnation} is gone: {found} now listens at its address")
        self.incarnation = found
        unsettled, self._resend = self.table.reset()
        # A loan whose return may have been lost proves nothing, so its segment is not filled again.
        self.transfers.reset()
        self._buffered_streams.clear()
        # Before the repeated calls: the host releases the answers that are not needed any more, and has room for
        # theirs.
        if self._was_accepted:
            self._channel.send_nowait(_SETTLED, 0, unsettled, flags=ONLY)
        self._was_accepted = True
        if self._requests is not None:
            self._requests.on_reset()
        for call in self._resend:
            if isinstance(call, CallStream):
                # The generator may still run, and would wait for credit that is never granted.
                self.cancel(call)
                # Out of the table, so that the call is not sent again: the host's answer is only settled.
                self.table.answered(call.number, 0)
                # Sent items are not stored by the host, so nothing can tell which of them were lost.
                call.fail_lost_items()
        self._is_up()

    def on_suspended(self, why: str) -> None:
        self.connected = False
        self.disconnected.set()

    def _on_silence(self, is_silent: bool) -> None:
        if is_silent:
            self.disconnected.set()
        elif self.connected:
            self.disconnected = trio.Event()

    def on_resumed(self) -> None:
        self._is_up()

    def on_end(self, error: FrayError) -> None:
        if self.ended is not None:
            return
        self.ended = error
        self.connected = False
        for event in (
            self.disconnected,
            self.closed,
            self._ready,
            *([self._has_room] if self._has_room is not None else []),
        ):
            event.set()
        if self._requests is not None:
            self._requests.on_end(error)
        # First: calls that the routes send again below must open another connection.
        self._owner.on_connection_end(self)
        self.transfers.end()
        for binding in list(self.bindings):
            binding.route.on_connection_end(binding, error, is_proof_of_death(error))

    def _is_up(self) -> None:
        self.connected = True
        self.disconnected = trio.Event()
        self._ready.set()
        self._flush()

    def fail_all(self, error: FrayError) -> None:
        """Fail all calls; the caller is closing."""
        # Taken out of the table before any is failed: callbacks may look at it.
        queued, opened = self.table.take()
        for call in (*opened, *queued):
            call.fail(error)


def is_proof_of_death(error: FrayError) -> bool:
    """Return whether the end of a channel proves that the incarnation behind it is gone for good.

    A lost connection proves nothing: the channel redials. Proofs are a refused connection (a listener lives exactly as
    long as its process), a hello that names another incarnation, and the host's own goodbye. The directory's report is
    the other way to learn of a death (`fray.runtime.calls.route`).
    """
    return isinstance(error, ActorDied | Refused) or error.details.get("reason") == HOST_LEFT


def _meta_of(call: CallFuture) -> bytes:
    deadline_s = None if call.deadline is None else call.deadline - trio.current_time()
    return pack_meta(CallMeta(deadline_s=deadline_s, chain=call.chain))
