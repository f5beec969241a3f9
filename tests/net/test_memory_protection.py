"""Tests of what processes of one account can read of a process that has forbidden it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fray.net.memory_protection import hides_processes
from tests.support.inspection import AS_ACCOUNT, can_read, needs_accounts

PROGRAM = """
import sys
from fray.net.memory_protection import forbid_inspection
if sys.argv[1] == "forbid":
    forbid_inspection()
print("ready", flush=True)
sys.stdin.read()
"""


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


@pytest.mark.parametrize(
    ("options", "hides"),
    [("rw", False), ("rw,hidepid=0", False), ("rw,hidepid=2", True), ("rw,hidepid=invisible", True)],
)
def test_it_is_known_whether_proc_hides_what_may_not_be_inspected(tmp_path: Path, options: str, hides: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"21 27 0:5 / / rw - ext4 /dev/sda rw\n22 21 0:21 / /proc rw,relatime shared:9 - proc proc {options}\n"
    )
    assert hides_processes(str(mounts)) is hides


@needs_accounts
@pytest.mark.parametrize(("word", "readable"), [("allow", True), ("forbid", False)])
def test_the_environment_of_a_daemon_cannot_be_read_by_its_account(word: str, readable: bool) -> None:
    process = start(word)
    try:
        assert can_read(process.pid, "environ") is readable
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
