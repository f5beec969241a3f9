"""Whole runs on the simulated cluster, with faults of every part."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from attrs import evolve

from fray.testing.seed import Trace
from tests.rl.actor_simulation import ROLES, PlannedFault, draw_plan, run_seed, summary
from tests.rl.simulated_model import solve

BY_DEFAULT = 6
SEEDS = 40
FOUND = (24, 163, 239, 273)
"""Seeds that found a defect: a trainer that is lost in the last save; two coordinators that wrote to one journal, also
when the older one starts again; tasks of an answer that was lost."""
MORE = [seed for seed in range(BY_DEFAULT, SEEDS) if seed not in FOUND]
RANDOM_SEEDS = 2
"""Seeds that are others each time, with ``--all``."""
FIRST_RANDOM = 10_000


@pytest.mark.parametrize(
    "seed", [*range(BY_DEFAULT), *FOUND, *(pytest.param(seed, marks=pytest.mark.full) for seed in MORE)]
)
def test_a_run_with_faults_keeps_every_promise(seed: int) -> None:
    result = run_seed(seed)
    assert not result.breaches, summary(result)
    assert result.happened["update"] >= 6, summary(result)


@pytest.mark.full
@pytest.mark.parametrize("number", range(RANDOM_SEEDS))
def test_a_run_of_a_random_seed_keeps_every_promise(number: int, pytestconfig: pytest.Config) -> None:
    first = FIRST_RANDOM + int(pytestconfig.getoption("hypothesis_seed")) % 1_000_000
    test_a_run_with_faults_keeps_every_promise(first + number)


def test_each_part_of_a_run_is_killed_by_the_faults_that_are_drawn() -> None:
    plan = draw_plan(random.Random(0))
    faults = tuple(PlannedFault(4.0 + 3 * number, f"kill {role}", 0.0, number) for number, role in enumerate(ROLES))
    result = run_seed(0, plan=evolve(plan, faults=faults))
    assert not result.breaches, summary(result)
    assert {name for name in result.happened if name.startswith("kill ")} == {fault.kind for fault in faults}


@pytest.mark.parametrize("seed", [4, 6, 7, 8])
def test_the_newest_table_of_servers_counts_when_several_wait_for_the_coordinator(seed: int) -> None:
    # Without a controller nothing that dies is started again: its only server is suspect, then dead, and stale when the
    # coordinator is back.
    plan = draw_plan(random.Random(seed))
    faults = (
        PlannedFault(4.0, "stop controller", 10.0, 0),
        PlannedFault(5.3, "kill InferenceServer", 0.0, 1),
        PlannedFault(5.31, "kill Coordinator", 0.0, 2),
    )
    options = {**plan.options, "inference_servers": 1, "min_servers": 1, "liveness_s": 4.0}
    result = run_seed(seed, plan=evolve(plan, options=options, faults=faults))
    assert not result.breaches, summary(result)
    assert result.happened["kill Coordinator"] == result.happened["stop controller"] == 1, summary(result)


async def solve_late(task: dict[str, Any], llm: Any) -> Any:
    await trio.sleep(task.get("late_s", 0.0))
    return await solve(task, llm)


def test_the_last_version_is_validated_though_trainer_and_server_die_after_the_last_update() -> None:
    plan = draw_plan(random.Random(0))
    options = {
        **plan.options,
        "rollout": solve_late,
        "episode": "sample",
        "inference_servers": 1,
        "min_servers": 1,
        "weight_sync": "memory",
        "validation_data": [{"number": 0, "late_s": 100.0}],
        "validate_freq": 2,
    }
    faults = (PlannedFault(60.0, "kill TrainerProcess", 0.0, 0), PlannedFault(70.0, "kill InferenceServer", 0.0, 1))
    result = run_seed(0, plan=evolve(plan, options=options, steps=2, faults=faults))
    assert not result.breaches, summary(result)
    assert sum("Process-" in line or "Server-" in line for line in result.lines) == 2, result.lines
    assert "2 updates" in result.lines[-1]
    assert "1 validations" in result.lines[-1]


def test_the_same_seed_gives_the_same_run_to_the_last_byte() -> None:
    first, second = Trace(keep=True), Trace(keep=True)
    run_seed(1, trace=first)
    run_seed(1, trace=second)
    assert first.kept is not None
    assert second.kept is not None
    for number, (one, other) in enumerate(zip(first.kept, second.kept, strict=False)):
        assert one == other, f"entry {number} differs"
    assert first.digest == second.digest
