"""Functions that run on the cluster of a campaign; each records its start and its end."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from bench.faults.lab import PACKAGE

BUSY_S = (0.0, 0.6)


def note(ledger: str, what: str) -> None:
    """Write a line, whole or not at all, to the ledger of this job."""
    line = {"what": what, "attempt": os.environ["FRAY_ATTEMPT_ID"], "pid": os.getpid()}
    path = Path(ledger) / f"{os.environ['FRAY_JOB_ID']}.jsonl"
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def count(ledger: str, number: int, busy_s: float) -> int:
    note(ledger, "begun")
    time.sleep(busy_s)
    note(ledger, "done")
    return number


def family(ledger: str, number: int, busy_s: float) -> int:
    """Start a child, a grandchild in its own session, and a daemon that clears its environment."""
    note(ledger, "begun")
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)", ledger]
    subprocess.Popen(sleeper)
    subprocess.Popen(["sh", "-c", 'setsid "$@" & sleep 3600', "sh", *sleeper])
    subprocess.Popen(["setsid", "env", "-i", *sleeper], stdin=subprocess.DEVNULL, start_new_session=True)
    time.sleep(busy_s)
    note(ledger, "done")
    return number


def serves(ledger: str, number: int, busy_s: float) -> int:
    """Listen on the job's port."""
    note(ledger, "begun")
    port = int(os.environ["FRAY_PORT_HTTP"])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        time.sleep(busy_s)
    note(ledger, "done")
    return number


def imports(ledger: str, number: int, busy_s: float) -> int:
    """Run in its own environment."""
    note(ledger, "begun")
    importlib.import_module(PACKAGE)
    time.sleep(busy_s)
    note(ledger, "done")
    return number


PROGRAM = """
line='{"what": "%s", "attempt": "%s", "pid": %s}'
say() { printf "$line\\n" "$1" "$FRAY_ATTEMPT_ID" $$ >> "$LEDGER/$FRAY_JOB_ID.jsonl"; }
say begun; sleep 3600 & sleep "$BUSY_S"; say done
"""


class Echo:
    """Actor that answers calls."""

    async def twice(self, number: int) -> int:
        return 2 * number
