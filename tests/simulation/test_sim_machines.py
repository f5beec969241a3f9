"""Machines out of service in simulation: they come back, and each violated rule is found."""

from __future__ import annotations

import pytest

from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.nodes import drain
from fray.scheduler.state.rows import Node
from fray.testing.seed import Trace
from tests.simulation.run import run_seed
from tests.simulation.scenario import ScenarioResult
from tests.simulation.scenario_plans import ScenarioPlan, direct_plan

JOBS = ("value job", "program", "sync job", "background job")
BAD: ScenarioPlan = direct_plan(JOBS * 20, [(5.0, "bad machine", 60.0)], every_s=0.7)
DRAINED: ScenarioPlan = direct_plan(
    ("make an actor", "background job", "gang", "value job") * 6, [(4.0, "out of service", 8.0)] * 6, every_s=1.0
)


def broken(result: ScenarioResult) -> list[str]:
    return [breach.text for breach in result.breaches if breach.promise == "invariant"]


def happened(trace: Trace, what: str) -> int:
    return sum(f"what='{what}'" in line for line in trace.kept or ())


def test_a_bad_machine_is_quarantined_and_its_probe_returns_it_to_service() -> None:
    trace = Trace(keep=True)
    result = run_seed(1, plan=BAD, trace=trace)
    assert result.breaches == ()
    assert happened(trace, "node in quarantine") >= 1
    assert happened(trace, "node back in service") >= 1


def test_drained_machines_break_no_promise() -> None:
    trace = Trace(keep=True)
    result = run_seed(1, plan=DRAINED, trace=trace)
    assert result.breaches == ()
    assert happened(trace, "preempted") >= 1
    assert happened(trace, "node uncordoned") >= 1


def test_a_drain_that_leaves_jobs_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_evict", lambda *arguments: None)
    assert any("which is drained" in text for text in broken(run_seed(1, plan=DRAINED)))


def test_jobs_on_a_closed_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_schedulable(node: Node) -> bool:
        return node.phase is NodePhase.ALIVE and node.has_reported and not node.stray_attempts

    monkeypatch.setattr(Node, "is_schedulable", property(is_schedulable))
    assert any("which is cordoned since" in text for text in broken(run_seed(1, plan=DRAINED)))
    # A job has to be placed just then: not with every seed.
    assert any("in quarantine since" in text for seed in range(1, 4) for text in broken(run_seed(seed, plan=BAD)))
