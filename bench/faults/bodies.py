"""Functions that run on the cluster of a campaign; each records its start and its end."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys

from bench.faults.lab import PACKAGE
from bench.histories.clients import work
from bench.histories.files import sign

BUSY_S = (0.0, 0.6)


def count(ledger: str, owner: str, number: int, busy_s: float) -> int:
    sign(ledger, "begun", owner)
    work(ledger, owner, busy_s)
    return number


def family(ledger: str, owner: str, number: int, busy_s: float) -> int:
    """Start a child, a grandchild in its own session, and a daemon that clears its environment."""
    sign(ledger, "begun", owner)
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)", ledger]
    subprocess.Popen(sleeper)
    subprocess.Popen(["sh", "-c", 'setsid "$@" & sleep 3600', "sh", *sleeper])
    subprocess.Popen(["setsid", "env", "-i", *sleeper], stdin=subprocess.DEVNULL, start_new_session=True)
    work(ledger, owner, busy_s)
    return number


def serves(ledger: str, owner: str, number: int, busy_s: float) -> int:
    """Listen on the job's port."""
    sign(ledger, "begun", owner)
    port = int(os.environ["FRAY_PORT_HTTP"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        work(ledger, owner, busy_s)
    return number


def imports(ledger: str, owner: str, number: int, busy_s: float) -> int:
    """Run in its own environment."""
    sign(ledger, "begun", owner)
    importlib.import_module(PACKAGE)
    work(ledger, owner, busy_s)
    return number


PROGRAM = 'sleep 3600 & sleep "$BUSY_S"'


class Echo:
    """Actor that answers calls."""

    def __init__(self, ledger: str, owner: str) -> None:
        self.ledger, self.owner = ledger, owner
        sign(ledger, "begun", owner)

    async def twice(self, number: int, token: str) -> int:
        sign(self.ledger, "effect", self.owner, call=token)
        return 2 * number
