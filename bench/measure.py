"""Helpers of the benchmarks: rounds of probes in turn, medians with their range, a table and a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio
import trio.lowlevel
from attrs import define, field, frozen

Probe = Callable[[float], Awaitable[Mapping[str, float]]]
"""Function that measures for about so many seconds and returns numbers by name and unit, such as ``p50_us``."""


@frozen
class Number:
    """Number over all rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)}–{_short(self.high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@define
class Results:
    """Numbers by probe and by name, an entry per round."""

    rounds: dict[str, dict[str, list[float]]] = field(factory=dict)

    def add(self, probe: str, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.rounds.setdefault(probe, {}).setdefault(name, []).append(value)

    def number(self, probe: str, name: str) -> Number:
        values = self.rounds[probe][name]
        return Number(statistics.median(values), min(values), max(values))

    def ratio(self, name: str, above: str, below: str, below_name: str | None = None) -> Number:
        """Return the ratio round by round, since both were measured side by side."""
        pairs = zip(self.rounds[above][name], self.rounds[below][below_name or name], strict=True)
        values = [a / b for a, b in pairs]
        return Number(statistics.median(values), min(values), max(values))

    def table(self) -> list[str]:
        width = max(map(len, self.rounds))
        return [
            f"{probe:<{width}}  " + "  ".join(f"{name} {self.number(probe, name)}" for name in numbers)
            for probe, numbers in self.rounds.items()
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            probe: {
                name: {"median": number.median, "min": number.low, "max": number.high, "rounds": values}
                for name, values in numbers.items()
                for number in [self.number(probe, name)]
            }
            for probe, numbers in self.rounds.items()
        }


async def take_turns(probes: Mapping[str, Probe], rounds: int, seconds: float) -> Results:
    """Run every probe once a round, each for ``seconds``, after a short round that is discarded."""
    for probe in probes.values():
        await probe(min(seconds, 0.1))
    results = Results()
    for _ in range(rounds):
        for name, probe in probes.items():
            results.add(name, await probe(seconds))
            await trio.lowlevel.checkpoint()
    return results


async def one_by_one(step: Callable[[], Awaitable[object]], seconds: float) -> dict[str, float]:
    """Measure the latency of ``step``, one at a time: ``p50_us``, ``p95_us``, ``p99_us``."""
    clock, times = time.perf_counter, []
    until = clock() + seconds
    now = clock()
    while now < until:
        await step()
        then, now = now, clock()
        times.append(now - then)
    return percentiles(times)


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Return ``p50_us``, ``p95_us``, ``p99_us`` of some times in seconds."""
    ordered = sorted(times_s)
    return {f"p{p}_us": 1e6 * ordered[len(ordered) * p // 100] for p in (50, 95, 99)}


async def by_the_lot(lot: Callable[[], Awaitable[int]], seconds: float) -> dict[str, float]:
    """Measure the rate of ``lot``, which returns the size of its batch: ``per_s``."""
    clock = time.perf_counter
    began, done = clock(), 0
    while clock() - began < seconds:
        done += await lot()
    return {"per_s": done / (clock() - began)}


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "trio": trio.__version__,
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def report(title: str, results: Results, ratios: Mapping[str, Number], json_file: Path | None) -> None:
    """Print the table and, if requested, write everything to a file."""
    about = machine()
    print(f"{title}: median (lowest–highest) of the rounds; {about['cpus']} CPUs, load {about['load']:.1f}")
    print("\n".join(results.table()))
    for name, number in ratios.items():
        print(f"{name}: {number}")
    sys.stdout.flush()
    if json_file is not None:
        data = {
            "title": title,
            "machine": about,
            "results": results.as_json(),
            "ratios": {
                name: {"median": number.median, "min": number.low, "max": number.high}
                for name, number in ratios.items()
            },
        }
        json_file.write_text(json.dumps(data, indent=1) + "\n")
