"""The fleet benchmark: its nodes are members of a real controller, register with the next one, and run all jobs."""

from __future__ import annotations

from pathlib import Path

import trio

from bench.fleet import measure


def test_a_fleet_joins_registers_with_the_next_controller_and_runs_all_jobs(tmp_path: Path) -> None:
    found = trio.run(measure, 3, 12, 0.01, tmp_path)
    assert list(found) == ["join", "storm", "jobs"]
    for figures in found.values():
        assert figures["passes"] > 0
        assert 0 < figures["p50_ms_up_to"] <= figures["p99_ms_up_to"] <= figures["longest_ms"]
