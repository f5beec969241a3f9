"""Time limits, gaps and taken places in the simulation; and the rules about them, broken on purpose, are seen."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from fray.scheduler import step
from fray.scheduler.preemption import preemption
from tests.simulation.run import run_story
from tests.simulation.scenario_plans import direct_plan

Patch = pytest.MonkeyPatch
WAITS = ["who goes first"] * 16
"""Something small every so often while the shields of those before it end."""
STORY = [*["long batch"] * 8, "limited job", *WAITS, "production gang", "gap filler", "production gang", "limited job"]


def broken(*acts: str, machines: int = 2, every_s: float = 4.0) -> str:
    told = run_story(1, plan=direct_plan(acts, [], machines=machines, every_s=every_s))
    return "\n".join(map(str, told.breaches))


def test_batch_makes_room_and_nothing_is_broken(monkeypatch: Patch) -> None:
    taken: list[Any] = []
    really = preemption._preempt_victims
    monkeypatch.setattr(preemption, "_preempt_victims", lambda *said: (taken.append(said[3].victims), really(*said)))
    told = run_story(1, plan=direct_plan(STORY, [], machines=2, every_s=4.0))
    assert told.breaches == ()
    assert taken
    assert sum("production gang: value 5" in line for line in told.lines) == 2


def test_nothing_is_broken_while_the_controller_falls_in_the_midst_of_it() -> None:
    faults = [(100.5, "crash controller", 2.0), (104.0, "crash at save", 1.0), (109.0, "break connections", 0.0)]
    assert run_story(2, plan=direct_plan(STORY, faults, machines=2, every_s=4.0)).breaches == ()


def forget_limits(state: Any, out: Any) -> None:
    """In the place of ending those whose time is over."""
    while state.time_limits and state.time_limits[0][0] <= state.now:
        job = state.jobs[state.time_limits.pop(0)[2]]
        job.spec = evolve(job.spec, time_limit_s=None)


def test_a_job_that_is_not_ended_at_its_limit_is_seen(monkeypatch: Patch) -> None:
    overdue, *others = step.RULES_FOR_ATTEMPTS
    monkeypatch.setattr(step, "RULES_FOR_ATTEMPTS", ((overdue[0], forget_limits), *others))
    assert "was over at" in broken("limited job", "gap filler")
