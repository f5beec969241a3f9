"""Waits that do not end are violations, and say why: the chain from the waiter to the part that does not move on."""

from __future__ import annotations

from typing import Any

import pytest

from fray.node.membership import ClusterMembership
from fray.runtime.controller_client.client import ControllerClient
from fray.scheduler.pool.pool import MachinePool
from tests.simulation.run import run_seed, summary
from tests.simulation.scenario import ENDED_WITHIN_S
from tests.simulation.scenario_plans import direct_plan
from tests.simulation.shrink import kind_of

Patch = pytest.MonkeyPatch


def waits(*acts: str) -> tuple[str, ...]:
    """Return the chain of causes of the first act that still waits."""
    result = run_seed(1, plan=direct_plan(acts, []))
    first = next(breach for breach in result.breaches if breach.promise == "P3")
    assert first.time <= len(acts) + ENDED_WITHIN_S + 1
    assert kind_of(first) == f"P3: still waits: {acts[0]} # of # begun at #"
    assert f"    because {first.causes[0]}\n" in summary(result) + "\n"
    return first.causes


def test_a_waiter_that_was_not_notified_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ControllerClient, "_on_notice", lambda *arguments: None)
    (cause,) = waits("value job")
    assert cause.startswith("a0-")
    assert cause.endswith("(succeeded) has ended, of which the waiter has not heard")


def test_a_node_that_starts_nothing_is_named(monkeypatch: Patch) -> None:
    def without_starts(self: Any, action: Any) -> None:
        if type(action).__name__ != "Start":
            really(self, action)

    really = ClusterMembership._act
    monkeypatch.setattr(ClusterMembership, "_act", without_starts)
    job, attempt, node = waits("value job")
    assert job.endswith(" is starting")
    assert " is desired on m" in attempt
    assert attempt.endswith(", which is alive")
    assert node.endswith(" does not hold it")


def test_a_job_that_is_never_placed_says_what_it_waits_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr(MachinePool, "place", lambda *arguments, **named: None)
    (cause,) = waits("value job")
    assert " has been queued for 2" in cause


def test_a_chain_reaches_the_jobs_below(monkeypatch: Patch) -> None:
    def without_starts_below(self: Any, action: Any) -> None:
        if type(action).__name__ != "Start" or "below" not in action.desired.spec.name:
            really(self, action)

    really = ClusterMembership._act
    monkeypatch.setattr(ClusterMembership, "_act", without_starts_below)
    chain = waits("lent CPUs")
    assert chain[0].endswith(" is running")
    assert chain[2].startswith("its process lives since ")
    assert chain[-1].endswith(" does not hold it")
    assert any(line.startswith("a0.below-") for line in chain)
