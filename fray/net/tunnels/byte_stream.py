"""Tunnel whose end is a stream of bytes: one connection, carried as it is.

Contract: each side's end of stream is sent as a part of its own (`FIN`), so that one side may have finished sending and
still receive. Every other end (a reset, a lost channel, the end of the job) becomes a reset on the other side too: a
lost connection is never mistaken for an end of stream. Data in flight is bounded by the window that each side grants,
and granted again as the stream takes it: so a slow reader blocks its own writer only.
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
    PART_BYTES,
    WINDOW_BYTES,
    TunnelFlow,
    cost_bytes,
)

FIN = 4
"""Flag of DATA: end of stream in this direction."""
SEND_AHEAD_BYTES = 128 * 1024
"""Unsent bytes from which on no more is read from the stream."""
GRANT_FROM_BYTES = WINDOW_BYTES // 4
ACCEPTED = b"accepted"


class HalfCloseableStream(Protocol):
    """Interface of `trio.SocketStream` and Trio's other streams that can be closed in one direction."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray: ...
    async def send_all(self, data: bytes) -> None: ...
    async def send_eof(self) -> None: ...
    async def aclose(self) -> None: ...


class ByteStreamTunnel:
    """One end of such a tunnel (a `fray.net.tunnels.multiplexer.TunnelEndpoint`)."""

    def __init__(self) -> None:
        self.error: FrayError | None = None
        """Reason for its end; None after an orderly end."""
        self._flow: TunnelFlow | None = None
        self._accepted = False
        self._finished = False
        self._fin_received = False
        self._parts: deque[tuple[int, bytes]] = deque()
        self._taken = 0
        """Used credit that has not been granted again yet."""
        self._changed = trio.lowlevel.ParkingLot()

    def begin(self, flow: TunnelFlow) -> None:
        """Bind the endpoint to its flow; the far end has been granted one window."""
        self._flow = flow

    async def wait_accepted(self) -> None:
        """Wait until the far end accepts; raises its refusal, or the reason why the tunnel is lost."""
        while not self._accepted and self.error is None:
            await self._changed.park()
        if self.error is not None:
            raise self.error

    def accept(self) -> None:
        """Accept the tunnel: allow the far end to send."""
        assert self._flow is not None
        self._accepted = True
        # The far end has no credit before, so nothing arrives for a port that could not be dialed.
        self._flow.grant(WINDOW_BYTES, ACCEPTED)

    def refuse(self, error: FrayError) -> None:
        """End the tunnel at once and send the reason."""
        self.error = self.error or error
        if self._flow is not None:
            self._flow.drop(error)
        self._changed.unpark_all()

    async def carry(self, stream: HalfCloseableStream) -> None:
        """Carry bytes until both sides have ended, or one is lost. The stream is closed then; nothing is raised."""
        assert self._flow is not None
        try:
            async with trio.open_nursery() as nursery:
                # Ends both directions when the tunnel is lost: each may be waiting in the stream, where it would not
                # notice.
                nursery.start_soon(self._watch, nursery.cancel_scope)
                # Each direction ends by itself, so one side may have finished sending and still receive.
                async with trio.open_nursery() as both:
                    both.start_soon(self._send, stream)
                    both.start_soon(self._receive, stream)
                self._finished = True
                self._flow.close()
                nursery.cancel_scope.cancel()
        finally:
            if not self._finished:
                self.refuse(ConnectionFailed("the connection was lost"))
                reset_at_close(stream)
            # Shielded, since the tunnel may have been cancelled; bounded, for streams whose close waits for their peer.
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await stream.aclose()

    async def _watch(self, scope: trio.CancelScope) -> None:
        while self.error is None:
            await self._changed.park()
        scope.cancel()

    async def _send(self, stream: HalfCloseableStream) -> None:
        assert self._flow is not None
        while True:
            try:
                data = bytes(await stream.receive_some(PART_BYTES))
            except (trio.BrokenResourceError, OSError) as error:
                self.refuse(ConnectionFailed(f"the far end of the tunnel was reset: {error.__cause__ or error}"))
                return
            if not data:
                self._flow.put(b"", FIN)
                return
            # Not limited by credit here: the flow holds the part back until the far end has granted enough.
            self._flow.put(data)
            while self._flow.queued_bytes > SEND_AHEAD_BYTES:
                await self._changed.park()

    async def _receive(self, stream: HalfCloseableStream) -> None:
        while True:
            while not self._parts:
                await self._changed.park()
            flags, data = self._parts.popleft()
            try:
                if data:
                    # Data before the flag: the last part may have both.
                    await stream.send_all(data)
                if flags & FIN:
                    await stream.send_eof()
                    return
            except (trio.BrokenResourceError, OSError) as error:
                self.refuse(ConnectionFailed(f"the far end of the tunnel was reset: {error.__cause__ or error}"))
                return
            self._regrant(data)

    def _regrant(self, data: bytes) -> None:
        assert self._flow is not None
        self._taken += cost_bytes(data)
        # In quarters of the window: a grant per part would double the number of frames.
        if self._taken >= GRANT_FROM_BYTES:
            self._flow.grant(self._taken)
            self._taken = 0

    # Callbacks of the flow (`fray.net.tunnels.multiplexer.TunnelEndpoint`)

    def on_credit(self, size_bytes: int, body: Bytes) -> None:
        self._accepted = True
        self._changed.unpark_all()

    def on_room(self) -> None:
        self._changed.unpark_all()

    def on_data(self, flags: int, body: Bytes) -> None:
        # The credit is not checked again: such a tunnel always passes the controller's relay, which has done it.
        self._fin_received = self._fin_received or bool(flags & FIN)
        self._parts.append((flags, bytes(body)))
        self._changed.unpark_all()

    def on_close(self, error: FrayError | None) -> None:
        # Without an end of stream before it, also an orderly close is a loss: data may be missing.
        if error is not None or not self._fin_received:
            self.error = self.error or error or ConnectionFailed("the far end of the tunnel was lost")
        self._changed.unpark_all()


def reset_at_close(stream: HalfCloseableStream) -> None:
    """Make a lost tunnel visible: the peer of a socket gets a reset instead of an end of stream."""
    if isinstance(stream, trio.SocketStream):
        # With a linger time of zero, close() sends a reset and discards unsent data (socket(7)).
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
