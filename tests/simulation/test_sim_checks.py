"""The checks of the simulation can fail: each promise is broken on purpose, by one change, and the breach is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

import fray.api.scope
import fray.runtime.controller_client.client
import fray.scheduler.lifecycle
from fray.controller.store import Store
from fray.model.specs import AttemptSpec, EndReason
from fray.node.config import NodeConfig
from fray.node.health.metrics_report import MetricsReporter
from fray.node.membership import ClusterMembership
from fray.runtime.calls.host_loss import LossAction
from fray.scheduler.jobs import submit, transitions
from tests.simulation.run import run_seed
from tests.simulation.scenario import ScenarioResult
from tests.simulation.scenario_plans import ScenarioPlan, direct_plan
from tests.simulation.workloads import Boom

CALM_S = 12.0
Patch = pytest.MonkeyPatch


def breaches(result: ScenarioResult, promise: str) -> list[str]:
    return [breach.text for breach in result.breaches if breach.promise == promise]


def calm(*acts: str) -> ScenarioPlan:
    return direct_plan(acts, [])


def test_without_faults_no_promise_is_broken() -> None:
    kinds = ("make an actor", "calls", "failing scope", "family", "gang", "cancelled scope", "cancelled call", "names")
    kinds += ("actor of a job",) * 4
    result = run_seed(1, plan=calm(*kinds, "terminate", "background job", "scoped actor"), gone_within_s=CALM_S)
    assert result.breaches == ()
    assert not result.outcomes


def test_a_node_that_does_not_stop_attempts_breaks_p1(monkeypatch: Patch) -> None:
    def ignoring_stops(self: Any, action: Any) -> None:
        if type(action).__name__ not in ("Stop", "Kill"):
            really(self, action)

    really = ClusterMembership._act
    monkeypatch.setattr(ClusterMembership, "_act", ignoring_stops)
    result = run_seed(1, plan=calm("cancelled scope", "cancelled scope"), gone_within_s=CALM_S)
    assert any("was ended" in text for text in breaches(result, "P1"))


def test_a_scheduler_that_forgets_children_of_ended_attempts_breaks_p1(monkeypatch: Patch) -> None:
    monkeypatch.setattr(transitions, "stop_owned", lambda *arguments: None)
    plan = direct_plan(["family"] * 12, [(4.0, "kill process", 1.0), (6.0, "kill process", 1.0)], every_s=0.7)
    result = run_seed(1, plan=plan, gone_within_s=CALM_S)
    assert breaches(result, "invariant") or breaches(result, "P1")


def test_an_actor_that_outlives_the_job_that_owns_it_breaks_p1(monkeypatch: Patch) -> None:
    def only_of_attempts(state: Any, out: Any, owner: str, reason: str) -> None:
        if owner not in state.jobs:
            really(state, out, owner, reason)

    really = transitions.stop_owned
    monkeypatch.setattr(transitions, "stop_owned", only_of_attempts)
    result = run_seed(1, plan=calm("actor of a job", "background job"), gone_within_s=CALM_S)
    assert any("which owns it" in text for text in breaches(result, "invariant"))
    assert any(".own was ended" in text for text in breaches(result, "P1"))
    assert any("its job a0-" in text for text in breaches(result, "P1"))


def test_an_actor_of_a_job_that_ends_with_the_attempt_that_launched_it_breaks_p1(monkeypatch: Patch) -> None:
    def of_the_attempt(state: Any, out: Any, spec: Any, owner: str, root: str, session: str, parent: str) -> None:
        if spec.owned_by_job:
            spec, owner = evolve(spec, owned_by_job=False), state.sessions[session].owner
        really(state, out, spec, owner, root, session, parent)

    really = transitions.accept_job
    monkeypatch.setattr(submit, "accept_job", of_the_attempt)
    result = run_seed(1, plan=calm(*["actor of a job"] * 6), gone_within_s=CALM_S)
    assert any("its actor counted 1 of 3" in text for text in breaches(result, "P1"))


WATCHED = ("recovering job", "stalled job", "sick job") * 2


def test_stalled_and_unhealthy_jobs_end_as_they_should() -> None:
    result = run_seed(3, plan=calm(*WATCHED), gone_within_s=CALM_S)
    assert result.breaches == ()
    said = "\n".join(result.lines)
    assert "succeeded, stalled: True" in said
    assert "failure after 2 attempts" in said


def test_a_node_that_does_not_end_stalled_jobs_breaks_p1(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ClusterMembership, "fail_attempt", lambda *arguments: None)
    result = run_seed(1, plan=calm("stalled job"), gone_within_s=CALM_S)
    assert any("stalled at" in text for text in breaches(result, "P1"))


def test_a_node_that_loses_the_stacks_breaks_p10(monkeypatch: Patch) -> None:
    monkeypatch.setattr(MetricsReporter, "add_capture", lambda *arguments: None)
    result = run_seed(1, plan=calm("recovering job", "stalled job", "sick job", "recovering job"), gone_within_s=CALM_S)
    assert len(breaches(result, "P10")) >= 3


def test_a_scope_that_raises_something_else_breaks_p2(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fray.api.scope, "error_of", lambda record: Boom("another error"))
    result = run_seed(1, plan=calm("failing scope"))
    assert any("another error" in text for text in breaches(result, "P2"))


def test_a_lost_notice_breaks_p3(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fray.runtime.controller_client.client.ControllerClient, "_on_notice", lambda *arguments: None)
    result = run_seed(1, plan=calm("value job"))
    assert any("value job" in text for text in breaches(result, "P3"))


def test_a_call_that_is_repeated_on_its_own_breaks_p4(monkeypatch: Patch) -> None:
    import fray.runtime.calls.route as route

    monkeypatch.setattr(route, "on_host_lost", lambda **facts: LossAction.REPEAT)
    seen = _until("P4", lambda seed: direct_plan(
        ["make an actor"] * 4 + ["pipelined calls", "relayed call"] * 20,
        [(4.0 + number, "kill process", 0.1) for number in range(15)],
        every_s=0.4,
    ))  # fmt: skip
    assert seen


def test_an_attempt_that_is_started_twice_breaks_p4(monkeypatch: Patch) -> None:
    def twice(self: Any, desired: Any) -> None:
        really(self, desired)
        really(self, desired)

    really = ClusterMembership._start
    monkeypatch.setattr(ClusterMembership, "_start", twice)
    result = run_seed(1, plan=calm("value job"))
    assert any("was started again" in text for text in breaches(result, "P4"))


def test_a_node_that_keeps_its_attempts_beyond_the_lease_breaks_p5(monkeypatch: Patch) -> None:
    monkeypatch.setattr(NodeConfig, "patience_s", 1e9)
    faults = [(100.0 + number, "cut off", 350.0) for number in range(3)]
    plan = direct_plan(["make an actor"] * 30, faults, every_s=16.0)
    assert _until("P5", lambda seed: plan)


def test_a_node_that_allocates_another_device_breaks_p6(monkeypatch: Patch) -> None:
    def with_other_device(self: Any, *asked: Any) -> AttemptSpec:
        from attrs import evolve

        return evolve(really(self, *asked), devices=("gpu-0",))

    really = ClusterMembership._make_attempt_spec
    monkeypatch.setattr(ClusterMembership, "_make_attempt_spec", with_other_device)
    result = run_seed(1, plan=calm("device gang", "device gang", "gang", "gang"))
    assert any("gpu-0" in text for text in breaches(result, "P6"))


def test_a_store_that_loses_jobs_breaks_p7(monkeypatch: Patch) -> None:
    def without_jobs(self: Any, upserts: Any = (), *more: Any, **named: Any) -> None:
        really(self, [row for row in upserts if row[0] not in ("job", "attempt")], *more, **named)

    really = Store.save
    monkeypatch.setattr(Store, "save", without_jobs)
    plan = direct_plan(["detached job"] * 3, [(4.0, "crash controller", 1.0)])
    result = run_seed(1, plan=plan)
    assert any("not on record" in text for text in breaches(result, "P7"))


def test_an_error_that_no_fault_explains_is_a_breach(monkeypatch: Patch) -> None:
    monkeypatch.setitem(
        fray.scheduler.lifecycle.FINAL_STATE, EndReason.SUCCEEDED, fray.scheduler.lifecycle.JobState.FAILED
    )  # type: ignore[arg-type]
    result = run_seed(1, plan=calm("value job"))
    assert any("JobFailed" in text for text in breaches(result, "error"))


def _until(promise: str, plan: Callable[[int], ScenarioPlan]) -> list[str]:
    """Return the breaches of the first of a few seeds that has any."""
    for seed in range(6):
        found = breaches(run_seed(seed, plan=plan(seed)), promise)
        if found:
            return found
    return []
