"""What is due when: at most one time for each thing, soonest first. Built again from the rows, as every index."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

TimerKey: TypeAlias = tuple[str, str]
"""(what is due, of which row)"""


class Timers:
    """Setting, moving and taking a time away cost the logarithm of all of them; nobody walks over them."""

    def __init__(self) -> None:
        self.at: dict[TimerKey, float] = {}
        self._queue: list[tuple[float, TimerKey]] = []

    def __repr__(self) -> str:
        return f"<Timers {len(self._queue)}, the first at {self.first()}>"

    def set(self, timed: TimerKey, at: float | None) -> None:
        """It is due then, and at no other time; None: never."""
        before = self.at.get(timed)
        if before == at:
            return
        if before is not None:
            del self._queue[bisect_left(self._queue, (before, timed))]
            del self.at[timed]
        if at is not None:
            self.at[timed] = at
            insort(self._queue, (at, timed))

    def first(self) -> float | None:
        return self._queue[0][0] if self._queue else None

    def take_due(self, now: float) -> list[TimerKey]:
        """All that are due, soonest first; they are timed no more."""
        due = []
        while self._queue and self._queue[0][0] <= now:
            due.append(self._queue.pop(0)[1])
        for timed in due:
            del self.at[timed]
        return due
