"""Node side of the socket between node and shim: JSON lines, documented in `fray.node.shim.main`."""

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
    """Socket of one shim; closing it makes the shim end its job."""

    def __init__(self, end: socket.socket, unread: str = "") -> None:
        end.setblocking(False)
        self._socket = end
        self._lines: list[bytes]
        *self._lines, self._rest = unread.encode().split(b"\n")
        self._descriptors: list[int] = []

    def hand_over(self) -> tuple[int, str] | None:
        """Return the descriptor of the socket, and what was received and not returned yet; None: not now."""
        if self._descriptors:
            return None
        return self._socket.fileno(), b"\n".join((*self._lines, self._rest)).decode()

    async def send(self, message: dict[str, Any]) -> None:
        """Send a large message. Raises OSError if the shim has ended."""
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    def notify(self, **message: float | str) -> None:
        """Send a small message without waiting: the shim always reads, and the buffer holds thousands of these."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n")

    def notify_with(self, descriptor: int, **message: int | str) -> None:
        """Send a small message with a descriptor, as `notify`."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(message).encode() + b"\n"], [descriptor])

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None when the shim has ended."""
        while not self._lines:
            try:
                # Close-on-exec from the start: a zygote or a builder may be spawned before the next line.
                data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, FDS_LIMIT, _CLOEXEC)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                continue
            except ConnectionError:
                return None
            # Descriptors arrive with the first byte of their message, which may take several reads: they wait in a
            # queue.
            self._descriptors += descriptors
            if not data:
                return None
            *self._lines, self._rest = (self._rest + data).split(b"\n")
        message: dict[str, Any] = json.loads(self._lines.pop(0))
        return message

    def take_descriptor(self) -> int:
        """Return a descriptor that came with a message, to be closed by the caller; -1 if there was none."""
        return self._descriptors.pop(0) if self._descriptors else -1

    def take_descriptors(self, *names: str) -> dict[str, int]:
        """Return the descriptors that came with a message, by name; empty if not all were received."""
        if len(self._descriptors) < len(names):
            return {}
        return {name: self._descriptors.pop(0) for name in names}

    def close(self) -> None:
        # Those of messages that were not handled, because the attempt was cancelled.
        while (descriptor := self.take_descriptor()) >= 0:
            os.close(descriptor)
        # Wakes tasks that wait for this socket, whose number may be reused at once.
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
