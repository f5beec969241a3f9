"""State machines of a health check and of stall detection. Pure.

A health check has failed once so many answers in a row were bad or missing; before the first good answer none counts
until `HealthCheck.start_s` has passed. An attempt has stalled when it has reported no progress for `stall_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import define

from fray.model.monitoring.health import HealthCheck


class HealthAnswer(StrEnum):
    """Classified answer to a health check."""

    GOOD = "good"
    BAD = "bad"
    """Bad answer, or none in time."""
    EXCUSED = "excused"
    """Bad answer while the attempt may still be starting."""
    LAST = "last"
    """Bad answer that exceeds the limit."""


class HealthState(StrEnum):
    """State of a health check."""

    STARTING = "starting"
    """Waiting for the first good answer."""
    WELL = "well"
    UNWELL = "unwell"
    FAILED = "failed"
    """Final: no further checks."""


TABLE: Mapping[tuple[HealthState, HealthAnswer], HealthState] = {
    (HealthState.STARTING, HealthAnswer.GOOD): HealthState.WELL,
    (HealthState.STARTING, HealthAnswer.EXCUSED): HealthState.STARTING,
    (HealthState.STARTING, HealthAnswer.BAD): HealthState.STARTING,
    (HealthState.STARTING, HealthAnswer.LAST): HealthState.FAILED,
    (HealthState.WELL, HealthAnswer.GOOD): HealthState.WELL,
    (HealthState.WELL, HealthAnswer.BAD): HealthState.UNWELL,
    (HealthState.WELL, HealthAnswer.LAST): HealthState.FAILED,
    (HealthState.UNWELL, HealthAnswer.GOOD): HealthState.WELL,
    (HealthState.UNWELL, HealthAnswer.BAD): HealthState.UNWELL,
    (HealthState.UNWELL, HealthAnswer.LAST): HealthState.FAILED,
}
"""State transitions; a failed check has none."""


@define
class HealthCounter:
    """Answers to one health check."""

    check: HealthCheck
    began: float
    """Start of the attempt."""
    state: HealthState = HealthState.STARTING
    bad: int = 0
    """Bad answers in a row that count."""
    last: str = ""
    """Text of the last bad answer."""

    def record_good(self) -> HealthState:
        self.bad = 0
        return self._turn(HealthAnswer.GOOD)

    def record_bad(self, why: str, now: float) -> HealthState:
        """Count a bad or missing answer."""
        if self.state is HealthState.FAILED:
            return self.state
        self.last = why
        # A model may load for minutes; the first good answer ends this grace period for good.
        if self.state is HealthState.STARTING and now < self.began + self.check.start_s:
            return self._turn(HealthAnswer.EXCUSED)
        self.bad += 1
        return self._turn(HealthAnswer.LAST if self.bad >= self.check.failures else HealthAnswer.BAD)

    def _turn(self, answer: HealthAnswer) -> HealthState:
        self.state = TABLE.get((self.state, answer), self.state)
        return self.state

    def status_text(self) -> str:
        """Return the text of `AttemptInfo.health`."""
        if self.state is HealthState.WELL:
            return "well"
        if not self.bad:
            return f"starting: {self.last}" if self.last else ""
        return f"unwell ({self.bad} of {self.check.failures}): {self.last}"

    def failure_text(self) -> str:
        """Return the message of an attempt that has failed its check."""
        times = "once" if self.bad == 1 else f"{self.bad} times in a row"
        return f"not healthy: {check_text(self.check)} failed {times}; last answer: {self.last}"


def check_text(check: HealthCheck) -> str:
    """Return ``GET /healthz on port 'http'`` or ``the method ping()``."""
    return f"the method {check.actor}()" if check.path is None else f"GET {check.path} on port {check.port!r}"


@define
class StallDetector:
    """Time since the last progress."""

    stall_s: float
    since: float
    """Time of the last progress, or of the start."""
    stalled: bool = False

    def on_progress(self, now: float) -> bool:
        """Note progress; return whether this ends a stall."""
        self.since = now
        was, self.stalled = self.stalled, False
        return was

    def stalls_at(self) -> float:
        """Return when the attempt stalls without further progress; infinite while it is stalled."""
        # One event and one capture per stall: the next follows after progress only.
        return float("inf") if self.stalled else self.since + self.stall_s

    def check(self, now: float) -> bool:
        """Return whether it has stalled; true once per stall."""
        if self.stalled or now < self.stalls_at():
            return False
        self.stalled = True
        return True
