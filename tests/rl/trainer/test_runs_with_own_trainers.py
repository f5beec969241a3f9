"""Runs of real processes with trainers of the guide and of the user."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import rl
from fray.errors import InvalidRequest
from tests.rl.test_run_with_torch import MODEL, NAMES, first_is_1, processes, run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.usefixtures("warm_cluster"),
]


class Collecting(rl.BaseTrainer):
    """Trainer without weights: it counts."""

    def initialize_workers(self) -> None:
        self.updates = 0

    def train(self, trajectories: list[rl.Trajectory]) -> dict[str, Any]:
        self.updates += 1
        groups = {one["group_id"] for one in trajectories}
        return {"groups": len(groups), "updates": self.updates, "has_torch": "torch" in sys.modules}


class BadMetrics(Collecting):
    """Trainer that returns a word as a metric."""

    def train(self, trajectories: list[rl.Trajectory]) -> dict[str, Any]:
        return {"groups": "many"}


def test_a_trainer_needs_only_a_method_from_trajectories_to_metrics(tmp_path: Path) -> None:
    result = trio.run(
        run(1, trainer=Collecting({"groups": 4, "group_size": 2, "steps": 3}), output=tmp_path, save_every=2).main
    )
    assert [(step["groups"], step["updates"], step["trajectories"]) for step in result.steps] == [
        (4, 1, 8),
        (4, 2, 8),
        (4, 3, 8),
    ]
    assert all(0 <= step["reward_mean"] <= 1 for step in result.steps)
    status = result.status
    assert status is not None
    # It has no weights: versions are counted, and servers keep those of the model.
    assert (status.version.number, status.rollout_version.number) == (3, 3)


def test_metrics_that_are_no_numbers_end_the_run_by_name() -> None:
    with pytest.raises(TypeError, match=r"BadMetrics\.train returned 'groups': 'many'; expected numbers"):
        trio.run(run(1, trainer=BadMetrics({"groups": 4, "group_size": 2, "steps": 3})).main)


class Unprepared(Collecting):
    """Trainer that cannot be prepared."""

    def initialize_workers(self) -> None:
        raise LookupError("no such table")


def test_an_error_before_the_first_update_is_raised_once() -> None:
    with pytest.raises(LookupError, match="no such table") as raised:
        trio.run(run(1, trainer=Unprepared({"groups": 4, "group_size": 2, "steps": 3})).main)
    assert any("raised by the constructor of actor TrainerProcess" in note for note in raised.value.__notes__)


def test_the_guides_grpo_trainer_learns_in_a_run_and_continues_when_it_is_killed(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 5 and not killed:
            killed.extend(processes(NAMES["trainer"]))
            os.kill(killed[0], signal.SIGKILL)

    trainer = rl.SelfHostedGrpoTrainer({"batch_size": 32, "group_size": 4, "lr": 1e-2, "total_train_steps": 12})
    result = trio.run(run(1, trainer=trainer, output=tmp_path, save_every=4, on_step=kill).main)
    assert [step["line"] for step in result.steps] == [0] * 4 + [1] * 8
    assert [step["updates"] for step in result.steps] == list(range(1, 13))
    rewards = [step["reward_mean"] for step in result.steps]
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_the_pig_latin_example_learns_to_say_words_that_were_held_out() -> None:
    path = Path(__file__).parents[3] / "examples" / "rl_pig_latin.py"
    spec = importlib.util.spec_from_file_location("rl_pig_latin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # By name, where the processes of the run find it, too.
    sys.modules["rl_pig_latin"] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        validations = trio.run(module.pig_latin_run(progress=False).main).validations
    finally:
        sys.path.remove(str(path.parent))
    assert [metrics["step"] for metrics in validations] == [0, 20, 40, 60, 80]
    assert validations[0]["val/reward"] == 0
    assert validations[-1]["val/reward"] >= 0.95


def test_another_kind_of_trainer_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"invalid trainer 3: expected rl\.GRPO\(\.\.\.\), a trainer that derives from"
    ):
        rl.Run(model=MODEL, data=[{"prompt": "1"}], rollout=first_is_1, trainer=3)  # type: ignore[arg-type]
