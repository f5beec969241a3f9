"""Training through the Tinker API: ``python -m bench.tinker sft rl requests adapters``, or some.

The first two train an adapter on a base model of random weights (two layers of width 64): ``sft`` learns pig latin by
cross-entropy, ``rl`` to copy three digits by importance sampling, 32 prompts x 16 samples a step. The client is the
Tinker SDK in an environment of its own (``tools/venv tinker-0.38``), against a service with real processes; the plain
loop is transformers, peft and torch in one process. Targets: losses of twenty steps of ``sft`` equal within 1e-3, and
those at the end within .02; the reward of the last ten steps of ``rl`` within .05, and above .5.

``requests`` sends small ones, one after another, and ``adapters`` trains eight, alone and then together (target: 1.3
times the sum of their times alone).
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import trio

import fray
from bench.tinker_tasks import DIGITS, LETTERS
from fray import rl, tinker

ROOT = Path(__file__).parents[1]
LETTERS_MODEL = rl.TinyLlama(chars=LETTERS)
MODELS = {
    **dict.fromkeys(("sft", "requests", "adapters"), LETTERS_MODEL),
    "rl": rl.TinyLlama(chars=DIGITS),
}
RANK, RATE = 64, 3e-3
PLAIN, SDK = "plain loop", "Tinker API"


async def output_of(*command: object) -> list[float]:
    """Run a command and return the numbers that it prints at the end."""
    run = functools.partial(trio.run_process, capture_stdout=True, capture_stderr=True, check=False, cwd=ROOT)
    done = await run([str(each) for each in command])
    if done.returncode:
        raise subprocess.SubprocessError(done.stderr.decode()[-4_000:])
    found: list[float] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


async def plain_loop(task: str, steps: int, directory: Path, seed: int = 0) -> list[float]:
    """Return the loss or reward of each step of the plain loop."""
    from fray.rl.tensors.language_model import hide_progress, load_model

    hide_progress()
    load_model(MODELS[task]).model.save_pretrained(directory)
    options = ("--rank", RANK, "--rate", RATE, "--steps", steps, "--seed", seed)
    return await output_of(sys.executable, "-m", "bench.tinker_plain_loop", task, directory, *options)


async def through_service(task: str, steps: int, directory: Path, sdk: Path, seed: int = 0) -> list[float]:
    """Return the loss or reward of each step, or seconds, through the SDK.

    Args:
        sdk: interpreter of an environment with the SDK.
    """
    options = ("--rank", RANK, "--rate", RATE, "--steps", steps, "--seed", seed)
    async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
        serving = tinker.serve(models={task: MODELS[task]}, threads=1, directory=directory, cluster=cluster)
        async with serving as service:
            return await output_of(sdk, "-m", "bench.tinker_client", task, service.url, task, *options)


def report_requests(seconds: list[float]) -> None:
    """Print the times of small requests."""
    ms = sorted(1e3 * each for each in seconds)
    print(f"requests: {len(ms)} of one datum: p50 {ms[len(ms) // 2]:.1f} ms, p95 {ms[len(ms) * 19 // 20]:.1f} ms")


def report_adapters(seconds: list[float]) -> None:
    """Print the times of adapters alone and together."""
    *alone, together = seconds
    ratio = together / sum(alone)
    print(f"adapters: {len(alone)} alone {sum(alone):.1f} s in sum, together {together:.1f} s: {ratio:.2f} times")


REPORTS = {"requests": report_requests, "adapters": report_adapters}
COUNTS = {"requests": 300, "adapters": 20}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(MODELS)} (default all)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sdk", type=Path, default=ROOT / ".venv-tinker-0.38/bin/python")
    options = parser.parse_args()
    if unknown := sorted(set(options.tasks) - MODELS.keys()):
        parser.error(f"unknown task {unknown[0]!r}; expected some of {', '.join(MODELS)}")
    for task in options.tasks or MODELS:
        found, seconds = {}, {}
        with TemporaryDirectory() as directory:
            if task in REPORTS:
                REPORTS[task](await through_service(task, COUNTS[task], Path(directory), options.sdk))
                continue
            for name, run in (
                (PLAIN, plain_loop(task, options.steps, Path(directory, "base"), options.seed)),
                (SDK, through_service(task, options.steps, Path(directory, "run"), options.sdk, options.seed)),
            ):
                began = time.perf_counter()
                found[name] = await run
                seconds[name] = time.perf_counter() - began
        for name, values in found.items():
            curve = " ".join(f"{mean(values[at : at + 10]):.3f}" for at in range(0, len(values), options.steps // 10))
            print(f"{task}, {name}: {seconds[name]:.0f} s; mean of ten steps, ten times: {curve}")
        plain, served = found[PLAIN], found[SDK]
        if task == "sft":
            apart = [abs(a - b) for a, b in zip(plain, served, strict=True)]
            print(
                f"sft: losses differ by at most {max(apart[:20]):.1e} in twenty steps, {max(apart[-10:]):.1e} at last"
            )
        else:
            print(f"rl: reward of the last ten steps: plain {mean(plain[-10:]):.3f}, served {mean(served[-10:]):.3f}")


if __name__ == "__main__":
    trio.run(main)
