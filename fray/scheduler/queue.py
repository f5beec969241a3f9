"""What waits for machines: the order in which it is tried, grouped by what it asks for.

Applicants of one `Shape` fit or do not fit together, so a pass tries each shape once more than it succeeds, and a shape
that did not fit is not tried again before something has changed for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from attrs import frozen

from fray.model.bands import Band
from fray.model.ids import Namespace
from fray.scheduler.asks import Ask

T = TypeVar("T")
Entry: TypeAlias = tuple[int, int, str]
"""(rank of the band, order of acceptance, id)"""


class Kind(StrEnum):
    """What an applicant is, and so who is told of its places (`placement.STARTERS`)."""

    JOB = "job"
    GROUP = "group"
    """A job group: all its jobs at once."""
    RESERVATION = "reservation"
    """The minimum of a reservation."""
    GROWTH = "growth"
    """One unit more of a reservation."""


@frozen(cache_hash=True)
class Shape:
    """What decides whether an applicant fits."""

    ask: Ask
    child: bool = False
    """Launched by a running job, and so part of it: never held back for a starving one."""
    reservation: str = ""
    """Whose machines it takes; empty: those of the fleet."""
    growth: bool = False
    """It is one of a reservation, which stands behind everybody else."""


@frozen(cache_hash=True)
class Tenant:
    """Who is given shares of the cluster."""

    user: str = ""
    namespace: Namespace = ""


@frozen
class Applicant:
    """Something that waits for machines."""

    id: str
    """Of the job, the group, or the reservation (growth has a mark behind it)."""
    shape: Shape
    order: int
    """Of acceptance."""
    since: float
    """When it began to wait, by the law's time."""
    kind: Kind = Kind.JOB
    band: Band = Band.INTERACTIVE
    tenant: Tenant = Tenant()
    time_limit_s: float | None = None
    """It is known to be over so long after its start."""

    @property
    def entry(self) -> Entry:
        return self.band.rank, self.order, self.id


class Queue:
    """Waiting applicants in order, and by shape."""

    def __init__(self) -> None:
        self.line: list[Entry] = []
        self.waiting: dict[Shape, list[Entry]] = {}
        self.applicants: dict[str, Applicant] = {}
        self.failed: dict[Shape, int] = {}
        """Version of the pool (`Pool.version`) at which a shape last did not fit."""
        self.refused: dict[Shape, None] = {}
        """What came, or did not fit, since the last look: whoever looks (`giving_back.make_room`) clears it."""
        self.changes = 0
        """Grows with every change."""
        self._cache: tuple[object, Any] | None = None

    def __len__(self) -> int:
        return len(self.line)

    def __contains__(self, applicant_id: str) -> bool:
        return applicant_id in self.applicants

    def __iter__(self) -> Iterator[Applicant]:
        """Who is tried first comes first."""
        return (self.applicants[entry[2]] for entry in self.line)

    def add(self, applicant: Applicant) -> None:
        insort(self.line, applicant.entry)
        insort(self.waiting.setdefault(applicant.shape, []), applicant.entry)
        self.applicants[applicant.id] = applicant
        self.refused[applicant.shape] = None
        self.changes += 1

    def remove(self, applicant_id: str) -> None:
        applicant = self.applicants.pop(applicant_id)
        entries = self.waiting[applicant.shape]
        for line in (self.line, entries):
            del line[bisect_left(line, applicant.entry)]
        if not entries:
            del self.waiting[applicant.shape]
            self.failed.pop(applicant.shape, None)
        self.changes += 1

    def head(self, shape: Shape) -> Applicant:
        """The first of this shape."""
        return self.applicants[self.waiting[shape][0][2]]

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """``make()``, computed once for each ``key`` and state of the queue."""
        if self._cache is None or self._cache[0] != (self.changes, key):
            self._cache = (self.changes, key), make()
        value: T = self._cache[1]
        return value

    def ahead(self, applicant_id: str) -> int:
        """How many are before this one."""
        return bisect_left(self.line, self.applicants[applicant_id].entry)
