"""Promises of the scheduler in simulation: bands, limits, slices, quotas, reservations; each violated rule is found."""

from __future__ import annotations

from typing import Any

import pytest

from fray.model.policy.policy import Amounts, TenantPolicy
from fray.node.membership import ClusterMembership
from fray.node.reconcile import Stop
from fray.scheduler import step
from fray.scheduler.autoscaler import plan as scaling
from fray.scheduler.autoscaler.bin_packing import PackingEstimate
from fray.scheduler.pool import pool
from fray.scheduler.preemption import preemption
from fray.scheduler.queue import quotas
from fray.scheduler.state.machine_tables import RESERVATION
from fray.scheduler.state.tables import Tables
from tests.simulation.run import run_seed
from tests.simulation.scenario import ScenarioResult
from tests.simulation.scenario_plans import ScenarioPlan, direct_plan

Patch = pytest.MonkeyPatch
ANYTHING = TenantPolicy()
CROWDED = direct_plan(
    ["crowd", "crowd", "crowded gang", "production gang"] * 2, [], machines=3, every_s=4.0, terms=ANYTHING
)
LIMITED = direct_plan(["limited job"] * 4, [])
RESERVED = direct_plan(["open reservation", "kept units", "expiring reservation", "crowd"] * 5, [], every_s=0.7)
FEW_DEVICES = TenantPolicy(quota=Amounts(devices={"gpu": 4}), borrow=False)
QUOTAS = direct_plan(["device gang"] * 8, [], every_s=0.5, terms=FEW_DEVICES)


def broken(plan: ScenarioPlan, seed: int = 1) -> str:
    return "\n".join(str(breach) for breach in run(plan, seed).breaches)


def run(plan: ScenarioPlan, seed: int = 1) -> ScenarioResult:
    return run_seed(seed, plan=plan)


def test_a_production_gang_preempts_and_no_promise_is_broken() -> None:
    result = run(CROWDED)
    assert result.breaches == ()
    assert result.events["preempts"] >= 2
    assert result.events["preempted"] >= 4


def test_claims_of_two_applicants_are_both_held() -> None:
    """The quota of their user holds them back while their victims end: each alone would leave room for a third one."""
    quota = TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=Amounts(cpu_milli=6000))
    crowd = ["crowd", "crowd", "crowded gang", "production gang"] * 2
    assert "claims more of" not in broken(direct_plan(crowd, [], machines=3, every_s=4.0, terms=quota))


def test_a_job_that_is_preempted_again_and_again_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(preemption, "protection_reason", lambda *arguments: "")
    plan = direct_plan(["crowd", "production gang"] + ["production gang"] * 24, [], machines=1, every_s=1.5)
    assert "the limit is 2" in broken(plan)


def test_capacity_held_without_an_applicant_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tables, "drop_claim", lambda *arguments: None)
    assert "has a claim, and does not wait" in broken(CROWDED)


def test_a_job_ends_at_its_time_limit() -> None:
    result = run(LIMITED)
    assert result.breaches == ()
    assert result.events["time limit"] >= 3


def test_a_job_that_runs_beyond_its_time_limit_is_found(monkeypatch: Patch) -> None:
    def ignoring_stops(self: ClusterMembership, action: Any) -> None:
        if not isinstance(action, Stop):
            really(self, action)

    really = ClusterMembership._act
    monkeypatch.setattr(ClusterMembership, "_act", ignoring_stops)
    assert "the time limit of a0 has expired" in broken(direct_plan(["limited job"], []))


def test_no_tenant_exceeds_its_quota_and_what_it_may_borrow() -> None:
    result = run(QUOTAS)
    assert result.breaches == ()
    assert sum("value 9" in line for line in result.lines) >= 2


def test_a_quota_that_is_overspent_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(quotas, "exceeded_resource", lambda *arguments: "")
    assert "more than its quota and what it may borrow" in broken(QUOTAS)


def test_reservations_come_and_go_and_no_promise_is_broken() -> None:
    result = run(RESERVED)
    assert result.breaches == ()
    assert result.events["held"] >= 5
    assert result.events["reservation expiring"] >= 2


def test_a_reservation_that_never_ends_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setitem(step.TIMER_HANDLERS, RESERVATION, lambda *arguments: None)  # type: ignore[arg-type]
    assert "P3" in broken(RESERVED)


def test_capacity_that_is_allocated_twice_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(pool.Machine, "shift", lambda *arguments: None)
    text = broken(direct_plan(["crowd"] * 3, [], machines=1))
    assert "P6" in text
    assert "is overcommitted by" in text


def test_more_machines_than_the_maximum_are_found(monkeypatch: Patch) -> None:
    def roomy(*arguments: Any, **named: Any) -> PackingEstimate:
        return PackingEstimate(*arguments, **named | {"unit_limits": dict.fromkeys(named["unit_limits"], 9)})

    monkeypatch.setattr(scaling, "PackingEstimate", roomy)
    monkeypatch.setattr(scaling, "_close_surplus", lambda *arguments: None)  # would close the surplus
    plan = direct_plan(["crowd"] * 12, [], machines=1, cloud=True, every_s=0.1, terms=ANYTHING)
    assert "units at most" in broken(plan)
