"""Training through the Tinker API: ``python -m bench.tinker [TASK ...]``.

``sft`` and ``rl`` train an adapter on a base model of random weights (two layers of width 64): pig latin by
cross-entropy, and to copy three digits by importance sampling, 32 prompts x 16 samples a step. The client is the
Tinker SDK in an environment of its own (``tools/venv tinker-0.38``), against a service with real processes; the plain
loop is transformers, peft and torch in one process. Targets: losses of twenty steps of ``sft`` equal within 1e-3, and
those at the end within .02; the reward of the last ten steps of ``rl`` within .05, and above .5.

``requests`` sends small ones, one after another, in turn to the service and to `bench.tinker_stub`, which answers at
once (target: at most 10 ms between the medians; in one connection without the SDK at least a quarter of the requests of
an empty route, or 200 a second), and ``adapters`` trains eight of eight users, alone and then together (target: 1.3
times the sum of their times alone).

``neighbours``, ``answers`` and ``kills`` need no SDK: small requests of one user beside large ones of another (target:
p95 at most twice that alone and .1 s more), the time from an answer to its client (5 ms), and the seconds after which a
service (3 s) and an engine (5 s, and import and load) that were killed answer again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import trio

import fray
from bench.tinker_tasks import DIGITS, LETTERS
from bench.tinker_times import TASKS
from fray import rl, tinker

ROOT = Path(__file__).parents[1]
LETTERS_MODEL = rl.TinyLlama(chars=LETTERS)
MODELS = {
    **dict.fromkeys(("sft", "adapters"), LETTERS_MODEL),
    # As little as there can be to compute.
    "requests": rl.TinyLlama(layers=1, width=8, mlp=8),
    "rl": rl.TinyLlama(chars=DIGITS),
}
RANK, RATE = 64, 3e-3
PLAIN, SDK = "plain loop", "Tinker API"


async def output_of(*command: object) -> Any:
    """Run a command and return the JSON that it prints at the end."""
    # A crash of the interpreter says nothing by itself.
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    run = functools.partial(trio.run_process, capture_stdout=True, capture_stderr=True, check=False, cwd=ROOT)
    done = await run([str(each) for each in command], env=environment)
    if done.returncode:
        errors = done.stderr.decode()[-4_000:]
        raise subprocess.SubprocessError(f"{command[2]} ended with {done.returncode}: {errors or 'no error output'}")
    return json.loads(done.stdout.decode().splitlines()[-1])


async def plain_loop(task: str, steps: int, directory: Path, seed: int = 0) -> list[float]:
    """Return the loss or reward of each step of the plain loop."""
    from fray.rl.tensors.language_model import hide_progress, load_model

    hide_progress()
    load_model(MODELS[task]).model.save_pretrained(directory)
    options = ("--rank", RANK, "--rate", RATE, "--steps", steps, "--seed", seed)
    found: list[float] = await output_of(sys.executable, "-m", "bench.tinker_plain_loop", task, directory, *options)
    return found


async def through_service(
    task: str, steps: int, directory: Path, sdk: Path, seed: int = 0, more: Sequence[object] = ()
) -> Any:
    """Return the loss or reward of each step, or seconds, through the SDK.

    Args:
        sdk: interpreter of an environment with the SDK.
        more: options of `bench.tinker_client`.
    """
    options = ("--rank", RANK, "--rate", RATE, "--steps", steps, "--seed", seed)
    async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
        is_shared = task == "adapters"
        serving = tinker.serve(
            models={task: MODELS[task]}, threads=1, directory=directory, cluster=cluster, auth=is_shared
        )
        async with serving as service:
            if is_shared:
                keys = [(await service.create_key(f"user {number}")).replace("otk_", "tml-") for number in range(8)]
                os.environ["BENCH_TINKER_KEYS"] = " ".join(keys)
            return await output_of(sdk, "-m", "bench.tinker_client", task, service.url, task, *options, *more)


async def requests(count: int, directory: Path, sdk: Path) -> list[list[float]]:
    """Return the seconds of small requests to the service and to the stub, through the SDK and without it."""
    async with trio.open_nursery() as nursery:
        run = functools.partial(trio.run_process, stdout=subprocess.PIPE, cwd=ROOT, check=False)
        stub: trio.Process = await nursery.start(run, [sys.executable, "-m", "bench.tinker_stub"])
        assert stub.stdout is not None
        url = (await stub.stdout.receive_some()).decode().strip()
        found: list[list[float]] = await through_service("requests", count, directory, sdk, more=("--stub", url))
        stub.terminate()
    return found


def report_requests(found: list[list[float]]) -> None:
    """Print the times of small requests."""
    names = ("forward_backward, service", "forward_backward, stub", "heartbeat, service", "empty route, stub")
    medians = [1e3 * median(seconds) for seconds in found]
    for name, middle, seconds in zip(names, medians, found, strict=True):
        p95 = 1e3 * sorted(seconds)[len(seconds) * 19 // 20]
        print(f"requests: {name}: p50 {middle:.1f} ms, p95 {p95:.1f} ms, {len(seconds) / sum(seconds):.0f}/s")
    print(f"requests: the service takes {medians[0] - medians[1]:.1f} ms more than the stub")


def report_adapters(seconds: list[float]) -> None:
    """Print the times of adapters alone and together."""
    *alone, together = seconds
    ratio = together / sum(alone)
    print(f"adapters: {len(alone)} alone {sum(alone):.1f} s in sum, together {together:.1f} s: {ratio:.2f} times")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join([*MODELS, *TASKS])} (default all)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sdk", type=Path, default=ROOT / ".venv-tinker-0.38/bin/python")
    options = parser.parse_args()
    if unknown := sorted(set(options.tasks) - MODELS.keys() - TASKS.keys()):
        parser.error(f"unknown task {unknown[0]!r}; expected some of {', '.join([*MODELS, *TASKS])}")
    for task in options.tasks or [*MODELS, *TASKS]:
        found, seconds = {}, {}
        with TemporaryDirectory() as directory:
            if task in TASKS:
                await TASKS[task](Path(directory))
                continue
            if task == "requests":
                report_requests(await requests(300, Path(directory), options.sdk))
                continue
            if task == "adapters":
                report_adapters(await through_service(task, 20, Path(directory), options.sdk))
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
