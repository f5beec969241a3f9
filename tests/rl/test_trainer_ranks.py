"""Runs whose trainer has several processes: they train as one, and continue when one of them is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.records.replay import replay
from fray.rl.trainer import RemoteApiGrpoTrainer
from fray.rl.trainer_gang import check_places
from fray.rl.trainer_process import RankPlace
from tests.rl.test_run_with_torch import NAMES, counts_up, processes, run

RANK = "fray:TrainerRan"
"""Title of the processes of further ranks."""
needs_torch = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.usefixtures("warm_cluster"),
]


def marked(test: Any) -> Any:
    for mark in needs_torch:
        test = mark(test)
    return test


@marked
def test_ranks_have_the_losses_of_one_process_and_are_replaced_when_one_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before: list[int] = []

    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 4 and not before:
            before.extend(processes(RANK) + processes(NAMES["trainer"]))
            os.kill(before[0], signal.SIGKILL)

    trainer = rl.GRPO(groups=8, group_size=4, lr=1e-3, steps=10, lora=rl.LoRA(4), kl=0.01)
    options: dict[str, Any] = {"output": tmp_path, "save_every": 3, "rollout": counts_up}
    result = trio.run(run(10, trainer=trainer, trainer_ranks=2, on_step=kill, progress=True, **options).main)
    assert len(before) == 2
    assert [(step["step"], step["line"]) for step in result.steps] == [(n, int(n > 3)) for n in range(1, 11)]
    assert capfd.readouterr().err.count("the trainer lost one of its 2 ranks: all are replaced") == 1
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()]
    assert result.status is not None
    assert result.status.trained == 10 * 32
    # All ten again, from the model, in this process.
    again = list(replay(tmp_path, 10))
    assert [step.number for step in again] == list(range(1, 11))
    for step in again:
        # Adam makes steps of lr of gradients that are rounding alone, in other directions on other processors.
        assert step.metrics["loss"] == pytest.approx(step.recorded["loss"], abs=1e-3)
        assert step.metrics["grad_norm"] == pytest.approx(step.recorded["grad_norm"], rel=1e-2)
    # Continued by another number of ranks, whose weights are those of the servers.
    (more,) = trio.run(run(11, trainer=attrs.evolve(trainer, steps=11), **options).main).steps
    assert more["step"] == 11
    assert abs(more["mismatch_k3"]) < 1e-4


class Own(rl.SelfHostedGrpoTrainer):
    """Trainer of a user, which fails in one rank after the first update."""

    def _compute_data_metrics(self, batch: rl.Batch) -> dict[str, float]:
        import torch.distributed

        if self.policy.updates and torch.distributed.get_rank() == 1:
            raise ValueError("boom")
        return {"rows": float(len(batch)), "own_world_size": float(self.world_size)}


@marked
def test_an_error_in_one_rank_of_a_users_trainer_ends_the_run_though_the_other_waits() -> None:
    steps: list[dict[str, float]] = []
    settings = rl.GRPO(groups=3, group_size=3, lr=1e-2, steps=2)
    failing = run(2, trainer=Own(settings), trainer_ranks=2, rollout=counts_up, on_step=steps.append)
    with pytest.raises(ValueError, match="boom"):
        trio.run(failing.main)
    assert [(step["rows"], step["own_world_size"], step["updates"]) for step in steps] == [(10, 2, 1)]
    assert processes(RANK) + processes(NAMES["trainer"]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer_ranks": 0}, "invalid trainer_ranks 0: expected 1 to 32, the samples of a batch"),
        ({"trainer_ranks": 33}, "invalid trainer_ranks 33: expected 1 to 32, the samples of a batch"),
        ({"trainer_ranks": 2, "trainer": None}, "invalid trainer_ranks 2: expected 1 to 1, there is no trainer"),
        (
            {"trainer_ranks": 2, "trainer": RemoteApiGrpoTrainer(rl.GRPO(steps=1))},
            "trainer_ranks 2 with RemoteApiGrpoTrainer: each rank would send what it trains",
        ),
    ],
)
def test_numbers_of_ranks_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(2, **options)
    assert message in str(error.value)


def test_ranks_on_several_machines_are_refused_where_other_traffic_is_encrypted() -> None:
    check_places([RankPlace("10.0.0.1", is_encrypted=True), RankPlace("10.0.0.1", is_encrypted=True)])
    check_places([RankPlace("10.0.0.1", is_encrypted=False), RankPlace("10.0.0.2", is_encrypted=False)])
    with pytest.raises(InvalidRequest, match=r"2 machines \(10.0.0.1, 10.0.0.2\) of a cluster with TLS"):
        check_places([RankPlace("10.0.0.2", is_encrypted=True), RankPlace("10.0.0.1", is_encrypted=True)])
