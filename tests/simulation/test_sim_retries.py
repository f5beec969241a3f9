"""Retries, exit codes, templates and shared names in simulation; each violated rule is found."""

from __future__ import annotations

import pytest

from fray.scheduler.jobs import retries, submit, transitions
from tests.simulation.run import run_seed
from tests.simulation.scenario import ScenarioResult
from tests.simulation.scenario_plans import ScenarioPlan, direct_plan

Patch = pytest.MonkeyPatch
KINDS = ("stumbling job", "ruled program", "template", "adopted job", "job of an id", "gang that breaks")


def breaches(result: ScenarioResult, promise: str) -> list[str]:
    return [breach.text for breach in result.breaches if breach.promise == promise]


def calm(*acts: str) -> ScenarioPlan:
    return direct_plan(acts, [], every_s=0.3)


def test_without_faults_no_promise_is_broken_and_a_seed_is_one_scenario() -> None:
    first, second = (run_seed(1, plan=calm(*KINDS * 4), gone_within_s=40) for _ in range(2))
    assert first.breaches == ()
    assert first.digest == second.digest  # jitter comes from the scheduler, not from a generator


def test_no_promise_is_broken_while_machines_and_the_controller_are_killed() -> None:
    faults = [
        (2.0, "kill process", 1.0),
        (3.0, "crash at save", 1.0),
        (5.0, "kill machine", 5.0),
        (7.0, "cut off", 5.0),
    ]
    assert run_seed(2, plan=direct_plan(KINDS * 6, faults, every_s=0.3)).breaches == ()


def test_more_retries_than_a_budget_has_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(retries, "is_within_limit", lambda *arguments: True)
    assert any(
        "failure retries" in text for text in breaches(run_seed(1, plan=calm(*["stumbling job"] * 8)), "invariant")
    )


def test_an_exit_rule_that_is_not_applied_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(transitions, "apply_exit_rule", lambda spec, outcome: outcome)
    assert any("ignore" in text for text in breaches(run_seed(1, plan=calm(*["ruled program"] * 6)), "P2"))


def test_a_crash_loop_that_is_not_reported_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(transitions, "crash_loop_text", lambda job: "")
    assert any("its events are" in text for text in breaches(run_seed(1, plan=calm(*["stumbling job"] * 8)), "P2"))


def test_a_prefix_that_ends_no_job_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(submit, "matching_jobs", lambda state, event: iter(()))
    result = run_seed(1, plan=calm(*["template"] * 4))
    assert breaches(result, "P1") or breaches(result, "P3")


def test_a_job_that_is_launched_beside_the_one_to_adopt_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(submit, "_living_holder", lambda state, spec: None)
    assert any("live together" in text for text in breaches(run_seed(1, plan=calm(*["adopted job"] * 8)), "P4"))
