"""Usage of the cluster over time: a sample every few seconds, in memory, since the controller started.

Their number is limited: when there are too many, every second one is dropped and the period is doubled. So the samples
always reach back to the start, with as much detail as there is room for.
"""

from __future__ import annotations

from fray.model.messages.usage import UsageSample
from fray.scheduler.explain.queue_view import sample
from fray.scheduler.state.state import State

PERIOD_S = 2.0
"""Initial period; doubled each time when half of the samples are dropped."""
LIMIT = 1_000


class UsageHistory:
    """Samples of the cluster's usage, taken after turns of the loop, since nothing changes between turns."""

    def __init__(self, period_s: float = PERIOD_S, limit: int = LIMIT) -> None:
        self.period_s = period_s
        self._limit = limit
        self._samples: list[UsageSample] = []
        self.next_at = 0.0
        """Time from which the next sample is due, in seconds since the epoch."""

    def take_sample(self, state: State, now: float) -> None:
        self.next_at = now + self.period_s
        self._samples.append(sample(state, now))
        if len(self._samples) > self._limit:
            # The first sample stays, so the history always begins with the controller's start.
            del self._samples[1::2]
            self.period_s *= 2

    def all(self, state: State, now: float) -> tuple[UsageSample, ...]:
        """Return all samples and one of this moment."""
        return (*self._samples, sample(state, now))
