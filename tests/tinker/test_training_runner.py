"""Snapshots of a training job, beside the answers that its service has on disk."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from fray.rl.model_spec import TinyLlama
from fray.tinker.training_runner import TrainingRunner
from fray.tinker.wire.dataproto import encode_data_proto
from tests.tinker.services import MODEL, REWARD
from tests.tinker.test_opentinker_service import CONFIG, NUMBERS, batch_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


GAE = {"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: several wait for each other where all cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_a_job_with_a_critic_that_resumes_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    check_resumed(tmp_path, {**GAE, "algorithm.lam": 0.9, "algorithm.gamma": 0.99})


def test_a_job_with_an_adapter_and_a_penalty_in_the_reward_resumes_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    config = {"lora": {"rank": 4, "target_modules": "all-linear"}, "kl.use_kl_in_reward": True}
    check_resumed(tmp_path, {**config, "kl.kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.05}})
    (saved,) = tmp_path.glob("a/checkpoints/*/actor")
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 4


def test_a_reward_function_of_the_configuration_is_read_from_a_file_at_the_engine(tmp_path: Path) -> None:
    with closing(TrainingRunner({"tiny": MODEL}, {}, tmp_path)) as runner:
        file = tmp_path / "rewards.py"

        def ask(kind: str, **body: Any) -> dict[str, Any]:
            return runner.execute(1, kind, json.dumps(body).encode()).body

        ask("set_config", config_overrides={**CONFIG, "custom_reward_function": {"path": str(file), "name": "share"}})
        refused = ask("init_workers")["detail"]
        assert refused.startswith(f"custom_reward_function.path: '{file}': No such file or directory; the file is read")
        assert refused.endswith("upload a function of the client's with POST upload_reward_function")
        file.write_text(REWARD)
        assert ask("init_workers")["status"] == "success"
        assert ask("train_step", batch_data=encode_data_proto(batch_of(["407"])))["status"] == "success"


def test_a_model_learns_the_first_digit_with_a_critic(tmp_path: Path) -> None:
    config = {**GAE, "data.max_response_length": 1, "actor_rollout_ref.rollout.n": 4}
    with closing(Job(tmp_path, config)) as job:
        rng, found = random.Random(0), []
        for _ in range(45):
            numbers = rng.sample(NUMBERS, 64)
            truths = np.empty(64, object)
            truths[:] = [{"ground_truth": number[0]} for number in numbers]
            batch = {"non_tensor_batch": {"raw_prompt": [f"{each}>" for each in numbers], "reward_model": truths}}
            found.append(job.ask("train_step", batch_data=encode_data_proto(batch))["metrics"])
        rewards = [each["training_step_reward"] for each in found]
        assert fmean(rewards[:5]) < 0.15
        assert fmean(rewards[-5:]) > 0.35
        assert set(found[0]) >= {
            *("critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/values/mean", "critic/lr"),
            *("critic/returns/mean", "critic/grad_norm", "critic/score/mean", "actor/pg_loss"),
        }
        assert found[-1]["critic/values/mean"] == pytest.approx(fmean(rewards[-5:]), abs=0.15), "what it predicts"
        saved = job.ask("save_checkpoint")["result"]
        critic = transformers.AutoModel.from_pretrained(saved["critic_path"])
        assert saved["critic_path"].startswith(saved["actor_path"])
        assert type(critic).__name__ == "LlamaModel"


def test_what_a_critic_needs_is_checked_with_the_configuration(tmp_path: Path) -> None:
    other = TinyLlama(layers=1, width=32, heads=2, chars="$ab")
    runner = TrainingRunner({"tiny": MODEL, "letters": other}, {}, tmp_path)
    with closing(runner):
        config = {**CONFIG, **GAE, "actor_rollout_ref.model.path": "tiny"}

        def ask(kind: str, **body: Any) -> str:
            return str(runner.execute(1, kind, json.dumps(body).encode()).body)

        for key, value, text in (
            ("critic.model.path", "big", "critic.model.path: 'big' is not served here; expected one of tiny, letters"),
            ("algorithm.lam", 1.5, "algorithm.lam: expected a number from 0 to 1, not 1.5"),
        ):
            assert text in ask("set_config", config_overrides={**config, key: value})
        ask("set_config", config_overrides={**config, "critic.model.path": "letters"})
        ask("upload_reward_function", function_name="share", source_code=REWARD)
        assert "the critic's model has vocabulary_size 3, and the policy's 15" in ask("init_workers")
        assert "success" in ask("override_config", config_overrides={"critic.model.path": None})
        assert "success" in ask("init_workers")


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
