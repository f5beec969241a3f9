"""Exponential back-off."""

from __future__ import annotations

_DOUBLINGS_LIMIT = 60
"""Limit of the exponent, so that the power stays finite; every wait has reached its maximum long before."""


def backoff_s(first_s: float, most_s: float, failures: int) -> float:
    """Return the wait after so many failures in a row: ``first_s`` after one, doubled with each, at most ``most_s``."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, _DOUBLINGS_LIMIT))
