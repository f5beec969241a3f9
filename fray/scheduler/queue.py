"""Jobs that wait for machines: first in, first tried, grouped by what they ask for.

Jobs of one `Shape` fit or do not fit together, so a pass tries each shape once more than it succeeds, and a shape that
did not fit is not tried again before something has changed for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from attrs import frozen

from fray.model.ids import JobId
from fray.model.resources import Demand

T = TypeVar("T")
Entry: TypeAlias = tuple[int, JobId]
"""(order of acceptance, job)"""


@frozen(cache_hash=True)
class Shape:
    """What decides whether a job fits."""

    demand: Demand
    members: int
    child: bool
    """Launched by a running job, and so part of it: never held back for a starving one."""


class Queue:
    """Waiting jobs in the order of acceptance, and by shape."""

    def __init__(self) -> None:
        self.line: list[Entry] = []
        self.waiting: dict[Shape, list[Entry]] = {}
        self.failed: dict[Shape, int] = {}
        """Version of the pool (`Pool.version`) at which a shape last did not fit."""
        self.changes = 0
        """Grows with every change."""
        self._shapes: dict[JobId, tuple[int, Shape]] = {}
        self._cache: tuple[object, Any] | None = None

    def __len__(self) -> int:
        return len(self.line)

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._shapes

    def __iter__(self) -> Iterator[JobId]:
        """Oldest first."""
        return (job_id for _, job_id in self.line)

    def add(self, job_id: JobId, order: int, shape: Shape) -> None:
        insort(self.line, (order, job_id))
        insort(self.waiting.setdefault(shape, []), (order, job_id))
        self._shapes[job_id] = order, shape
        self.changes += 1

    def remove(self, job_id: JobId) -> None:
        order, shape = self._shapes.pop(job_id)
        entries = self.waiting[shape]
        for line in (self.line, entries):
            del line[bisect_left(line, (order, job_id))]
        if not entries:
            del self.waiting[shape]
            self.failed.pop(shape, None)
        self.changes += 1

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """``make()``, computed once for each ``key`` and state of the queue."""
        if self._cache is None or self._cache[0] != (self.changes, key):
            self._cache = (self.changes, key), make()
        value: T = self._cache[1]
        return value

    def ahead(self, job_id: JobId) -> int:
        """How many jobs are before this one."""
        order, _ = self._shapes[job_id]
        return bisect_left(self.line, (order, ""))
