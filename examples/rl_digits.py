"""Teach a model that knows nothing to copy three digits, by reinforcement learning, in under two minutes on two cores.

The prompt is ``407>``, the answer ``407$``; the reward is the share of its four characters that are right.

    pip install 'fray[rl]'
    python examples/rl_digits.py
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import trio

from fray import rl

DIGITS = "0123456789"


async def copy_digits(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    """Roll out one episode."""
    reply = await llm.completion(task["prompt"], max_tokens=4)
    return rl.score(reply, reward=_share_right(reply, task["answer"]))


async def copy_digits_in_groups(task: dict[str, Any], llm: rl.LLM) -> list[rl.Score]:
    """Roll out all samples of a prompt with one request."""
    replies = await llm.completion(task["prompt"], max_tokens=4, n=16)
    return [rl.score(reply, reward=_share_right(reply, task["answer"])) for reply in replies]


def _share_right(reply: rl.ModelReply, answer: str) -> float:
    text = reply.text + ("$" if reply.finish_reason == "stop" else "")
    return sum(one == other for one, other in zip(text, answer, strict=False)) / len(answer)


def digits_run(**options: Any) -> rl.Run:
    """Return the run; ``options`` replace those below."""
    numbers = ["".join(digits) for digits in itertools.product(DIGITS, repeat=3)]
    settings: dict[str, Any] = {
        "model": rl.TinyLlama(layers=2, width=64, chars="0123456789+=>$ "),
        "data": [{"prompt": f"{number}>", "answer": f"{number}$"} for number in numbers],
        "rollout": copy_digits,
        "trainer": rl.GRPO(groups=32, group_size=16, lr=1e-3, steps=200),
        "rollout_workers": 512,
        "rollout_processes": 1,
    }
    return rl.Run(**{**settings, **options})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="updates (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and sampling (default 0)")
    parser.add_argument("--sync", default="sync", help="sync (default), batch-async or fully-async")
    parser.add_argument("--threshold", type=int, default=1, help="updates by which a token may be behind (default 1)")
    parser.add_argument("--groups", action="store_true", help="one episode for all samples of a prompt")
    parser.add_argument("--output", help="directory for metrics, rollouts and checkpoints; a run continues from there")
    parser.add_argument("--save-every", type=int, default=50, help="updates between checkpoints (default 50)")
    options = parser.parse_args()
    run = digits_run(
        model=rl.TinyLlama(layers=2, width=64, chars="0123456789+=>$ ", seed=options.seed),
        trainer=rl.GRPO(groups=32, group_size=16, lr=1e-3, steps=options.steps),
        sync=options.sync,
        staleness_threshold=options.threshold,
        seed=options.seed,
        output=options.output,
        save_every=options.save_every,
        rollout=copy_digits_in_groups if options.groups else copy_digits,
        episode="group" if options.groups else "sample",
    )
    result = trio.run(run.main)
    rewards = [step["reward_mean"] for step in result.steps]
    if not rewards:
        print(f"the run had made all {options.steps} updates before; --steps takes more, another --output begins again")
        return
    first, last = rewards[:10], rewards[-10:]
    print(f"mean reward: {sum(first) / len(first):.3f} in the first steps, {sum(last) / len(last):.3f} in the last ten")


if __name__ == "__main__":
    main()
