"""Jobs that wait for machines: first in, first tried, grouped by what they ask for.

Jobs of one `Shape` fit or do not fit together, so a pass tries each shape once more than it succeeds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from attrs import frozen

from fray.model.ids import JobId
from fray.model.resources import Demand


@frozen
class Shape:
    """What decides whether a job fits."""

    demand: Demand
    members: int
    child: bool
    """Launched by a running job, and so part of it: never held back for a starving one."""


class Queue:
    """Waiting jobs by shape, in the order of acceptance."""

    def __init__(self) -> None:
        self.waiting: dict[Shape, list[tuple[int, JobId]]] = {}
        self.failed: dict[Shape, int] = {}
        """Version of the pool (`Pool.version`) at which a shape last did not fit."""
        self._shapes: dict[JobId, tuple[int, Shape]] = {}

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._shapes

    def __iter__(self) -> Iterator[JobId]:
        """Oldest first."""
        return (job_id for _, job_id in sorted(entry for entries in self.waiting.values() for entry in entries))

    def add(self, job_id: JobId, order: int, shape: Shape) -> None:
        insort(self.waiting.setdefault(shape, []), (order, job_id))
        self._shapes[job_id] = order, shape

    def remove(self, job_id: JobId) -> None:
        order, shape = self._shapes.pop(job_id)
        entries = self.waiting[shape]
        del entries[bisect_left(entries, (order, job_id))]
        if not entries:
            del self.waiting[shape]
            self.failed.pop(shape, None)

    def ahead(self, job_id: JobId) -> int:
        """How many jobs are before this one."""
        order, _ = self._shapes[job_id]
        return sum(bisect_left(entries, (order, "")) for entries in self.waiting.values())
