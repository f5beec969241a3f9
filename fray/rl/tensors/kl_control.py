"""Coefficients of a KL divergence, fixed or adaptive, without torch."""

from __future__ import annotations

import math


class FixedKlController:
    """Coefficient that stays as it is: ``value``, 0 or more. Raises ValueError for another number."""

    def __init__(self, value: float) -> None:
        self.value = _checked("value", value, least=0.0)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing; an adaptive controller adapts here."""


class AdaptiveKlController:
    """Coefficient that rises while the divergence is above its target, and falls while it is below.

    From Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2:
    ``value *= 1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon``.

    Args:
        value: first coefficient, above 0. To resume, pass the ``value`` that was saved.
        target: divergence to reach, above 0, in the unit in which `update` gets it.
        horizon: number of samples after which a divergence far from the target changes the coefficient by 20 %.

    Raises:
        ValueError: a number is 0 or less, or not finite.
    """

    def __init__(self, value: float, target: float = 6.0, horizon: float = 10_000) -> None:
        self.value = _checked("value", value)
        self.target = _checked("target", target)
        self.horizon = _checked("horizon", horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt ``value`` after ``n_steps`` samples with the mean divergence ``current_kl``.

        Raises ValueError if the divergence is not finite, or the number of samples negative or above the horizon
        times 5 (the coefficient would become 0 or less).
        """
        if not math.isfinite(current_kl):
            raise ValueError(f"invalid KL divergence {current_kl}: expected a finite number")
        if not 0 <= n_steps < 5 * self.horizon:
            raise ValueError(
                f"invalid n_steps {n_steps}: expected 0 to less than 5 times the horizon ({self.horizon:g})"
            )
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def _checked(name: str, number: float, least: float | None = None) -> float:
    valid = math.isfinite(number) and (number > 0 if least is None else number >= least)
    if not valid:
        raise ValueError(f"invalid {name} {number}: expected {'a number above 0' if least is None else 'at least 0'}")
    return number
