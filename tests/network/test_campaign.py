"""Random faults under load, in small; ``python -m tests.network.campaign`` runs many."""

from __future__ import annotations

import pytest

from tests.network.campaign import run_campaign
from tests.network.laboratory import Laboratory


@pytest.mark.in_test_all
@pytest.mark.within(300)
def test_calls_streams_and_arrays_take_effect_once_under_random_faults(
    lab: Laboratory, pytestconfig: pytest.Config
) -> None:
    seed = int(pytestconfig.getoption("hypothesis_seed") or 1)
    result = run_campaign(lab, seed, cuts=5)
    assert not result.breaches, f"seed {seed}: {result.faults}"
    assert result.calls > 1000, "there was load"
    assert result.items > 100
