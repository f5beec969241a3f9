"""When something that failed may begin anew: how often, within what time, after what wait.

Waits double with each restart that follows a short life. What fails again and again right after its start is in a crash
loop, and waits even if nobody has asked for a back-off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

from attrs import define, field

from fray.model.backoff import backoff_s
from fray.model.specs import ActorConfig

JITTER = 0.25
"""A wait is shortened by up to this part of it, so that what fell together does not come back together."""
CRASH_S = 10.0
"""Who fails so soon after its start has crashed."""
CRASHES = 3
"""So many crashes in a row are a crash loop."""
CRASH_WAIT_S = 1.0
"""What a crash loop waits first, if its back-off is not longer; doubled with each further crash."""


class BackoffPolicy(Protocol):
    """The waits somebody has asked for: `ActorConfig` and `JobSpec` say them."""

    @property
    def backoff_s(self) -> float: ...
    @property
    def backoff_max_s(self) -> float: ...


def restarts_in_period(config: ActorConfig, times: Iterable[float], now: float) -> list[float]:
    """Those of the restarts at ``times`` that still count."""
    since = float("-inf") if config.restart_period_s is None else now - config.restart_period_s
    return [at for at in times if at > since]


def is_within_limit(most: int, used: int) -> bool:
    """Whether one more is within the limit; negative: there is none."""
    return most < 0 or used < most


def next_streak(config: BackoffPolicy, streak: int, lived_s: float) -> int:
    """Who has lived longer than any back-off has a new trouble."""
    return 1 if lived_s > config.backoff_max_s else streak + 1


def restart_delay_s(config: BackoffPolicy, streak: int) -> float:
    """The wait before the restart of this number, counted from 1."""
    return backoff_s(config.backoff_s, config.backoff_max_s, streak)


def crash_loop_delay_s(config: BackoffPolicy, crashes: int) -> float:
    """What so many crashes in a row cost; never more than ``backoff_max_s``."""
    if crashes < CRASHES:
        return 0.0
    return backoff_s(CRASH_WAIT_S, config.backoff_max_s, crashes - CRASHES + 1)


def with_jitter(wait_s: float, key: str) -> float:
    """The wait, shortened by a part that ``key`` decides: the same in every run."""
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32
    return wait_s * (1 - JITTER * share)


@define
class RestartCounter:
    """The account of one actor. Times are seconds of one clock."""

    config: ActorConfig
    times: list[float] = field(factory=list)
    """Of the restarts that still count, oldest first."""
    streak: int = 0
    """Restarts without a long life in between."""

    def on_failure(self, now: float, lived_s: float) -> float | None:
        """Note a failure: how long to wait before it is made anew, or None: it is not."""
        most = self.config.max_restarts or 0
        self.times = restarts_in_period(self.config, self.times, now)
        if not is_within_limit(most, len(self.times)):
            return None
        self.times = [*self.times, now][-max(1, most) :]
        self.streak = next_streak(self.config, self.streak, lived_s)
        return restart_delay_s(self.config, self.streak)
