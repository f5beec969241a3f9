"""Leak check: an actor is killed a thousand times: ``python -m bench.restarts --count 1000``.

An actor with ``max_restarts=-1`` is killed with SIGKILL and called again until the count is reached, on ``machine``.
Then no process, descriptor, task, thread, file, socket or segment of shared memory may be there that was not there
after the first few, in the driver (which is the controller too), the nodes, and below them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import trio

import fray
from bench import resource_count
from bench.measure import machine
from bench.resource_count import ResourceCount

WARM_UP = 10
SETTLE_S = 0.5
SETTLE_WITHIN_S = 15.0


class Mortal:
    """Actor that holds every kind of resource that could leak when it dies."""

    def __init__(self) -> None:
        self.lives = [os.getpid()]

    async def pid(self) -> int:
        return os.getpid()


async def one_death(actor: fray.ActorHandle, pid: int) -> tuple[int, float]:
    """Kill an actor; return the pid of its successor, and the seconds until it answered."""
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            new = int(await actor.pid())
        except fray.OutcomeUnknown:
            continue  # the call was on its way to the killed process
        if new != pid:
            return new, time.perf_counter() - began


async def quiet(nodes: list[int], before: ResourceCount | None) -> ResourceCount:
    """Count once everything has settled: when nothing exceeds ``before``, or after `SETTLE_WITHIN_S`."""
    give_up = time.monotonic() + SETTLE_WITHIN_S
    while True:
        await trio.sleep(SETTLE_S)
        now = resource_count.take(nodes)
        if time.monotonic() > give_up or (before is not None and not residue(before, now)):
            return now
        if before is None:
            return now


ALLOWED = {"objects": 1_000_000, "descriptors": 2, "tasks": 2, "threads": 2, "orphans": 8}
"""Growth that is allowed. Objects: bounded records, such as attempts of the last restarts, sessions, nonces."""


def residue(before: ResourceCount, after: ResourceCount) -> dict[str, Any]:
    """Return the growth that the kills have caused."""
    return resource_count.growth(before, after, more_than=ALLOWED)


async def campaign(count: int, *, nodes: int = 1, progress: bool = False) -> dict[str, Any]:
    """Kill ``count`` times. ``left`` in the result lists new resources; it should be empty."""
    times: list[float] = []
    async with fray.open_cluster(f"machine?nodes={nodes}&cpu=4", logs=False) as cluster:
        pids = [node.pid for node in await cluster.wait_for_nodes(nodes) if node.pid is not None]
        async with cluster.open_scope("mortals") as scope:
            actor = await scope.create_actor(Mortal, max_restarts=-1)
            pid = int(await actor.pid())
            for _ in range(WARM_UP):
                pid, _ = await one_death(actor, pid)
            before = await quiet(pids, None)
            for number in range(count):
                pid, took_s = await one_death(actor, pid)
                times.append(took_s)
                if progress and number % 100 == 99:
                    print(f"{number + 1} deaths, {statistics.median(times) * 1e3:.0f} ms each", file=sys.stderr)
            after = await quiet(pids, before)
    times.sort()
    return {
        "deaths": count,
        "to_next_answer_ms": {
            "p50": 1e3 * times[len(times) // 2],
            "p99": 1e3 * times[len(times) * 99 // 100],
            "max": 1e3 * times[-1],
        },
        "left": residue(before, after),
        "grown": {
            name: numbers
            for name, numbers in resource_count.growth(before, after).items()
            if name.startswith("objects")
        },
        "pss_kb": {"before": before.pss_kb, "after": after.pss_kb},
        "before": {**before.as_json(), "objects": None},
        "after": {**after.as_json(), "objects": None},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.restarts", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = trio.run(lambda: campaign(options.count, nodes=options.nodes, progress=True))
    print(json.dumps({key: found[key] for key in ("deaths", "to_next_answer_ms", "left", "pss_kb")}, indent=1))
    for name, numbers in sorted(found["grown"].items()):
        print(f"  on record: {name} {numbers['before']} -> {numbers['after']}")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    sys.exit(1 if found["left"] else 0)


if __name__ == "__main__":
    main()
