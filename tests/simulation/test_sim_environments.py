"""Environments that are slow or impossible to make, while machines and controllers come and go."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from fray.model.environment import EnvironmentSpec
from fray.testing.sim_environments import BROKEN, SimEnvironments
from tests.simulation.run import run_seed
from tests.simulation.scenario_plans import direct_plan


@pytest.mark.parametrize("seed", range(3))
def test_an_environment_that_cannot_be_made_is_never_retried(seed: int) -> None:
    faults = [
        (1.5, "crash controller", 2.0),
        (5.2, "restart node", 1.0),
        (8.4, "cut off", 4.0),
        (14.6, "kill machine", 5.0),
        (20.5, "break connections", 0.0),
    ]
    results = run_seed(seed, plan=direct_plan(["packaged job"] * 25, faults))
    assert not results.breaches, results.breaches
    assert sum(results.faults.values()) >= 4


def test_a_machine_makes_each_environment_once_and_a_broken_one_again_for_each_job() -> None:
    one, broken = EnvironmentSpec(pip_packages=("alpha",)), EnvironmentSpec(pip_packages=(BROKEN,))

    async def main() -> SimEnvironments:
        environments = SimEnvironments(random.Random(1))
        results: list[str] = []

        async def ask(spec: EnvironmentSpec) -> None:
            results.append(await environments.prepare(spec))

        async with trio.open_nursery() as nursery:
            for spec in (one, one, one, broken, broken, EnvironmentSpec(python="3.11")):
                nursery.start_soon(ask, spec)
        assert sorted(results)[:4] == [""] * 4
        assert all(BROKEN in text for text in sorted(results)[4:])
        return environments

    assert trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)).built == [one]
