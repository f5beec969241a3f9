"""Ports for servers that tests start in other processes.

Between the choice of a port and the start of its server seconds may pass. A port that the kernel chose (a bind to port
0) may be given to a connection of any other process in that time; these are below the range the kernel chooses from,
which begins at 32768 (`net.ipv4.ip_local_port_range`), and above the ports that a node claims for jobs by default.
"""

from __future__ import annotations

import secrets
import socket

LOWEST, BEYOND = 22_000, 32_000


def free_port(host: str = "127.0.0.1", consecutive: int = 1) -> int:
    """Return a port of ``host`` at which nothing listens: the first of so many consecutive ones."""
    while True:
        first = LOWEST + secrets.randbelow(BEYOND - LOWEST - consecutive)
        try:
            for port in range(first, first + consecutive):
                socket.create_server((host, port)).close()
        except OSError:
            continue
        return first
