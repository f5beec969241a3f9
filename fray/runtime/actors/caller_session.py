"""Server side of one caller: its calls, each run once, and their answers, stored until it has them.

A `CallerSession` outlives its caller's connections, and channels: the record of its calls (`CallDeduplicator`) stays as
long as the conversation does. Then the calls that the caller still had under way are cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import trio
from attrs import Factory, define

from fray.errors import ActorDied, ChannelClosed, ChannelFull, FrayError, NoSuchActor, OutcomeUnknown, ProtocolMismatch
from fray.model.ids import SessionId
from fray.model.messages.calls import ActorNumber, GetMetrics, LookUpActor, RequestShutdown, ShutdownAccepted
from fray.model.monitoring.trace_context import TRACEPARENT_BYTES
from fray.net.channel.public import Channel
from fray.net.channel.session import STALE_S
from fray.net.codec import META, Bytes, Kind, decode_message
from fray.runtime import tracing
from fray.runtime.actors.incoming_call import IncomingCall, InputBuffer, TracedCall
from fray.runtime.actors.lifecycle import ShutdownRequest
from fray.runtime.actors.pending_calls import PendingLightCalls
from fray.runtime.actors.served_actor import ServedActor, no_such_actor
from fray.runtime.calls.dedup import CANCELLED_ANSWER, Admission, Answer, CallDeduplicator
from fray.runtime.calls.flow_control import pack_count
from fray.runtime.calls.wire import (
    AGAIN,
    BUFFERS,
    CREDIT,
    INPUT,
    ITEM,
    NOT_RUN,
    ONLY,
    TRACE,
    TWO_WAY,
    split_call,
    split_meta,
)
from fray.runtime.serialization import errors
from fray.runtime.serialization.buffer_transfer import SEGMENTS_REMOVED, SHARE, BufferTransfer
from fray.runtime.serialization.buffers import PickledObject, TransferCapabilities, is_large
from fray.runtime.serialization.number_list import unpack_numbers

if TYPE_CHECKING:
    from fray.runtime.tracing_sdk import ServedCall

# Plain integers: an enum member would be looked up for every frame.
_CALL, _FAULT = int(Kind.CALL), int(Kind.FAULT)
_CANCEL, _SETTLED, _REQUEST = int(Kind.CANCEL), int(Kind.SETTLED), int(Kind.REQUEST)


class CallerSession:
    """Calls of one caller under way, answers it has not confirmed, and its present channel, if any.

    Args:
        unbroken: False if the caller was known to an earlier host of this address, which may have run its calls.
        incarnation: of the host.
        actors: the actors of the host, by number; shared with it.
        pending: calls of light actors that are not there now.
        spawn: starts a task of the host.
        on_left: called with the session when its channel has ended.
    """

    def __init__(
        self,
        session: SessionId,
        *,
        unbroken: bool,
        incarnation: str,
        actors: dict[int, ServedActor],
        pending: PendingLightCalls,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        on_left: Callable[[CallerSession], None],
    ) -> None:
        self.session = session
        self._incarnation = incarnation
        self._actors = actors
        self._pending = pending
        self._spawn = spawn
        self._on_left = on_left
        self.channel: Channel | None = None
        self.dedup = CallDeduplicator(is_complete=unbroken)
        self._calls: dict[int, IncomingCall] = {}
        self._deferred: deque[tuple[int, IncomingCall]] = deque()
        """Calls admitted and not delivered to their actor, because the caller must settle answers first."""
        self._unsent: deque[tuple[int, Answer]] = deque()
        """Answers that did not fit into the channel."""
        self._touched_actors: dict[ServedActor, None] = {}
        self.buffer_transfer = BufferTransfer(spawn)
        self._buffer_waits = BufferWaits(self._on_call_ready)
        self._closing = False
        self._trace: tuple[int, ServedCall] | None = None
        """Number of the next call, and its span, if it came with one."""

    def __repr__(self) -> str:
        stored = self.dedup.kept_bytes
        return f"<caller {self.session}: {len(self._calls)} calls under way, {stored} bytes of answers stored>"

    @property
    def under_way(self) -> int:
        """Number of calls that have not been answered."""
        return len(self._calls)

    def attach(self, channel: Channel) -> CallerChannelHandler:
        """Return the handler for a new channel of this caller; answers are sent through it from now on."""
        self.channel = channel
        # Calls are orders. A process that was stopped for minutes may have been replaced, and must not run what lay
        # unread in its sockets; the callers send it again where it belongs.
        channel.stale_s = STALE_S
        self.buffer_transfer.attach(channel)
        return CallerChannelHandler(self, channel)

    def on_reset(self) -> None:
        """Start the conversation from zero: the caller asks again for the answers it has not received."""
        # The caller repeats its open calls and is sent their stored answers then, so each of these would be sent twice.
        self._unsent.clear()
        self.buffer_transfer.reset()

    # Calls -----------------------------------------------------------------------------------------------------------

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == _CALL:
            # The goodbye named the last call that was received. Its caller counts this one as not delivered and may
            # send it elsewhere.
            if self._closing:
                return
            admission = self.dedup.admit(ref, bool(flags & AGAIN))
            if admission is Admission.RUN:
                self._start_call(flags, target, ref, body)
            else:
                if flags & BUFFERS:
                    # The chunks of its buffers arrive even if the call is not run, so the transfer has to be accepted
                    # or given up.
                    self._receive_repeated_buffers(admission, ref, body)
                self._answer_repeat(admission, ref)
        elif kind == _SETTLED:
            self._on_settled(flags, body)
        elif kind == _CANCEL:
            self._on_cancel(ref)
        elif kind == CREDIT:
            self._on_credit(ref, body)
        elif kind == INPUT:
            self._on_input(ref, flags, body)
        elif kind == _REQUEST:
            self._on_request(ref, body)
        elif SHARE <= kind <= SEGMENTS_REMOVED:
            self.buffer_transfer.on_frame(kind, flags, body)
        elif kind == TRACE:
            self._on_trace(ref, body)

    def on_batch(self) -> None:
        if self._touched_actors:
            # Once per batch of frames: one wake-up of a thread for a burst of calls instead of one for each.
            for actor in self._touched_actors:
                actor.flush()
            self._touched_actors.clear()

    def _start_call(self, flags: int, target: int, number: int, body: Bytes) -> None:
        meta = transfer = None
        if flags & BUFFERS:
            # The parts of the body in the order in which the caller packs them: table of buffers, options, method,
            # pickle.
            transfer, body = self.buffer_transfer.receive(body)
        if flags & META:
            meta, body = split_meta(body)
        method, body = split_call(body)
        if self._trace is None or self._trace[0] != number:
            call = self._calls[number] = IncomingCall(self, number, flags, method, body)
        else:
            call = self._calls[number] = TracedCall(self, number, flags, method, body, self._trace[1])
        if flags & TWO_WAY:
            call.inputs = InputBuffer(call)
        if meta is not None:
            call.links = meta.chain
            if meta.deadline_s is not None:
                # Only durations cross the wire: the clocks of two machines differ.
                call.deadline = trio.current_time() + meta.deadline_s
        call.transfer = transfer
        if not self._buffer_waits.add(target, call):
            self._on_call_ready(target, call)

    def _on_trace(self, number: int, body: Bytes) -> None:
        """Note the span of which the next call is part. A malformed ``traceparent`` is ignored, and the call runs."""
        served = None
        if tracing.active is not None and len(body) <= TRACEPARENT_BYTES:
            served = tracing.active.served_call(bytes(body))
        self._trace = None if served is None else (number, served)

    def _on_call_ready(self, target: int, call: IncomingCall) -> None:
        """Deliver a call whose turn it is and whose buffers are there, if answers have room."""
        # Behind those that wait already: calls start in the order of their arrival.
        if self._deferred or not self.dedup.has_room:
            self._deferred.append((target, call))
        else:
            self.deliver(target, call)

    def deliver(self, target: int, call: IncomingCall) -> None:
        # Looked up now and not at the arrival: the actor may have ended or been made while the call waited for buffers.
        actor = self._actors.get(target)
        if actor is None:
            self._pending.admit(target, self, call)
        else:
            self._touched_actors[actor] = None
            actor.submit(call)

    def _receive_repeated_buffers(self, admission: Admission, number: int, body: Bytes) -> None:
        """Receive the buffers of a call sent again in a new conversation; use them if the old ones never arrived."""
        transfer, _ = self.buffer_transfer.receive(body)
        waiting = self._buffer_waits.find(number) if admission is Admission.ATTACH else None
        if waiting is None:
            self.buffer_transfer.forget(transfer)
        # The old transfer can never complete, as its chunks were lost with the conversation.
        elif waiting[1].transfer is not None and not waiting[1].transfer.is_ready:
            waiting[1].transfer = transfer
            self._buffer_waits.watch(*waiting)

    def _answer_repeat(self, admission: Admission, number: int) -> None:
        """Answer a call that was sent before, again or as of unknown outcome; one that still runs is attached."""
        # ATTACH needs no answer here: the running call answers on the newest channel when it ends.
        if admission is Admission.REPEAT:
            answer = self.dedup.answer(number)
            assert answer is not None
            self._send_answer(number, answer)
        elif admission is Admission.FORGOTTEN:
            text = f"the host no longer has the outcome of call {number}: it may or may not have taken effect"
            self._send_answer(number, (_FAULT, 0, errors.dump_error(OutcomeUnknown(text))))
        elif admission is Admission.FULL:
            text = f"caller {self.session} has {len(self.dedup)} calls open at this host: settle some first"
            # NOT_RUN: the call surely had no effect, so its caller may send it again.
            self._send_answer(number, (_FAULT, NOT_RUN, errors.dump_error(ChannelFull(text))))

    def _on_settled(self, flags: int, body: Bytes) -> None:
        numbers = unpack_numbers(body)
        if flags & ONLY:
            self.dedup.discard_answers_except(numbers)
        else:
            self.dedup.discard_answers(numbers)
        # Settling is what makes room, so this is where the waiting calls continue.
        while self._deferred and self.dedup.has_room:
            target, call = self._deferred.popleft()
            if not call.cancelled:
                self.deliver(target, call)

    def _on_cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        if call.actor is not None:
            call.actor.cancel(call)
        else:
            # It waits for buffers, for room, or for a light actor; each of these looks at the flag before the call is
            # delivered.
            call.cancelled = True
            if call.transfer is not None:
                self.buffer_transfer.forget(call.transfer)
            self._buffer_waits.drop(call)
            call.finish(CANCELLED_ANSWER)

    def _on_credit(self, number: int, body: Bytes) -> None:
        call = self._calls.get(number)
        if call is not None and call.stream is not None:
            call.stream.grant(body)

    def _on_input(self, number: int, flags: int, body: Bytes) -> None:
        call = self._calls.get(number)
        if call is not None and call.inputs is not None:
            call.inputs.on_item(flags, body)

    def announce_close(self) -> None:
        """Report up to which call this host has listened: later ones are undelivered, never of unknown outcome."""
        # Before the number is sent: a call with a higher number must not be admitted after it was declared undelivered.
        self._closing = True
        for call in self._buffer_waits.clear():
            call.refuse(ActorDied("the process of this actor is shutting down"))
        if self.channel is not None:
            try:
                # `highest` and not the last answered one: running calls are answered or of unknown outcome, and only
                # later ones are surely undelivered.
                self.channel.send_nowait(_SETTLED, self.dedup.highest)
            except (ChannelFull, ChannelClosed):
                pass  # then the caller reports calls without an answer as OutcomeUnknown

    def on_channel_ended(self) -> None:
        """Note the end of the channel; another one may follow."""
        self.channel = None
        self._on_left(self)

    def cancel_all(self) -> None:
        """Cancel all calls: the caller is gone for good."""
        self._deferred.clear()
        self._buffer_waits.clear()
        self.buffer_transfer.end()
        for call in list(self._calls.values()):
            call.cancelled = True  # also one that waits for its actor
            if call.actor is not None:
                call.actor.cancel(call)

    # Answers ---------------------------------------------------------------------------------------------------------

    def answer(self, call: IncomingCall, answer: Answer) -> None:
        number = call.number
        # A call is answered by its end, its cancellation or its deadline, whichever is first.
        if self._calls.pop(number, None) is not None and self.dedup.answered(number, answer):
            self._send_answer(number, answer)

    @property
    def capabilities(self) -> TransferCapabilities:
        """Ways in which large buffers can be sent to the caller."""
        return self.buffer_transfer.capabilities

    def send_item(self, call: IncomingCall, data: bytes | PickledObject) -> None:
        """Send one item of a stream; cancel the call if the channel is full or closed."""
        if self.channel is not None and call.number in self._calls:
            try:
                if isinstance(data, PickledObject):
                    self._send_pickled(self.channel, ITEM, call.number, BUFFERS, data)
                else:
                    self.channel.send_nowait(ITEM, call.number, data)
            # Items are not stored: a lost one would be a gap in the stream, so the call ends instead.
            except (ChannelFull, ChannelClosed):
                self._on_cancel(call.number)

    def grant_credit(self, call: IncomingCall, items: int) -> None:
        """Allow the caller to send as many items as its method has taken."""
        if self.channel is not None and call.number in self._calls:
            try:
                self.channel.send_nowait(CREDIT, call.number, pack_count(items))
            except (ChannelFull, ChannelClosed):
                self._on_cancel(call.number)

    async def wait_room(self) -> None:
        """Wait until the channel has room (back-pressure of streams)."""
        if self.channel is not None:
            try:
                await self.channel.wait_room()
            except ChannelClosed:
                pass  # the call is cancelled with its session

    def _send_answer(self, number: int, answer: Answer) -> None:
        channel = self.channel
        if channel is None:
            return  # stored: sent when the caller requests it again
        # Behind the others, so that answers leave in the order in which calls have ended.
        if self._unsent:
            self._unsent.append((number, answer))
            return
        kind, flags, body = answer
        try:
            if flags & BUFFERS:
                self._send_answer_with_buffers(channel, number, answer)
            else:
                channel.send_nowait(kind, number, body, flags=flags)
        except ChannelFull:
            self._unsent.append((number, answer))
            self._spawn(lambda: self._send_unsent(channel))
        except ChannelClosed:
            pass  # stored: sent when the caller requests it again

    def _send_answer_with_buffers(self, channel: Channel, number: int, answer: Answer) -> None:
        """Send an answer with large buffers.

        Buffers that must be copied into shared segments are copied while other tasks run; that is safe, as nothing else
        refers to them by now.
        """
        kind, flags, pickled = answer
        if not self.buffer_transfer.can_copy_to_segments(pickled):
            self._send_pickled(channel, kind, number, flags, pickled)
            return

        async def place_and_send() -> None:
            await self.buffer_transfer.copy_to_segments(pickled)
            # Meanwhile the caller may have reconnected and been sent the stored answer, or have settled it.
            if self.channel is channel and self.dedup.answer(number) is answer:
                self._send_answer(number, answer)

        self._spawn(place_and_send)

    def _send_pickled(self, channel: Channel, kind: int, number: int, flags: int, pickled: PickledObject) -> None:
        """Send a pickled object with buffers.

        Raises:
            ChannelFull, ChannelClosed: as `Channel.send_nowait`; no buffer is in flight then.
        """
        if is_large(pickled):
            self.buffer_transfer.must_wait()  # offers shared memory; this answer does not wait, later ones may use it
        shipped = self.buffer_transfer.send(pickled, number)
        try:
            # The table that announces the buffers goes first; `commit` then releases their chunks, `abort` the
            # segments.
            channel.send_nowait(kind, number, shipped.table + pickled.pickle, flags=flags)
        except (ChannelFull, ChannelClosed):
            self.buffer_transfer.abort(shipped)
            raise
        self.buffer_transfer.commit(shipped)

    async def _send_unsent(self, channel: Channel) -> None:
        """Send the answers that did not fit as soon as the channel has room."""
        try:
            await channel.wait_room()
        except ChannelClosed:
            return
        # A new channel has been sent the stored answers after its reset.
        if self.channel is channel:
            unsent, self._unsent = self._unsent, deque()
            for number, answer in unsent:
                self._send_answer(number, answer)

    # Requests to the server itself -----------------------------------------------------------------------------------

    def _on_request(self, ref: int, body: Bytes) -> None:
        assert self.channel is not None
        message, _ = decode_message(body)
        try:
            self.channel.reply(ref, self._reply(message))
        except FrayError as error:
            self.channel.fail(ref, error)

    def _reply(self, message: object) -> object:
        if isinstance(message, LookUpActor):
            return self._look_up(message.name)
        if isinstance(message, GetMetrics):
            return self._actor(message.number).metrics()
        if isinstance(message, RequestShutdown):
            lifecycle = self._actor(message.number).lifecycle
            if lifecycle is not None:
                # Returns before the end: the actor may take long, and this reply would block the connection's other
                # frames.
                lifecycle.request_shutdown(ShutdownRequest(message.reason))
            return ShutdownAccepted()
        raise ProtocolMismatch(f"a host does not understand {type(message).__name__}")

    def _actor(self, number: int) -> ServedActor:
        actor = self._actors.get(number)
        if actor is None:
            raise no_such_actor(number)
        return actor

    def _look_up(self, name: str) -> ActorNumber:
        # Several actors may share a name; the latest registration is the one that the directory names.
        actor = next((actor for actor in reversed(self._actors.values()) if actor.name == name), None)
        if actor is None:
            known = ", ".join(sorted({each.name for each in self._actors.values()})) or "none"
            raise NoSuchActor(f"no actor named {name!r} is served here; there are: {known}", name=name)
        return ActorNumber(number=actor.number, actor_id=actor.actor_id, incarnation=self._incarnation)


class CallerChannelHandler:
    """Handler of one channel; a session has several, one after the other."""

    def __init__(self, session: CallerSession, channel: Channel) -> None:
        self._session = session
        self._channel = channel
        # Bound directly: one call less for each frame.
        self.on_frame = session.on_frame
        self.on_batch = session.on_batch

    def on_reset(self, greeting: bytes) -> None:
        self._session.on_reset()

    def on_suspended(self, why: str) -> None:
        """Keep the answers."""

    def on_resumed(self) -> None:
        """Continue; the channel itself sends again what was lost."""

    def on_end(self, error: FrayError) -> None:
        # A caller that reconnects gets its new channel before the end of the old one is noticed.
        if self._session.channel is self._channel:
            self._session.on_channel_ended()


@define(eq=False)
class BufferWaits:
    """Queues of calls that wait for buffers, one for each actor.

    Calls are started in the order of arrival, so a call waits for the buffers of those before it to the same actor;
    calls to other actors do not. ``on_ready`` is called with the actor's number and each call, in order, once
    everything before it has arrived.
    """

    on_ready: Callable[[int, IncomingCall], None]
    _queues: dict[int, deque[IncomingCall]] = Factory(dict)

    def add(self, target: int, call: IncomingCall) -> bool:
        """Keep the call until it is its turn. Return False if it need not wait."""
        queue = self._queues.get(target)
        if queue is None:
            # The common case: nothing waits for this actor, so the call needs no queue.
            if call.transfer is None or call.transfer.is_ready:
                return False
            queue = self._queues[target] = deque()
        queue.append(call)
        self.watch(target, call)
        return True

    def watch(self, target: int, call: IncomingCall) -> None:
        """Release calls when the buffers of ``call`` are there (they may have been sent again, in a new transfer)."""
        if call.transfer is not None:
            # By actor, not by call: those behind it in the queue become ready with it.
            call.transfer.on_ready = lambda: self._release(target)
            if call.transfer.is_ready:
                self._release(target)

    def find(self, number: int) -> tuple[int, IncomingCall] | None:
        """Return the waiting call of this number and its actor's number; None if it does not wait."""
        return next(((target, call) for target, call in self if call.number == number), None)

    def drop(self, call: IncomingCall) -> None:
        """Remove a cancelled call: those behind it need not wait for its buffers."""
        call.transfer = None
        for target, queue in list(self._queues.items()):
            if call in queue:
                queue.remove(call)
                # It may have been the one that the others waited for.
                self._release(target)

    def clear(self) -> list[IncomingCall]:
        """Remove and return all waiting calls."""
        waiting = [call for _, call in self]
        self._queues.clear()
        return waiting

    def __iter__(self) -> Iterator[tuple[int, IncomingCall]]:
        return iter([(target, call) for target, queue in self._queues.items() for call in queue])

    def _release(self, target: int) -> None:
        queue = self._queues.get(target)
        while queue and ((transfer := queue[0].transfer) is None or transfer.is_ready):
            call = queue.popleft()
            if not queue:
                self._queues.pop(target, None)
            self.on_ready(target, call)
        # Empty from the start if `drop` has removed the only call.
        if queue is not None and not queue:
            self._queues.pop(target, None)
