"""Evaluator of the recipe."""

from __future__ import annotations

from typing import Any

from fray import rl


class CopyEvaluator:
    """Rewards the share of characters that are as in the answer, the end of the response included."""

    def evaluate(self, task: dict[str, Any], reply: rl.ModelReply) -> float:
        """Return the reward of a reply, 0 to 1."""
        answer = task["answer"]
        text = reply.text + ("$" if reply.finish_reason == "stop" else "")
        return sum(one == other for one, other in zip(text, answer, strict=False)) / len(answer)
