"""Train a model that may use a calculator: several turns with `llm.chat`, and the results of a tool between them.

The prompt is ``12+30>``. An answer that ends with ``=``, such as ``12+30=``, is a question to the calculator:
the result is the next message, and the model answers again. The reward is the share of right digits in the last
answer, and a little for each question that could be calculated. What the tool has written is not trained.

    pip install 'fray[rl]'
    python examples/rl_tools.py
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import trio

from fray import rl

TURNS = 3
SUM = re.compile(r"(\d+)\+(\d+)=")


def calculate(question: str) -> str | None:
    """Return the result of a sum; None for any other text."""
    found = SUM.fullmatch(question)
    return None if found is None else str(int(found[1]) + int(found[2]))


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    """Roll out one episode."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    calculated = 0
    for _ in range(TURNS):
        reply = await llm.chat(messages, max_tokens=6, stop="=")
        question = reply.text + "=" if reply.completion.stopped_by == "=" else ""
        result = calculate(question)
        if result is None:
            break
        calculated += 1
        messages += [reply.message, {"role": "tool", "content": f"{result}>"}]
    right = sum(one == other for one, other in zip(reply.text, task["answer"], strict=False)) / len(task["answer"])
    return rl.score(reply, reward=right + 0.1 * calculated, score={"right": right, "calculated": calculated})


def tools_run(**options: Any) -> rl.Run:
    """Return the run; ``options`` replace those below."""
    pairs = [(one, other) for one in range(10, 50) for other in range(10, 50)]
    settings: dict[str, Any] = {
        "model": rl.TinyLlama(layers=2, width=64, chars="0123456789+=>$ "),
        "data": [{"prompt": f"{one}+{other}>", "answer": str(one + other)} for one, other in pairs],
        "rollout": solve,
        "trainer": rl.GRPO(groups=16, group_size=16, lr=1e-3, steps=100),
        "rollout_workers": 256,
        "rollout_processes": 1,
    }
    return rl.Run(**{**settings, **options})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="updates (default 100)")
    parser.add_argument("--output", help="directory for metrics, rollouts and checkpoints; a run continues from there")
    options = parser.parse_args()
    settings = rl.GRPO(groups=16, group_size=16, lr=1e-3, steps=options.steps)
    result = trio.run(tools_run(trainer=settings, output=options.output).main)
    rewards = [step["reward_mean"] for step in result.steps]
    first, last = rewards[:10], rewards[-10:]
    print(f"mean reward: {sum(first) / len(first):.3f} in the first steps, {sum(last) / len(last):.3f} in the last ten")


if __name__ == "__main__":
    main()
