"""The shim's end of the socket to its node: JSON lines (`fray.node.shim.main` lists the words)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

READ_BYTES = 64 * 1024


class NodeSocket:
    """The shim's end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self.socket = control
        self.buffer = b""

    def receive_start(self) -> dict[str, Any] | None:
        """The start, however long it is; None if the node is gone."""
        while True:
            found = self.receive()
            if found is None or found:
                return found[0] if found else None

    def receive(self) -> list[dict[str, Any]] | None:
        """One read, and the messages that are whole now; None at the end of the stream."""
        try:
            data = self.socket.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def send_pid(self, pid: int) -> None:
        """The shim's pid as the node sees it, with a descriptor of it: the number alone might be another process's
        when it is read."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(self.socket, [json.dumps({"shim": pid}).encode() + b"\n"], [pidfd])
            os.close(pidfd)

    def send_with_descriptors(self, descriptors: list[int], **message: int) -> None:
        """Say something, and hand descriptors over."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.socket, [json.dumps(message).encode() + b"\n"], descriptors)

    def send(self, **message: Any) -> None:
        """Say something to the node; if it is gone the loop will notice by itself."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")
