"""`Transport` of WebSocket messages on a non-blocking socket, with as few checkpoints as possible.

A message that is already there is returned, and a message that the kernel takes at once is sent, without a task switch:
a call's latency is mostly checkpoints and framing. A receiver that got several full buffers in a row lets other tasks
run.

Not trio-websocket, with which the tests speak to it: an echo through it takes longer than a whole call here, a message
one byte over its limit is sent and then kills the connection, a reader that lags stops answering pings, and closing
waits 60 s for a frozen peer.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

import trio

from fray.errors import ConnectionFailed, MessageTooLarge, ProtocolMismatch
from fray.net.transport import Bytes, PeerIdentity
from fray.net.transports import sockets, websocket_frames
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES, too_large
from fray.net.transports.tls_socket import RECORD_BYTES, TlsSocket
from fray.net.transports.websocket_frames import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    Control,
    Place,
    Reader,
)

RECEIVE_BYTES = 128 * 1024
JOIN_UP_TO_BYTES = 32 * 1024
"""Largest message that is copied into one buffer before it is sent."""
PARTS_LIMIT = 256
"""Number of parts from which on they are joined as well (the kernel takes at most 1024)."""
BETWEEN_CHUNKS_BYTES = 8 * 1024
"""First read after a message that was received into its place: enough to find the place of the next one. With TLS it
is a whole record, which is decrypted as a whole."""
EAGER_READS = 8
CLOSE_S = 1.0


class WebSocketTransport:
    """One connection after its handshake. ``surplus`` are the bytes received after the handshake's head."""

    may_share_memory = True
    """Set because its other end is a process, which may be on this host."""

    def __init__(self, sock: socket.socket, peer: PeerIdentity, *, client: bool, surplus: bytes) -> None:
        self.peer = peer
        self.is_near = sockets.is_near(sock)
        """True if the other end is certainly on this machine."""
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._between_bytes = BETWEEN_CHUNKS_BYTES if self._tls is None else RECORD_BYTES
        self._client = client
        self._reader = Reader(masked=not client, limit_bytes=TRANSPORT_LIMIT_BYTES, data=surplus)
        self._closed_reason: str | None = None
        """Reason why nothing more can be sent or received; None while open."""
        self._send_failed_reason: str | None = None
        """Reason why nothing more can be sent, though what has arrived can still be received."""
        self._closed = False
        self._close_sent = False
        self._sending = False
        self._unsent: memoryview | None = None
        """Rest of a message that `send_now` could not send."""
        self._pong = b""
        self._more = False
        """Set if the last read filled its buffer, so there may be more."""
        self._streak = 1
        """Number of reads in a row that filled their buffers, as the handshake's last one may have done."""
        self._receiving = False
        self._done = trio.Event()

    def __repr__(self) -> str:
        return f"<WebSocketTransport {self.peer.remote}: {self._closed_reason or 'open'}>"

    def place_into(self, first_bytes: int, place: Place) -> None:
        """Set the callback that chooses the buffer for the rest of a large message, by its first bytes and its size.

        If it returns a buffer, `receive` returns those first bytes as `PrefixOnly` once the rest has been received.
        """
        self._reader.place_bytes = first_bytes
        self._reader.place = place

    # Sending

    async def send(self, parts: Sequence[Bytes]) -> None:
        """See `Transport.send`. After `send_now` returned False it must be called with the same message."""
        self._sending = True
        unsent, self._unsent = self._unsent, None
        views: list[Bytes] = [unsent] if unsent is not None else self._views(parts)
        try:
            waited = not self._push(views)
            if waited:
                await self._push_all(views)
        # Part of the frame may be on the wire, and its rest is lost: nothing after it could be understood.
        except trio.Cancelled:
            self._end("a cancelled send left this connection unusable")
            raise
        self._sending = False
        # Its ping arrived while this message was being sent, and a control frame cannot be put inside a frame.
        if self._pong:
            self._flush_pong()
        if not waited:
            # Others must run even if the kernel always takes everything. Shielded, since the message has been sent.
            await trio.lowlevel.cancel_shielded_checkpoint()

    def send_now(self, parts: Sequence[Bytes]) -> bool:
        """Send without waiting. False: not all was sent; call `send` with it next, which continues there."""
        if self._sending or self._unsendable_reason is not None:
            return False
        views = self._views(parts)
        try:
            if self._push(views):
                return True
        # The error is raised by the `send` that follows.
        except ConnectionFailed:
            return False
        self._unsent = memoryview(b"".join(views))
        return False

    def _views(self, parts: Sequence[Bytes]) -> list[Bytes]:
        size = sum(map(len, parts))
        if size > TRANSPORT_LIMIT_BYTES:
            self._sending = False
            raise too_large(size)
        start = websocket_frames.head(BINARY, size, self._client)
        # Copying little costs less than passing many parts to the kernel.
        if size <= JOIN_UP_TO_BYTES or len(parts) > PARTS_LIMIT:
            return [b"".join((start, *parts))]
        return [start, *parts]

    def _push(self, views: list[Bytes]) -> bool:
        """Pass to the kernel what it takes and keep the rest in ``views``; return whether nothing is left."""
        if self._unsendable_reason is not None:
            raise ConnectionFailed(self._unsendable_reason)
        try:
            count = self._sock.send(views[0]) if len(views) == 1 else self._sock.sendmsg(views)
        except BlockingIOError:
            return False
        except OSError as error:
            # Only sending has ended: the kernel still has what arrived before, and then reports the end to `receive`.
            failed = _lost_error(error)
            self._send_failed_reason = str(failed)
            raise failed from None
        if len(views) == 1 and count == len(views[0]):
            return True
        # A full socket buffer may take any part of the message, also half of one view.
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views and count:
            views[0] = memoryview(views[0])[count:]
        return not views

    async def _push_all(self, views: list[Bytes]) -> None:
        while views:
            try:
                await trio.lowlevel.wait_writable(self._sock)
            except (trio.ClosedResourceError, ValueError, OSError):
                raise ConnectionFailed(self._closed_reason or "the connection was closed here") from None
            if self._push(views):
                return

    def _send_control(self, frame: bytes) -> bool:
        """Send a control frame if that is possible at once, between messages; return whether it was sent."""
        if self._sending or self._unsent is not None or self._unsendable_reason is not None:
            return False
        try:
            count = self._sock.send(frame)
        except OSError:
            return False
        # Rare: a nearly full buffer. Losing the connection replaces a second queue for the rest of control frames.
        if count < len(frame):
            self._end("a control frame was truncated")
        return count == len(frame)

    def _flush_pong(self) -> None:
        pong, self._pong = self._pong, b""
        if not self._send_control(pong):
            self._pong = pong

    # Receiving

    async def receive(self) -> Bytes:
        """See `Transport.receive`. Cancelling it loses nothing."""
        reader = self._reader
        while True:
            try:
                message = reader.next()
            except (ProtocolMismatch, MessageTooLarge) as error:
                self._report_violation(error)
                raise
            if message is None:
                # The only possible checkpoint: messages that are already in memory are returned without one.
                await self._fill()
            elif type(message) is Control:
                self._handle_control(message)
            else:
                return message  # type: ignore[return-value]

    async def _fill(self) -> None:
        if self._closed_reason is not None:
            raise ConnectionFailed(self._closed_reason)
        # After a read that filled its buffer there is probably more: reading at once saves a pass through the event
        # loop.
        if not self._more:
            await self._wait_readable()
        target = self._reader.direct()
        try:
            if target is not None:
                count, room = self._sock.recv_into(target), len(target)
                self._reader.filled(count)
            else:
                room = self._between_bytes if self._reader.take_hint() else RECEIVE_BYTES
                data = self._sock.recv(room)
                count = len(data)
                if count:
                    self._reader.feed(data)
        except BlockingIOError:
            self._more = False
            return
        except OSError as error:
            lost = _lost_error(error)
            raise self._end(str(lost), by_peer=lost.details["by_peer"]) from None
        if count == 0:
            raise self._end("the peer closed the connection", by_peer=True)
        # After eight full buffers in a row other tasks get their turn, by waiting once.
        self._streak = self._streak + 1 if count == room else 0
        self._more = self._streak % EAGER_READS > 0

    async def _wait_readable(self) -> None:
        # In memory already, so the kernel would not report it.
        if self._tls is not None and self._tls.has_received:
            await trio.lowlevel.checkpoint()
            return
        self._receiving = True
        try:
            await trio.lowlevel.wait_readable(self._sock)
        # Closed from another task, before (an invalid descriptor) or while it waits.
        except (trio.ClosedResourceError, ValueError, OSError):
            raise ConnectionFailed(self._closed_reason or "the connection was closed here") from None
        finally:
            self._receiving = False

    def _handle_control(self, control: Control) -> None:
        # Only the last ping has to be answered (RFC 6455, section 5.5.3).
        if control.opcode == PING:
            self._pong = websocket_frames.head(PONG, len(control.payload), self._client)
            self._pong += control.payload
            self._flush_pong()
        elif control.opcode == CLOSE:
            code, reason = websocket_frames.read_close(control.payload)
            # 1005 stands for a missing code and must not be sent.
            self._send_close(websocket_frames.NORMAL if code == 1005 else code, "")
            raise self._end(f"the peer closed the connection ({code}{' ' + reason if reason else ''})")

    # Ending

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        self._send_close(websocket_frames.NORMAL, "")
        try:
            with trio.move_on_after(CLOSE_S):
                # Only one task may wait for a socket in Trio; the one that receives will see the peer's close frame.
                await (self._done.wait() if self._receiving else self._drain())
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._end("the connection was closed here")
        if not self._closed:
            self._closed = True
            # Before the close: its descriptor may be reused at once, and waiting tasks would wait for another socket.
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    async def _drain(self) -> None:
        try:
            while True:
                # Read until the peer's end: closing a TCP socket with unread data sends a reset, which may destroy what
                # was just sent.
                await self.receive()
        except (ConnectionFailed, MessageTooLarge):
            return

    def _send_close(self, code: int, reason: str) -> None:
        if not self._close_sent:
            self._close_sent = True
            self._send_control(websocket_frames.close_frame(code, reason, self._client))

    def _report_violation(self, error: ProtocolMismatch | MessageTooLarge) -> None:
        # With the reason, which then shows in the log of the peer, where the mistake is.
        code = websocket_frames.TOO_LARGE if isinstance(error, MessageTooLarge) else error.details.get("code", 1002)
        self._send_close(code, str(error))
        self._end(str(error))

    @property
    def _unsendable_reason(self) -> str | None:
        return self._closed_reason or self._send_failed_reason

    def _end(self, why: str, by_peer: bool = False) -> ConnectionFailed:
        """Mark the connection as unusable; the first reason counts. ``by_peer``: its machine has ended it."""
        self._closed_reason = self._closed_reason or why
        self._done.set()
        return ConnectionFailed(self._closed_reason, by_peer=by_peer)


def _lost_error(error: OSError) -> ConnectionFailed:
    """Return the error of a connection that the kernel reports as lost."""
    by_peer = error.errno in (errno.ECONNRESET, errno.EPIPE)
    return ConnectionFailed(f"the connection was lost: {error.strerror or error}", by_peer=by_peer)
