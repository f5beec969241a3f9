"""The scheduler benchmark: its loads run, and no schedule beats the bound that it computes."""

from __future__ import annotations

import random
import statistics
import sys

import pytest

from bench.schedule.__main__ import burst, quality, restart, starve, steady
from bench.schedule.baselines import first_fit, fluid
from bench.schedule.fleet import Fleet
from bench.schedule.loads import backlog, day, odd
from fray.testing.invariants.check import check


@pytest.mark.parametrize("seed", range(3))
def test_all_of_a_load_runs_by_the_rules_and_within_the_bound(seed: int) -> None:
    works = day(300, 8, random.Random(seed))
    fleet = Fleet(8)
    for work in works:
        fleet.happen_until(work.arrives_s)
        fleet.launch([work])
        assert not check(fleet.state)
    until = works[-1].arrives_s
    bound = fluid(works, 8, until) + 1e-9
    assert fleet.utilisation(until) <= bound
    assert first_fit(works, 8).utilisation(8, until) <= bound
    fleet.finish()
    assert len(fleet.waited_s) == len(works)
    assert not check(fleet.state)
    assert not fleet.busy_milli


def test_the_probes_report_what_they_say() -> None:
    assert burst(4, 60, 1)["placements"] == 60
    assert steady(4, 200, 1, events=50)["queued"] >= 100
    assert all(window["steps"] > 10 for window in starve(10, 200, 1).values())
    assert restart(4, 100, 1)["living"] == 100
    assert quality(4, 60, 1)["started"] == 60


def test_an_end_costs_no_look_at_every_kind_of_what_waits() -> None:
    few, many = calls_of_an_end(200), calls_of_an_end(2000)
    assert many < 3 * few, (few, many)


def calls_of_an_end(shapes: int) -> float:
    """Functions called for the end of a task and what takes its place: the median of some."""
    rng = random.Random(1)
    fleet = Fleet(10)
    fleet.launch([odd(f"w{number}", rng, 0.0) for number in range(shapes)])
    counts: list[int] = []
    while len(counts) < 60:
        counts.append(0)

        def called(_frame: object, event: str, _arg: object) -> None:
            counts[-1] += event == "call"

        sys.setprofile(called)
        try:
            fleet.happen()
        finally:
            sys.setprofile(None)
    return statistics.median(counts)


def test_a_load_is_the_same_for_the_same_seed() -> None:
    assert list(backlog(50, random.Random(7))) == list(backlog(50, random.Random(7)))
