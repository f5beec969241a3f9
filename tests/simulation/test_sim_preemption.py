"""Time limits, back-fill and preemption in simulation; and each violated rule is found."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from fray.scheduler import step
from fray.scheduler.preemption import preemption
from tests.simulation.run import run_seed
from tests.simulation.scenario_plans import direct_plan

Patch = pytest.MonkeyPatch
WAITS = ["who goes first"] * 16
"""Small jobs every so often while the shields of those before them expire."""
STORY = [*["long batch"] * 8, "limited job", *WAITS, "production gang", "gap filler", "production gang", "limited job"]


def broken(*acts: str, machines: int = 2, every_s: float = 4.0) -> str:
    result = run_seed(1, plan=direct_plan(acts, [], machines=machines, every_s=every_s))
    return "\n".join(map(str, result.breaches))


def test_batch_jobs_are_preempted_and_no_promise_is_broken(monkeypatch: Patch) -> None:
    taken: list[Any] = []
    really = preemption._preempt_victims
    monkeypatch.setattr(preemption, "_preempt_victims", lambda *said: (taken.append(said[3].victims), really(*said)))
    result = run_seed(1, plan=direct_plan(STORY, [], machines=2, every_s=4.0))
    assert result.breaches == ()
    assert taken
    assert sum("production gang: value 5" in line for line in result.lines) == 2


def test_no_promise_is_broken_while_the_controller_crashes_meanwhile() -> None:
    faults = [(100.5, "crash controller", 2.0), (104.0, "crash at save", 1.0), (109.0, "break connections", 0.0)]
    assert run_seed(2, plan=direct_plan(STORY, faults, machines=2, every_s=4.0)).breaches == ()


def forget_limits(state: Any, out: Any) -> None:
    """Drop the time limits of overdue jobs instead of ending them."""
    while state.time_limits and state.time_limits[0][0] <= state.now:
        job = state.jobs[state.time_limits.pop(0)[2]]
        job.spec = evolve(job.spec, time_limit_s=None)


def test_a_job_that_is_not_ended_at_its_limit_is_found(monkeypatch: Patch) -> None:
    overdue, *others = step.RULES_FOR_ATTEMPTS
    monkeypatch.setattr(step, "RULES_FOR_ATTEMPTS", ((overdue[0], forget_limits), *others))
    assert "has expired at" in broken("limited job", "gap filler")
