"""Inspection of a process by another one of its account."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

# Root reads everything by its capabilities: without them it is as any account to its own processes.
AS_ACCOUNT = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
"""Beginning of the command line of a process without capabilities."""
needs_accounts = pytest.mark.skipif(
    bool(AS_ACCOUNT) and shutil.which("setpriv") is None, reason="root needs setpriv for this test"
)


def can_read(pid: int, name: str) -> bool:
    """Return whether another process of this account can read a file of a process that has no capabilities."""
    reader = [*AS_ACCOUNT, "head", "-c1", f"/proc/{pid}/{name}"]
    return subprocess.run(reader, capture_output=True, check=False).returncode == 0
