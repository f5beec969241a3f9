"""Light actors: from nothing to the first answers of all, and what each costs in memory.

``python -m bench.light`` on a cluster of real processes; the host's process is there already.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import trio

import fray


class Async:
    """Lives in the host's loop."""

    async def pid(self) -> int:
        return os.getpid()


class Sync:
    """Runs on the host's threads."""

    def pid(self) -> int:
        return os.getpid()


def private_kib(pid: int) -> int:
    """Memory that is this process's alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


async def once(scope: fray.Scope, cls: type, count: int) -> tuple[float, float, float]:
    """Milliseconds to the first answers, KiB per actor in the host, KiB per actor here."""
    host = await scope.create_host()
    probe = await host.create_actor(cls)
    pid, here = await probe.pid(), os.getpid()
    before, own = private_kib(pid), private_kib(here)
    began = time.perf_counter()
    group = await host.create_actors(cls, count=count)
    for answer in [handle.pid.start() for handle in group]:
        await answer
    took_ms = 1e3 * (time.perf_counter() - began)
    return took_ms, (private_kib(pid) - before) / count, (private_kib(here) - own) / count


async def main(rounds: int) -> None:
    async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
        for count in (100, 1_000):
            for cls in (Async, Sync):
                seen = []
                for _ in range(rounds):
                    async with cluster.open_scope("round") as scope:
                        seen.append(await once(scope, cls, count))
                took, there, here = (statistics.median(column) for column in zip(*seen, strict=True))
                low = min(row[0] for row in seen)
                print(
                    f"{count:>5} {cls.__name__.lower():<6} first answers {took:7.1f} ms (best {low:.1f}), "
                    f"{there:.1f} KiB each in the host, {here:.1f} KiB each in the driver",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    trio.run(main, parser.parse_args().rounds)
