"""Coefficients of KL divergences."""

from __future__ import annotations

import math

import pytest

from fray.rl.tensors.kl_control import AdaptiveKlController, FixedKlController


def test_a_fixed_coefficient_stays() -> None:
    fixed = FixedKlController(0.1)
    fixed.update(current_kl=100.0, n_steps=64)
    assert fixed.value == 0.1


@pytest.mark.parametrize(("current_kl", "factor"), [(6.0, 1.0), (60.0, 1.02), (0.0, 0.98), (6.6, 1.01), (5.4, 0.99)])
def test_an_adaptive_coefficient_follows_the_divergence_by_at_most_a_fifth_for_each_horizon(
    current_kl: float, factor: float
) -> None:
    adaptive = AdaptiveKlController(0.2, target=6.0, horizon=1000)
    adaptive.update(current_kl, n_steps=100)
    assert adaptive.value == pytest.approx(0.2 * factor)


def test_invalid_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"invalid value -0.1: expected at least 0"):
        FixedKlController(-0.1)
    with pytest.raises(ValueError, match="invalid target 0: expected a number above 0"):
        AdaptiveKlController(0.1, target=0)
    with pytest.raises(ValueError, match="invalid KL divergence nan: expected a finite number"):
        AdaptiveKlController(0.1).update(math.nan, 1)
    with pytest.raises(ValueError, match="invalid n_steps 5000: expected 0 to less than 5 times the horizon"):
        AdaptiveKlController(0.1, horizon=1000).update(1.0, 5000)
