"""What the cluster was like over time: a sample every few seconds, in RAM, for as long as this controller lives.

Their number is bounded: when there are too many, every second one is dropped, and from then on half as many are taken.
So what is kept reaches back to the start at whatever detail there is room for.
"""

from __future__ import annotations

from fray.model.messages.usage import UsageSample
from fray.scheduler.explain.queue_view import sample
from fray.scheduler.state.state import State

PERIOD_S = 2.0
"""At first; doubled each time when half of the samples are dropped."""
LIMIT = 1_000


class UsageHistory:
    """Asked to look after each turn of the loop: between turns nothing changes."""

    def __init__(self, period_s: float = PERIOD_S, limit: int = LIMIT) -> None:
        self.period_s = period_s
        self._limit = limit
        self._samples: list[UsageSample] = []
        self._next_at = 0.0

    def sample_if_due(self, state: State, now: float) -> None:
        """Take one if it is time."""
        if now < self._next_at:
            return
        self._next_at = now + self.period_s
        self._samples.append(sample(state, now))
        if len(self._samples) > self._limit:
            del self._samples[1::2]
            self.period_s *= 2

    def all(self, state: State, now: float) -> tuple[UsageSample, ...]:
        """Those that are kept, and this moment."""
        return (*self._samples, sample(state, now))
