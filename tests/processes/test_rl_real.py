"""The reinforcement learning example where every job and actor is a process: one is killed, one is lost, a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fray.v2 import FrayClient
from tests.processes.lab import TOKEN, open_lab

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import rl

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "rl.py"


def command(client: str, *more: str) -> list[str]:
    return [sys.executable, str(EXAMPLE), "--client", client, "--json", *more]


ENVIRON = {**os.environ, "PYTHONPATH": os.getcwd(), "FRAY_TOKEN": TOKEN}


def learned(client: str, *more: str) -> dict[str, Any]:
    """Return its report, with all lessons passed."""
    done = subprocess.run(command(client, *more), env=ENVIRON, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    last = report["lessons"][-1]
    assert last["trained"] >= 0.9 > 0.05 > last["untrained"]
    jobs = sorted(report["jobs"].values())
    assert jobs == ["stopped"] * len(report["rollouts"]) + ["succeeded"], "the trainer has ended, the others were"
    return report


def test_a_rollout_that_is_killed_restarts_and_learning_continues() -> None:
    report = learned("machine?nodes=1&cpu=2", "--rollouts", "1", "--kill-rollout")  # there is no other to learn from
    (rollout,) = report["rollouts"]
    assert rollout["begun"] == 2
    assert rollout["batches"] >= report["versions"] > 50


def test_on_a_running_cluster_it_learns_as_well(tmp_path: Path) -> None:
    with open_lab(tmp_path, "alpha") as lab:
        report = learned(lab.spec, "--rollouts", "2")
        assert [one["begun"] for one in report["rollouts"]] == [1, 1]


def test_when_an_actor_is_lost_that_all_rest_on_the_run_ends_and_says_so() -> None:
    with FrayClient("machine?nodes=1&cpu=2") as client:

        def kill(line: str) -> None:
            if "passed bandit" in line:
                (weights,) = [job for job in client.cluster.list_jobs() if job.name == "rl-weights"]
                os.kill(weights.attempts[-1].pid, signal.SIGKILL)

        with pytest.raises(RuntimeError, match="rl-weights"):
            rl.run(client, rl.arguments(["--client", "machine"]), kill)
