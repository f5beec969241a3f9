"""The promises P1 to P7 hold in random scenarios of whole clusters: 200 operations and 10 faults each.

The default suite runs the first 6 seeds, ``--all`` the first 12. `make test-all` adds 200 fresh ones; `make campaign`
runs 1,000 and looks for leaks in long runs.
"""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import evolve

from fray.testing.seed import Seed
from tests.simulation.run import run_seed, summary
from tests.simulation.scenario_plans import ACTS, FAULTS, draw_plan

BY_DEFAULT = 6
SEEDS = 12
CAMPAIGN = 1_000
KINDS_OF_FAULTS = 6
"""Least number of kinds that happen in a scenario; 15 are drawn, and some find nothing to break."""
CALM_WITHIN_S = 12.0
"""P1 without faults: termination steps of five seconds, a cleanup that outlasts them, and the latency."""


@pytest.mark.parametrize(
    "seed", [*range(BY_DEFAULT), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(BY_DEFAULT, SEEDS))]
)
def test_every_promise_holds_in_a_random_scenario(seed: int) -> None:
    result = run_seed(seed)
    assert not result.breaches, summary(result)
    assert result.operations.total() >= 200, summary(result)
    assert result.faults.total() >= 10, summary(result)
    assert len(result.faults) >= KINDS_OF_FAULTS, summary(result)


@pytest.mark.parametrize("seed", [1000, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1001, 1005))])
def test_nothing_fails_in_a_random_scenario_without_faults(seed: int) -> None:
    plan = evolve(draw_plan(Seed(seed).stream("plan"), acts=80), faults=())
    result = run_seed(seed, plan=plan, gone_within_s=CALM_WITHIN_S)
    assert not result.breaches, summary(result)
    assert not result.outcomes, summary(result)


def test_every_kind_of_act_and_fault_is_tried_by_the_seeds_of_the_campaign() -> None:
    plans = [draw_plan(Seed(seed).stream("plan")) for seed in range(CAMPAIGN)]
    acts = Counter(act.kind for plan in plans for act in plan.acts)
    faults = Counter(fault.kind for plan in plans for fault in plan.faults)
    assert min(acts[kind] for kind in ACTS) >= 100
    assert min(faults[kind] for kind in FAULTS) >= 100
    assert any(fault.span_s > 300 for plan in plans for fault in plan.faults), "no fault outlasts the lease"
    assert any(plan.on_disk for plan in plans)
    assert any(plan.declares for plan in plans)
