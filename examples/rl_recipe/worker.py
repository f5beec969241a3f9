"""Episodes of the recipe: one question to the model, scored by the evaluator beside this file."""

from __future__ import annotations

import os
from typing import Any

from evaluator import CopyEvaluator  # a file beside this one

from fray import rl

EVALUATOR = CopyEvaluator()


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    """Roll out one episode."""
    reply = await llm.completion(task["prompt"], max_tokens=int(os.environ["DIGITS_MAX_TOKENS"]))
    return rl.score(reply, reward=EVALUATOR.evaluate(task, reply))
