"""When something that failed may begin anew, by its `ActorConfig`: how often, within what time, after what wait."""

from __future__ import annotations

from attrs import define, field

from fray.model.specs import ActorConfig

DOUBLINGS = 60
"""More of them are no number of seconds any more."""


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
        most, period_s = self.config.max_restarts or 0, self.config.restart_period_s
        if period_s is not None:
            self.times = [at for at in self.times if at > now - period_s]
        if 0 <= most <= len(self.times):
            return None
        self.times = [*self.times, now][-max(1, most) :]
        self.streak = 1 if lived_s > self.config.backoff_max_s else self.streak + 1
        doubled: float = self.config.backoff_s * 2 ** min(self.streak - 1, DOUBLINGS)
        return min(self.config.backoff_max_s, doubled)
