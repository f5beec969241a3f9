"""The channel itself: what both ends have in common, whoever dialed.

It outlives connections. Frames are numbered and kept until the peer has dispatched them (`fray.net.channel.session`);
a `Link`
moves them while there is a connection. It ends once, for one reason, which `Handler.on_end` is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import trio
from attrs import define

from fray.errors import ChannelClosed, FrayError
from fray.model.messages.session import Goodbye
from fray.net import codec
from fray.net.buffers.chunks import ChunkReceiver, ChunkSender
from fray.net.channel.connection import Connection
from fray.net.channel.session import (
    BUFFER_LIMIT_BYTES,
    BUFFER_LIMIT_FRAMES,
    HEARTBEAT_S,
    HIGH_WATER_BYTES,
    ReceiveState,
    SendQueue,
)
from fray.net.codec import FIRST_SEQUENCED, FRAGMENT_BYTES, HEADER, HEADER_BYTES, MESSAGE_LIMIT_BYTES, MORE, Bytes, Kind
from fray.net.transports.websocket_frames import PrefixOnly

logger = logging.getLogger("fray.net")

JOIN_BELOW_BYTES = 4096
"""Bodies below are joined with their header at once; larger ones are kept apart and never copied."""
CLOSE_S = 2.0
"""How long `Channel.close` takes at most."""
_BULK = int(Kind.BULK)
_pack = HEADER.pack


class Handler(Protocol):
    """What a channel tells. All plain functions; an exception ends the channel with that reason."""

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        """A sequenced frame, whole, in order, once."""

    def on_batch(self) -> None:
        """One transport message has been dispatched; what was sent meanwhile goes out after this."""

    def on_reset(self, greeting: bytes) -> None:
        """First connection, or the peer forgot us: send all unanswered requests again, subscribe again.

        Frames that were not acknowledged are gone.
        """

    def on_suspended(self, why: str) -> None:
        """The connection is lost; redialing (dialer) or waiting for a redial (listener)."""

    def on_resumed(self) -> None:
        """Connected again, and nothing was lost."""

    def on_end(self, error: FrayError) -> None:
        """Exactly once, last: the one reason."""


class NullHandler:
    """Does nothing, whatever a channel tells, but for frames: for those who care for little else."""

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
    """A supervised conversation with one peer. Made by `run_dialed` and `Acceptor`, never by hand."""

    def __init__(self, *, session: str, incarnation: str, remote: str) -> None:
        self.session = session
        self.incarnation = incarnation
        """Of the peer."""
        self.remote = remote
        self.stats = ChannelStats()
        self.outbox = SendQueue()
        self.inbox = ReceiveState()
        self.bulk_out = ChunkSender()
        """Large buffers to the peer: add to it, send the frame that announces them, then call `announced`."""
        self.bulk_in = ChunkReceiver()
        """Large buffers from the peer: tell it what to expect when a frame announces it."""
        self.may_share_memory = False
        """The peer is another process that may be on this host (`fray.net.buffers.shared_memory` can prove it)."""
        self.heartbeat_s = HEARTBEAT_S
        """After so much silence the peer is asked whether it is there; its handler may choose another."""
        self.stale_s = float("inf")
        """What lay unread for so long is not read: for an end that takes orders, set when its handler is made."""
        self.received_at = float("-inf")
        """When a connection that is gone last brought something, on Trio's clock."""
        self.was_stopped = False
        """Its last connection ended because this process was stopped for long, and there is no new one yet."""
        self.on_ended: Callable[[], None] = lambda: None
        """For the owner (dialer or acceptor): called after `Handler.on_end`."""
        self.refill: Callable[[], None] | None = None
        """Asked for more (`fill`) when what is unsent fits in one message: see `fray.net.tunnels.multiplexer`."""
        self._handler: Handler | None = None
        self._link: Connection | None = None
        self._corked = False
        self._closing: str | None = None
        self._closing_error: FrayError | None = None
        self._error: FrayError | None = None
        self._over = trio.Event()
        self._room = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        state = "ended" if self._error else "connected" if self._link else "suspended"
        held = self.outbox.size_bytes
        return f"<Channel {self.session} with {self.incarnation} at {self.remote}: {state}, {held} bytes to deliver>"

    @property
    def in_doubt(self) -> bool:
        """This process was stopped for long, and has not been welcomed by the peer since."""
        return self.was_stopped or (self._link is not None and self._link.is_stale)

    @property
    def connected(self) -> bool:
        """There is a connection at this moment."""
        return self._link is not None

    @property
    def error(self) -> FrayError | None:
        """Why it ended; None while it lives."""
        return self._error

    async def wait_ended(self) -> FrayError:
        """Wait for the end and return its reason."""
        await self._over.wait()
        assert self._error is not None
        return self._error

    # Sending

    def send_nowait(self, kind: int, ref: int, body: Bytes = b"", *, target: int = 0, flags: int = 0) -> None:
        """Queue one frame; it is delivered once and in order as long as both ends remember the session.

        ``body`` is a flat buffer of bytes; from 4 KiB on it is not copied and must not change afterwards.

        Raises:
            ChannelClosed: the channel has ended or is closing (as the cause: the reason it ended for).
            ChannelFull: over 128 MiB or a million frames wait for the peer.
            MessageTooLarge: over 64 MiB.
        """
        if self._error is not None or self._closing is not None:
            raise self._closed()
        size = len(body)
        outbox = self.outbox
        if size < JOIN_BELOW_BYTES:
            held = outbox.size_bytes
            if held > BUFFER_LIMIT_BYTES or len(outbox.unsent) >= BUFFER_LIMIT_FRAMES:
                outbox.check_room(size)
            size += HEADER_BYTES
            outbox.unsent.append(_pack(size - HEADER_BYTES, kind, flags, 0, target, ref) + body)
            outbox.unsent_bytes += size
            outbox.size_bytes = held + size
        else:
            self._push_large(kind, flags, target, ref, body)
        if not self._corked and self._link is not None:
            self._link.poke()

    def mark_announced(self, transfers: Sequence[int]) -> None:
        """The frame sent last announces these transfers of `bulk_out`: they may follow it."""
        self.bulk_out.mark_announced(transfers, self.outbox.numbered + len(self.outbox.unsent))
        self.wake()

    def fill(self, kind: int, ref: int, body: Bytes, *, target: int = 0, flags: int = 0) -> None:
        """Within `refill`: one frame of at most a fragment, whatever waits already."""
        head = _pack(len(body), kind, flags, 0, target, ref)
        if len(body) < JOIN_BELOW_BYTES:
            self.outbox.push(head + body, HEADER_BYTES + len(body))
        else:
            self.outbox.push((head, body), HEADER_BYTES + len(body))

    def wake(self) -> None:
        """`refill` or `bulk_out` has more."""
        if not self._corked and self._link is not None:
            self._link.poke()

    def send_later(self, kind: int, ref: int, body: Bytes = b"") -> None:
        """`send_nowait` for what nobody waits for: it rides with the next frame, or goes within `ACK_AFTER_S`."""
        corked, self._corked = self._corked, True
        try:
            self.send_nowait(kind, ref, body)
            self.outbox.deferred += 1
        finally:
            self._corked = corked
        if self._link is not None:
            self._link.note_received()

    def notice(self, message: object, blobs: Sequence[Bytes] = ()) -> None:
        """Send a control message that has no answer. Raises as `send_nowait`."""
        self.send_nowait(Kind.NOTICE, 0, codec.encode_message(message, blobs))

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None:
        """Answer request ``ref``. Raises as `send_nowait`."""
        self.send_nowait(Kind.REPLY, ref, codec.encode_message(message, blobs))

    def fail(self, ref: int, error: FrayError) -> None:
        """Answer request ``ref`` with an error. Raises as `send_nowait`."""
        self.send_nowait(Kind.ERROR, ref, codec.encode_error(error))

    async def wait_room(self, most_bytes: int = HIGH_WATER_BYTES) -> None:
        """Wait until less than 16 MiB are unsent or unacknowledged. Returns at once, without a checkpoint, if so.

        Args:
            most_bytes: less than that, for what should not stand in front of anything else.

        Raises:
            ChannelClosed: the channel has ended.
        """
        while self.outbox.size_bytes > most_bytes:
            await self._room.park()
        if self._error is not None:
            raise self._closed()

    def _push_large(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        codec.check_size(len(body), "a message")
        self.outbox.check_room(len(body))
        view = memoryview(body)
        for at in range(0, len(view), FRAGMENT_BYTES):
            piece = view[at : at + FRAGMENT_BYTES]
            more = MORE if at + FRAGMENT_BYTES < len(view) else 0
            self.outbox.push((_pack(len(piece), kind, flags | more, 0, target, ref), piece), HEADER_BYTES + len(piece))

    def _closed(self) -> ChannelClosed:
        reason = str(self._error) if self._error is not None else self._closing or "closing"
        where = f"{self.incarnation} at {self.remote}"
        error = ChannelClosed(f"the conversation with {where} has ended: {reason}", reason=reason)
        error.__cause__ = self._error
        return error

    # Ending

    async def close(self, reason: str = "", error: FrayError | None = None) -> None:
        """Send what is queued, say goodbye, end. Takes at most 2 s, also when cancelled; then it ends anyhow.

        ``error``: what the peer's end of it ends with, in place of an orderly `ChannelClosed`.
        """
        self._closing_error = self._closing_error or error
        self.begin_close(reason or "closed")
        if self._error is None and self._link is not None:
            self._link.poke()
            with trio.move_on_after(CLOSE_S, shield=True):
                await self._over.wait()
        self.end(ChannelClosed(reason or "closed", reason=reason or "closed"))

    def abort(self, error: FrayError) -> None:
        """End now, for this reason, without sending what is queued. The peer is told if that needs no waiting."""
        if self._error is None and self._link is not None:
            goodbye = Goodbye(reason=str(error), error=codec.error_to_dict(error))
            self._link.try_send_goodbye(codec.encode_frame(Kind.GOODBYE, 0, codec.encode_message(goodbye)))
        self.end(error)

    def end(self, error: FrayError) -> None:
        """End for this reason unless it has ended. For the owner; others use `close` or `abort`."""
        if self._error is not None:
            return
        self._error = error
        link, self._link = self._link, None
        if link is not None:
            link.drop(error)
        self.outbox.clear()
        self.inbox.clear()
        self.bulk_out.clear()
        self.bulk_in.clear()
        self._room.unpark_all()
        self._over.set()
        if self._handler is not None:
            try:
                self._handler.on_end(error)
            except Exception:
                logger.exception("on_end of %r failed", self)
        self.on_ended()

    # For the owner: connections come and go

    def begin(self, handler: Handler) -> None:
        """Give it its handler, once."""
        self._handler = handler

    def attach(self, link: Connection, greeting: bytes | None) -> None:
        """A connection is there. ``greeting`` is set when the peer knows nothing of before (`Handler.on_reset`)."""
        self._link, self.was_stopped = link, False
        self.may_share_memory = getattr(link.transport, "may_share_memory", False)
        self.stats.connections += 1
        self._corked = True
        try:
            if greeting is not None:
                self.stats.resets += 1
                self.bulk_out.clear()
                self.bulk_in.clear()
                self._call(lambda handler: handler.on_reset(greeting))
            else:
                self._call(lambda handler: handler.on_resumed())
        finally:
            self._corked = False

    def suspend(self, link: Connection) -> None:
        """The connection is gone."""
        if self._link is not link:
            return
        self._link, self.was_stopped = None, link.was_stopped
        self.received_at = link.received_at
        if link.goodbye_sent:
            self.end(ChannelClosed(self._closing or "closed", reason=self._closing or "closed"))
        else:
            self._tell_suspended(str(link.error or "the connection was lost"))

    def supersede(self, link: Connection) -> None:
        """A newer connection is there while this one still seemed alive."""
        self._link = None
        superseded = ChannelClosed("a newer connection took over", reason="superseded")
        link.drop(superseded)
        self._tell_suspended(str(superseded))

    def _tell_suspended(self, why: str) -> None:
        self._call(lambda handler: handler.on_suspended(why))

    def _call(self, tell: Callable[[Handler], None]) -> None:
        if self._handler is None or self._error is not None:
            return
        try:
            tell(self._handler)
        except Exception as error:  # noqa: BLE001 (it is the reason the channel ends for)
            self._handler_failed(error)

    def _handler_failed(self, error: Exception) -> None:
        if isinstance(error, FrayError):
            self.abort(error)
            return
        logger.error("the handler of %r failed", self, exc_info=error)
        reason = f"the code behind this channel failed: {error!r}"
        wrapped = ChannelClosed(reason, reason=reason)
        wrapped.__cause__ = error
        self.abort(wrapped)

    # For the link

    def owns(self, link: Connection) -> bool:
        """Whether this link still is ours."""
        return self._link is link

    def begin_close(self, reason: str) -> None:
        """From now on only what is queued is sent, then goodbye for this reason."""
        self._closing = self._closing or reason

    def goodbye_frame(self) -> bytes | None:
        """The goodbye frame, once it is due."""
        if self._closing is None:
            return None
        error = None if self._closing_error is None else codec.error_to_dict(self._closing_error)
        return codec.encode_frame(Kind.GOODBYE, 0, codec.encode_message(Goodbye(reason=self._closing, error=error)))

    def dispatch(self, message: Bytes, link: Connection) -> None:
        """Take one message apart: acknowledgement, then each frame.

        Raises:
            ProtocolMismatch: it is no batch, or cut short. What came before has been dispatched and counted.
        """
        self._on_ack(codec.read_ack(message))
        inbox, before = self.inbox, self.inbox.received
        self._corked = True
        try:
            if type(message) is PrefixOnly:
                self._on_placed(message)
            else:
                self._on_frames(message, link)
        finally:
            self._corked = False
            self.stats.messages_received += 1
            self.stats.bytes_received += len(message)
            self.stats.frames_received += max(0, inbox.received - before)
        if self._link is not link:
            return
        if inbox.received != inbox.acked:
            inbox.unacked_bytes += len(message)
            link.note_received()
        frames = len(self.outbox.unsent) > self.outbox.deferred
        if frames or self.bulk_out.waiting_bytes or self.refill is not None or link.must_send():
            link.poke()

    def place(self, start: Bytes, message_bytes: int) -> memoryview | None:
        """Where the rest of a large transport message that starts like this is to be received; None: nowhere."""
        return self.bulk_in.place(start, message_bytes) if self._error is None else None

    def _on_placed(self, start: Bytes) -> None:
        """A message that was one chunk, received into its place: only its start is here."""
        size, _, _, _, _, number = HEADER.unpack_from(start, codec.ACK_BYTES)
        self.inbox.received += 1
        self.inbox.unacked_bytes += size
        self._call(lambda handler: self.bulk_in.placed(number, size))
        self._call(lambda handler: handler.on_batch())

    def _on_frames(self, message: Bytes, link: Connection) -> None:
        handler, inbox = self._handler, self.inbox
        assert handler is not None
        on_frame = handler.on_frame
        for kind, flags, target, ref, body in codec.read_frames(message):
            if kind < FIRST_SEQUENCED:
                self._on_session_frame(kind, body, link)
            else:
                inbox.received += 1
                try:
                    if flags & MORE or (inbox.fragments and kind != _BULK):
                        inbox.add_fragment(body, MESSAGE_LIMIT_BYTES)
                        if flags & MORE:
                            continue
                        body = inbox.take_fragments()
                    if kind == _BULK:
                        self.bulk_in.on_chunk(ref, body)
                    else:
                        on_frame(kind, flags, target, ref, body)
                except Exception as error:  # noqa: BLE001 (it is the reason the channel ends for)
                    self._handler_failed(error)
            if self._link is not link:
                return
        self._call(lambda handler: handler.on_batch())

    def _on_ack(self, count: int) -> None:
        outbox = self.outbox
        if count != outbox.acked:
            outbox.ack(count)
            if self._room and outbox.size_bytes <= HIGH_WATER_BYTES:
                self._room.unpark_all()

    def _on_session_frame(self, kind: int, body: Bytes, link: Connection) -> None:
        if kind == Kind.PING:
            link.answer_ping()
        elif kind == Kind.GOODBYE:
            message, _ = codec.decode_message(body)
            if isinstance(message, Goodbye):
                orderly = ChannelClosed(message.reason, reason=message.reason)
                self.end(codec.error_from_dict(message.error) if message.error else orderly)


HandlerFactory: TypeAlias = Callable[[Channel], Handler]
