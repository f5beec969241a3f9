"""Agents of NexAU and of the user: traces as trajectories, and workers that run them. Without the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.rollout.scores import AttemptEnded
from fray.rl.rollout_worker import WorkerEpisode
from fray.rl.rollout_worker.nexau_traces import calls_of_traces, merged_trajectories
from tests.support.counting_engine import TOKENIZER, answer_of

AGENT = """
from fray.rl.rollout_worker import EvaluationRunResult, Evaluator


def make(llm):
    def agent(query):
        first = llm.completion(query, max_tokens=2)
        second = llm.completion([*first.prompt_ids, *first.token_ids, 0], max_tokens=1)
        llm.completion("9", max_tokens=1)
        return second["response"]

    return agent


def traced(llm):
    def agent(query):
        reply = llm.completion(query, max_tokens=2)
        outputs = {"response": reply["response"], "nexrl_train": reply["nexrl_train"]}
        call = {"type": "LLM", "inputs": {"messages": [{"role": "user", "content": query}]}, "outputs": outputs}
        llm.completion("9", max_tokens=1)
        return "done", [{"type": "AGENT", "children": [call]}]

    return agent


def foreign(llm):
    train = {"prompt_tokens": [1], "response_tokens": [2], "response_logprobs": [-1.0]}
    return lambda query: ("done", [{"type": "LLM", "outputs": {"nexrl_train": train}}])


def no_agent(llm):
    return 7


class Judge(Evaluator):
    def evaluate(self, data, target):
        return EvaluationRunResult(1.0, metrics={"messages": float(len(target.observation))})
"""


def span(prompt: list[int], response: list[int], *children: dict[str, Any], kind: str = "LLM") -> dict[str, Any]:
    train = {"prompt_tokens": prompt, "response_tokens": response, "response_logprobs": [-0.5] * len(response)}
    return {"type": kind, "inputs": {}, "outputs": {"nexrl_train": train}, "children": list(children)}


def test_calls_of_nested_agents_are_found_in_the_order_of_their_spans() -> None:
    inner = {"type": "AGENT", "children": [span([8], [9])]}
    tool = {"type": "TOOL", "children": [inner]}
    traces = [{"type": "AGENT", "children": [span([1], [2]), tool, span([1, 2, 3], [4])]}]
    assert [call["response_tokens"] for call in calls_of_traces(traces)] == [[2], [9], [4]]


def test_calls_whose_prompts_continue_a_call_are_one_trajectory_and_others_their_own() -> None:
    calls = calls_of_traces([span([1], [2, 3]), span([8], [9]), span([1, 2, 3, 4], [5]), span([8, 9, 1], [6])])
    first, second = merged_trajectories(calls, [True, True, False, True])
    assert first["tokens"] == [1, 2, 3, 4, 5]
    assert first["loss_mask"] == [0, 1, 1, 0, 0]
    assert first["logprobs"] == [0.0, -0.5, -0.5, 0.0, -0.5]
    assert (second["tokens"], second["loss_mask"]) == ([8, 9, 1, 6], [0, 1, 0, 1])
    assert merged_trajectories(calls[:1], [False]) == []


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({"type": "LLM"}, r"traces\[0\]: a call of the model has no nexrl_train with prompt_tokens"),
        ({"children": [{"type": "llm", "outputs": {}}]}, r"traces\[0\].children\[0\]: a call of the model has no"),
        (
            {"type": "LLM", "outputs": {"nexrl_train": {key: [1] for key in ("prompt_tokens", "response_tokens")}}},
            "has no nexrl_train with",
        ),
    ],
)
def test_a_call_without_tokens_is_refused_by_its_place(trace: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calls_of_traces([trace])


def test_masks_and_logprobs_of_another_length_are_refused() -> None:
    broken = span([1], [2])
    broken["outputs"]["nexrl_train"]["response_logprobs"] = []
    with pytest.raises(ValueError, match="1 response_tokens, but 0 response_logprobs"):
        calls_of_traces([broken])
    with pytest.raises(ValueError, match="get_train_loss_mask returned 2 values for 1 calls of the model"):
        merged_trajectories(calls_of_traces([span([1], [2])]), [True, True])


async def rolled_out(
    tmp_path: Path, factory: str, worker: type[rl.BaseRolloutWorker] = rl.DefaultNexAURolloutWorker
) -> list[dict[str, Any]]:
    (tmp_path / "agent.py").write_text(AGENT)
    config = {
        "directory": str(tmp_path),
        "nexau_agent_config_path": f"agent.py:{factory}",
        "evaluator_module_path": "agent.py:Judge",
        "nexau_agent_workspace": ".",
        "task_name": "digits",
    }
    episode = WorkerEpisode(worker, config, ("logprobs", "reward"))
    return list((await episode({"question": "12", "id": 7}, rl.LLM(answer_of, TOKENIZER))).trajectories)


async def test_an_agent_of_the_user_needs_no_package_and_all_its_calls_are_trained(tmp_path: Path) -> None:
    first, second = await rolled_out(tmp_path, "make")
    assert first["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert (second["tokens"][0], second["loss_mask"]) == (9, [0, 1])
    assert [length for _, length in first["versions"]] == [2, 1]
    for trajectory in (first, second):
        assert (trajectory["reward"], trajectory["id"], trajectory["task_name"]) == (1.0, 7, "digits")
    assert first["final_answer"] == second["final_answer"]


async def test_calls_in_traces_get_the_versions_of_the_replies_that_they_are(tmp_path: Path) -> None:
    (trajectory,) = await rolled_out(tmp_path, "traced")
    assert (trajectory["final_answer"], trajectory["tokens"]) == ("done", [1, 2, 3, 4])
    assert [length for _, length in trajectory["versions"]] == [2]
    assert trajectory["score"]["messages"] == 1.0
    with pytest.raises(AttemptEnded, match="call 0 of the traces was not answered by the servers of this run"):
        await rolled_out(tmp_path, "foreign")


async def test_the_query_and_the_mask_are_the_users(tmp_path: Path) -> None:
    class Masked(rl.BaseNexAURolloutWorker):
        def format_task_query(self, data_item: dict[str, Any]) -> str:
            return super().format_task_query(data_item) + "3"

        def get_train_loss_mask(self, trajectory_infos: list[dict[str, Any]]) -> list[bool]:
            return [number == 0 for number in range(len(trajectory_infos))]

        def run_agent(self, task: dict[str, Any]) -> Any:
            return super().run_agent({**task, "seen": True})

    (trajectory,) = await rolled_out(tmp_path, "make", Masked)
    assert trajectory["tokens"][:3] == [1, 2, 3]
    assert (trajectory["loss_mask"], trajectory["seen"]) == ([0, 0, 0, 1, 1, 0, 0], True)


def test_a_file_of_nexau_without_the_package_is_refused_with_what_needs_nothing() -> None:
    with pytest.raises(InvalidRequest) as refused:
        rl.DefaultNexAURolloutWorker({"nexau_agent_config_path": "agent.yaml"})
    assert "the package nexau is not installed" in str(refused.value)
    assert "file.py:factory" in str(refused.value)


def test_a_factory_that_makes_no_agent_and_a_row_without_a_query_are_refused(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    config = {"directory": str(tmp_path), "nexau_agent_config_path": "agent.py:no_agent"}
    with pytest.raises(InvalidRequest, match="no_agent returned int; expected a function from the query"):
        rl.DefaultNexAURolloutWorker(config)
    worker = rl.DefaultNexAURolloutWorker({**config, "nexau_agent_config_path": "agent.py:make"})
    with pytest.raises(ValueError, match="none of query, prompt, question: override format_task_query; it has id"):
        worker.format_task_query({"id": 1})
