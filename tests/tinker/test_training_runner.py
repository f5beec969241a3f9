"""Snapshots of a training job, beside the answers that its service has on disk."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fray.tinker.training_runner import TrainingRunner
from fray.tinker.wire.dataproto import encode_data_proto
from tests.tinker.services import MODEL, REWARD
from tests.tinker.test_opentinker_service import CONFIG, batch_of

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Job:
    """Requests of one job, executed in this process; the engine is lost whenever the test wants."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self._directory, self.requests = directory, list[tuple[str, bytes, Any]]()
        self.runner = TrainingRunner({"tiny": MODEL}, {}, directory)
        self.ask("upload_reward_function", function_name="share", source_code=REWARD)
        self.ask("set_config", config_overrides={**CONFIG, **config})
        self.ask("init_workers")

    def ask(self, kind: str, **body: Any) -> dict[str, Any]:
        content = json.dumps(body).encode()
        answer = self.runner.execute(len(self.requests) + 1, kind, content)
        assert answer.body.get("status") == "success", answer.body
        self.requests.append((kind, content, answer.scores))
        return answer.body

    def steps(self, *numbers: str) -> list[dict[str, float]]:
        """Return the metrics of a step with each of these numbers."""
        found = []
        for number in numbers:
            batch = encode_data_proto(batch_of([number, "123", "980"]))
            metrics = self.ask("train_step", batch_data=batch)["metrics"]
            found.append(
                {name: value for name, value in metrics.items() if "seconds" not in name and name[-2:] != "_s"}
            )
        return found

    def lose_engine(self) -> int:
        """Continue in another runner, as after a kill; return how many requests it had from a snapshot."""
        self.close()
        self.runner = TrainingRunner({"tiny": MODEL}, {}, self._directory)
        begun = self.runner.begin()
        for seq, (kind, content, scores) in enumerate(self.requests[begun:], begun + 1):
            assert self.runner.execute(seq, kind, content, scores).body.get("status") == "success"
        return begun

    def close(self) -> None:
        self.runner.close()


def same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def check_resumed(tmp_path: Path, config: dict[str, Any]) -> None:
    """Check that another job, and one whose engine is lost, continue from a checkpoint as if nothing had stopped."""
    with closing(Job(tmp_path / "a", {**config, "trainer.seed": 3})) as first:
        first.ask("set_generation_config", temperature=0.8, top_k=7)
        first.steps("407", "011", "005")
        path = first.ask("save_checkpoint")["result"]["checkpoint_dir"]
        expected = first.steps("061", "007")
        shown = first.ask("validate", batch_data=encode_data_proto(batch_of(["407"])))
    with closing(Job(tmp_path / "b", config)) as second:
        different = second.steps("099")
        answer = second.ask("resume", path=path)
        assert (answer["global_steps"], answer["generation_config"]["top_k"]) == (3, 7)
        found = second.steps("061")
        assert found != different
        assert second.lose_engine() >= len(second.requests) - 1, "a snapshot has what was resumed"
        same([*found, *second.steps("007")], expected)
        again = second.ask("validate", batch_data=encode_data_proto(batch_of(["407"])))
        assert (again["samples"], again["global_steps"]) == (shown["samples"], 5)


def test_a_job_that_resumes_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    check_resumed(tmp_path, {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.1})


def test_a_checkpoint_that_cannot_be_resumed_changes_nothing(tmp_path: Path) -> None:
    with closing(Job(tmp_path / "a", {"trainer.seed": 1})) as job:
        path = Path(job.ask("save_checkpoint")["result"]["checkpoint_dir"])
        with closing(Job(tmp_path / "b", {"trainer.seed": 1})) as other:
            expected = other.steps("407", "005")
        first = job.steps("407")
        (path / "actor/model.safetensors").write_bytes(b"broken")
        for wanted, text in ((path, "SafetensorError"), (tmp_path, "progress.json"), (3, "valid string")):
            answer = job.runner.execute(9, "resume", json.dumps({"path": wanted}, default=str).encode())
            assert text in str(answer.body), answer.body
            assert answer.is_failure
        same([*first, *job.steps("005")], expected)


def test_a_snapshot_never_has_the_request_whose_answer_is_not_on_disk_yet(tmp_path: Path) -> None:
    """The service may be lost between the execution of a request and the save of its answer, and the engine with it."""
    batch = {"batch_data": encode_data_proto(batch_of(["407", "123"]))}
    requests = [
        ("upload_reward_function", {"function_name": "share", "source_code": REWARD}),
        ("set_config", {"config_overrides": CONFIG}),
        ("init_workers", {"total_steps": 3}),
        ("train_step", batch),
        ("validate", batch),
        ("train_step", batch),
    ]
    runner = TrainingRunner({"tiny": MODEL}, {}, tmp_path)
    try:
        continued = []
        for seq, (kind, body) in enumerate(requests, 1):
            assert runner.execute(seq, kind, json.dumps(body).encode()).body.get("status") == "success"
            another = TrainingRunner({"tiny": MODEL}, {}, tmp_path)
            continued.append(another.begin())
            another.close()
        assert continued == [0, 0, 0, 0, 4, 4]
    finally:
        runner.close()
