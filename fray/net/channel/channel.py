"""Supervised channel between two processes: the part common to both ends.

It outlives connections. Frames are numbered and stored until the peer has dispatched them (`fray.net.channel.session`);
a `Connection` moves them while there is one. A channel ends once, for one reason, which is passed to `Handler.on_end`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import trio
from attrs import define

from fray.errors import ChannelClosed, ChannelFull, FrayError, Unsupported
from fray.model.messages.session import Goodbye
from fray.net import codec
from fray.net.buffers.chunks import ChunkReceiver, ChunkSender
from fray.net.channel.connection import Connection
from fray.net.channel.session import (
    BUFFER_LIMIT_BYTES,
    BUFFER_LIMIT_FRAMES,
    HEARTBEAT_S,
    HIGH_WATER_BYTES,
    FragmentBudget,
    ReceiveState,
    SendQueue,
    make_transfer_budget,
)
from fray.net.channel.versions import explain_unsupported, own_release
from fray.net.codec import FIRST_SEQUENCED, FRAGMENT_BYTES, HEADER, HEADER_BYTES, MESSAGE_LIMIT_BYTES, MORE, Bytes, Kind
from fray.net.limited_log import LimitedLog
from fray.net.transports.websocket_frames import PrefixOnly

logger = logging.getLogger("fray.net")
_ignored = LimitedLog(logger, logging.WARNING)

JOIN_BELOW_BYTES = 4096
"""Smaller bodies are joined with their header at once; larger ones stay separate and are never copied."""
CLOSE_S = 2.0
"""Longest duration of `Channel.close`."""
_BULK = int(Kind.BULK)
_budget: trio.lowlevel.RunVar[FragmentBudget] = trio.lowlevel.RunVar("fray fragments")
_transfer_budget: trio.lowlevel.RunVar[FragmentBudget] = trio.lowlevel.RunVar("fray transfers")
_pack = HEADER.pack


class Handler(Protocol):
    """Callbacks of a channel: plain functions; an exception ends the channel with that reason."""

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        """Handle one sequenced frame: whole, in order, once."""

    def on_batch(self) -> None:
        """Handle the end of one transport message; frames sent meanwhile go out after this."""

    def on_reset(self, greeting: bytes) -> None:
        """Handle the first connection, or a new session: send all unanswered requests and subscriptions again.

        Frames that were not acknowledged are lost.
        """

    def on_suspended(self, why: str) -> None:
        """Handle the loss of a connection; the dialer dials again, the listener waits for it."""

    def on_resumed(self) -> None:
        """Handle a new connection of the same session: nothing was lost."""

    def on_end(self, error: FrayError) -> None:
        """Handle the end of the channel and its reason: exactly once, as the last call."""


class NullHandler:
    """Base class of handlers that need only `on_frame`: all other callbacks do nothing."""

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        pass

    def on_suspended(self, why: str) -> None:
        pass

    def on_resumed(self) -> None:
        pass

    def on_end(self, error: FrayError) -> None:
        pass


@define
class ChannelStats:
    """Counts since the channel began."""

    frames_received: int = 0
    bytes_received: int = 0
    messages_received: int = 0
    connections: int = 0
    resets: int = 0


class Channel:
    """Supervised channel to one peer, created by `run_dialed` and `Acceptor` only."""

    def __init__(self, *, session: str, incarnation: str, remote: str, key_id: str = "") -> None:
        self.session = session
        self.key_id = key_id
        """Key that the dialer has proven; empty at the dialer's end."""
        self.incarnation = incarnation
        """Incarnation of the peer."""
        self.remote = remote
        self.seen_from = ""
        """IP address of this process as the listener sees it (`Welcome`); empty at the listener's end."""
        self.peer_release = own_release()
        """Release of the peer, as its last hello or welcome says."""
        self.stats = ChannelStats()
        self.outbox = SendQueue()
        self.inbox = ReceiveState(on_fragments=self._note_fragments)
        self.bulk_out = ChunkSender()
        """Large buffers to the peer: add to it, send the frame that announces them, then call `mark_announced`."""
        self.bulk_in = ChunkReceiver(on_held=self._note_transfers)
        """Large buffers from the peer: call `expect` when a frame announces one."""
        self.may_share_memory = False
        """The peer is another process that may be on this host (`fray.net.buffers.shared_memory` can prove it)."""
        self.heartbeat_s = HEARTBEAT_S
        """Seconds of silence after which the peer is pinged; the handler may change it."""
        self.waiting_heartbeat_s = HEARTBEAT_S
        """The same while `is_waiting`; the listener tells its dialers (`Welcome`)."""
        self.is_waiting: Callable[[], bool] = lambda: True
        """Returns whether anything of the peer is awaited; set by handlers of channels that are idle for long."""
        self.silence_changed: Callable[[bool], None] = lambda is_silent: None
        """Callback of the handler: what was sent is not answered; or the peer has answered after all."""
        self.stale_s = float("inf")
        """Age in seconds from which unread messages are dropped unread; set by handlers of ends that execute orders."""
        self.received_at = float("-inf")
        """Time when the last, lost connection received its last message, on Trio's clock."""
        self.ended_by_peer = False
        """Set while there is no connection, and the last one was ended by the peer or its machine."""
        self.process_was_suspended = False
        """Set while the last connection ended because this process was suspended for long, and there is no new one
        yet."""
        self.on_ended: Callable[[], None] = lambda: None
        """Callback of the owner (dialer or acceptor), called after `Handler.on_end`."""
        self.refill: Callable[[], None] | None = None
        """Source of more frames (`fill`) when unsent frames fit in one message: see `fray.net.tunnels.multiplexer`."""
        self._handler: Handler | None = None
        self._connection: Connection | None = None
        self._corked = False
        self._closing: str | None = None
        self._closing_error: FrayError | None = None
        self._error: FrayError | None = None
        self._ended = trio.Event()
        self._room = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        state = "ended" if self._error else "connected" if self._connection else "suspended"
        where = f"{self.incarnation} at {self.remote}"
        return f"<Channel {self.session} with {where}: {state}, {self.outbox.size_bytes} bytes to deliver>"

    @property
    def in_doubt(self) -> bool:
        """Return whether this process was suspended for long, and has not been welcomed by the peer since."""
        return self.process_was_suspended or (self._connection is not None and self._connection.is_stale)

    @property
    def heard_at(self) -> float:
        """Time of the last message of the peer, on Trio's clock; ``-inf``: none."""
        return self._connection.received_at if self._connection is not None else self.received_at

    @property
    def connected(self) -> bool:
        """Return whether there is a connection at this moment."""
        return self._connection is not None

    @property
    def error(self) -> FrayError | None:
        """Reason for its end; None while it is open."""
        return self._error

    async def wait_ended(self) -> FrayError:
        """Wait for the end and return its reason."""
        await self._ended.wait()
        assert self._error is not None
        return self._error

    # Sending

    def send_nowait(self, kind: int, ref: int, body: Bytes = b"", *, target: int = 0, flags: int = 0) -> None:
        """Queue one frame, which is delivered once and in order as long as both ends remember the session.

        ``body`` is a flat buffer of bytes; from 4 KiB on it is not copied and must not change afterwards.

        Raises:
            ChannelClosed: the channel has ended or is closing (with the reason as its cause).
            ChannelFull: over 128 MiB are unacknowledged, or a million frames are unsent.
            MessageTooLarge: over 64 MiB.
        """
        if self._error is not None or self._closing is not None:
            raise self._closed()
        size = len(body)
        outbox = self.outbox
        # This path runs for every call and every answer, so `SendQueue.push` and the exact check of the limits are not
        # called here. A small frame may exceed the limit by its own size, and of frames that were sent and not
        # acknowledged only the bytes count, which bounds their number as well.
        if size < JOIN_BELOW_BYTES:
            unacked_bytes = outbox.size_bytes
            if unacked_bytes > BUFFER_LIMIT_BYTES or len(outbox.unsent) >= BUFFER_LIMIT_FRAMES:
                outbox.check_room(size)
            size += HEADER_BYTES
            outbox.unsent.append(_pack(size - HEADER_BYTES, kind, flags, 0, target, ref) + body)
            outbox.unsent_bytes += size
            outbox.size_bytes = unacked_bytes + size
        else:
            self._push_large(kind, flags, target, ref, body)
        # Frames that callbacks send while a message is dispatched leave together after it.
        if not self._corked and self._connection is not None:
            self._connection.poke()

    def mark_announced(self, transfers: Sequence[int]) -> None:
        """Declare that the last sent frame announces these transfers of `bulk_out`, which may follow it."""
        # The announcing frame is the last one in the queue; its last fragment if it is large. Its place is not counted
        # by sequence numbers: chunks of other transfers take some of those before it is sent.
        self.bulk_out.mark_announced(transfers, self.outbox.taken + len(self.outbox.unsent))
        self.wake()

    def fill(self, kind: int, ref: int, body: Bytes, *, target: int = 0, flags: int = 0) -> None:
        """Add one frame of at most a fragment from `refill`, regardless of the limits."""
        # No limit applies: the source of these frames looks at the outbox itself and stops long before
        # (`UNACKED_BYTES`).
        head = _pack(len(body), kind, flags, 0, target, ref)
        if len(body) < JOIN_BELOW_BYTES:
            self.outbox.push(head + body, HEADER_BYTES + len(body))
        else:
            self.outbox.push((head, body), HEADER_BYTES + len(body))

    def wake(self) -> None:
        """Signal that `refill` or `bulk_out` has more to send."""
        if not self._corked and self._connection is not None:
            self._connection.poke()

    def send_later(self, kind: int, ref: int, body: Bytes = b"") -> None:
        """Queue a frame that is not urgent: it is sent with the next frame, or within `ACK_AFTER_S`."""
        # Corked, or the push would send it at once.
        corked, self._corked = self._corked, True
        try:
            self.send_nowait(kind, ref, body)
            self.outbox.deferred += 1
        finally:
            self._corked = corked
        if self._connection is not None:
            # The alarm for acknowledgements sends deferred frames as well.
            self._connection.note_received()

    def notice(self, message: object, blobs: Sequence[Bytes] = ()) -> None:
        """Send a control message without an answer. Raises as `send_nowait`; Unsupported: the peer does not know it."""
        message = self.peer_release.adapt(message)
        self.send_nowait(Kind.NOTICE, 0, codec.encode_message(message, blobs))

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None:
        """Answer request ``ref``. Raises as `notice`."""
        message = self.peer_release.adapt(message)
        self.send_nowait(Kind.REPLY, ref, codec.encode_message(message, blobs))

    def fail(self, ref: int, error: FrayError) -> None:
        """Answer request ``ref`` with an error. Raises as `send_nowait`."""
        self.send_nowait(Kind.ERROR, ref, codec.encode_error(error))

    async def wait_room(self, most_bytes: int = HIGH_WATER_BYTES) -> None:
        """Wait until less than 16 MiB are unsent or unacknowledged. Returns at once, without a checkpoint, if so.

        Args:
            most_bytes: lower limit, for bulk data that should not delay anything else.

        Raises:
            ChannelClosed: the channel has ended.
        """
        # A fraction of the limit at which sends fail: the rest is for callbacks, which cannot wait.
        while self.outbox.size_bytes > most_bytes:
            await self._room.park()
        if self._error is not None:
            raise self._closed()

    def _push_large(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        codec.check_size(len(body), "a message")
        # Checked for the whole body: after a part of one, the peer would take the next frames for its fragments.
        self.outbox.check_room(len(body))
        view = memoryview(body)
        # A single WebSocket message of 100 MB stalls the event loop for 0.7 s; fragments keep stalls at some 5 ms.
        for at in range(0, len(view), FRAGMENT_BYTES):
            part = view[at : at + FRAGMENT_BYTES]
            more = MORE if at + FRAGMENT_BYTES < len(view) else 0
            self.outbox.push((_pack(len(part), kind, flags | more, 0, target, ref), part), HEADER_BYTES + len(part))

    def _closed(self) -> ChannelClosed:
        reason = str(self._error) if self._error is not None else self._closing or "closing"
        where = f"{self.incarnation} at {self.remote}"
        error = ChannelClosed(f"the channel to {where} has ended: {reason}", reason=reason)
        error.__cause__ = self._error
        return error

    # Ending

    async def close(self, reason: str = "", error: FrayError | None = None) -> None:
        """Send queued frames and the goodbye, then end. Takes at most 2 s, also when cancelled.

        ``error``: reason for the end on the peer's side, in place of an orderly `ChannelClosed`.
        """
        self._closing_error = self._closing_error or error
        self.begin_close(reason or "closed")
        if self._error is None and self._connection is not None:
            self._connection.poke()
            # Shielded: an owner that is being cancelled still delivers what it has queued.
            with trio.move_on_after(CLOSE_S, shield=True):
                await self._ended.wait()
        # Also without a connection, or if the peer did not answer. Does nothing if the channel has ended meanwhile.
        self.end(ChannelClosed(reason or "closed", reason=reason or "closed"))

    def abort(self, error: FrayError) -> None:
        """End now, for this reason, without sending queued frames. The peer is notified if that needs no waiting."""
        if self._error is None and self._connection is not None:
            goodbye = Goodbye(reason=str(error), error=codec.error_to_dict(error))
            self._connection.try_send_goodbye(codec.encode_frame(Kind.GOODBYE, 0, codec.encode_message(goodbye)))
        self.end(error)

    def end(self, error: FrayError) -> None:
        """End for this reason unless it has ended. Only for the owner; others use `close` or `abort`."""
        if self._error is not None:
            return
        # Set before anything is called from here, so that callbacks and woken tasks see an ended channel.
        self._error = error
        connection, self._connection = self._connection, None
        if connection is not None:
            # Kept: the controller counts the silence of a node from its last message, also after an orderly end.
            self.received_at = connection.received_at
            connection.drop(error)
        # Cleared before waiters for room are woken: they leave their loop, find the error and raise it.
        self.outbox.clear()
        self.inbox.clear()
        self.bulk_out.clear()
        self.bulk_in.clear()
        self._room.unpark_all()
        self._ended.set()
        if self._handler is not None:
            try:
                self._handler.on_end(error)
            except Exception:
                logger.exception("on_end of %r failed", self)
        self.on_ended()

    # Called by the owner

    def begin(self, handler: Handler) -> None:
        """Set the handler, once."""
        self._handler = handler

    def attach(self, connection: Connection, greeting: bytes | None) -> None:
        """Use a new connection. ``greeting`` is set if the peer has no state of the session (`Handler.on_reset`)."""
        self._connection, self.process_was_suspended = connection, False
        self.may_share_memory = getattr(connection.transport, "may_share_memory", False)
        self.stats.connections += 1
        # The connection does not run yet: its writer takes all frames queued by these callbacks when it starts.
        self._corked = True
        try:
            if greeting is not None:
                self.stats.resets += 1
                # Transfers of the old instance are lost with the frames that announced them; `on_reset` sends the calls
                # again, as new transfers.
                self.bulk_out.clear()
                self.bulk_in.clear()
                self._call(lambda handler: handler.on_reset(greeting))
            else:
                self._call(lambda handler: handler.on_resumed())
        finally:
            self._corked = False

    def suspend(self, connection: Connection) -> None:
        """Handle the loss of the connection."""
        # Superseded by a newer connection, or dropped at the channel's end: its loss is not news.
        if self._connection is not connection:
            return
        self._connection, self.process_was_suspended = None, connection.process_was_suspended
        self.received_at = connection.received_at
        self.ended_by_peer = connection.error is not None and connection.error.details.get("by_peer") is True
        # The peer ends its channel at the goodbye and drops the connection. No other answer follows, so this loss is
        # the answer.
        if connection.goodbye_sent:
            self.end(ChannelClosed(self._closing or "closed", reason=self._closing or "closed"))
        else:
            self._report_suspended(str(connection.error or "the connection was lost"))

    def supersede(self, connection: Connection) -> None:
        """Replace a connection that still seemed alive by a newer one."""
        self._connection = None
        superseded = ChannelClosed("a newer connection took over", reason="superseded")
        connection.drop(superseded)
        self._report_suspended(str(superseded))

    def _report_suspended(self, why: str) -> None:
        self._call(lambda handler: handler.on_suspended(why))

    def _call(self, callback: Callable[[Handler], None]) -> None:
        if self._handler is None or self._error is not None:
            return
        try:
            callback(self._handler)
        except Exception as error:  # noqa: BLE001 (it becomes the reason for the channel's end)
            self._handler_failed(error)

    def _handler_failed(self, error: Exception) -> None:
        # A handler's own refusal: the peer gets that error. Of a bug it gets one line; the traceback stays in this log.
        if isinstance(error, FrayError):
            self.abort(error)
            return
        logger.error("the handler of %r failed", self, exc_info=error)
        reason = f"the code behind this channel failed: {error!r}"
        wrapped = ChannelClosed(reason, reason=reason)
        wrapped.__cause__ = error
        self.abort(wrapped)

    def _on_unsupported(self, kind: int, ref: int, error: Unsupported) -> None:
        """Handle a message of a later release that the handler does not know: it must not cost the channel."""
        explained = explain_unsupported(error, self.peer_release)
        if kind == Kind.REQUEST:
            try:
                self.fail(ref, explained)
            except (ChannelClosed, ChannelFull) as full:
                self.end(full)
        elif kind == Kind.NOTICE:
            _ignored.write("a notice of %s at %s was ignored: %s", self.incarnation, self.remote, explained)
        else:
            self._handler_failed(explained)

    # Called by the connection

    def owns(self, connection: Connection) -> bool:
        """Return whether this is the current connection."""
        return self._connection is connection

    def on_silence(self, is_silent: bool) -> None:
        """Pass on that the peer does not answer, or that it has answered after all."""
        self._call(lambda handler: self.silence_changed(is_silent))

    def begin_close(self, reason: str) -> None:
        """Close in order: send only queued frames, then the goodbye with this reason."""
        self._closing = self._closing or reason

    def goodbye_frame(self) -> bytes | None:
        """Return the goodbye frame, once it is due."""
        if self._closing is None:
            return None
        error = None if self._closing_error is None else codec.error_to_dict(self._closing_error)
        return codec.encode_frame(Kind.GOODBYE, 0, codec.encode_message(Goodbye(reason=self._closing, error=error)))

    def dispatch(self, message: Bytes, connection: Connection) -> None:
        """Dispatch one message: acknowledgement, then each frame.

        Raises:
            ProtocolMismatch: malformed or truncated. Frames before the damage have been dispatched and counted.
        """
        # Before the frames: handlers that send find the room that this message has made.
        self._on_ack(codec.read_ack(message))
        inbox, before = self.inbox, self.inbox.received
        # Answers sent while dispatching go out together after the batch: one message instead of one per frame.
        self._corked = True
        try:
            if type(message) is PrefixOnly:
                self._on_placed(message)
            else:
                self._on_frames(message, connection)
        finally:
            self._corked = False
            self.stats.messages_received += 1
            self.stats.bytes_received += len(message)
            # The count starts at zero again if a handler has ended the channel meanwhile.
            self.stats.frames_received += max(0, inbox.received - before)
        # A handler has closed the channel, or a newer connection has taken over.
        if self._connection is not connection:
            return
        if inbox.received != inbox.acked:
            inbox.unacked_bytes += len(message)
            must_send = connection.note_received()
        else:
            must_send = connection.must_send()
        # Deferred frames alone are not worth a message.
        frames = len(self.outbox.unsent) > self.outbox.deferred
        if frames or must_send or self.bulk_out.waiting_bytes or self.refill is not None:
            connection.poke()

    def place(self, start: Bytes, message_bytes: int) -> memoryview | None:
        """Return where to receive the rest of a large transport message that starts like this; None: nowhere."""
        return self.bulk_in.place(start, message_bytes) if self._error is None else None

    def _on_placed(self, start: Bytes) -> None:
        """Handle a message of one chunk that was received into its place: ``start`` is only its beginning."""
        # `place` has checked that the message is exactly one chunk, so there are no further frames to look for.
        size, _, _, _, _, number = HEADER.unpack_from(start, codec.ACK_BYTES)
        self.inbox.received += 1
        self.inbox.unacked_bytes += size
        self._call(lambda handler: self.bulk_in.placed(number, size))
        self._call(lambda handler: handler.on_batch())

    def _on_frames(self, message: Bytes, connection: Connection) -> None:
        handler, inbox = self._handler, self.inbox
        assert handler is not None
        on_frame = handler.on_frame
        for kind, flags, target, ref, body in codec.read_frames(message):
            if kind < FIRST_SEQUENCED:
                self._on_session_frame(kind, body, connection)
            else:
                inbox.received += 1
                try:
                    # Fragments of one body are adjacent, except for chunks, which get their numbers only when they are
                    # sent.
                    if flags & MORE or (inbox.fragments and kind != _BULK):
                        inbox.add_fragment(body, MESSAGE_LIMIT_BYTES)
                        if self._connection is not connection:
                            return
                        if flags & MORE:
                            continue
                        body = inbox.take_fragments()
                    if kind == _BULK:
                        self.bulk_in.on_chunk(ref, body)
                    else:
                        on_frame(kind, flags, target, ref, body)
                except Unsupported as error:
                    self._on_unsupported(kind, ref, error)
                except Exception as error:  # noqa: BLE001 (it becomes the reason for the channel's end)
                    self._handler_failed(error)
            # The frame may have ended the channel: `on_end` is the handler's last call, so the rest of the message is
            # dropped.
            if self._connection is not connection:
                return
        self._call(lambda handler: handler.on_batch())

    def _note_fragments(self, size_bytes: int) -> None:
        budget = _budget_of(_budget, FragmentBudget)
        session = budget.note(self.key_id, self, size_bytes)
        if isinstance(session, Channel):
            session._end_over_limit("messages", budget, "key", session.inbox.fragments_bytes)

    def _note_transfers(self, held_bytes: int) -> None:
        budget = _budget_of(_transfer_budget, lambda: make_transfer_budget(_memory_bytes()))
        session = budget.note(self.session, self, held_bytes)
        if isinstance(session, Channel):
            session._end_over_limit("transfers of large buffers", budget, "session", session.bulk_in.held_bytes)

    def _end_over_limit(self, what: str, budget: FragmentBudget, each: str, held_bytes: int) -> None:
        error = ChannelFull(
            f"incomplete {what} of all sessions are over the limit ({budget.limit_bytes} bytes, "
            f"{budget.key_limit_bytes} of one {each}), and this session has the most ({held_bytes})",
            held_bytes=held_bytes,
            limit_bytes=budget.limit_bytes,
        )
        _ignored.write("%r ends: %s", self, error)
        self.abort(error)

    def _on_ack(self, count: int) -> None:
        outbox = self.outbox
        # Often repeated, for example by a peer that only sends.
        if count != outbox.acked:
            outbox.ack(count)
            if self._room and outbox.size_bytes <= HIGH_WATER_BYTES:
                self._room.unpark_all()

    def _on_session_frame(self, kind: int, body: Bytes, connection: Connection) -> None:
        if kind == Kind.PING:
            connection.answer_ping()
        elif kind == Kind.GOODBYE:
            message, _ = codec.decode_message(body)
            if isinstance(message, Goodbye):
                orderly = ChannelClosed(message.reason, reason=message.reason)
                self.end(codec.error_from_dict(message.error) if message.error else orderly)


def _budget_of(of_loop: trio.lowlevel.RunVar[FragmentBudget], make: Callable[[], FragmentBudget]) -> FragmentBudget:
    """Return the budget of all channels in this loop: mostly the only one of the process."""
    try:
        return of_loop.get()
    except LookupError:
        budget = make()
        of_loop.set(budget)
        return budget


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


HandlerFactory: TypeAlias = Callable[[Channel], Handler]
