"""Timers: at most one time for each key, soonest first. Rebuilt from the rows, as every index."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

TimerKey: TypeAlias = tuple[str, str]
"""(kind of timer, key of its row)."""


class Timers:
    """Timers by key and in order. To set, move or remove one costs the logarithm of their number; no caller iterates
    over all."""

    def __init__(self) -> None:
        self.at: dict[TimerKey, float] = {}
        self._queue: list[tuple[float, TimerKey]] = []

    def __repr__(self) -> str:
        return f"<Timers {len(self._queue)}, the first at {self.first()}>"

    def set(self, timed: TimerKey, at: float | None) -> None:
        """Set the timer's time in place of any earlier one; None: remove it."""
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
        """Remove and return all timers that are due, soonest first."""
        due = []
        while self._queue and self._queue[0][0] <= now:
            due.append(self._queue.pop(0)[1])
        for timed in due:
            del self.at[timed]
        return due
