"""The caller's end of the conversation with one host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import trio

from fray.errors import ActorDied, ChannelClosed, ChannelFull, FrayError, Refused
from fray.model.messages.calls import CallerHello, CallMeta
from fray.model.messages.client import ActorEndpoint
from fray.net.channel.public import Channel, RedialPolicy, run_dialled
from fray.net.channel.requests import Requests
from fray.net.channel.session import HIGH_WATER_BYTES
from fray.net.codec import META, Bytes, Kind, encode_message
from fray.net.transport import Credential
from fray.runtime.calls.call_future import CallFuture
from fray.runtime.calls.duplex_stream import DuplexStream
from fray.runtime.calls.flow_control import unpack_count
from fray.runtime.calls.item_stream import CallStream
from fray.runtime.calls.wire import (
    AGAIN,
    BUFFERS,
    CALLER_KEY_ID,
    CREDIT,
    HOST_LEFT,
    INPUT,
    ITEM,
    NOT_RUN,
    ONLY,
    SETTLE_EVERY_BYTES,
    TWO_WAY,
    PendingCalls,
    pack_meta,
)
from fray.runtime.serialization import errors
from fray.runtime.serialization.buffer_transfer import (
    SHARE,
    WITHDRAWN,
    BufferTransfer,
    ReceivedObject,
)
from fray.runtime.serialization.buffers import is_large

if TYPE_CHECKING:
    from fray.runtime.calls.caller import Caller
    from fray.runtime.calls.route import RouteBinding

_CALL, _RESULT, _FAULT = int(Kind.CALL), int(Kind.RESULT), int(Kind.FAULT)
_CANCEL, _SETTLED = int(Kind.CANCEL), int(Kind.SETTLED)


class HostConnection:
    """One host incarnation; the handler of the channel to it."""

    def __init__(self, caller: Caller, name: str, endpoint: ActorEndpoint, give_up_s: float | None) -> None:
        self.caller = caller
        self.name = name
        """Of this conversation: (name, number) is the id of a call."""
        self.incarnation = endpoint.incarnation
        self.table: PendingCalls[CallFuture] = PendingCalls()
        self.bindings: dict[RouteBinding, None] = {}
        self.connected = False
        self.ended: FrayError | None = None
        self.heard_until: int | None = None
        """Set by the goodbye of a host: the number of the last call that it took note of."""
        self.down = trio.Event()
        """Set while there is no connection."""
        self.over = trio.Event()
        """Set when the conversation has ended."""
        self.down.set()
        self._ready = trio.Event()
        self._endpoint = endpoint
        self._policy = RedialPolicy(refused_is_final=True, give_up_s=give_up_s)
        self._channel: Channel | None = None
        self._requests: Requests | None = None
        self._welcomed = False
        self._again: list[CallFuture] = []
        self._pumping = False
        self._room: trio.Event | None = None
        self._scope = trio.CancelScope()
        self.exchange = BufferTransfer(caller.spawn)
        self.exchange.on_verdict = self._flush
        self._streams: set[int] = set()
        """Streams whose items have buffers."""

    def __repr__(self) -> str:
        where = f"connected at {self._channel.remote}" if self._channel is not None else "connected"
        state = "ended" if self.ended else where if self.connected else "connecting"
        return f"<Peer {self.incarnation or self._endpoint.addresses}: {state}, {len(self.table.open)} calls open>"

    # Life ------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Hold the conversation until it ends."""
        endpoint = self._endpoint
        credential = Credential(CALLER_KEY_ID, endpoint.key) if endpoint.key else None
        try:
            with self._scope:
                await run_dialled(
                    self.caller.network,
                    endpoint.addresses,
                    credential,
                    greeting=self._greeting,
                    handler=self._opened,
                    incarnation=self.caller.session,
                    expects=endpoint.incarnation or None,
                    policy=self._policy,
                    rng=self.caller.rng,
                )
        except FrayError as error:
            self.on_end(error)
        finally:
            self.on_end(ChannelClosed("the conversation was given up", reason="cancelled"))

    def _greeting(self) -> bytes:
        expects = self._endpoint.incarnation or None
        return encode_message(CallerHello(caller=self.name, expects=expects, known=self._welcomed))

    def _opened(self, channel: Channel) -> HostConnection:
        self._channel = channel
        self._requests = Requests(channel)
        self.exchange.begin(channel)
        return self

    def serves(self, endpoint: ActorEndpoint, target: int) -> bool:
        """Whether a binding to ``target`` here is a binding to ``endpoint``."""
        return self.ended is None and self.incarnation == endpoint.incarnation and target == endpoint.number

    def heard(self, call: CallFuture) -> bool:
        """Whether the host may have taken note of a call that was sent."""
        return self.heard_until is None or call.number <= self.heard_until

    def has_calls(self, binding: RouteBinding) -> bool:
        calls = (*self.table.open.values(), *self.table.queued)
        return any(call.binding is binding for call in calls)

    def release(self, binding: RouteBinding) -> None:
        """Nobody needs ``binding`` any more; the last one ends the conversation."""
        self.bindings.pop(binding, None)
        if not self.bindings and self.ended is None:
            self._scope.cancel()

    # Calls -----------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        channel = self._channel
        return self.table.is_full or (channel is not None and channel.outbox.size_bytes > HIGH_WATER_BYTES)

    async def wait_room(self) -> None:
        """Wait until `is_full` may have become false."""
        if self.table.is_full and self.ended is None:
            if self._room is None:
                self._room = trio.Event()
            await self._room.wait()
        elif self._channel is not None:
            try:
                await self._channel.wait_room()
            except ChannelClosed:
                pass  # the route finds out and says why

    def send(self, call: CallFuture) -> None:
        """Send the call, or queue it behind others or until there is a connection."""
        if self.connected and not self.table.queued and (call.parcel is None or not self._must_wait(call)):
            self._transmit(call, self.table.sent(call))
        else:
            self.table.queue(call)

    def cancel(self, call: CallFuture) -> None:
        """Tell the host, if it may know of the call."""
        if self.table.withdraw(call) or self.ended is not None:
            call.answer_cancelled()
        elif call.number in self.table.open and self._channel is not None:
            if call.shipped is not None:
                self.exchange.stop(call.shipped)
            try:
                self._channel.send_nowait(_CANCEL, call.number)
            except (ChannelClosed, ChannelFull):
                pass  # it is told again after a reset; a full channel is told by the deadline

    def grant(self, call: CallFuture, credit: bytes) -> None:
        """Let a stream go on."""
        if self._channel is not None and call.number in self.table.open:
            try:
                self._channel.send_nowait(CREDIT, call.number, credit)
            except (ChannelClosed, ChannelFull) as error:
                call.fail(error)

    def input(self, call: DuplexStream, flags: int, item: bytes) -> None:
        """One item for the method, or the end of all."""
        if self._channel is not None and call.number in self.table.open:
            try:
                self._channel.send_nowait(INPUT, call.number, item, flags=flags)
            except (ChannelClosed, ChannelFull) as error:
                call.fail(error)

    async def request(self, message: object, *, timeout_s: float | None = None) -> Any:
        """Ask the host itself. Raises what it answers, or why it cannot be asked."""
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
            if call.parcel is not None:
                self._transmit_parcel(channel, call, binding.target, number, again)
            elif call.deadline is None and not call.chain:
                channel.send_nowait(_CALL, number, call.body, target=binding.target, flags=call.flags | again)
            else:
                body = _meta_of(call) + call.body
                channel.send_nowait(_CALL, number, body, target=binding.target, flags=call.flags | again | META)
        except (ChannelFull, ChannelClosed):
            if not again:
                self.table.unsend(call)
            self._start_pump()
            return False
        if call.flags & TWO_WAY and isinstance(call, DuplexStream):
            call.transmitted()
        return True

    def _transmit_parcel(self, channel: Channel, call: CallFuture, target: int, number: int, again: int) -> None:
        assert call.parcel is not None
        shipped = call.shipped = self.exchange.ship(call.parcel, ("to", target))
        flags, meta = call.flags | again | BUFFERS, b""
        if call.deadline is not None or call.chain:
            flags, meta = flags | META, _meta_of(call)
        try:
            channel.send_nowait(_CALL, number, shipped.table + meta + call.body, target=target, flags=flags)
        except (ChannelFull, ChannelClosed):
            self.exchange.recall(shipped)
            raise
        self.exchange.sent(shipped)

    def _must_wait(self, call: CallFuture) -> bool:
        """Whether a large call waits until the host has said whether it reads our segments."""
        return call.parcel is not None and is_large(call.parcel) and self.exchange.must_wait()

    def _flush(self) -> None:
        """Send what waits, as far as the channel takes it."""
        while self._again and self.connected:
            call = self._again[0]
            if call.number in self.table.open:
                if self._must_wait(call) or not self._transmit(call, call.number, AGAIN):
                    return
                if call.cancelled:
                    self.cancel(call)
            self._again.pop(0)
        while self.table.queued and self.connected and not self._must_wait(self.table.queued[0]):
            call = self.table.sent_queued()
            if not self._transmit(call, call.number):
                return

    def _start_pump(self) -> None:
        if not self._pumping and self.ended is None:
            self._pumping = True
            self.caller.spawn(self._pump)

    async def _pump(self) -> None:
        """The channel was full: go on as soon as it has room."""
        try:
            if self._channel is not None:
                await self._channel.wait_room()
        except ChannelClosed:
            return  # `on_end` hands the calls on
        finally:
            self._pumping = False
        self._flush()

    # The channel's handler -------------------------------------------------------------------------------------------

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == _RESULT or kind == _FAULT:  # noqa: SIM109 - a tuple is slower, and this is the hot path
            if flags & BUFFERS or ref in self._streams:
                self._answer_with_buffers(kind, flags, ref, body)
                return
            call = self.table.answered(ref, len(body))
            if call is None:
                return
            if kind == _FAULT and flags & NOT_RUN:
                call.route.refused(call, errors.load_error(body))
            else:
                call.answer(kind, flags, body)
        elif kind == _SETTLED:
            self.heard_until = ref
        elif kind == ITEM:
            stream = self.table.open.get(ref)
            if isinstance(stream, CallStream):
                if flags & BUFFERS:
                    self._streams.add(ref)
                    stream.item(ReceivedObject(*self.exchange.receive(body)))
                else:
                    stream.item(body)
        elif kind == CREDIT:
            conversation = self.table.open.get(ref)
            if isinstance(conversation, DuplexStream):
                conversation.granted(unpack_count(body))
        elif SHARE <= kind <= WITHDRAWN:
            self.exchange.on_frame(kind, flags, body)
        elif self._requests is not None:
            self._requests.on_frame(kind, flags, target, ref, body)

    def _answer_with_buffers(self, kind: int, flags: int, number: int, body: Bytes) -> None:
        """An answer that may have to wait: for its own buffers, or for those of the items before it."""
        call = self.table.open.get(number)
        landed: Bytes | ReceivedObject = ReceivedObject(*self.exchange.receive(body)) if flags & BUFFERS else body
        if call is None:
            if isinstance(landed, ReceivedObject):
                self.exchange.forget(landed.arrival)
            self.table.answered(number, len(body))
            return

        def end() -> None:
            if self.table.open.get(number) is call:
                self._streams.discard(number)
                self.table.answered(number, SETTLE_EVERY_BYTES)
                call.answer(kind, flags, landed)

        if isinstance(call, CallStream) and call.awaits_items():
            call.answer_later(end)
        elif isinstance(landed, ReceivedObject) and not landed.arrival.is_ready:
            landed.arrival.on_ready = end
        else:
            end()

    def on_batch(self) -> None:
        settled = self.table.settlement()
        if settled is not None and self._channel is not None:
            try:
                if self.table.open:
                    self._channel.send_nowait(_SETTLED, 0, settled)
                else:  # one call at a time: this would cost every 64th of them the time of another
                    self._channel.send_later(_SETTLED, 0, settled)
            except ChannelFull:
                pass  # the host keeps these answers a little longer: until the next reset, at most
        if self._room is not None and not self.table.is_full:
            self._room.set()
            self._room = None

    def on_reset(self, greeting: Bytes) -> None:
        assert self._channel is not None
        found = self._channel.incarnation
        if self._welcomed and found != self.incarnation:
            raise ActorDied(f"{self.incarnation} is gone: {found} listens at its address now")
        self.incarnation = found
        unsettled, self._again = self.table.reset()
        self.exchange.reset()
        self._streams.clear()
        if self._welcomed:
            self._channel.send_nowait(_SETTLED, 0, unsettled, flags=ONLY)
        self._welcomed = True
        if self._requests is not None:
            self._requests.on_reset()
        for call in self._again:
            if isinstance(call, CallStream):
                call.lost_items()
        self._is_up()

    def on_suspended(self, why: str) -> None:
        self.connected = False
        self.down.set()

    def on_resumed(self) -> None:
        self._is_up()

    def on_end(self, error: FrayError) -> None:
        if self.ended is not None:
            return
        self.ended = error
        self.connected = False
        for event in (self.down, self.over, self._ready, *([self._room] if self._room is not None else [])):
            event.set()
        if self._requests is not None:
            self._requests.on_end(error)
        self.caller.peer_over(self)
        self.exchange.end()
        for binding in list(self.bindings):
            binding.route.peer_ended(binding, error, is_proof_of_death(error))

    def _is_up(self) -> None:
        self.connected = True
        self.down = trio.Event()
        self._ready.set()
        self._flush()

    def fail_all(self, error: FrayError) -> None:
        """The caller is closing."""
        queued, opened = self.table.take()
        for call in (*opened, *queued):
            call.fail(error)


def is_proof_of_death(error: FrayError) -> bool:
    """Whether the end of a channel proves that the incarnation behind it is gone for good."""
    return isinstance(error, ActorDied | Refused) or error.details.get("reason") == HOST_LEFT


def _meta_of(call: CallFuture) -> bytes:
    deadline_s = None if call.deadline is None else call.deadline - trio.current_time()
    return pack_meta(CallMeta(deadline_s=deadline_s, chain=call.chain))
