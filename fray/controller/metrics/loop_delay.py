"""Delay of the controller's event loop: a histogram of the lengths of its passes.

In one pass the loop runs every task that was ready when it began, among them the turn of the scheduler. A message that
arrives, or a timer that fires, waits at most for the end of the pass.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from fray.model.messages.usage import LoopDelay

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


# An instrument, and not a task that measures how late it wakes up: it costs nothing while the controller is idle.
class LoopDelayMeter(trio.abc.Instrument):
    """Instrument of a Trio loop that records how long each pass takes, in wall time."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._longest_s = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the loop of the caller while the block runs."""
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)

    def after_io_wait(self, timeout: float) -> None:
        """Begin a pass."""
        self._since = time.perf_counter()

    def before_io_wait(self, timeout: float) -> None:
        """End a pass."""
        took_s = time.perf_counter() - self._since
        self._counts[bisect_left(BOUNDS_S, took_s)] += 1
        if took_s > self._longest_s:
            self._longest_s = took_s

    def histogram(self) -> LoopDelay:
        """Return the passes until now; empty if it has measured nothing."""
        if not any(self._counts):
            return LoopDelay()
        return LoopDelay(bounds_s=BOUNDS_S, counts=tuple(self._counts), longest_s=self._longest_s)
