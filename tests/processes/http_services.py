"""Jobs that listen at a port of theirs."""

from __future__ import annotations

import socket
import threading
from typing import Any

import fray


def echo_server() -> None:
    """Sends back what comes, until the end of the stream, and then says goodbye."""
    with _listener("echo") as listener:
        while True:
            threading.Thread(target=_echo, args=(listener.accept()[0],), daemon=True).start()


def _listener(name: str) -> socket.socket:
    return socket.create_server(("127.0.0.1", fray.current_job().ports[name]), backlog=64)


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
        connection.sendall(b"goodbye")


def silent_server() -> None:
    """Says one word to everybody, and reads nothing."""
    with _listener("echo") as listener:
        taken: list[Any] = []
        while True:
            taken.append(listener.accept()[0])
            taken[-1].sendall(b"!")
