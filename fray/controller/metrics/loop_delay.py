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
    """Instrument of a Trio loop that records how long each pass takes, in wall time and in CPU time of its thread."""

    def __init__(self) -> None:
        self._wall, self._cpu = _Lengths(), _Lengths()
        self._since, self._cpu_since = time.perf_counter(), time.thread_time()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the loop of the caller while the block runs."""
        # Of this thread: the meter may have been made in another one.
        self.after_io_wait(0.0)
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)

    def after_io_wait(self, timeout: float) -> None:
        """Begin a pass."""
        self._since, self._cpu_since = time.perf_counter(), time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        """End a pass."""
        self._wall.add(time.perf_counter() - self._since)
        self._cpu.add(time.thread_time() - self._cpu_since)

    def histogram(self) -> LoopDelay:
        """Return the passes until now; empty if it has measured nothing."""
        if not any(self._wall.counts):
            return LoopDelay()
        return LoopDelay(
            bounds_s=BOUNDS_S,
            counts=tuple(self._wall.counts),
            longest_s=self._wall.longest_s,
            cpu_counts=tuple(self._cpu.counts),
            longest_cpu_s=self._cpu.longest_s,
        )


class _Lengths:
    """Histogram of lengths in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.longest_s = 0.0

    def add(self, took_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        if took_s > self.longest_s:
            self.longest_s = took_s
