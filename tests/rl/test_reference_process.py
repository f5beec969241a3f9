"""The frozen reference of a run in a process of its own: the same updates, none of which its death costs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import ResourceConfig, rl
from fray.cli.rl.start import processes_of
from fray.errors import InvalidRequest
from fray.rl.records.replay import replay
from fray.rl.trainer import RemoteApiGrpoTrainer
from fray.rl.trainer.train_service import MockTrainService
from tests.rl.test_run_with_torch import counts_up, processes, run
from tests.rl.test_trainer_ranks import marked

REFERENCE = "fray:ReferenceP"
"""Title of its process."""
TIMES = ("elapsed_s", "seconds", "servers_busy_share", "sync_pause_s", "tokens_per_s", "wait_s")
CPU = ResourceConfig(cpu=1, memory="1GB")


def trainer(steps: int, **options: Any) -> rl.GRPO:
    return rl.GRPO(**{"groups": 8, "group_size": 4, "lr": 1e-2, "steps": steps, "kl": 0.1} | options)


@marked
def test_updates_are_those_with_the_reference_beside_also_when_it_is_killed_within_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            (pid,) = processes(REFERENCE)
            killed.append(pid)
            # Frozen first: it is killed when it has the call of the next update.
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()

    found = []
    for name, options in (("trainer", {}), ("server", {"on_step": kill, "progress": True})):
        output = tmp_path / name
        training: Any = {"trainer": trainer(6), "deterministic": True, "output": output, "save_every": 3}
        result = trio.run(run(6, reference=name, **training, **options).main)
        metrics = [{key: value for key, value in step.items() if key not in TIMES} for step in result.steps]
        (model,) = output.glob("checkpoints/global_step_6*/model/model.safetensors")
        found.append((metrics, model.read_bytes()))
    (beside, weights), (remote, its_weights) = found
    assert len(killed) == 1
    assert [(step["step"], step["line"], step["kl"] > 0) for step in remote] == [(n, 0, n > 1) for n in range(1, 7)]
    assert remote == beside
    assert its_weights == weights
    assert "the reference was lost: the trainer waits until it is started again" in capfd.readouterr().err
    assert processes(REFERENCE) == []


@marked
def test_each_rank_of_a_trainer_asks_for_its_share(tmp_path: Path) -> None:
    training: Any = {"trainer": trainer(3), "trainer_ranks": 2, "rollout": counts_up, "output": tmp_path}
    result = trio.run(run(3, reference="server", **training).main)
    assert [step["step"] for step in result.steps] == [1, 2, 3]
    # With the reference beside one trainer, in this process.
    for step in replay(tmp_path, 3):
        assert step.metrics["kl"] == pytest.approx(step.recorded["kl"], abs=1e-5)
        assert step.metrics["loss"] == pytest.approx(step.recorded["loss"], abs=1e-3)
    assert result.steps[-1]["kl"] > 0


def test_the_reference_is_among_the_processes_of_a_run_with_its_own_resources() -> None:
    parts = run(1, trainer=trainer(1), reference="server", resources={"reference": CPU}).parts
    found = [one for one in processes_of(parts) if one["part"] == "reference"]
    does = "scores with TinyLlama, for the KL penalty"
    assert found == [{"part": "reference", "count": 1, "does": does, "reserves": "1 CPU, 1GB memory"}]
    assert not [one for one in processes_of(run(1, trainer=trainer(1)).parts) if one["part"] == "reference"]
    gpu = run(1, trainer=trainer(1), reference="server", resources={"reference": ResourceConfig.with_gpu("h100")}).parts
    assert (gpu.reference_device, gpu.trainer_device) == ("cuda", "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "servr"}, "invalid reference 'servr': expected 'trainer' or 'server'; did you mean server?"),
        ({"reference": "server", "trainer": trainer(1, kl=None)}, "without a KL penalty: expected a trainer such as"),
        ({"reference": "server", "trainer": None}, "without a KL penalty: expected a trainer such as"),
        ({"reference": "server", "trainer": trainer(1, lora=4)}, "without the adapter, which costs no memory"),
        (
            {"reference": "server", "trainer": RemoteApiGrpoTrainer(trainer(1))},
            "reference='server' with RemoteApiGrpoTrainer: it has no model here",
        ),
        (
            {"reference": "server", "trainer": rl.SelfHostedGrpoTrainer(trainer(1), MockTrainService())},
            "reference='server' with SelfHostedGrpoTrainer: it has no model here",
        ),
        ({"resources": {"reference": CPU}}, "resources has 'reference', but that is in the trainer: expected"),
    ],
)
def test_a_reference_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(1, **{"trainer": trainer(1), **options})
    assert message in str(error.value)
