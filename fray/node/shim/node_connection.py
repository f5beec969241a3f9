"""Shim side of the socket between shim and node: JSON lines, documented in `fray.node.shim.main`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

READ_BYTES = 64 * 1024
FDS_LIMIT = 4


class NodeSocket:
    """The shim's end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self.socket = control
        self.buffer = b""
        self.descriptors: list[int] = []
        """Descriptors that came with messages and were not taken yet."""
        self.unsent = bytearray()
        """Bytes of posted messages that the socket had no room for."""

    def receive_start(self) -> dict[str, Any] | None:
        """Return the first message, however long it is; None if the node has ended."""
        while True:
            # The start message has the whole attempt spec and may be longer than one read.
            found = self.receive()
            if found is None or found:
                return found[0] if found else None

    def receive(self) -> list[dict[str, Any]] | None:
        """Read once and return the messages that are complete; None at the end of the stream."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, READ_BYTES, FDS_LIMIT, socket.MSG_CMSG_CLOEXEC)
            self.descriptors += descriptors
        except ConnectionError:
            data = b""
        if not data:
            return None
        # A stream socket keeps no message boundaries: the rest is the beginning of the next line.
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def take_descriptor(self) -> int:
        """Return the oldest descriptor that came with a message, to be closed by the caller; -1: there is none."""
        return self.descriptors.pop(0) if self.descriptors else -1

    def send_pid(self, pid: int) -> None:
        """Send this shim's pid as the node sees it, with a pidfd."""
        with contextlib.suppress(OSError):
            # By the time the node reads the number, it may belong to another process; the descriptor never does.
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(self.socket, [_encode({"shim": pid})], [pidfd])
            os.close(pidfd)

    def send_with_descriptors(self, descriptors: list[int], **message: int) -> None:
        """Send a message with descriptors."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.socket, [_encode(message)], descriptors)

    def post(self, **message: Any) -> None:
        """Send a message without waiting; what does not fit into the socket is left to `flush`."""
        self.unsent += _encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what is left of posted messages, as far as the socket takes it."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # the loop notices by itself that the node has ended

    def send_last(self, **message: Any) -> None:
        """Send what is left and this message. Blocks while the node reads nothing; returns when it has ended."""
        with contextlib.suppress(OSError):
            self.socket.sendall(bytes(self.unsent) + _encode(message))


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
