"""Table of CPUs that attempts have for themselves. Pure.

Invariants: a CPU is allocated to one holder at a time, and whole. Attempts that asked for none run on all CPUs, beside
those that are pinned: driving them off would take changing the affinity of running processes, and the sum of what is
requested never exceeds the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, field

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
"""Variables by which libraries choose how many threads to start."""


def _sorted(cpus: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(cpus))


@define
class CpuTable:
    """CPUs of one node.

    Attributes:
        cpus: numbers of those it may use, as `os.sched_getaffinity` has them.
    """

    cpus: tuple[int, ...] = field(converter=_sorted)
    allocated: dict[str, tuple[int, ...]] = field(factory=dict)
    """CPUs by holder."""

    def free(self) -> list[int]:
        taken = {cpu for cpus in self.allocated.values() for cpu in cpus}
        return [cpu for cpu in self.cpus if cpu not in taken]

    def grant(self, holder: str, count: int) -> tuple[int, ...] | None:
        """Return so many CPUs for ``holder``, neighbours if possible; None: there are too few. A holder asks once."""
        free = self.free()
        # Repeating a request must not take CPUs twice.
        if holder in self.allocated or count < 1 or count > len(free):
            return self.allocated.get(holder)
        self.allocated[holder] = _neighbours(free, count)
        return self.allocated[holder]

    def release(self, holder: str) -> None:
        """Release what the holder has, if anything."""
        self.allocated.pop(holder, None)


def _neighbours(free: list[int], count: int) -> tuple[int, ...]:
    """Return the first row of ``count`` numbers without a gap; else the lowest numbers. Neighbours share caches."""
    for at in range(len(free) - count + 1):
        if free[at + count - 1] - free[at] == count - 1:
            return tuple(free[at : at + count])
    return tuple(free[:count])


def thread_variables(cpus: Iterable[int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process pinned to ``cpus``, except those that ``environ`` has already."""
    count = str(len(tuple(cpus)))
    # Many libraries start a thread for each CPU of the machine, also where the affinity leaves them four.
    return {name: count for name in THREADS if name not in environ} if count != "0" else {}
