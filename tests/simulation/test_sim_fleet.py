"""Machines of providers in simulation: trouble with the cloud only costs time, and wrong handling is found."""

from __future__ import annotations

from typing import Any

import pytest

from fray.controller.provider_driver import ProviderDriver
from fray.scheduler.autoscaler import provider_events
from fray.testing.sim_cloud import SimCloud
from tests.simulation.run import run_seed
from tests.simulation.scenario_plans import direct_plan

WORK = ["background job", "value job", "gang", "background job"] * 10
TROUBLE = [
    (4.0, "cloud trouble", 20.0),
    (9.0, "crash controller", 3.0),
    (15.0, "machine taken away", 5.0),
    (20.0, "crash at save", 2.0),
    (25.0, "cloud trouble", 40.0),
    (30.0, "machine taken away", 5.0),
]


def broken(faults: list[tuple[float, str, float]] | None = None) -> str:
    plan = direct_plan(WORK, faults or [], machines=1, every_s=0.5, cloud=True)
    return "\n".join(breach.text for breach in run_seed(1, plan=plan).breaches)


def test_trouble_with_the_cloud_only_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clouds: list[SimCloud] = []
    monkeypatch.setattr(SimCloud, "aclose", _noted(clouds))
    result = run_seed(1, plan=direct_plan(WORK, TROUBLE, machines=1, every_s=0.5, cloud=True))
    assert result.breaches == ()
    assert len(clouds[0].made) >= 4, "machines came"
    assert len(clouds[0].living()) <= 2, "and went: the floor is what is left"


def _noted(clouds: list[SimCloud]) -> Any:
    async def aclose(self: SimCloud) -> None:
        clouds.append(self)

    return aclose


def test_a_machine_that_is_never_deleted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def delete(self: ProviderDriver, *arguments: object) -> None:
        pass

    monkeypatch.setattr(ProviderDriver, "_delete", delete)
    assert "is idle and has" in broken()


def test_a_death_that_the_provider_reported_and_the_scheduler_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [(8.0, "machine taken away", 5.0), (12.0, "machine taken away", 5.0), (16.0, "machine taken away", 5.0)]
    monkeypatch.setattr(provider_events, "mark_nodes_dead", lambda state, out, unit, why: None)
    assert broken(taken)
