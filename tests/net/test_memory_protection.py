"""Tests of what processes of one account can read of a process that has forbidden it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from fray.net.memory_protection import forbid_inspection
if sys.argv[1] == "forbid":
    forbid_inspection()
print("ready", flush=True)
sys.stdin.read()
"""


# Root reads everything by its capabilities: without them it is as any account to its own processes.
AS_ACCOUNT = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


def start(word: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*AS_ACCOUNT, sys.executable, "-c", PROGRAM, word],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "FRAY_TOKEN": "hard-to-guess"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def can_read(pid: int, name: str) -> bool:
    """Return whether another process of this account can read a file of a process."""
    reader = [*AS_ACCOUNT, "head", "-c1", f"/proc/{pid}/{name}"]
    return subprocess.run(reader, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(bool(AS_ACCOUNT) and shutil.which("setpriv") is None, reason="root needs setpriv for this test")
@pytest.mark.parametrize(("word", "readable"), [("allow", True), ("forbid", False)])
def test_the_environment_of_a_daemon_cannot_be_read_by_its_account(word: str, readable: bool) -> None:
    process = start(word)
    try:
        assert can_read(process.pid, "environ") is readable
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
