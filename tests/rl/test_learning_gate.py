"""The learning gate: a model that knows nothing learns to copy three digits in 200 updates.

Controls, other seeds and thresholds are in ``bench/rl.py`` (``learn``), and their numbers in docs/rl-reliability.md.
"""

from __future__ import annotations

import importlib.util

import pytest
import trio

from examples.rl_digits import copy_digits_in_groups, digits_run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.within(400),
]


@pytest.mark.parametrize("sync", [pytest.param("sync", marks=pytest.mark.full), "fully-async"])
def test_a_model_that_knows_nothing_learns_to_copy_digits(sync: str) -> None:
    run = digits_run(sync=sync, rollout=copy_digits_in_groups, episode="group", progress=False)
    result = trio.run(run.main)
    rewards = [step["reward_mean"] for step in result.steps]
    assert len(rewards) == 200
    assert sum(rewards[:10]) / 10 < 0.15
    assert sum(rewards[-10:]) / 10 >= 0.9
