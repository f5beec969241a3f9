"""Trajectories of workers, completed with what the recorded replies of the model and an evaluator say; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fray.rl.nexrl_types import Trajectory
from fray.rl.rollout.scores import Score, ScoredReply, trajectory_of
from fray.rl.rollout_worker.evaluation import EvaluationRunResult


class RecordedReply(ScoredReply, Protocol):
    """Reply of the model, with its text and the arguments of its request."""

    @property
    def text(self) -> str: ...
    def get(self, key: str, default: Any = None, /) -> Any: ...


def with_tokens(trajectory: Trajectory, replies: Sequence[RecordedReply]) -> Trajectory:
    """Return a trajectory with ``tokens``, ``loss_mask``, ``logprobs`` and ``versions`` of the reply that it quotes.

    Earlier turns that the prompt of this reply continues are in it, too. A trajectory that has tokens is returned as
    it is.

    Raises:
        ValueError: it has no tokens, and no reply has the text of its ``response``.
    """
    if "tokens" in trajectory:
        return trajectory
    reply = quoted_reply(trajectory, replies)
    if reply is None:
        raise ValueError(
            f"a trajectory has no tokens, and its response {_short(trajectory.get('response'))} is not among the "
            f"{len(replies)} replies of the model: expected response=result['response'], or tokens, loss_mask, logprobs"
        )
    made = trajectory_of(Score(reply, 0.0), replies)
    del made["reward"]
    return {**made, **trajectory}


def quoted_reply(trajectory: Trajectory, replies: Sequence[RecordedReply]) -> RecordedReply | None:
    """Return the last reply that a trajectory quotes: by prompt and response, or by its response alone."""
    response = trajectory.get("response")
    same = [reply for reply in replies if response is not None and response in (reply.text, reply.get("response"))]
    by_prompt = [reply for reply in same if "prompt" in trajectory and reply.get("prompt") == trajectory["prompt"]]
    found = by_prompt or same
    return found[-1] if found else None


def with_evaluation(trajectory: Trajectory, result: EvaluationRunResult) -> Trajectory:
    """Return a trajectory with the reward of an evaluation, and its metrics as ``score``.

    Raises:
        TypeError: the evaluator returned something else.
        ValueError: the reward or a metric is not a finite number.
    """
    if not isinstance(result, EvaluationRunResult):
        raise TypeError(f"the evaluator returned {type(result).__name__}; expected EvaluationRunResult(reward=...)")
    numbers = {"reward": result.reward, **result.metrics}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the evaluator returned {name} {value!r}; expected a finite number")
    return {
        "ground_truth": result.ground_truth,
        "extra_info": result.extra_info,
        **trajectory,
        "reward": float(result.reward),
        "score": {**trajectory.get("score", {}), **{name: float(value) for name, value in numbers.items()}},
    }


def missing_key(trajectory: Mapping[str, Any], needs: Sequence[str]) -> str | None:
    """Return why a trainer cannot take a trajectory; None if it has all keys that are needed."""
    for key in needs:
        if key not in trajectory and not (key == "group_id" and "uid" in trajectory):
            hint = "; set rollout_worker.evaluator_module_path, or put it in" if key == "reward" else ""
            return (
                f"the trajectory lacks {key!r}, which the trainer needs{hint}; it has {', '.join(sorted(trajectory))}"
            )
    return None


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
