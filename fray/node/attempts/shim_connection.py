"""The node's end of the socket between node and shim: JSON lines (`fray.node.shim.main` lists the words)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

import trio

READ_BYTES = 4096
FDS_LIMIT = 4
_CLOEXEC = socket.MSG_CMSG_CLOEXEC


class ShimConnection:
    """One shim's socket; `close` it, and the shim ends its job."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._lines: list[bytes] = []
        self._rest = b""
        self._descriptors: list[int] = []

    async def send(self, message: dict[str, Any]) -> None:
        """Send something large. OSError if the shim is gone."""
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    def notify(self, **message: float | str) -> None:
        """Send something small: the shim always reads, and the buffer holds thousands of these."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None when the shim is gone."""
        while not self._lines:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, FDS_LIMIT, _CLOEXEC)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                continue
            except ConnectionError:
                return None
            self._descriptors += descriptors
            if not data:
                return None
            *self._lines, self._rest = (self._rest + data).split(b"\n")
        message: dict[str, Any] = json.loads(self._lines.pop(0))
        return message

    def take_descriptor(self) -> int:
        """The descriptor that came with a message; the caller closes it. -1: there was none."""
        return self._descriptors.pop(0) if self._descriptors else -1

    def take_descriptors(self, *names: str) -> dict[str, int]:
        """The descriptors that came with a message, by name; none if they could not all be received."""
        if len(self._descriptors) < len(names):
            return {}
        return {name: self._descriptors.pop(0) for name in names}

    def close(self) -> None:
        while (descriptor := self.take_descriptor()) >= 0:
            os.close(descriptor)
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
