"""Whole runs on the simulated cluster, with faults of every part."""

from __future__ import annotations

import pytest

from fray.testing.seed import Trace
from tests.rl.actor_simulation import run_seed, summary

BY_DEFAULT = 6
SEEDS = 40
FOUND = (163, 239)
"""Seeds that found a defect: two coordinators that wrote to one journal, also when the older one starts again."""


@pytest.mark.parametrize(
    "seed",
    [*range(BY_DEFAULT), *FOUND, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(BY_DEFAULT, SEEDS))],
)
def test_a_run_with_faults_keeps_every_promise(seed: int) -> None:
    result = run_seed(seed)
    assert not result.breaches, summary(result)
    assert result.happened["update"] >= 6, summary(result)


def test_the_same_seed_gives_the_same_run_to_the_last_byte() -> None:
    first, second = Trace(keep=True), Trace(keep=True)
    run_seed(1, trace=first)
    run_seed(1, trace=second)
    assert first.kept is not None
    assert second.kept is not None
    for number, (one, other) in enumerate(zip(first.kept, second.kept, strict=False)):
        assert one == other, f"entry {number} differs"
    assert first.digest == second.digest
