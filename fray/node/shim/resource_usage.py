"""What an attempt's process tree takes: its memory, on_sample at now and then, and its CPU time, known at the end.

Law: looking costs at most `MAX_CPU_SHARE` of one CPU, however many processes there are; between two looks a tree with a
limit can take no more than memory is written in that time. Resident sets are added up first, which counts shared pages
once for each process and is therefore never too little; only a sum near the limit is on_sample at again by proportional
sets, which are exact and ten times as dear.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Container, Iterable

from attrs import evolve

from fray.model.specs import EndReason, Outcome
from fray.model.text import byte_size_text
from fray.node.linux.process_tree import descendants
from fray.node.shim.plugin import ShimPlugin

MAX_CPU_SHARE = 0.02
FIRST_SAMPLE_S = 0.05
MIN_SAMPLE_S, MAX_SAMPLE_S = 0.02, 10.0
FILL_BYTES_PER_S = 2 * 1024**3
"""How quickly a process can write to fresh memory, about."""
NEAR_LIMIT_SHARE = 0.9
"""Resident sets beyond this part of the limit are on_sample at closely."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pids: Iterable[int]) -> int:
    """Sum of resident sets; those that have ended count nothing."""
    return sum(map(_resident, pids))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


def proportional_bytes(pids: Iterable[int]) -> int:
    """Sum of proportional sets: pages that several share count once. Where one cannot be read its resident set does."""
    return sum(map(_proportional, pids))


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)


def next_sample_s(used_bytes: int, limit_bytes: int, cost_s: float, age_s: float) -> float:
    """How long to wait after a look that took ``cost_s`` and found so much. Pure.

    Without a limit only the peak is at stake: less and less often. With one: before it can be passed by far.
    """
    wanted_s = max(MIN_SAMPLE_S, (limit_bytes - used_bytes) / FILL_BYTES_PER_S) if limit_bytes else age_s
    return max(min(wanted_s, MAX_SAMPLE_S), cost_s / MAX_CPU_SHARE)


class ResourceUsage(ShimPlugin):
    """Of the tree below the calling process, which is an attempt's shim.

    Args:
        limit_bytes: of its memory; 0: none.
        fail: called once with the outcome when there is more.
        on_sample: called after each look with what was found: now, at most, and whose.
        excluded: processes of the shim's own below it, which take nothing of the job's.
    """

    def __init__(
        self,
        limit_bytes: int,
        fail: Callable[[Outcome], None],
        on_sample: Callable[[int, int, list[int]], object] = lambda used_bytes, peak_bytes, pids: None,
        excluded: Callable[[], Container[int]] = lambda: (),
    ) -> None:
        self.limit_bytes, self._fail, self._on_sample, self._excluded = limit_bytes, fail, on_sample, excluded
        self.used_bytes = self.peak_bytes = 0
        """At the last look, and the most of all looks."""
        self._begun = time.monotonic()
        self._next_at = self._begun + FIRST_SAMPLE_S
        self._exceeded = False

    def next_due_at(self) -> float | None:
        return None if self._exceeded else self._next_at

    def on_timer(self, now: float) -> None:
        if not self._exceeded and now >= self._next_at:
            before_s = time.process_time()
            self._sample()
            cost_s = time.process_time() - before_s
            pause_s = next_sample_s(self.used_bytes, self.limit_bytes, cost_s, now - self._begun)
            self._next_at = time.monotonic() + pause_s

    def on_exit(self) -> None:
        if not self._exceeded:
            self._sample()

    def amend_outcome(self, outcome: Outcome) -> Outcome:
        """The record's peak and CPU seconds: of all that were ever below, as each was waited for in its turn."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak_bytes = max(outcome.peak_memory_bytes, self.peak_bytes, used.ru_maxrss * 1024)
        cpu_s = round(used.ru_utime + used.ru_stime, 6)
        return evolve(outcome, peak_memory_bytes=peak_bytes, cpu_s=cpu_s)

    def _sample(self) -> None:
        excluded = self._excluded()
        pids = [pid for pid in descendants(os.getpid()) if pid not in excluded]
        used_bytes = resident_bytes(pids)
        if self.limit_bytes and used_bytes > NEAR_LIMIT_SHARE * self.limit_bytes:
            used_bytes = proportional_bytes(pids)
        self.used_bytes, self.peak_bytes = used_bytes, max(self.peak_bytes, used_bytes)
        self._on_sample(self.used_bytes, self.peak_bytes, pids)
        if self.limit_bytes and used_bytes > self.limit_bytes:
            self._exceeded = True
            self._fail(out_of_memory_outcome(self.limit_bytes, used_bytes))


def out_of_memory_outcome(limit_bytes: int, peak_bytes: int, how: str = "was killed by Fray") -> Outcome:
    """The outcome of a tree that took more than it said it would."""
    advice = byte_size_text(_rounded(max(peak_bytes, limit_bytes)), "")
    message = (
        f"its processes took {byte_size_text(peak_bytes)} of memory, and it asked for "
        f"{byte_size_text(limit_bytes)}, which is the limit: it {how}. "
        f"Write ResourceConfig(memory={advice!r}) or more, or nothing for no limit"
    )
    return Outcome(cause=EndReason.OUT_OF_MEMORY, message=message, peak_memory_bytes=peak_bytes)


def _rounded(peak_bytes: int) -> int:
    """A quarter more, in steps that people would choose."""
    step = 128 * 1024**2
    while step * 16 < peak_bytes:
        step *= 2
    return -(-peak_bytes * 5 // 4 // step) * step
