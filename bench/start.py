"""How long things take to start: a cold driver, a job, an actor.

    python -m bench.start [--rounds 5] [--json FILE]

`cold_driver_ms` is a whole fresh interpreter: import, cluster of one node, one actor, its first answer, and out again.
The other figures are taken in one warm ``machine`` cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import trio

import fray

ROUNDS = 5
COLD_DRIVER = """
import time
began = {began}
import fray, trio
class Echo:
    def echo(self, value):
        return value
async def main():
    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster:
        up = time.monotonic()
        async with cluster.open_scope("cold") as scope:
            echo = await scope.create_actor(Echo)
            assert await echo.echo(7) == 7
            answered = time.monotonic()
    print((up - began) * 1e3, (answered - began) * 1e3, (time.monotonic() - answered) * 1e3)
trio.run(main)
"""


class Echo:
    """The actor that is created."""

    def echo(self, value: int) -> int:
        return value


def nothing() -> int:
    """The job that is launched."""
    return 7


def cold_driver() -> dict[str, float]:
    """One fresh interpreter, from before its start."""
    script = COLD_DRIVER.format(began=repr(time.monotonic()))
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    up, answered, ended = (float(part) for part in out.split())
    return {"cold_driver_cluster_up_ms": up, "cold_driver_first_answer_ms": answered, "shutdown_ms": ended}


def imports() -> dict[str, float]:
    """``import fray`` beside what it stands on, each in a fresh interpreter."""

    def one(modules: str) -> float:
        code = f"import time; t = time.perf_counter(); import {modules}; print((time.perf_counter() - t) * 1e3)"
        return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    base, own = one("trio, trio_websocket"), one("fray")
    return {"import_trio_websocket_ms": base, "import_fray_ms": own, "import_ratio": own / base}


async def timed(step: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await step()
    return (time.perf_counter() - began) * 1e3


async def warm(rounds: int) -> dict[str, list[float]]:
    """Launch to running, launch to result, actor to first answer, in one warm cluster."""
    seen: dict[str, list[float]] = {}

    async def launch(scope: fray.Scope, index: int) -> None:
        request = fray.JobRequest(name=f"start-{index}", entrypoint=fray.Entrypoint.from_callable(nothing))
        began = time.perf_counter()
        job = await scope.launch(request)
        seen.setdefault("launch_accepted_ms", []).append((time.perf_counter() - began) * 1e3)
        await job.wait_running()
        seen.setdefault("launch_to_running_ms", []).append((time.perf_counter() - began) * 1e3)
        assert await job.wait() == 7
        seen.setdefault("launch_to_result_ms", []).append((time.perf_counter() - began) * 1e3)

    async def actor(scope: fray.Scope) -> None:
        echo = await scope.create_actor(Echo)
        assert await echo.echo(7) == 7

    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster:
        for index in range(rounds + 1):
            async with cluster.open_scope("bench") as scope:
                await launch(scope, index)
                spent = await timed(lambda scope=scope: actor(scope))  # type: ignore[misc]
                seen.setdefault("actor_first_answer_ms", []).append(spent)
    return {name: values[1:] for name, values in seen.items()}


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.start", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", metavar="FILE", help="write the figures there as JSON")
    options = parser.parse_args()
    seen: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, value in {**imports(), **cold_driver()}.items():
            seen.setdefault(name, []).append(value)
    seen |= trio.run(warm, max(options.rounds, 10))
    results = {name: summary(values) for name, values in seen.items()}
    for name, figures in results.items():
        print(f"{name:32} {figures['median']:9.1f}  ({figures['min']:.1f} to {figures['max']:.1f})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
