"""A tunnel whose end here is a stream of bytes: one connection, carried as it is.

Law. Each side's end of stream travels as a piece of its own (`FIN`), so that one side may have said all and still
listen. Whatever ends otherwise (a reset, a lost conversation, the end of the job) is a reset at the other side too: a
cut is never taken for an end. What is under way is bounded by the window that each side gives, and given again as the
stream takes it: so a reader that does not read holds up its writer, and nobody else.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import Protocol

import trio

from fray.errors import ConnectionFailed, FrayError
from fray.net.codec import Bytes
from fray.net.tunnels.multiplexer import (
    PIECE_BYTES,
    WINDOW_BYTES,
    TunnelFlow,
    cost_bytes,
)

FIN = 4
"""Flag of DATA: nothing more follows in this direction."""
SEND_AHEAD_BYTES = 128 * 1024
"""More than this unsent, and no more is read from the stream."""
GRANT_FROM_BYTES = WINDOW_BYTES // 4
ACCEPTED = b"accepted"


class HalfCloseableStream(Protocol):
    """`trio.SocketStream`, or another of Trio's streams that can be closed in one direction."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray: ...
    async def send_all(self, data: bytes) -> None: ...
    async def send_eof(self) -> None: ...
    async def aclose(self) -> None: ...


class ByteStreamTunnel:
    """One end of such a tunnel (`fray.net.tunnels.multiplexer.End`)."""

    def __init__(self) -> None:
        self.error: FrayError | None = None
        """Why it is over, if it did not end in order."""
        self._lane: TunnelFlow | None = None
        self._accepted = False
        self._over = False
        self._heard_fin = False
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._taken = 0
        """Credit used up, and not given again yet."""
        self._news = trio.lowlevel.ParkingLot()

    def begin(self, lane: TunnelFlow) -> None:
        """It goes by this lane; the far end was told of one window."""
        self._lane = lane

    async def wait_accepted(self) -> None:
        """Raises what the far end refused with, or why the tunnel is lost."""
        while not self._accepted and self.error is None:
            await self._news.park()
        if self.error is not None:
            raise self.error

    def accept(self) -> None:
        """The stream is there: let the far end send."""
        assert self._lane is not None
        self._accepted = True
        self._lane.grant(WINDOW_BYTES, ACCEPTED)

    def refuse(self, error: FrayError) -> None:
        """End it, whatever is under way, and say why."""
        self.error = self.error or error
        if self._lane is not None:
            self._lane.drop(error)
        self._news.unpark_all()

    async def carry(self, stream: HalfCloseableStream) -> None:
        """Carry until both sides have said all, or one of them is cut. The stream is closed then; nothing is raised."""
        assert self._lane is not None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, nursery.cancel_scope)
                async with trio.open_nursery() as both:
                    both.start_soon(self._send, stream)
                    both.start_soon(self._receive, stream)
                self._over = True
                self._lane.close()
                nursery.cancel_scope.cancel()
        finally:
            if not self._over:
                self.refuse(ConnectionFailed("the connection was cut"))
                reset_at_close(stream)
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await stream.aclose()

    async def _watch(self, scope: trio.CancelScope) -> None:
        while self.error is None:
            await self._news.park()
        scope.cancel()

    async def _send(self, stream: HalfCloseableStream) -> None:
        assert self._lane is not None
        while True:
            try:
                data = bytes(await stream.receive_some(PIECE_BYTES))
            except (trio.BrokenResourceError, OSError) as error:
                self.refuse(ConnectionFailed(f"the far side of a tunnel was reset: {error.__cause__ or error}"))
                return
            if not data:
                self._lane.put(b"", FIN)
                return
            self._lane.put(data)
            while self._lane.queued_bytes > SEND_AHEAD_BYTES:
                await self._news.park()

    async def _receive(self, stream: HalfCloseableStream) -> None:
        while True:
            while not self._pieces:
                await self._news.park()
            flags, data = self._pieces.popleft()
            try:
                if data:
                    await stream.send_all(data)
                if flags & FIN:
                    await stream.send_eof()
                    return
            except (trio.BrokenResourceError, OSError) as error:
                self.refuse(ConnectionFailed(f"the far side of a tunnel was reset: {error.__cause__ or error}"))
                return
            self._regrant(data)

    def _regrant(self, data: bytes) -> None:
        assert self._lane is not None
        self._taken += cost_bytes(data)
        if self._taken >= GRANT_FROM_BYTES:
            self._lane.grant(self._taken)
            self._taken = 0

    # What the lane tells (`fray.net.carrier.End`)

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        self._accepted = True
        self._news.unpark_all()

    def on_room(self) -> None:
        self._news.unpark_all()

    def on_data(self, flags: int, body: Bytes) -> None:
        self._heard_fin = self._heard_fin or bool(flags & FIN)
        self._pieces.append((flags, bytes(body)))
        self._news.unpark_all()

    def on_close(self, error: FrayError | None) -> None:
        if error is not None or not self._heard_fin:
            self.error = self.error or error or ConnectionFailed("the far side of a tunnel was cut")
        self._news.unpark_all()


def reset_at_close(stream: HalfCloseableStream) -> None:
    """A cut shall look like one: the peer of a socket gets a reset, and no end of stream."""
    if isinstance(stream, trio.SocketStream):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
