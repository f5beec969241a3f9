"""Orders of operators in scenarios: nodes that leave, other policies, other limits of groups.

Their checks fail when the product forgets an order.
"""

from __future__ import annotations

from typing import Any

import pytest

from fray.controller.connections.node import NodeConnection
from fray.node.membership import ClusterMembership
from fray.scheduler import step
from fray.scheduler.autoscaler import plan as autoscaler
from fray.scheduler.effects import PolicyChanged
from tests.simulation.run import run_seed, summary
from tests.simulation.scenario_plans import ScenarioPlan, direct_plan

Patch = pytest.MonkeyPatch
# Jobs begin all the while: a node that leaves within a second or so gets one in some seeds only.
LEAVING = direct_plan(
    ["background job"] * 120, [(10.0 + 23 * number, "node leaves", 1.0) for number in range(4)], every_s=0.8
)
POLICIES = direct_plan(
    ["crowd"] * 5, [(40.0 + 30 * n, "policy changed", 8.0) for n in range(4)], cloud=True, every_s=6.0
)
SCALED = direct_plan(["crowd"] * 5, [(40.0 + 30 * n, "group scaled", 8.0) for n in range(4)], cloud=True, every_s=6.0)
PLANS = {"leaving": LEAVING, "policies": POLICIES, "scaled": SCALED}
SEEDS = 8


def broken(plan: ScenarioPlan, promise: str, text: str) -> bool:
    """Return whether one of a few seeds breaks the promise with this text."""
    results = (run_seed(seed, plan=plan) for seed in range(SEEDS))
    return any(breach.promise == promise and text in breach.text for result in results for breach in result.breaches)


@pytest.mark.parametrize("name", PLANS)
def test_orders_of_operators_break_no_promise(name: str) -> None:
    for seed in (0, 1):
        result = run_seed(seed, plan=PLANS[name])
        assert not result.breaches, summary(result)
        assert result.faults, summary(result)


def test_a_node_that_does_not_say_that_it_leaves_gets_work(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ClusterMembership, "notify", lambda *arguments: None)
    assert broken(LEAVING, "P6", "which was asked to leave")


def test_a_goodbye_that_is_lost_leaves_the_node_on_record(monkeypatch: Patch) -> None:
    monkeypatch.setattr(NodeConnection, "mark_dead", lambda *arguments: None)
    assert broken(LEAVING, "P3", "has left, and is silent")


def test_a_policy_that_is_not_read_is_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setitem(step.HANDLERS, PolicyChanged, lambda *arguments: None)
    assert broken(POLICIES, "P7", "is not the controller's")


def test_groups_of_an_old_policy_are_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setitem(step.HANDLERS, PolicyChanged, lambda state, event, out: state.set_policy(event.policy))
    assert broken(POLICIES, "cloud", "its maximum is")


def test_units_beyond_a_lowered_maximum_are_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(autoscaler, "_close_surplus", lambda *arguments: None)
    assert broken(SCALED, "cloud", "its maximum is")


def test_a_raised_minimum_without_units_is_noticed(monkeypatch: Patch) -> None:
    def request_only_at_first(state: Any, out: Any, config: Any) -> None:
        if state.now - 1_700_000_000 < 30:
            really(state, out, config)

    really = autoscaler._request_floor
    monkeypatch.setattr(autoscaler, "_request_floor", request_only_at_first)
    assert broken(SCALED, "cloud", "its min is")
