"""Worker whose model calls tools in a conversation of several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fray.errors import InvalidRequest
from fray.model.text import near_text
from fray.rl.recipe.user_files import load_object
from fray.rl.rollout_worker.agent_tools import AgentTool, tool_of
from fray.rl.rollout_worker.base_rollout_worker import BaseRolloutWorker, NeededKeys, base_directory
from fray.rl.rollout_worker.evaluation import BaseEvaluationTarget, NexAUEvaluationTarget
from fray.rl.rollout_worker.prompt_workers import sampling_of_config

MAX_TURNS = 10


class AgentRolloutWorker(BaseRolloutWorker):
    """Worker that lets the model call tools until it calls none, or for ``max_turns`` replies.

    The trajectory has all turns; what is not of the model is masked.

    Args:
        config: beside that of `SimpleRolloutWorker`, ``tools`` (a list of ``file.py:function``), ``max_turns`` (default
            10) and ``system_prompt``.

    Raises:
        InvalidRequest: a tool cannot be loaded, is not a plain function, or ``max_turns`` is below 1.
    """

    needed_keys: ClassVar[NeededKeys] = (("prompt", "messages"),)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._tools = {tool.name: tool for tool in _tools_of(config)}
        self._max_turns = int(config.get("max_turns") or MAX_TURNS)
        if self._max_turns < 1:
            raise InvalidRequest(f"invalid rollout_worker.max_turns {self._max_turns}: expected 1 or more")

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Check the evaluator and the tools. Raises InvalidRequest as the constructor."""
        super().check_config(config)
        _tools_of(config)

    def step(self, task: dict[str, Any]) -> Any:
        """Put the conversation about ``task["messages"]`` or ``task["prompt"]``; None if the task has neither."""
        messages = self._first_messages(task)
        if messages is None:
            return None
        options = sampling_of_config(self._config)
        if self._tools:
            options["tools"] = [tool.schema for tool in self._tools.values()]
        for turn in range(1, self._max_turns + 1):
            result = self._llm_client.generate(messages, **options)
            calls = result["tool_calls"]
            answer = {"role": "assistant", "content": result["response"]}
            messages = [*messages, {**answer, "tool_calls": calls} if calls else answer]
            if not calls or turn == self._max_turns:
                break
            messages += [self._answer(call) for call in calls]
        return self._put_trajectory(
            {
                **{key: value for key, value in task.items() if key != "tokens"},
                "messages": messages,
                "response": result["response"],
                "turns": turn,
                "finish_reason": "max_turns" if calls else result["finish_reason"],
                "model_tag": self._llm_client._model_tag,
            }
        )

    def _first_messages(self, task: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        given = task.get("messages") or ([{"role": "user", "content": task["prompt"]}] if "prompt" in task else None)
        prompt = self._config.get("system_prompt")
        system = [{"role": "system", "content": str(prompt)}] if prompt else []
        return None if given is None else [*system, *given]

    def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        tool = self._tools.get(function["name"])
        if tool is None:
            text = f"error: unknown tool {function['name']!r}{near_text(str(function['name']), self._tools)}"
        else:
            text = tool.call(function["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": text}

    def _evaluation_target(self, trajectory: Mapping[str, Any]) -> BaseEvaluationTarget:
        messages: Sequence[dict[str, Any]] = trajectory.get("messages", ())
        return NexAUEvaluationTarget(str(trajectory.get("response", "")), list(messages))


def _tools_of(config: Mapping[str, Any]) -> list[AgentTool]:
    found = []
    for reference in map(str, config.get("tools") or ()):
        try:
            found.append(tool_of(load_object(reference, base_directory(config))))
        except (InvalidRequest, TypeError) as error:
            raise InvalidRequest(f"rollout_worker.tools: {reference}: {error}") from error.__cause__
    return found
