"""One connection of a channel: a reader (the task that runs it), a writer, and a clock.

The writer drains all that is pending into one message. While it sleeps, a frame may go straight to the transport
(`Transport.send_now`), once for each message received or burst drained: so a single request or answer costs no task
switch, and the second frame of a burst wakes the writer, which gathers the rest. A long burst does not wait for the
writer's turn: until that comes, pending frames go straight to the transport too. Task switches and messages are the
main costs of a call, which is why frames are gathered and single ones bypass the writer.

Only the writer waits in a send: a cancelled send leaves part of a message on the wire, so cancelling it costs the
connection. A failed send ends the connection once the reader has read what had arrived before: a peer that ends its
channel says goodbye and closes the connection, and the next send may fail before the goodbye is read.

An end that executes orders (`Channel.stale_s`) does not read messages that were written long ago: if its process was
suspended for minutes, it closes the connection first, and receives the current orders on a new connection. Otherwise a
machine that wakes up after its lease has expired would run the calls that wait in its sockets. Answers are facts, and
read however old they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Protocol

import trio

from fray.errors import ConnectionFailed, FrayError, MessageTooLarge, Unreachable
from fray.net.alarm import Alarm
from fray.net.buffers.chunks import (
    NEAR_WINDOW_BYTES,
    PLACE_BYTES,
    WINDOW_BYTES,
    ChunkSender,
)
from fray.net.channel.session import (
    ACK_AFTER_S,
    SILENT_PERIODS,
    Heartbeat,
    HeartbeatAction,
    ReceiveState,
    SendQueue,
)
from fray.net.codec import ACK, Bytes, Kind, encode_frame
from fray.net.transport import Transport

logger = logging.getLogger("fray.net")

FAREWELL_S = 1.0
"""Longest time for which a cancelled dialer sends queued frames and its goodbye."""
FINISH_READING_S = 1.0
"""Longest time for which messages that had arrived are read after a failed send."""
DIRECT_BYTES = 64 * 1024
"""Largest amount that is sent directly; the writer sends more."""
STREAM_BYTES = 16 * 1024
"""Step of direct sends in a burst without a checkpoint, so that the peer works in parallel to the burst."""
_PING = encode_frame(Kind.PING)
_PONG = encode_frame(Kind.PONG)


class ConnectionOwner(Protocol):
    """Part of a channel that its connection uses."""

    outbox: SendQueue
    inbox: ReceiveState
    heartbeat_s: float
    waiting_heartbeat_s: float
    is_waiting: Callable[[], bool]
    stale_s: float
    refill: Callable[[], None] | None
    """Adds frames to the outbox when there is room; None: no more frames."""
    bulk_out: ChunkSender

    def place(self, start: Bytes, message_bytes: int) -> memoryview | None:
        """Return where to receive the remaining of a large message that starts like this; None: nowhere."""

    def dispatch(self, message: Bytes, connection: Connection) -> None:
        """Dispatch the frames of one message. May drop the connection."""

    def begin_close(self, reason: str) -> None:
        """Begin an orderly close, for this reason."""

    def goodbye_frame(self) -> bytes | None:
        """Return the goodbye frame, if the channel is closing."""

    def owns(self, connection: Connection) -> bool:
        """Return whether this is still the channel's connection."""

    def on_silence(self, is_silent: bool) -> None:
        """Note that the peer does not answer; or that it has answered after all."""


class Connection:
    """Runner of one transport until it is lost or dropped; ``error`` is the reason."""

    def __init__(
        self, channel: ConnectionOwner, transport: Transport, *, opening: bytes | None = None, polite: bool = False
    ) -> None:
        self.transport = transport
        self.error: FrayError | None = None
        self.received_any = False
        """A valid message has arrived."""
        self.began = trio.current_time()
        self.process_was_suspended = False
        """Closed because this process had been suspended for long."""
        self.goodbye_sent = False
        self.on_silent: Callable[[], None] | None = None
        """Callback of a dialer, which dials again beside a silent connection."""
        self.on_heard: Callable[[], None] | None = None
        """Callback of a dialer: the silent connection has answered after all."""
        self._channel = channel
        self._opening = opening
        self._polite = polite
        self._scope = trio.CancelScope()
        self._heartbeat = Heartbeat(self.began, self.began, stale_s=channel.stale_s)
        self._alarm = Alarm(math.inf)
        self._alarm_soon = False
        self._urgent: list[bytes] = []
        self._ack_now = False
        self._send_now: Callable[[list[Bytes]], bool] | None = getattr(transport, "send_now", None)
        self._unfinished: list[Bytes] | None = None
        self._direct = False
        self._idle: trio.lowlevel.Task | None = None
        """Task of the writer, while it sleeps."""
        self._woken = False
        """The writer has been woken but has not run since, so frames may be sent before it runs."""
        self._chunk_next = False
        """Frames were sent last: a chunk is next, if any is pending."""
        self._window_bytes = NEAR_WINDOW_BYTES if getattr(transport, "is_near", False) else WINDOW_BYTES
        place_into = getattr(transport, "place_into", None)
        if place_into is not None:
            place_into(PLACE_BYTES, channel.place)

    @property
    def received_at(self) -> float:
        """Time when the last message arrived, on Trio's clock."""
        return self._heartbeat.received_at

    @property
    def is_stale(self) -> bool:
        """Return whether unread messages date from before this process was suspended for long."""
        return self._heartbeat.is_stale(trio.current_time())

    async def run(self) -> None:
        """Serve until the connection is lost. A polite one that is cancelled from outside sends its goodbye first."""
        try:
            with self._scope:
                self._send_first()
                async with trio.open_nursery() as nursery:
                    # Reader and writer are tasks by themselves: a message then resumes no frame but theirs, while the
                    # heartbeat, which sleeps most of the time, may stay below the frames of the dialer or the acceptor.
                    nursery.start_soon(self._read)
                    nursery.start_soon(self._write)
                    await self._tick()
        finally:
            # Only a dialer says goodbye when it is cancelled. A listener that stops may be a controller that restarts,
            # whose peers shall dial again instead of ending their channels.
            if self._polite and self.error is None and self._channel.owns(self):
                self._channel.begin_close("cancelled")
                with trio.move_on_after(FAREWELL_S, shield=True):
                    await self._farewell()
            self.transport.abort()

    def _send_first(self) -> None:
        """Send the opening and what is pending before the tasks begin: the peer works on it meanwhile."""
        # A channel that has ended while it was attached has sent its goodbye, and the opening before it.
        if self._send_now is None or not self._channel.owns(self):
            return
        if self._opening is not None:
            opening, self._opening = self._opening, None
            if not self._send_now([opening]):
                self._unfinished = [opening]
                return
        message = self._next_frames()
        if message is not None and not self._send_now(message):
            self._unfinished = message

    def drop(self, why: FrayError) -> None:
        """Close it now, for this reason (the first reason counts)."""
        if self.error is None:
            self.error = why
        self.transport.abort()
        self._scope.cancel()

    def poke(self) -> None:
        """Send pending frames now if the writer sleeps and a direct send is due, else wake the writer."""
        # The writer runs or waits in a send, and takes what is pending afterwards. Only between its wake-up and its
        # turn nothing is being sent, so a direct send keeps the order.
        if self._idle is None:
            if self._woken and self._channel.outbox.unsent_bytes >= STREAM_BYTES:
                self._stream()
            return
        if self._direct and self._send_now is not None and self._channel.outbox.unsent_bytes <= DIRECT_BYTES:
            self._direct = False
            message = self._next_frames()
            if message is None or self._send_now(message):
                channel = self._channel
                if (
                    # The rest of what was pending would otherwise wait for the next tick, 1 s or longer.
                    not channel.outbox.unsent  # a message gathers `BATCH_BYTES` at most
                    and channel.refill is None
                    and (not channel.bulk_out.waiting_bytes or not self._may_send_chunk())
                ):
                    return
            else:
                # Part of it may be on the wire: the writer has to finish it before anything else.
                self._unfinished = message
        task, self._idle = self._idle, None
        self._woken = self._send_now is not None and self._unfinished is None
        trio.lowlevel.reschedule(task)

    def _stream(self) -> None:
        """Send pending frames directly: the writer is awake but has not run yet, so nothing is being sent."""
        message = self._next_frames()
        if message is not None and self._send_now is not None and not self._send_now(message):
            self._unfinished = message
            self._woken = False

    def try_send_goodbye(self, goodbye: bytes) -> None:
        """Send the goodbye if that is possible without waiting."""
        if self._send_now is None or self.goodbye_sent or self._unfinished is not None:
            return
        # Set first: the channel ends now, whether this succeeds or not.
        self.goodbye_sent = True
        try:
            # A listener may end the channel before its writer has run. The dialer must get the welcome first.
            if self._opening is None or self._send_now([self._opening]):
                self._send_now([ACK.pack(self._channel.inbox.take_ack()), goodbye])
        except MessageTooLarge as error:
            logger.warning("close reason truncated: %s", error)

    def answer_ping(self) -> None:
        """Queue the answer to a ping."""
        self._urgent.append(_PONG)

    def must_send(self) -> bool:
        """Return whether an unsequenced frame or an acknowledgement is waiting to be sent."""
        return bool(self._urgent) or self._ack_now

    # Reading

    async def _read(self) -> None:
        channel, receive = self._channel, self.transport.receive
        try:
            while True:
                message = await receive()
                now = trio.current_time()
                stale = self._heartbeat.is_stale(now)
                # A newer connection has taken over. The exchanged counts do not include this message, so its frames are
                # sent again there.
                if not channel.owns(self):
                    return
                if stale:
                    self._close_after_suspension(now)
                    return
                self._heartbeat.received_at = now
                if self._heartbeat.is_silent:
                    self._note_heard()
                # The answer to this message may bypass the writer.
                self._direct = True
                channel.dispatch(message, self)
                # After dispatching: a message that is malformed counts as no progress.
                self.received_any = True
        except (ConnectionFailed, MessageTooLarge) as error:
            self._lost(error)
        finally:
            self._scope.cancel()

    def _close_after_suspension(self, now: float) -> None:
        """Close the connection: this process was suspended, so its peers have given it up, or will be dialed again."""
        self.process_was_suspended = True
        suspended_s = round(now - self._heartbeat.received_at, 1)
        self.drop(Unreachable(f"this process was suspended for some {suspended_s} s", suspended_s=suspended_s))

    def _note_heard(self) -> None:
        self._heartbeat.is_silent = False
        self._channel.on_silence(False)
        if self.on_heard is not None:
            self.on_heard()

    def note_received(self) -> bool:
        """Schedule an acknowledgement of received frames; return whether something must be sent now."""
        if self._channel.inbox.is_ack_due():
            self._ack_now = True
        elif not self._alarm_soon:
            self._tick_soon()
        return bool(self._urgent) or self._ack_now

    def _tick_soon(self) -> None:
        # Once per tick: each change of a deadline costs Trio an entry in its heap.
        self._alarm_soon = True
        self._alarm.deadline = min(self._alarm.deadline, trio.current_time() + ACK_AFTER_S)

    # Writing

    async def _write(self) -> None:
        try:
            if self._opening is not None:
                opening, self._opening = self._opening, None
                await self.transport.send([opening])
            while True:
                # A send that need not wait hides a cancellation, as a cancelled send costs the connection: so it is
                # delivered here, between two messages.
                await trio.lowlevel.checkpoint_if_cancelled()
                message = self._unfinished or self._next_message()
                self._unfinished = None
                if message is None:
                    await self._sleep()
                else:
                    await self.transport.send(message)
        except ConnectionFailed as error:
            self._note_lost(error)
            # The reader ends the connection, at its end: the goodbye of the peer may be unread. A partition may keep
            # that end from this side.
            self._scope.deadline = trio.current_time() + FINISH_READING_S
        except MessageTooLarge as error:
            self._lost(error)

    async def _sleep(self) -> None:
        # Everything pending has been sent, so the next frame is the first of a burst.
        self._direct = True
        # The task itself instead of an event: this happens once per message, and is the shortest way through Trio.
        self._idle = trio.lowlevel.current_task()

        def abort(_: Any) -> trio.lowlevel.Abort:
            # Or `poke` would reschedule a task that Trio has woken already, which is an internal error.
            self._idle = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._woken = False

    def _next_message(self) -> list[Bytes] | None:
        """Return the next message: frames first, but one chunk between two messages of frames."""
        # Alternating: a steady load of frames must not stop chunks, nor a large buffer the frames.
        self._chunk_next = not self._chunk_next
        if not self._chunk_next and self._may_send_chunk():
            return self._next_chunk()
        message = self._next_frames()
        return self._next_chunk() if message is None and self._may_send_chunk() else message

    def _may_send_chunk(self) -> bool:
        channel = self._channel
        bulk, outbox = channel.bulk_out, channel.outbox
        # Frames of a lost connection that are sent again include its chunks. A new chunk ahead of them would be placed
        # where they belong.
        if not bulk.waiting_bytes or outbox.bulk_bytes >= self._window_bytes or outbox.numbered < outbox.resend_until:
            return False
        return bulk.is_due(outbox.taken)

    def _next_chunk(self) -> list[Bytes] | None:
        """Return a message of one chunk alone, so that the peer can receive it straight into its place."""
        channel = self._channel
        chunk = channel.bulk_out.take(channel.outbox.taken)
        if chunk is None:
            return None
        self._ack_now = False
        if not self._alarm_soon:
            self._tick_soon()
        return [ACK.pack(channel.inbox.take_ack()), *channel.outbox.number_chunk(chunk)]

    def _next_frames(self) -> list[Bytes] | None:
        channel = self._channel
        if channel.refill is not None:
            channel.refill()
        frames = channel.outbox.take()
        if not (frames or self._urgent or self._ack_now):
            # The goodbye is the very last frame: buffers announced before it are still delivered.
            return self._goodbye() if not channel.bulk_out.waiting_bytes else None
        message: list[Bytes] = [ACK.pack(channel.inbox.take_ack()), *self._urgent, *frames]
        self._urgent.clear()
        self._ack_now = False
        # The tick looks whether the peer has acknowledged them by then.
        if frames and not self._alarm_soon:
            self._tick_soon()
        return message

    def _goodbye(self) -> list[Bytes] | None:
        goodbye = None if self.goodbye_sent else self._channel.goodbye_frame()
        if goodbye is None:
            return None
        self.goodbye_sent = True
        return [ACK.pack(self._channel.inbox.take_ack()), goodbye]

    async def _farewell(self) -> None:
        try:
            if self._unfinished is not None:
                await self.transport.send(self._unfinished)
            # Frames and the goodbye, but no more chunks: large buffers could take longer than `FAREWELL_S`.
            while (message := self._next_frames() or self._goodbye()) is not None:
                await self.transport.send(message)
            await self.transport.aclose()
        except ConnectionFailed:
            return

    # Time

    async def _tick(self) -> None:
        while True:
            self._read_periods()
            self._alarm = Alarm(self._heartbeat.next_at())
            self._alarm_soon = False
            # The earlier deadline belonged to the previous alarm, which is gone.
            if self._channel.inbox.received != self._channel.inbox.acked:
                self.note_received()
            await self._alarm.wait()
            now = trio.current_time()
            outbox = self._channel.outbox
            # How late the alarm comes shows a suspension of this process: a clock of its own, without any message of
            # the peer.
            late_s = now - self._alarm.deadline
            self._act_on_heartbeat(self._heartbeat.beat(now, late_s, outbox.numbered != outbox.acked))

    def _read_periods(self) -> None:
        # Read each time, since handlers set them when they know more about the peer, and begin and end to wait.
        channel = self._channel
        waiting_s = channel.waiting_heartbeat_s if channel.is_waiting() else channel.heartbeat_s
        self._heartbeat.period_s = min(channel.heartbeat_s, waiting_s)
        self._heartbeat.drop_s = channel.heartbeat_s * SILENT_PERIODS

    def _act_on_heartbeat(self, beat: HeartbeatAction) -> None:
        if beat is HeartbeatAction.DROP and self._heartbeat.is_stale(trio.current_time()):
            self._close_after_suspension(trio.current_time())
            return
        if beat is HeartbeatAction.DROP:
            silent_s = round(trio.current_time() - self._heartbeat.received_at, 1)
            self.drop(Unreachable(f"the peer has been silent for {silent_s} s", silent_s=silent_s))
            return
        if beat is HeartbeatAction.SILENT:
            self._channel.on_silence(True)
            if self.on_silent is not None:
                self.on_silent()
        if beat is HeartbeatAction.PING:
            self._urgent.append(_PING)
        if self._channel.inbox.received != self._channel.inbox.acked:
            self._ack_now = True
        if self.must_send() or self._channel.outbox.unsent:
            self.poke()

    def _lost(self, error: FrayError) -> None:
        self._note_lost(error)
        self._scope.cancel()

    def _note_lost(self, error: FrayError) -> None:
        self.process_was_suspended = self.process_was_suspended or self._heartbeat.is_stale(trio.current_time())
        if self.error is None:
            self.error = error
