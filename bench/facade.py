"""Calls of sync code, beside the async API and Ray's own handles: ``python -m bench.facade --peer ray``.

In one run and in turn, on a sync actor in its own process: a call at a time (native from the loop,
`fray.blocking` and `fray.v2` from a plain thread), the same beside a thread that computes all the time, and many
concurrent calls from one thread. `LocalClient`, which has no process and no connection, is there for scale. Targets: a
sync call at most 150 us above the native one, at least 20,000 pipelined calls a second, no call beside a busy thread
above 2 ms at the median, and both ahead of Ray. Ray runs in its own process, which is signalled when it is its turn; it
must be installed (``tools/venv test``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from bench.measure import Probe, by_the_lot, one_by_one, percentiles, report, take_turns
from fray import blocking
from fray.v2 import LocalClient
from fray.v2.fray.client import FrayClient

IN_THE_AIR = 2_000
Measure = Callable[[float], dict[str, float]]


class Counter:
    """Sync actor, as sync code has them."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n


def one_call(call: Callable[[], object]) -> Measure:
    """Repeat ``call()`` in a thread; return the percentiles."""

    def measure(seconds: float) -> dict[str, float]:
        clock, times = time.perf_counter, []
        now = clock()
        until = now + seconds
        while now < until:
            call()
            then, now = now, clock()
            times.append(now - then)
        return percentiles(times)

    return measure


def many_calls(start: Callable[[], Any], end: Callable[[list[Any]], object]) -> Measure:
    """Start many calls in one thread, then read their results; return the rate per second."""

    def measure(seconds: float) -> dict[str, float]:
        clock = time.perf_counter
        began, done = clock(), 0
        while clock() - began < seconds:
            end([start() for _ in range(IN_THE_AIR)])
            done += IN_THE_AIR
        return {"per_s": done / (clock() - began)}

    return measure


def results_of(futures: list[Any]) -> None:
    for future in futures:
        future.result()


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run a thread that computes without a pause."""
    over = threading.Event()

    def compute() -> None:
        n = 0
        while not over.is_set():
            n += sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def beside_a_busy_thread(measure: Measure) -> Measure:
    def both(seconds: float) -> dict[str, float]:
        with busy_thread():
            return measure(seconds)

    return both


# Ray, in its own process ---------------------------------------------------------------------------------------------


def measure_ray() -> None:
    """Run the probe that each line of standard input names, and print a line of JSON."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    actor = ray.remote(Counter).remote()
    probes = {
        "one call": one_call(lambda: ray.get(actor.add.remote(1))),
        "one call beside a busy thread": beside_a_busy_thread(one_call(lambda: ray.get(actor.add.remote(1)))),
        "pipelined": many_calls(lambda: actor.add.remote(1), ray.get),
    }
    ray.get(actor.add.remote(1))
    print(json.dumps(list(probes)), flush=True)
    for line in sys.stdin:
        name, seconds = json.loads(line)
        print(json.dumps(probes[name](seconds)), flush=True)
    ray.shutdown()


class RaySide:
    """Process of `measure_ray`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bench.facade", "--be-ray"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self._read()
        self.names: list[str] = json.loads(line)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("--peer ray: its process has ended; is Ray installed here (tools/venv test)?")
        return line

    def measure(self, name: str) -> Measure:
        def ask(seconds: float) -> dict[str, float]:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([name, seconds]) + "\n")
            self._process.stdin.flush()
            numbers: dict[str, float] = json.loads(self._read())
            return numbers

        return ask

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(30)


# Everything ----------------------------------------------------------------------------------------------------------


def in_thread(measure: Measure) -> Probe:
    return lambda seconds: trio.to_thread.run_sync(measure, seconds)


def native_probes(cluster: blocking.Cluster, actor: Any) -> dict[str, Measure]:
    """Return the probes of the async API, measured in the loop itself while a thread waits."""

    async def one() -> None:
        await actor.add(1)

    async def lot() -> int:
        futures = [actor.add.start(1) for _ in range(IN_THE_AIR)]
        for future in futures:
            await future
        return IN_THE_AIR

    portal = cluster._portal
    return {
        "native: one call": lambda seconds: portal.call(one_by_one, one, seconds),
        "native: pipelined": lambda seconds: portal.call(by_the_lot, lot, seconds),
    }


def our_probes(client: FrayClient, local: LocalClient) -> dict[str, Measure]:
    cluster = client.cluster
    blocking_actor = cluster.create_actor(Counter)
    actor = client.create_actor(Counter, name="counter")
    near = local.create_actor(Counter, name="counter")
    for each in (blocking_actor, actor, near):
        each.add(1)
    add = actor.add
    return {
        **native_probes(cluster, blocking_actor._native),
        "blocking: one call": one_call(lambda: blocking_actor.add(1)),
        "blocking: pipelined": many_calls(lambda: blocking_actor.add.remote(1), results_of),
        "v2: one call": one_call(lambda: actor.add(1)),
        "v2: one call by a future": one_call(lambda: add.remote(1).result()),
        "v2: one call beside a busy thread": beside_a_busy_thread(one_call(lambda: actor.add(1))),
        "v2: pipelined": many_calls(lambda: actor.add.remote(1), results_of),
        "LocalClient: one call": one_call(lambda: near.add(1)),
        "LocalClient: pipelined": many_calls(lambda: near.add.remote(1), results_of),
    }


def measure(seconds: float, rounds: int, json_file: Path | None, peers: list[str]) -> None:
    client, local = FrayClient("machine?nodes=1&cpu=8"), LocalClient()
    ray = RaySide() if "ray" in peers else None
    try:
        probes = {name: in_thread(one) for name, one in our_probes(client, local).items()}
        if ray is not None:
            probes |= {f"ray: {name}": in_thread(ray.measure(name)) for name in ray.names}
        results = trio.run(take_turns, probes, rounds, seconds / rounds / len(probes))
    finally:
        if ray is not None:
            ray.close()
        client.shutdown()
    difference = [
        ours - native
        for ours, native in zip(
            results.rounds["v2: one call"]["p50_us"], results.rounds["native: one call"]["p50_us"], strict=True
        )
    ]
    for value in difference:
        results.add("v2: one call above the native one", {"p50_us": value})
    ratios = {
        "v2: one call / native": results.ratio("p50_us", "v2: one call", "native: one call"),
        "v2: pipelined / native": results.ratio("per_s", "v2: pipelined", "native: pipelined"),
    }
    if ray is not None:
        ratios |= {
            "v2: one call / Ray's": results.ratio("p50_us", "v2: one call", "ray: one call"),
            "v2: pipelined / Ray's": results.ratio("per_s", "v2: pipelined", "ray: pipelined"),
        }
    report("APIs for sync code", results, ratios, json_file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.facade", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of all probes together (default 30)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of all probes in turn (default 5)")
    parser.add_argument(
        "--peer", action="append", choices=["ray"], default=[], help="Ray's own handles in the same run"
    )
    parser.add_argument("--be-ray", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_ray:
        measure_ray()
    else:
        measure(options.seconds, options.rounds, options.json, options.peer)


if __name__ == "__main__":
    main()
