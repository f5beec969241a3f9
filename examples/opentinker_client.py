"""Teach a model to copy three digits through OpenTinker's protocol, with an uploaded reward function.

The service is started by this program; with ``--scheduler-url`` it is one that runs elsewhere (``fray tinker serve``).

    pip install 'fray[tinker]'
    python examples/opentinker_client.py
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from typing import Any

import numpy as np
import trio

import fray
from fray import rl, tinker

MODEL = rl.TinyLlama(layers=2, width=64, chars="0123456789+=>$ ")
REWARD = """
def share_right(data_source, solution_str, ground_truth, extra_info, **kw):
    right = sum(one == other for one, other in zip(solution_str, ground_truth))
    return {"score": right / len(ground_truth)}
"""
CONFIG = {
    "data": {"max_prompt_length": 4, "max_response_length": 4},
    "actor_rollout_ref": {"rollout": {"n": 16}, "actor": {"optim": {"lr": 1e-3}}},
    "critic": {"optim": {"lr": 1e-3}},  # of gae alone
}
ESTIMATORS = ("grpo", "gae")


def batch_of(numbers: list[str]) -> tinker.DataProto:
    """Return the batch of these numbers: prompts as texts, and what the reward function compares with."""
    prompts, truths = np.empty(len(numbers), object), np.empty(len(numbers), object)
    prompts[:] = [f"{number}>" for number in numbers]
    truths[:] = [{"ground_truth": f"{number}$"} for number in numbers]
    return tinker.DataProto({}, {"raw_prompt": prompts, "reward_model": truths})


def train(url: str, steps: int, api_key: str | None = None, estimator: str = "grpo") -> dict[str, Any]:
    """Submit a job, train, validate; return rewards, the score of the validation, and seconds."""
    scheduler = tinker.SchedulerClient(url, api_key)
    job = scheduler.submit_job({})
    server_url = scheduler.wait_until_running(job["job_id"])["server_url"]
    service = tinker.ServiceClient(server_url)
    config = {**CONFIG, "algorithm": {"adv_estimator": estimator}}
    service.set_config(config, reward=("share_right", REWARD), total_steps=steps)
    numbers, rng = ["".join(digits) for digits in itertools.product("0123456789", repeat=3)], random.Random(0)
    began = time.perf_counter()
    history = service.fit(batch_of(rng.sample(numbers, 32)) for _ in range(steps))
    seconds = time.perf_counter() - began
    score = service.client.validate(batch_of(numbers))["metrics"]["val/mean_score"]
    scheduler.complete_job(job["job_id"])
    return {"rewards": [step["training_step_reward"] for step in history], "validation": score, "seconds": seconds}


async def serve_and_train(steps: int, estimator: str) -> dict[str, Any]:
    """Train with a service that ends with this call."""
    with tempfile.TemporaryDirectory() as directory:
        async with (
            fray.open_cluster("machine") as cluster,
            tinker.serve(models=[MODEL], directory=directory, cluster=cluster, threads=1) as service,
        ):
            return await trio.to_thread.run_sync(train, service.url, steps, None, estimator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--scheduler-url", help="a service that runs; default: one is started")
    parser.add_argument("--estimator", choices=ESTIMATORS, default="grpo", help="of advantages (default grpo)")
    options = parser.parse_args()
    if options.scheduler_url:
        result = train(options.scheduler_url, options.steps, estimator=options.estimator)
    else:
        result = trio.run(serve_and_train, options.steps, options.estimator)
    first, last = result["rewards"][:10], result["rewards"][-10:]
    print(
        f"mean reward: {sum(first) / len(first):.3f} in the first steps, {sum(last) / len(last):.3f} in the last ten; "
        f"validation {result['validation']:.3f}; {result['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
