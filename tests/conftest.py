"""Common to all tests: no cluster of the caller's, the same examples in CI each time, processes one by one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

PROCESSES = Path(__file__).parent / "processes"

for name in ("CLUSTER_SPEC", "TOKEN", "JOB_ID", "JOB_NAME", "NAMESPACE", "CLUSTER_ADDRESS", "ATTEMPT_ID"):
    os.environ.pop(f"FRAY_{name}", None)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes share one worker of pytest-xdist: they measure times, and do not fight for the cores."""
    for item in items:
        if PROCESSES in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))
