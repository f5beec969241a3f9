"""Reporter of an attempt's current memory and CPU time, sent to the node when they have changed significantly."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterable

from fray.model.monitoring.progress_protocol import UsageReport
from fray.node.linux.process_tree import cpu_ticks

REPORT_EVERY_S = 2.0
SIGNIFICANT_SHARE = 0.05
"""Change of memory that is reported, as a share; of CPU time, twice this share."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def is_significant(before: UsageReport, after: UsageReport) -> bool:
    """Return whether ``after`` differs enough from ``before`` to be reported. Pure."""
    moved_bytes = abs(after.memory_bytes - before.memory_bytes)
    return (
        moved_bytes > SIGNIFICANT_SHARE * before.memory_bytes
        or after.cpu_s > before.cpu_s * (1 + 2 * SIGNIFICANT_SHARE) + 0.01
    )


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of living processes and of all that were waited for, by them or by this process."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            ticks += cpu_ticks(pid)
    # Nothing counts twice: a process moves from the first sum to this one when it is reaped.
    waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(ticks / _TICKS_PER_S + waited_for.ru_utime + waited_for.ru_stime, 2)


class UsageReporter:
    """Receives samples of resource usage and sends some of them."""

    def __init__(self, send: Callable[[UsageReport], object]) -> None:
        self._send = send
        self._sent = UsageReport()
        self._sent_at = float("-inf")

    def on_sample(self, used_bytes: int, peak_bytes: int, pids: Iterable[int]) -> None:
        now = time.monotonic()
        if now < self._sent_at + REPORT_EVERY_S:
            return
        used = UsageReport(memory_bytes=used_bytes, peak_memory_bytes=peak_bytes, cpu_s=cpu_s(pids))
        # Idle jobs send nothing: thousands of them cost the controller no messages.
        if is_significant(self._sent, used):
            self._sent, self._sent_at = used, now
            self._send(used)
