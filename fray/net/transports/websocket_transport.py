"""The lean `Transport`: WebSocket messages on a non-blocking socket, with as few checkpoints as there can be.

A message that is there already is returned, and one that the kernel takes at once is sent, without a task switch; a
receiver that was served several full buffers in a row lets others run.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import trio

from fray.errors import ConnectionFailed, MessageTooLarge, ProtocolMismatch
from fray.net.transport import Bytes, PeerIdentity
from fray.net.transports import sockets, websocket_frames
from fray.net.transports.memory import TRANSPORT_LIMIT_BYTES, too_large
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
"""Messages up to this are copied into one buffer before they are sent."""
PARTS_LIMIT = 256
"""More parts than this are joined as well (the kernel takes at most 1024)."""
BETWEEN_CHUNKS_BYTES = 8 * 1024
"""What is read first after a message that was received into its place: enough to see where the next one goes."""
EAGER_READS = 8
CLOSE_S = 1.0


class WebSocketTransport:
    """One connection after its handshake. ``surplus`` is what was received behind the handshake's head."""

    may_share_memory = True
    """Its other end is a process, which may be on this host."""

    def __init__(self, sock: socket.socket, peer: PeerIdentity, *, client: bool, surplus: bytes) -> None:
        self.peer = peer
        self.is_near = sockets.is_near(sock)
        """The other end is on this machine for sure."""
        self._sock = sock
        self._client = client
        self._reader = Reader(masked=not client, limit_bytes=TRANSPORT_LIMIT_BYTES, data=surplus)
        self._gone: str | None = None
        """Why nothing more can be sent or received."""
        self._closed = False
        self._said_close = False
        self._sending = False
        self._rest: memoryview | None = None
        """What `send_now` could not get rid of."""
        self._pong = b""
        self._more = False
        """The last read filled its buffer: there may be more."""
        self._streak = 0
        self._receiving = False
        self._done = trio.Event()

    def __repr__(self) -> str:
        return f"<WebSocketTransport {self.peer.remote}: {self._gone or 'open'}>"

    def place_into(self, first_bytes: int, place: Place) -> None:
        """Ask ``place``, with the first bytes of a large message and its size, where the rest is to be received.

        If it says so, `receive` returns those first bytes as `Placed` once the rest is there.
        """
        self._reader.place_bytes = first_bytes
        self._reader.place = place

    # Sending

    async def send(self, parts: Sequence[Bytes]) -> None:
        """See `Transport.send`. After `send_now` returned False it must be called with the same message."""
        self._sending = True
        rest, self._rest = self._rest, None
        views: list[Bytes] = [rest] if rest is not None else self._views(parts)
        try:
            waited = not self._push(views)
            if waited:
                await self._push_all(views)
        except trio.Cancelled:
            self._end("a cancelled send left this connection unusable")
            raise
        self._sending = False
        if self._pong:
            self._flush_pong()
        if not waited:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def send_now(self, parts: Sequence[Bytes]) -> bool:
        """Send without waiting. False: not all of it went out, `send` it next (it goes on where this stopped)."""
        if self._sending or self._gone is not None:
            return False
        views = self._views(parts)
        try:
            if self._push(views):
                return True
        except ConnectionFailed:
            return False
        self._rest = memoryview(b"".join(views))
        return False

    def _views(self, parts: Sequence[Bytes]) -> list[Bytes]:
        size = sum(map(len, parts))
        if size > TRANSPORT_LIMIT_BYTES:
            self._sending = False
            raise too_large(size)
        start = websocket_frames.head(BINARY, size, self._client)
        if size <= JOIN_UP_TO_BYTES or len(parts) > PARTS_LIMIT:
            return [b"".join((start, *parts))]
        return [start, *parts]

    def _push(self, views: list[Bytes]) -> bool:
        """Give the kernel what it takes and keep the rest in ``views``; True if nothing is left."""
        if self._gone is not None:
            raise ConnectionFailed(self._gone)
        try:
            count = self._sock.send(views[0]) if len(views) == 1 else self._sock.sendmsg(views)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(error) from None
        if len(views) == 1 and count == len(views[0]):
            return True
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
                raise ConnectionFailed(self._gone or "the connection was closed here") from None
            if self._push(views):
                return

    def _say(self, frame: bytes) -> bool:
        """Send a control frame if that is possible at once, between messages."""
        if self._sending or self._rest is not None or self._gone is not None:
            return False
        try:
            count = self._sock.send(frame)
        except OSError:
            return False
        if count < len(frame):
            self._end("a control frame was cut short")
        return count == len(frame)

    def _flush_pong(self) -> None:
        pong, self._pong = self._pong, b""
        if not self._say(pong):
            self._pong = pong

    # Receiving

    async def receive(self) -> Bytes:
        """See `Transport.receive`. Cancelling it loses nothing."""
        reader = self._reader
        while True:
            try:
                message = reader.next()
            except (ProtocolMismatch, MessageTooLarge) as error:
                self._protest(error)
                raise
            if message is None:
                await self._fill()
            elif type(message) is Control:
                self._obey(message)
            else:
                return message  # type: ignore[return-value]

    async def _fill(self) -> None:
        if self._gone is not None:
            raise ConnectionFailed(self._gone)
        if not self._more:
            await self._wait_readable()
        target = self._reader.direct()
        try:
            if target is not None:
                count, room = self._sock.recv_into(target), len(target)
                self._reader.filled(count)
            else:
                room = BETWEEN_CHUNKS_BYTES if self._reader.take_hint() else RECEIVE_BYTES
                data = self._sock.recv(room)
                count = len(data)
                if count:
                    self._reader.feed(data)
        except BlockingIOError:
            self._more = False
            return
        except OSError as error:
            raise self._lost(error) from None
        if count == 0:
            raise self._end("the peer closed the connection")
        self._streak = self._streak + 1 if count == room else 0
        self._more = self._streak % EAGER_READS > 0

    async def _wait_readable(self) -> None:
        self._receiving = True
        try:
            await trio.lowlevel.wait_readable(self._sock)
        except (trio.ClosedResourceError, ValueError, OSError):
            raise ConnectionFailed(self._gone or "the connection was closed here") from None
        finally:
            self._receiving = False

    def _obey(self, control: Control) -> None:
        if control.opcode == PING:
            self._pong = websocket_frames.head(PONG, len(control.payload), self._client)
            self._pong += control.payload
            self._flush_pong()
        elif control.opcode == CLOSE:
            code, reason = websocket_frames.read_close(control.payload)
            self._say_close(websocket_frames.NORMAL if code == 1005 else code, "")
            raise self._end(f"the peer closed the connection ({code}{' ' + reason if reason else ''})")

    # Ending

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        self._say_close(websocket_frames.NORMAL, "")
        try:
            with trio.move_on_after(CLOSE_S):
                await (self._done.wait() if self._receiving else self._drain())
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Transport.abort`."""
        self._end("the connection was closed here")
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    async def _drain(self) -> None:
        try:
            while True:
                await self.receive()
        except (ConnectionFailed, MessageTooLarge):
            return

    def _say_close(self, code: int, reason: str) -> None:
        if not self._said_close:
            self._said_close = True
            self._say(websocket_frames.close_frame(code, reason, self._client))

    def _protest(self, error: ProtocolMismatch | MessageTooLarge) -> None:
        code = websocket_frames.TOO_LARGE if isinstance(error, MessageTooLarge) else error.details.get("code", 1002)
        self._say_close(code, str(error))
        self._end(str(error))

    def _lost(self, error: OSError) -> ConnectionFailed:
        return self._end(f"the connection was lost: {error.strerror or error}")

    def _end(self, why: str) -> ConnectionFailed:
        """Nothing more can be sent or received; the first reason counts."""
        self._gone = self._gone or why
        self._done.set()
        return ConnectionFailed(self._gone)
