"""When something that failed may begin anew, by its `ActorConfig`: how often, within what time, after what wait."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from fray.model.specs import ActorConfig

DOUBLINGS = 60
"""More of them are no number of seconds any more."""


def counting(config: ActorConfig, times: Iterable[float], now: float) -> list[float]:
    """Those of the restarts at ``times`` that still count."""
    since = float("-inf") if config.restart_period_s is None else now - config.restart_period_s
    return [at for at in times if at > since]


def allows(most: int, used: int) -> bool:
    """Whether one more is within the limit; negative: there is none."""
    return most < 0 or used < most


def next_streak(config: ActorConfig, streak: int, lived_s: float) -> int:
    """Who has lived longer than any back-off has a new trouble."""
    return 1 if lived_s > config.backoff_max_s else streak + 1


def back_off_s(config: ActorConfig, streak: int) -> float:
    """The wait before the restart of this number, counted from 1."""
    doubled: float = config.backoff_s * 2 ** min(streak - 1, DOUBLINGS)
    return min(config.backoff_max_s, doubled)


@define
class Restarts:
    """The account of one actor. Times are seconds of one clock."""

    config: ActorConfig
    times: list[float] = field(factory=list)
    """Of the restarts that still count, oldest first."""
    streak: int = 0
    """Restarts without a long life in between."""

    def after_failure(self, now: float, lived_s: float) -> float | None:
        """Note a failure: how long to wait before it is made anew, or None: it is not."""
        most = self.config.max_restarts or 0
        self.times = counting(self.config, self.times, now)
        if not allows(most, len(self.times)):
            return None
        self.times = [*self.times, now][-max(1, most) :]
        self.streak = next_streak(self.config, self.streak, lived_s)
        return back_off_s(self.config, self.streak)
