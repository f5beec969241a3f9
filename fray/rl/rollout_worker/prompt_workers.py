"""Workers that ask the model once: for a response, for one that is compared with an answer, and without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, ClassVar

from fray.rl.rollout_worker.base_rollout_worker import BaseRolloutWorker, NeededKeys

SAMPLING = {
    "max_response_length": "max_tokens",
    **{name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "stop")},
}
"""Keys of ``rollout_worker``, and the names that the model knows them by."""


def sampling_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker's configuration says about sampling."""
    return {name: config[key] for key, name in SAMPLING.items() if config.get(key) is not None}


class SimpleRolloutWorker(BaseRolloutWorker):
    """Worker that completes ``task["prompt"]``. The reward is that of the evaluator.

    Args:
        config: beside that of `BaseRolloutWorker`, ``max_response_length`` (tokens; or ``max_tokens``),
            ``temperature``, ``top_p``, ``top_k``, ``stop``.
    """

    needed_keys: ClassVar[NeededKeys] = ("prompt",)

    def step(self, task: dict[str, Any]) -> Any:
        """Put the completion of the prompt; None if the task has none."""
        if "prompt" not in task:
            return None
        return self._put_trajectory(self._trajectory_of(task))

    def _trajectory_of(self, task: dict[str, Any]) -> dict[str, Any]:
        result = self._llm_client.completion(task["prompt"], **sampling_of_config(self._config))
        return {
            **{key: value for key, value in task.items() if key != "tokens"},
            "response": result["response"],
            "finish_reason": result["finish_reason"],
            "model_tag": self._llm_client._model_tag,
        }


class SingleTurnMathRolloutWorker(SimpleRolloutWorker):
    """Worker whose reward is 1 if the response gives the answer of the task (``answer``, ``ground_truth``), else 0."""

    needed_keys: ClassVar[NeededKeys] = ("prompt", ("answer", "ground_truth"))

    def _trajectory_of(self, task: dict[str, Any]) -> dict[str, Any]:
        trajectory = super()._trajectory_of(task)
        expected = task.get("answer", task.get("ground_truth"))
        if expected is None:
            raise ValueError(f"the task lacks 'answer'; it has {', '.join(sorted(task))}")
        reward = float(is_same_answer(trajectory["response"], str(expected)))
        return {"reward": reward, "score": {"reward": reward}, **trajectory}


def is_same_answer(response: str, expected: str) -> bool:
    """Return whether a response gives an answer: in its last ``\\boxed{}``, as its last number, or as all its text."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", response)
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", response)
    found = boxed[-1] if boxed else numbers[-1] if numbers else response
    return _normal(found) == _normal(expected)


def _normal(text: str) -> str:
    plain = text.strip().replace(",", "").rstrip(".")
    try:
        return repr(float(plain))
    except ValueError:
        return plain


class MockRolloutWorker(BaseRolloutWorker):
    """Worker without a model: tokens and reward follow from the prompt.

    Args:
        config: beside that of `BaseRolloutWorker`, ``max_tokens``: length of the response. Default 4.
    """

    def step(self, task: dict[str, Any]) -> Any:
        """Put a made-up trajectory."""
        digest = sha256(str(task.get("prompt", "")).encode()).digest()
        length = min(int(self._config.get("max_tokens") or 4), len(digest) - 2)
        response = [1 + byte % 9 for byte in digest[:length]]
        reward = digest[-1] / 255
        return self._put_trajectory(
            {
                "prompt": task.get("prompt", ""),
                "response": " ".join(map(str, response)),
                "tokens": [1, *response],
                "loss_mask": [0] + [1] * length,
                "logprobs": [0.0] + [-1.0] * length,
                "reward": reward,
                "score": {"reward": reward},
                "finish_reason": "stop",
                "model_tag": self._llm_client._model_tag,
                **{key: task[key] for key in ("group_id", "run_id") if key in task},
            }
        )
