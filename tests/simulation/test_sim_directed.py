"""Directed scenarios have what random ones have too seldom; where that is handled wrongly, they find it."""

from __future__ import annotations

import pytest

import fray.controller.serve
from fray.controller.accepted_tokens import AcceptedTokens
from fray.controller.connections.node import NodeConnection
from fray.testing.rare_faults import RARE_FAULTS
from fray.testing.sim_cluster import SimController
from tests.simulation.directed_plans import DIRECTED, draw_directed
from tests.simulation.run import run_seed, summary
from tests.simulation.scenario import ScenarioResult

Patch = pytest.MonkeyPatch
LONG = ("changing cloud", "hour of suspend", "lost units")


def run(name: str, seed: int = 0) -> ScenarioResult:
    return run_seed(seed, plan=draw_directed(seed, name))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LONG else name for name in DIRECTED]
)
def test_every_promise_holds_in_a_directed_scenario(name: str) -> None:
    result = run(name)
    assert not result.breaches, summary(result, name)
    assert result.faults, summary(result, name)


def test_every_rare_fault_is_in_a_directed_scenario() -> None:
    planned = {fault.kind for name in DIRECTED for seed in range(20) for fault in draw_directed(seed, name).faults}
    assert set(RARE_FAULTS) <= planned


def test_a_restored_store_gives_up_attempts_of_each_phase() -> None:
    counts = run("restored store").coverage + run("restored store", 1).coverage
    for phase in ("starting", "running", "stopping"):
        assert counts[f"attempt: {phase} + absent"], phase
    assert not counts["attempt: running + starting"], "what ended since the backup was started again"


@pytest.mark.full
def test_half_a_slice_is_given_up_in_each_phase_and_not_taken_from_its_jobs() -> None:
    counts = [run("half slices", seed).coverage for seed in range(12)]
    for phase in ("wanted", "asked", "seen"):
        assert any(each[f"unit: {phase} + closed"] for each in counts), phase


def test_an_attempt_that_ended_since_the_backup_and_is_started_again_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(NodeConnection, "_was_forgotten", lambda self, desired: False)
    found = [breach.text for breach in run("restored store", 1).breaches if breach.promise == "P4"]
    assert any("was started again" in text for text in found), found


def test_callers_that_were_stopped_send_calls_again_to_a_host_that_lives() -> None:
    assert run("sleeping callers").coverage["use: call sent again"]


def test_a_clock_that_stands_still_after_a_restart_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fray.controller.serve, "continued_clock", lambda clock, saved: clock)
    found = [str(breach) for breach in run("other clock").breaches if breach.promise == "P3"]
    assert any("still waits: stumbling job" in text and "restarts in" in text for text in found), found


def test_a_controller_that_never_reads_its_new_token_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(AcceptedTokens, "refresh", lambda self: None)
    assert run("replaced token").breaches


def test_a_controller_that_serves_with_a_full_disk_is_found(monkeypatch: Patch) -> None:
    async def start(self: SimController) -> bool:
        self.is_disk_full = False
        return await really(self)

    really = SimController.try_to_start
    monkeypatch.setattr(SimController, "try_to_start", start)
    assert any("on a full disk" in breach.text for breach in run("full disk").breaches)
