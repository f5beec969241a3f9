"""Cost of a job's output for each process, and its effect on other jobs.

``python -m bench.logs [--seconds 10]`` prints JSON. A controller, a node, and a driver, each in its own process. One
job prints at the rate of the case; beside it a driver calls an actor, and another job prints a line with the time every
20 ms. Cases: no output; a million lines a minute (100 bytes each; in Python's own buffering, and flushed line by line);
as many lines as possible. For each: lines a second on the disk, CPU of shim, node, controller and driver (in percent of
one core), latency of the calls and of the other job's lines, at a reader that follows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

import fray
from fray import Entrypoint, Job, JobRequest, ResourceConfig

MILLION_A_MINUTE = 1_000_000 / 60
SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="64MB")
TEXT = "x" * 92


class Echo:
    async def echo(self, value: int) -> int:
        return value


def print_hard(rate: float | None, seconds: float, flush: bool) -> int:
    """Print numbered lines for so long; return their number. ``rate``: lines a second, in bursts of 10 ms."""
    began, count = time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds:
        due = int(passed * rate) + 1 if rate is not None else count + 1000
        for number in range(count, due):
            print(f"{number:07d} {TEXT}", flush=flush)
        count = max(count, due)
        if rate is not None:
            time.sleep(0.01)
    return count


def print_times(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print(f"t {time.time()}", flush=True)
        time.sleep(0.02)


# The processes -------------------------------------------------------------------------------------------------------


@contextmanager
def daemons(directory: Path) -> Iterator[dict[str, int]]:
    """Start a controller and a node; yield their pids. The driver's variables refer to them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"FRAY_TOKEN": f"{random.getrandbits(128):032x}", "FRAY_CLUSTER_SPEC": f"fray://127.0.0.1:{port}"}
    store, state = str(directory / "store"), str(directory / "node")
    commands = {
        "controller": ["fray.controller.main", "--listen", f"127.0.0.1:{port}", "--store", store],
        "node": ["fray.node", "--controller", f"fray://127.0.0.1:{port}", "--name", "n", "--state-dir", state],
    }
    config = directory / "node.toml"
    config.write_text("cpu = 16\n")
    commands["node"] += ["--config", str(config)]
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (directory / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)
            time.sleep(1.0)
        yield {name: process.pid for name, process in running.items()} | {"driver": os.getpid()}
    finally:
        for process in reversed(running.values()):
            process.send_signal(signal.SIGTERM)
            process.wait(10)


def cpu_s(pid: int) -> float:
    """Return the user and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shim_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# One case ------------------------------------------------------------------------------------------------------------


class Beside:
    """Calls and lines of others during the case."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.lines: list[float] = []
        self.heard = 0

    async def call(self, echo: fray.ActorHandle) -> None:
        while True:
            began = time.perf_counter()
            await echo.echo(1)
            self.calls.append(time.perf_counter() - began)
            await trio.sleep(0.005)

    async def read_times(self, job: Job) -> None:
        async for line in job.logs(follow=True):
            if line.text.startswith("t "):
                self.lines.append(time.time() - float(line.text[2:]))

    async def follow(self, job: Job) -> None:
        async for line in job.logs(follow=True):
            self.heard += line.kind == "line"


async def run_case(
    scope: fray.Scope, pids: dict[str, int], name: str, rate: float | None, flush: bool, seconds: float, follow: bool
) -> dict[str, Any]:
    beside = Beside()
    echo = await scope.create_actor(Echo, resources=SMALL)
    await echo.echo(0)

    def request(what: str, fn: Any, *args: Any) -> JobRequest:
        return JobRequest(name=f"{what}-{name}", entrypoint=Entrypoint.from_callable(fn, args), resources=SMALL)

    times = await scope.launch(request("times", print_times, seconds + 1))
    noisy = await scope.launch(request("noisy", print_hard, rate, seconds, flush))
    pid = (await noisy.wait_running()).attempts[-1].pid
    assert pid is not None
    watched = {**pids, "shim": shim_of(pid)}
    before, began = {who: cpu_s(found) for who, found in watched.items()}, time.monotonic()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside.call, echo)
        nursery.start_soon(beside.read_times, times)
        if follow:
            nursery.start_soon(beside.follow, noisy)
        await trio.sleep(seconds * 0.8)
        took_s = time.monotonic() - began
        used = {who: cpu_s(found) - before[who] for who, found in watched.items()}
        printed = await noisy.wait()
        if follow:
            with trio.move_on_after(30):
                while beside.heard < printed:  # noqa: ASYNC110 - another task counts
                    await trio.sleep(0.05)
        last = [line.number async for line in noisy.logs(tail=1)] or [-1]
        nursery.cancel_scope.cancel()
    await times.terminate()
    return {
        "case": name,
        "lines": printed,
        "lines_s": round(printed / seconds),
        "on_disk": last[0] + 1,
        "read_by_follower": beside.heard if follow else None,
        "cpu_percent": {who: round(100 * spent / took_s, 1) for who, spent in used.items()},
        "call_ms": spread(beside.calls),
        "line_ms": spread(beside.lines),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(cuts[49] * 1e3, 2), "p99": round(cuts[98] * 1e3, 2), "max": round(max(seconds) * 1e3, 2)}


CASES = (
    ("quiet", 0.0, False, False),
    ("million-a-minute", MILLION_A_MINUTE, False, False),
    ("million-a-minute-followed", MILLION_A_MINUTE, False, True),
    ("million-a-minute-flushed", MILLION_A_MINUTE, True, True),
    ("flood", None, False, False),
)


async def measure(seconds: float, pids: dict[str, int]) -> list[dict[str, Any]]:
    found = []
    async with fray.open_cluster(logs=False) as cluster, cluster.open_scope("bench") as scope:
        await cluster.wait_for_nodes(1)
        for name, rate, flush, follow in CASES:
            found.append(await run_case(scope, pids, name, rate, flush, seconds, follow))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.logs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each case (default: 10)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fray-bench-") as directory, daemons(Path(directory)) as pids:
        print(json.dumps({"cases": trio.run(measure, options.seconds, pids)}, indent=1))


if __name__ == "__main__":
    from bench import logs

    logs.main()
