"""Restart policy: how often, within what time and after what wait a failed job or actor is restarted.

Waits double with each restart that follows a short life. A job that fails repeatedly right after its start is in a
crash loop, and waits even without a configured back-off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

from attrs import define, field

from fray.model.backoff import backoff_s
from fray.model.specs import ActorConfig

JITTER = 0.25
"""Largest part by which a wait is shortened, so that jobs that failed together do not restart together."""
CRASH_S = 10.0
"""A failure so soon after the start counts as a crash."""
CRASHES = 3
"""Number of crashes in a row that count as a crash loop."""
CRASH_WAIT_S = 1.0
"""First wait of a crash loop, unless its back-off is longer; doubled with each further crash."""


class BackoffPolicy(Protocol):
    """Configured waits: fields that `ActorConfig` and `JobSpec` share."""

    @property
    def backoff_s(self) -> float: ...
    @property
    def backoff_max_s(self) -> float: ...


def restarts_in_period(config: ActorConfig, times: Iterable[float], now: float) -> list[float]:
    """Return the restarts at ``times`` that still count."""
    since = float("-inf") if config.restart_period_s is None else now - config.restart_period_s
    return [at for at in times if at > since]


def is_within_limit(most: int, used: int) -> bool:
    """Return whether one more restart is within the limit; negative: no limit."""
    return most < 0 or used < most


def next_streak(config: BackoffPolicy, streak: int, lived_s: float) -> int:
    """Return the streak after another failure: a life longer than any back-off starts it again."""
    return 1 if lived_s > config.backoff_max_s else streak + 1


def restart_delay_s(config: BackoffPolicy, streak: int) -> float:
    """Return the wait before the restart of this number, counted from 1."""
    return backoff_s(config.backoff_s, config.backoff_max_s, streak)


def crash_loop_delay_s(config: BackoffPolicy, crashes: int) -> float:
    """Return the wait after so many crashes in a row; at most ``backoff_max_s``."""
    if crashes < CRASHES:
        return 0.0
    return backoff_s(CRASH_WAIT_S, config.backoff_max_s, crashes - CRASHES + 1)


def with_jitter(wait_s: float, key: str) -> float:
    """Return the wait, shortened by a part derived from ``key``: the same in every run."""
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32
    return wait_s * (1 - JITTER * share)


@define
class RestartCounter:
    """Restart budget and history of one actor. Times are seconds of one clock."""

    config: ActorConfig
    times: list[float] = field(factory=list)
    """Times of the restarts that still count, oldest first."""
    streak: int = 0
    """Restarts without a long life in between."""

    def on_failure(self, now: float, lived_s: float) -> float | None:
        """Record a failure; return the wait before the restart, or None: no restart."""
        most = self.config.max_restarts or 0
        self.times = restarts_in_period(self.config, self.times, now)
        if not is_within_limit(most, len(self.times)):
            return None
        self.times = [*self.times, now][-max(1, most) :]
        self.streak = next_streak(self.config, self.streak, lived_s)
        return restart_delay_s(self.config, self.streak)
