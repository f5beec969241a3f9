"""A proxy between two processes that breaks connections: by reset, in the middle of anything."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, field

from fray.net.transports import sockets, websocket


@define(eq=False)
class Saboteur:
    """Forwards between its own address and the real one; each connection dies after a random number of bytes.

    A listener refuses dialers of an address that is not its own: see `as_wire`.

    Half of the connections live for ``bytes_low`` bytes at least, so that there is progress; the others may be cut in
    their handshake. `calm` ends the sabotage.
    """

    target: str
    rng: random.Random
    bytes_low: int = 2_000
    bytes_high: int = 60_000
    cuts: int = 0
    connections: int = 0
    calm: bool = False
    address: str = ""
    _open: set[trio.SocketStream] = field(factory=set)

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:
        if self.target.startswith("unix:"):
            self.address = f"{self.target}.cut"
            sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            await sock.bind(self.address.removeprefix("unix:"))
            sock.listen()
            listener = trio.SocketListener(sock)
        else:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.address = f"tcp:127.0.0.1:{listener.socket.getsockname()[1]}"
        await trio.serve_listeners(self._forward, [listener], task_status=task_status)  # type: ignore[arg-type]

    async def _forward(self, near: trio.SocketStream) -> None:
        self.connections += 1
        try:
            far = await self._dial()
        except OSError:
            _reset(near)
            return
        low = self.rng.choice((0, self.bytes_low))
        budget = [self.rng.randrange(low, self.bytes_high)]
        async with trio.open_nursery() as nursery:
            for source, sink in ((near, far), (far, near)):
                nursery.start_soon(self._copy, source, sink, budget, nursery.cancel_scope)
        _reset(near)
        _reset(far)

    async def _dial(self) -> trio.SocketStream:
        if self.target.startswith("unix:"):
            return await trio.open_unix_socket(self.target.removeprefix("unix:"))
        host, _, port = self.target.removeprefix("tcp:").rpartition(":")
        return await trio.open_tcp_stream(host, int(port))

    async def _copy(
        self, source: trio.SocketStream, sink: trio.SocketStream, budget: list[int], scope: trio.CancelScope
    ) -> None:
        try:
            while data := await source.receive_some(self.rng.randrange(1, 5000)):
                if not self.calm:
                    budget[0] -= len(data)
                    if budget[0] < 0:
                        data = data[: max(0, len(data) + budget[0])]
                        await sink.send_all(data)
                        self.cuts += 1
                        break
                await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


def _reset(stream: trio.SocketStream) -> None:
    """Close without goodbye: what is under way is lost."""
    try:
        if stream.socket.family != socket.AF_UNIX:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()
    except OSError:
        pass


def as_wire(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Make the dialers of this process name the listener at ``target``, as if what is between were a wire."""
    path = target.removeprefix("unix:")
    name = sockets.file_name(os.stat(path)) if path != target else target
    monkeypatch.setattr(websocket, "dialed_names", lambda address, connected: (name,))


@asynccontextmanager
async def open_saboteur(target: str, seed: int) -> AsyncIterator[Saboteur]:
    saboteur = Saboteur(target, random.Random(seed))
    async with trio.open_nursery() as nursery:
        await nursery.start(saboteur.serve)
        yield saboteur
        nursery.cancel_scope.cancel()
