"""Rows of data are checked for the keys that the workers of a run read, before a process is started."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.rollout_worker import SingleTurnMathRolloutWorker, WorkerEpisode


class ReadsQuestions(rl.SimpleRolloutWorker):
    """Worker whose step reads other keys, and does not say which."""

    def step(self, task: dict[str, Any]) -> Any:
        return super().step({**task, "prompt": task["question"]})


class SaysWhatItReads(ReadsQuestions):
    """Worker that says which keys it reads."""

    needed_keys = ("question", ("answer", "truth"))

    def step(self, task: dict[str, Any]) -> Any:
        return super().step(task)


class WithAnEvaluation(rl.SimpleRolloutWorker):
    """Worker whose step is that of its base class."""

    def _evaluation_target(self, trajectory: Any) -> Any:
        return super()._evaluation_target(trajectory)


class Queries(rl.BaseNexAURolloutWorker):
    """Worker that makes the query of other keys."""

    def format_task_query(self, data_item: dict[str, Any]) -> str:
        return str(data_item["text"])


def run(rollout: Any, *rows: dict[str, Any], **options: Any) -> rl.Run:
    trainer = rl.GRPO(groups=1, group_size=2, steps=1)
    return rl.Run(model=rl.TinyLlama(), data=rows, rollout=rollout, trainer=trainer, **options)


@pytest.mark.parametrize(
    ("worker", "good", "bad", "lacks"),
    [
        (rl.SimpleRolloutWorker, {"prompt": "1"}, {"promt": "1"}, "'prompt'; it has promt (did you mean prompt?)"),
        (SingleTurnMathRolloutWorker, {"prompt": "1", "ground_truth": "1"}, {"prompt": "1"}, "'answer' or 'ground_"),
        (rl.AgentRolloutWorker, {"messages": []}, {}, "'prompt' or 'messages'; it has no keys"),
        (rl.PigLatinRolloutWorker, {"input": "1"}, {"prompt": "1"}, "'input' or 'response'; it has prompt"),
        (WithAnEvaluation, {"prompt": "1"}, {"question": "1"}, "'prompt'; it has question"),
        (SaysWhatItReads, {"question": "1", "truth": 1}, {"question": "1"}, "'answer' or 'truth'; it has question"),
    ],
)
def test_a_row_without_a_key_that_the_worker_reads_is_refused(
    worker: type[rl.BaseRolloutWorker], good: dict[str, Any], bad: dict[str, Any], lacks: str
) -> None:
    text = f"{worker.__qualname__} cannot use row 1, which lacks {lacks}"
    for rollout in (worker, WorkerEpisode(worker, {})):
        run(rollout, good, good)
        with pytest.raises(InvalidRequest) as caught:
            run(rollout, good, bad)
        assert str(caught.value).startswith(f"invalid data: {text}")
        with pytest.raises(InvalidRequest) as caught:
            run(rollout, good, validation_data=[good, bad], validate_freq=1)
        assert str(caught.value).startswith(f"invalid validation_data: {text}")


def test_a_row_that_is_added_to_a_run_is_checked_as_its_data() -> None:
    one = run(rl.SimpleRolloutWorker, {"prompt": "1"})
    one._controller = object()  # type: ignore[assignment]
    with pytest.raises(
        InvalidRequest, match="invalid item: SimpleRolloutWorker cannot use row 0, which lacks 'prompt'"
    ):
        trio.run(one.add_item, {"text": "2"})


def test_an_agent_of_nexau_needs_a_query(tmp_path: Any) -> None:
    (tmp_path / "agent.py").write_text("def make(llm):\n    return lambda query: query\n")
    config = {"nexau_agent_config_path": f"{tmp_path}/agent.py:make"}
    run(WorkerEpisode(rl.BaseNexAURolloutWorker, config), {"question": "1"})
    with pytest.raises(InvalidRequest, match="row 0, which lacks 'query' or 'prompt' or 'question'; it has text"):
        run(WorkerEpisode(rl.BaseNexAURolloutWorker, config), {"text": "1"})
    run(WorkerEpisode(Queries, config), {"text": "1"})


def test_keys_that_code_of_the_user_reads_are_unknown_unless_it_says_them() -> None:
    run(ReadsQuestions, {"question": "1"})
    run(rl.MockRolloutWorker, {"anything": "1"})
