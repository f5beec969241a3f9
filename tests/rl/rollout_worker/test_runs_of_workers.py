"""Runs of real processes whose episodes are steps of the guide's rollout workers."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import rl
from fray.rl.rollout_worker import WorkerEpisode

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.usefixtures("warm_cluster"),
]
MODEL = rl.TinyLlama(layers=1, width=16, mlp=32)
ROWS = [{"prompt": f"{number}>"} for number in range(10)]


class FirstIs1(rl.BaseRolloutWorker):
    """Worker in the style of the guide: plain, with a dict of texts."""

    def step(self, task: dict[str, Any]) -> Any:
        assert not self._is_running_validate
        result = self._llm_client.completion(task["prompt"], max_tokens=self._config.get("max_tokens", 2))
        trajectory = {"prompt": task["prompt"], "response": result["response"]}
        return self._put_trajectory({**trajectory, "reward": float(result["response"].startswith("1"))})


class WithJudge(FirstIs1):
    """Worker that puts what another model has said, too, and whose rewards are equal for all tasks of a user."""

    def step(self, task: dict[str, Any]) -> Any:
        trajectory = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "reward": 0.0}
        assert self._put_trajectory({**trajectory, "model_tag": "judge"}) == "success"
        reply = self._llm_client.completion(task["prompt"], max_tokens=self._config["max_tokens"])
        return self._put_trajectory({"response": reply["response"], "reward": float(task["user"])})


class FailsOnce(FirstIs1):
    """Worker that asks for another rollout of its first task, fails the second, and adds a row with the third."""

    steps = 0

    async def step(self, task: dict[str, Any]) -> Any:
        self.steps += 1
        if self.steps <= 2:
            return "re-rollout" if self.steps == 1 else None
        if self.steps == 3:
            assert self._dataloader is not None
            self._dataloader.add_item_back({"prompt": "99>"})
        reply = await self._llm.completion(task["prompt"], max_tokens=1)
        return self._put_trajectory({"response": reply.text, "reward": 1.0})


class Posting(FirstIs1):
    """Worker that posts the first digit of its prompt to a tracker, and a message elsewhere."""

    def step(self, task: dict[str, Any]) -> Any:
        post = self._activity_tracker.experiment_logger_post
        step = self._activity_tracker.get_training_step()
        post("tensorboard", data={"worker/digit": float(task["prompt"][0]), "text": "x"}, step=step + 1)
        post("feishu", title="a task", content=task["prompt"])
        return super().step(task)


class PostingTrainer(rl.BaseTrainer):
    """Trainer without weights that posts the number of its samples, without a step."""

    def train(self, trajectories: list[rl.Trajectory]) -> dict[str, Any]:
        self._activity_tracker.experiment_logger_post("tensorboard", data={"trainer/samples": len(trajectories)})
        return {"loss": 1.0}


def run(rollout: Any, **options: Any) -> rl.RunResult:
    settings: dict[str, Any] = {
        "model": MODEL,
        "data": ROWS,
        "rollout": rollout,
        "trainer": rl.GRPO(groups=4, group_size=4, lr=1e-2, steps=3),
        "rollout_workers": 8,
        "progress": False,
    }
    return trio.run(rl.Run(**settings | options).main)


def test_a_run_trains_what_workers_of_the_guide_put_in_groups_by_their_keys() -> None:
    rows = [{**row, "user": number % 2} for number, row in enumerate(ROWS)]
    keys = {"data": rows, "group_keys": ["user"], "samples_per_row": 2}
    result = run(WorkerEpisode(WithJudge, {"max_tokens": 1}), **keys)
    assert [(step["updated"], step["skipped"]) for step in result.steps] == [(0, 1)] * 3
    assert result.status is not None
    # Updates all the same: the version is the third one.
    assert (result.status.skipped, result.status.version.number) == ({"nothing_to_learn": 3}, 3)
    assert result.steps[-1]["skipped/nothing_to_learn"] == 3
    assert result.status.trained == 48
    # More may have been left out since the last update.
    assert result.status.left_out["judge"] >= result.steps[-1]["left_out/judge"] >= 48
    assert max(step["response_tokens_max"] for step in result.steps) == 1


def test_answers_of_a_step_decide_about_the_lease() -> None:
    result = run(FailsOnce, trainer=None, rollout_workers=1)
    assert result.status is not None
    assert result.status.repeated == {"re-rollout": 1, "step_failed": 1}
    assert [one["task_id"] for one in result.trajectories if one["task_id"].startswith("-1")] == ["-1-0-0"]
    assert len(result.trajectories) == len(ROWS) + 1
    assert all(one["versions"] and one["reward"] == 1.0 for one in result.trajectories)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard: pip install")
def test_what_workers_and_trainers_post_is_in_the_trackers_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = PostingTrainer({"groups": 2, "group_size": 4, "steps": 3})
    with caplog.at_level(logging.INFO, "fray.rl"):
        run(Posting, trainer=trainer, output=tmp_path, trackers=["tensorboard"], shuffle=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    found = {
        name: [(one.step, float(one.tensor_proto.float_val[0])) for one in events.Tensors(name)]
        for name in ("worker/digit", "trainer/samples")
    }
    assert found["trainer/samples"] == [(1, 8), (2, 8), (3, 8)]
    # Rows 0 to 5, four samples of each, and of no update but theirs.
    assert sorted(found["worker/digit"])[:24] == sorted(
        (row // 2 + 1, float(row)) for row in range(6) for _ in range(4)
    )
    assert "feishu: {'title': 'a task', 'content': '0>'}" in caplog.messages
