"""Workers of agents: of the NexAU framework, or made by a function of the user."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fray.errors import InvalidRequest
from fray.rl.recipe.user_files import load_object
from fray.rl.rollout_worker.base_rollout_worker import FAIL, SUCCESS, BaseRolloutWorker, NeededKeys, base_directory
from fray.rl.rollout_worker.evaluation import (
    BaseEvaluationTarget,
    EvaluationRunResult,
    Evaluator,
    NexAUEvaluationTarget,
)
from fray.rl.rollout_worker.nexau_traces import calls_of_traces, merged_trajectories

__all__ = [
    "BaseEvaluationTarget",
    "BaseNexAURolloutWorker",
    "DefaultNexAURolloutWorker",
    "EvaluationRunResult",
    "Evaluator",
    "NexAUEvaluationTarget",
]

NEXAU_MISSING = (
    "rollout_worker.nexau_agent_config_path is {path!r}, a file of NexAU, but the package nexau is not installed. "
    "An agent of your own needs nothing: nexau_agent_config_path: file.py:factory, "
    "where factory(llm) returns a function from the query to the answer"
)
NEXAU_AGENTS = (
    "rollout_worker.nexau_agent_config_path is {path!r}, a file of NexAU: expected file.py:factory, where factory(llm) "
    "makes the agent of this file, and returns a function from the query to (answer, traces)"
)


class BaseNexAURolloutWorker(BaseRolloutWorker):
    """Worker that runs an agent for each task, and trains the calls of the model that it made.

    Args:
        config: beside that of `BaseRolloutWorker`, ``nexau_agent_config_path`` (``file.py:factory``),
            ``nexau_agent_workspace`` (directory that is added to `sys.path`) and ``task_name`` (a key of
            its trajectories).

    ``factory(llm)`` gets the `LLMServiceClient` and returns ``agent(query)``, which returns its answer, or a tuple of
    the answer and NexAU's traces. Without traces, all replies of the model in this step are the agent's.

    Raises:
        InvalidRequest: the agent cannot be loaded, or is a YAML file of NexAU.
    """

    needed_keys: ClassVar[NeededKeys] = (("query", "prompt", "question"),)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._agent = self._load_agent()

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Check the evaluator and the factory of the agent, which is not called. Raises InvalidRequest."""
        super().check_config(config)
        _load_factory(config)

    def step(self, task: dict[str, Any]) -> Any:
        """Run the agent: `run_agent`."""
        return self.run_agent(task)

    def format_task_query(self, data_item: dict[str, Any]) -> str:
        """Return the query of a row. Default: its ``query``, ``prompt`` or ``question``.

        Raises:
            ValueError: the row has none of them.
        """
        for key in ("query", "prompt", "question"):
            if key in data_item:
                return str(data_item[key])
        have = ", ".join(sorted(data_item))
        raise ValueError(f"the task has none of query, prompt, question: override format_task_query; it has {have}")

    def get_train_loss_mask(self, trajectory_infos: list[dict[str, Any]]) -> list[bool]:
        """Return for each call of the model whether its response counts in the loss. Default: all."""
        return [True] * len(trajectory_infos)

    def run_agent(self, task: dict[str, Any]) -> Any:
        """Run the agent for a task, evaluate its answer, and put the trajectories of its calls.

        Returns:
            As `step`: the first answer that is not ``"success"``; None if the agent made no call.
        """
        result = self._agent(self.format_task_query(task))
        answer, traces = result if isinstance(result, tuple) else (result, None)
        try:
            calls = self._recorded_calls() if traces is None else self._with_versions(calls_of_traces(traces))
            trajectories = merged_trajectories(calls, self.get_train_loss_mask(calls))
        except ValueError as error:
            self._activity_tracker.report_exception(self._module_name, "converts traces", error)
            return FAIL
        shared = {key: value for key, value in task.items() if key not in ("tokens", "messages")}
        observation = list(calls[-1]["messages"]) if calls else []
        shared |= {"final_answer": str(answer), "observation": observation}
        shared["model_tag"] = self._llm_client._model_tag
        if task_name := self._config.get("task_name"):
            shared["task_name"] = task_name
        answers = [self._put_trajectory({**shared, **trajectory}) for trajectory in trajectories]
        return next((one for one in answers if one != SUCCESS), SUCCESS) if answers else None

    def _evaluation_target(self, trajectory: Mapping[str, Any]) -> BaseEvaluationTarget:
        return NexAUEvaluationTarget(trajectory["final_answer"], trajectory["observation"])

    def _recorded_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "messages": reply.get("messages", []),
                "tools": reply.get("tools", []),
                "response": reply.text,
                "finish_reason": reply.finish_reason,
                "prompt_tokens": list(reply.prompt_ids),
                "response_tokens": list(reply.token_ids),
                "response_logprobs": list(reply.logprobs),
                "versions": list(reply.segments),
            }
            for reply in self._replies
        ]

    def _with_versions(self, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return calls of traces with the versions of the replies that they are.

        Raises:
            ValueError: this run's servers did not answer a call: its age would be unknown.
        """
        recorded = {(tuple(one["prompt_tokens"]), tuple(one["response_tokens"])): one for one in self._recorded_calls()}
        found = []
        for number, call in enumerate(calls):
            same = recorded.get((tuple(call["prompt_tokens"]), tuple(call["response_tokens"])))
            if same is None:
                raise ValueError(f"call {number} of the traces was not answered by the servers of this run")
            found.append({**call, "versions": same["versions"]})
        return found

    def _load_agent(self) -> Callable[[str], Any]:
        agent = _load_factory(self._config)(self._llm_client)
        if not callable(agent):
            path = self._config["nexau_agent_config_path"]
            raise InvalidRequest(
                f"{path} returned {type(agent).__name__}; expected a function from the query to the answer"
            )
        return agent  # type: ignore[no-any-return]


def _load_factory(config: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what makes the agent of a configuration. Raises InvalidRequest."""
    key = "rollout_worker.nexau_agent_config_path"
    path = str(config.get("nexau_agent_config_path") or "")
    if not path:
        raise InvalidRequest(f"{key}: missing; workers of type 'nexau' need it: file.py:factory")
    if ".py:" not in path:
        is_missing = importlib.util.find_spec("nexau") is None
        raise InvalidRequest((NEXAU_MISSING if is_missing else NEXAU_AGENTS).format(path=path))
    if workspace := config.get("nexau_agent_workspace"):
        directory = str(base_directory(config) / str(workspace))
        if directory not in sys.path:
            sys.path.append(directory)
    try:
        factory = load_object(path, base_directory(config))
    except InvalidRequest as error:
        raise InvalidRequest(f"{key}: {error}") from error.__cause__
    if not callable(factory):
        raise InvalidRequest(f"{key}: {path} is {type(factory).__name__}; expected a function that makes the agent")
    return factory  # type: ignore[no-any-return]


DefaultNexAURolloutWorker = BaseNexAURolloutWorker
"""The worker of ``type: nexau``: the base class is complete."""
