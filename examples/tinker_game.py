"""Teach a model a game of two turns over OpenTinker's protocol: copy a digit, then the next one.

The game is a class behind an environment server, which the training service asks for observations and rewards. Service
and server are started by this program; ``--serve PORT`` starts the server alone, for a service that runs elsewhere.

    pip install 'fray[tinker]'
    python examples/tinker_game.py
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from typing import Any

import trio

import fray
from fray import rl, tinker
from fray.tinker import game

MODEL = rl.TinyLlama(layers=2, width=64, chars="0123=>$ ")


class Copy:
    """Game in which each turn shows a digit, and a reply that begins with it has the reward .5."""

    def reset(self, digits: str) -> str:
        self.digits, self.at = digits, 0
        return f"{digits[0]}>"

    def step(self, action: str) -> game.StepResult:
        reward = 0.5 * action.startswith(self.digits[self.at])
        self.at += 1
        if self.at == len(self.digits):
            return game.StepResult(reward=reward, done=True)
        return game.StepResult(f"{self.digits[self.at]}>", reward)

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return "="


def config_of(environment_url: str) -> dict[str, Any]:
    """Return the configuration of the job. The interaction config is YAML, which JSON is, too."""
    interaction = {"interaction": [{"name": "copy", "config": {"env_endpoint": environment_url}}]}
    return {
        "data": {"max_prompt_length": 4, "max_response_length": 8},
        "actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"optim": {"lr": 5e-3}}},
        "algorithm": {"adv_estimator": "grpo_per_step"},
        "multi_turn": {"interaction_config_content": json.dumps(interaction), "max_tokens_per_turn": 1},
    }


def train(url: str, environment_url: str, steps: int) -> dict[str, Any]:
    """Submit a job, train, validate; return rewards, the score of the validation, and seconds."""
    scheduler = tinker.SchedulerClient(url)
    job = scheduler.submit_job({}, enable_agent_loop=True)
    service = tinker.ServiceClient(scheduler.wait_until_running(job["job_id"])["server_url"])
    service.set_config(config_of(environment_url), total_steps=steps)
    rng = random.Random(0)

    def batch(rows: int) -> tinker.DataProto:
        return game.batch_of(Copy, [{"digits": "".join(rng.choices("0123", k=2))} for _ in range(rows)])

    began = time.perf_counter()
    history = service.fit(batch(8) for _ in range(steps))
    seconds = time.perf_counter() - began
    score = service.client.validate(batch(32))["metrics"]["val/mean_score"]
    scheduler.complete_job(job["job_id"])
    return {"rewards": [step["training_step_reward"] for step in history], "validation": score, "seconds": seconds}


async def serve_and_train(steps: int) -> dict[str, Any]:
    """Train with a service and a server that end with this call."""
    with tempfile.TemporaryDirectory() as directory:
        async with (
            fray.open_cluster("machine") as cluster,
            tinker.serve(models=[MODEL], directory=directory, cluster=cluster, threads=1) as service,
            game.serve(Copy) as server,
        ):
            return await trio.to_thread.run_sync(train, service.url, server.url, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps (default 40)")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve the game there, and do nothing else")
    options = parser.parse_args()
    if options.serve:
        game.run(Copy, port=options.serve)
        return
    result = trio.run(serve_and_train, options.steps)
    first, last = result["rewards"][:5], result["rewards"][-5:]
    print(
        f"mean reward: {sum(first) / len(first):.3f} in the first steps, {sum(last) / len(last):.3f} in the last five; "
        f"validation {result['validation']:.3f}; {result['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
