"""Plug-in that samples the memory of an attempt's process tree, and adds its CPU time to the outcome.

Invariants: sampling costs at most `MAX_CPU_SHARE` of one CPU, however many processes there are; between two samples a
tree with a limit can exceed it only by what can be written to memory in that time.
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
"""Approximate speed at which a process can write to fresh memory."""
NEAR_LIMIT_SHARE = 0.9
"""Share of the limit from which on proportional set sizes are read."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the sum of resident set sizes; processes that have ended count as 0."""
    return sum(map(_resident_bytes, pids))


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


def proportional_bytes(pids: Iterable[int]) -> int:
    """Return the sum of proportional set sizes, which count shared pages once.

    The resident set size stands in where the proportional one cannot be read.
    """
    return sum(map(_proportional, pids))


def _proportional(pid: int) -> int:
    # One line for the whole process, added up by the kernel; ``smaps`` would have to be parsed mapping by mapping.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return _resident_bytes(pid)


def next_sample_s(used_bytes: int, limit_bytes: int, cost_s: float, age_s: float) -> float:
    """Return how long to wait after a sample that took ``cost_s``. Pure.

    Without a limit only the peak matters: samples get rarer with age. With one, the next sample comes before the limit
    can be exceeded by much.
    """
    # With 2 GiB left the next sample may wait for a second: memory is not filled faster than that.
    wanted_s = max(MIN_SAMPLE_S, (limit_bytes - used_bytes) / FILL_BYTES_PER_S) if limit_bytes else age_s
    # The cost has the last word: with thousands of processes the limit is noticed late, but no CPU is used up.
    return max(min(wanted_s, MAX_SAMPLE_S), cost_s / MAX_CPU_SHARE)


class ResourceUsage(ShimPlugin):
    """Memory and CPU time of the tree below the calling process, which is an attempt's shim.

    Args:
        limit_bytes: memory limit; 0: none.
        fail: called once with the outcome when the limit is exceeded.
        on_sample: called after each sample with the current bytes, the peak and the pids.
        excluded: returns the shim's own helper processes, which do not count.
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
        """Bytes at the last sample, and the peak of all samples."""
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
        """Add peak memory and CPU seconds of all that ever ran below.

        Nothing needs to be sampled for the CPU time: as a subreaper, the shim waits for every process of the tree in
        the end.
        """
        # ru_maxrss is the peak of the largest process: all that is known of a job shorter than the first sample.
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak_bytes = max(outcome.peak_memory_bytes, self.peak_bytes, used.ru_maxrss * 1024)
        cpu_s = round(used.ru_utime + used.ru_stime, 6)
        return evolve(outcome, peak_memory_bytes=peak_bytes, cpu_s=cpu_s)

    def _sample(self) -> None:
        # py-spy takes some 15 MB below the shim: a capture of a job near its limit must not end that job.
        excluded = self._excluded()
        pids = [pid for pid in descendants(os.getpid()) if pid not in excluded]
        # Resident sets count shared pages once per process, so their sum is never too low; only a sum near the limit is
        # checked by proportional sets, which are exact and ten times as expensive.
        used_bytes = resident_bytes(pids)
        if self.limit_bytes and used_bytes > NEAR_LIMIT_SHARE * self.limit_bytes:
            used_bytes = proportional_bytes(pids)
        self.used_bytes, self.peak_bytes = used_bytes, max(self.peak_bytes, used_bytes)
        self._on_sample(self.used_bytes, self.peak_bytes, pids)
        if self.limit_bytes and used_bytes > self.limit_bytes:
            self._exceeded = True
            self._fail(out_of_memory_outcome(self.limit_bytes, used_bytes))


def out_of_memory_outcome(limit_bytes: int, peak_bytes: int, how: str = "was killed by Fray") -> Outcome:
    """Return the outcome of a tree that exceeded its memory limit."""
    advice = byte_size_text(_rounded(max(peak_bytes, limit_bytes)), "")
    message = (
        f"its processes used {byte_size_text(peak_bytes)} of memory; the limit is the {byte_size_text(limit_bytes)} it "
        f"requested, so it {how}. Set ResourceConfig(memory={advice!r}) or more, or leave memory out for no limit"
    )
    return Outcome(cause=EndReason.OUT_OF_MEMORY, message=message, peak_memory_bytes=peak_bytes)


def _rounded(peak_bytes: int) -> int:
    """Return a quarter more than the peak, in steps that people would choose."""
    step = 128 * 1024**2
    while step * 16 < peak_bytes:
        step *= 2
    return -(-peak_bytes * 5 // 4 // step) * step
