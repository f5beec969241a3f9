"""The tour of tools/trace.py works for a launch, a call and a printed line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "trace.py"


@pytest.mark.parametrize(
    ("way", "first", "on_the_way"),
    [
        ("launch", "fray/api/scope.py", "fray/scheduler/jobs/submit.py"),
        ("call", "fray/api/actors/handle.py", "fray/runtime/actors/served_actor.py"),
        ("log", "", "fray/runtime/controller_client/log_lines.py"),
    ],
)
def test_the_files_of_one_operation_are_listed_in_order_of_first_use(way: str, first: str, on_the_way: str) -> None:
    done = subprocess.run([sys.executable, TOOL, way], capture_output=True, text=True, check=True, timeout=60)
    paths = [line.split()[1] for line in done.stdout.splitlines() if line.split()[1:2] and "fray/" in line.split()[1]]
    assert not first or paths[0] == first
    assert on_the_way in paths
    assert done.stdout.splitlines()[-1].startswith(f"{len(paths)} files, ")
