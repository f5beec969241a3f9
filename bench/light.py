"""Light actors: time from creation to the first answers of all, and memory of each.

``python -m bench.light`` on a cluster of real processes; the host's process exists already.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import trio

import fray
from bench.measure import Results, report


class Async:
    """Actor in the host's loop."""

    async def pid(self) -> int:
        return os.getpid()


class Sync:
    """Actor on the host's threads."""

    def pid(self) -> int:
        return os.getpid()


def private_kib(pid: int) -> int:
    """Return the memory that only this process uses, in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


async def once(scope: fray.Scope, cls: type, count: int) -> dict[str, float]:
    """Return ``ms`` from the request to the first answers of all; KiB per actor in the host and here."""
    host = await scope.create_host()
    probe = await host.create_actor(cls)
    pid, here = await probe.pid(), os.getpid()
    before, own = private_kib(pid), private_kib(here)
    began = time.perf_counter()
    group = await host.create_actors(cls, count=count)
    for answer in [handle.pid.start() for handle in group]:
        await answer
    took_ms = 1e3 * (time.perf_counter() - began)
    return {
        "first_answers_ms": took_ms,
        "host_kib_each": (private_kib(pid) - before) / count,
        "driver_kib_each": (private_kib(here) - own) / count,
    }


async def measure(rounds: int, json_file: Path | None) -> None:
    results = Results()
    async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
        for _ in range(rounds):
            for count in (100, 1_000):
                for cls in (Async, Sync):
                    async with cluster.open_scope("round") as scope:
                        results.add(f"{count:,} {cls.__name__.lower()}", await once(scope, cls, count))
    report("light actors", results, {}, json_file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.light", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    options = parser.parse_args()
    trio.run(measure, options.rounds, options.json)


if __name__ == "__main__":
    main()
