"""Train an agent that knows nothing of training: a plain program with an OpenAI client.

The agent asks for a number to be repeated, and if the answer is wrong, asks a second time in the same conversation. It
gets the address of the model and nothing else; all its turns are trained with the reward of its last answer.

    pip install 'fray[rl]' openai
    python examples/rl_agent.py
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import httpx
import openai
import trio

from fray import rl


def repeat_number(base_url: str, number: str) -> str:
    """Return the last answer of the agent."""
    messages: list[Any] = [{"role": "user", "content": f"{number}>"}]
    # Without certificates, which an address of this machine does not need and which take 0.1 s to load.
    with openai.OpenAI(base_url=base_url, api_key="-", http_client=httpx.Client(verify=False)) as client:
        for _ in range(2):
            reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            answer = reply.choices[0].message.content or ""
            if answer == number:
                break
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"+{number}>"}]
    return answer


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    """Roll out one episode: give the agent its address, and score what it brings."""
    answer = await trio.to_thread.run_sync(repeat_number, rl.agent_url(task), task["number"])
    right = sum(one == other for one, other in zip(answer, task["number"], strict=False))
    return rl.score(reward=right / len(task["number"]))


def agent_run(**options: Any) -> rl.Run:
    """Return the run; ``options`` replace those below."""
    settings: dict[str, Any] = {
        "model": rl.TinyLlama(layers=2, width=64, chars="0123456789+=>$ "),
        "data": [{"number": "".join(digits)} for digits in itertools.product("0123456789", repeat=2)],
        "rollout": solve,
        "trainer": rl.GRPO(groups=8, group_size=8, lr=1e-3, steps=100),
        "rollout_workers": 32,
        "rollout_processes": 1,
    }
    return rl.Run(**{**settings, **options})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="updates (default 100)")
    parser.add_argument("--output", help="directory for metrics, rollouts and checkpoints; a run continues from there")
    options = parser.parse_args()
    settings = rl.GRPO(groups=8, group_size=8, lr=1e-3, steps=options.steps)
    result = trio.run(agent_run(trainer=settings, output=options.output).main)
    rewards = [step["reward_mean"] for step in result.steps]
    first, last = rewards[:10], rewards[-10:]
    print(f"mean reward: {sum(first) / len(first):.3f} in the first steps, {sum(last) / len(last):.3f} in the last ten")


if __name__ == "__main__":
    main()
