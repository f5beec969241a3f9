"""Ports for servers that tests start in other processes.

Between the choice of a port and the start of its server seconds may pass. A port that the kernel chose (a bind to port
0) may be given to a connection of any other process in that time; these are below the range the kernel chooses from,
which begins at 32768 (`net.ipv4.ip_local_port_range`), and above the ports that a node claims for jobs by default.
"""

from __future__ import annotations

import os
import secrets
import socket
from itertools import count

LOWEST, BEYOND, SHARES = 22_000, 32_000, 16
"""Range, and its parts. Workers of pytest-xdist choose from parts of their own: two clusters of tests that choose one
port at the same moment would become one cluster, as the second controller ends and its machines join the first."""
SIZE = (BEYOND - LOWEST) // SHARES
_numbers = count(secrets.randbelow(SIZE))
"""Numbers of the next ports, taken in turn: ports that are chosen before the first server starts differ."""


def free_port(host: str = "127.0.0.1", consecutive: int = 1) -> int:
    """Return a port of ``host`` at which nothing listens: the first of so many consecutive ones."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % SHARES
    while True:
        number, *_ = (next(_numbers) for _ in range(consecutive))
        first = LOWEST + share * SIZE + number % (SIZE - consecutive + 1)
        try:
            for port in range(first, first + consecutive):
                socket.create_server((host, port)).close()
        except OSError:
            continue
        return first
