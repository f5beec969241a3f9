"""Counting: whether an attempt is well by its answers, and whether it has stalled by its beats. Tables, no clock.

One `Pulses` counts the answers to one health check. It has failed once so many in a row were bad or missing; before it
has been well for the first time none counts until `HealthCheck.start_s` is over. One `Beats` waits for progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import define

from fray.model.monitoring.health import HealthCheck


class HealthAnswer(StrEnum):
    GOOD = "good"
    BAD = "bad"
    """A bad answer, or none in time."""
    EXCUSED = "excused"
    """A bad one while it may still be starting."""
    LAST = "last"
    """The bad one that is one too many."""


class HealthState(StrEnum):
    STARTING = "starting"
    """It has not been well yet."""
    WELL = "well"
    UNWELL = "unwell"
    FAILED = "failed"
    """For good."""


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
"""A failed one is asked no more."""


@define
class HealthCounter:
    """The answers to one health check."""

    check: HealthCheck
    began: float
    """When the attempt did."""
    state: HealthState = HealthState.STARTING
    bad: int = 0
    """In a row, those that count."""
    last: str = ""
    """What was wrong the last time."""

    def record_good(self) -> HealthState:
        self.bad = 0
        return self._turn(HealthAnswer.GOOD)

    def record_bad(self, why: str, now: float) -> HealthState:
        """A bad answer, or none."""
        if self.state is HealthState.FAILED:
            return self.state
        self.last = why
        if self.state is HealthState.STARTING and now < self.began + self.check.start_s:
            return self._turn(HealthAnswer.EXCUSED)
        self.bad += 1
        return self._turn(HealthAnswer.LAST if self.bad >= self.check.failures else HealthAnswer.BAD)

    def _turn(self, answer: HealthAnswer) -> HealthState:
        self.state = TABLE.get((self.state, answer), self.state)
        return self.state

    def status_text(self) -> str:
        """As `AttemptInfo.health` has it."""
        if self.state is HealthState.WELL:
            return "well"
        if not self.bad:
            return f"starting: {self.last}" if self.last else ""
        return f"unwell ({self.bad} of {self.check.failures}): {self.last}"

    def failure_text(self) -> str:
        """The message of an attempt that has failed its check."""
        times = "once" if self.bad == 1 else f"{self.bad} times in a row"
        return f"not healthy: {check_text(self.check)} failed {times}; the last time: {self.last}"


def check_text(check: HealthCheck) -> str:
    """``GET /healthz on port 'http'`` or ``the method ping()``."""
    return f"the method {check.actor}()" if check.path is None else f"GET {check.path} on port {check.port!r}"


@define
class StallDetector:
    """Progress, or its absence."""

    stall_s: float
    since: float
    """The last beat, or the start."""
    stalled: bool = False

    def on_progress(self, now: float) -> bool:
        """Progress; True: this ends a stall."""
        self.since = now
        was, self.stalled = self.stalled, False
        return was

    def stalls_at(self) -> float:
        """When it has stalled, if no beat comes; infinite while it has."""
        return float("inf") if self.stalled else self.since + self.stall_s

    def check(self, now: float) -> bool:
        """True, once a stall: it has stalled."""
        if self.stalled or now < self.stalls_at():
            return False
        self.stalled = True
        return True
