"""Indexes of the state: small containers with ``add`` and ``remove``, and counts of the members of jobs and groups.

Every index can be rebuilt from the rows (`Tables.load`); `fray.testing.invariants` compares it with such a rebuild.
All of them keep the order of insertion: a plain set would be walked in another order in every run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias, TypeVar

from attrs import Factory, define

from fray.model.ids import BlobId, JobId, Namespace
from fray.model.specs import JobSpec, JobState
from fray.scheduler.lifecycle import LIVING_STATE, JobPhase

K = TypeVar("K")
V = TypeVar("V")
TimedJob: TypeAlias = tuple[float, int, JobId]
"""(time, order of acceptance, job)"""
TimerKey: TypeAlias = tuple[str, str]
"""(kind of timer, key of its row)."""
LAST_TIMES = 128
"""Entries at the end of `TimedJobs` that are searched first."""
PLACED = (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.CLOSING)
"""Phases of jobs that have machines, or processes that are still being ended."""


class OrderedSet(dict[V, None]):
    """Ids in order of insertion."""

    def add(self, item: V) -> None:
        self[item] = None

    def remove(self, item: V) -> None:
        """Remove an item that may be absent."""
        self.pop(item, None)

    def set(self, item: V, belongs: bool) -> None:
        """Add or remove the item."""
        if belongs:
            self[item] = None
        else:
            self.pop(item, None)


class OneToMany(dict[K, dict[V, None]]):
    """Ids by key, in order of insertion; a key without ids is absent."""

    def add(self, key: K, item: V) -> None:
        self.setdefault(key, {})[item] = None

    def remove(self, key: K, item: V) -> None:
        """Remove an item that may be absent."""
        items = self.get(key)
        if items is not None:
            items.pop(item, None)
            # Empty keys go, so that `key in index` means that there is something, and ids of the past do not pile up.
            if not items:
                del self[key]


class LivingJobs(dict[tuple[str, Namespace, JobState], int]):
    """Numbers of living jobs by user, namespace and state; what is 0 is absent."""

    def move(self, spec: JobSpec, before: JobPhase | None, after: JobPhase) -> None:
        """Count a job in the phase that it enters, and not in the one that it leaves (None: it is new)."""
        # None for a job that is new, or has ended.
        old, new = LIVING_STATE.get(before) if before is not None else None, LIVING_STATE.get(after)
        if new is old:
            return
        for state, times in ((old, -1), (new, 1)):
            if state is not None:
                key = spec.user, spec.namespace, state
                self[key] = self.get(key, 0) + times
                if not self[key]:
                    del self[key]


class TimedJobs(list[TimedJob]):
    """Jobs by time, soonest first."""

    def add(self, entry: TimedJob) -> None:
        # Most come near the end, by the time of placement: no search through 100,000 entries, most of which are in no
        # cache of the CPU.
        near = max(0, len(self) - LAST_TIMES)
        insort(self, entry, near if near and self[near] < entry else 0)

    def remove(self, entry: TimedJob) -> None:
        """Remove an entry.

        Raises:
            ValueError: it is not present.
        """
        # By the whole entry and not by the job: the list is sorted, and a search by job would walk over it.
        index = bisect_left(self, entry)
        # An error, as an entry under another time would fire for a job that has moved on.
        if self[index : index + 1] != [entry]:
            raise ValueError(f"no entry {entry}")
        del self[index]


class BlobReferenceCounts(dict[BlobId, int]):
    """Number of rows that refer to each payload, value or checkpoint."""

    def add(self, blob: BlobId | None) -> None:
        if blob is not None:
            self[blob] = self.get(blob, 0) + 1

    def remove(self, blob: BlobId | None) -> None:
        if blob is not None:
            # A KeyError here is a reference that was never counted: a bug that would delete a payload too early.
            self[blob] -= 1
            if not self[blob]:
                del self[blob]


class ResultSizes(dict[JobId, int]):
    """Sizes in bytes of the stored results of ended jobs, oldest end first, and their sum."""

    total = 0

    def add(self, job_id: JobId, size: int) -> None:
        self[job_id] = size
        self.total += size

    def remove(self, job_id: JobId) -> None:
        """Remove a result that may be absent."""
        self.total -= self.pop(job_id, 0)


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
        # Most changes of a row leave its times alone.
        if before == at:
            return
        if before is not None:
            # The list is sorted by (time, key), so the entry is found by its old time.
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
        # Removed before the handlers run: a handler that sets its timer again finds it free.
        for timed in due:
            del self.at[timed]
        return due


@define
class GenerationCount:
    """Attempts of a job: the living ones of all generations, and those of the current generation that have run."""

    living: int = 0
    ran: int = 0


def stage_of(spec: JobSpec) -> int:
    return spec.role.stage if spec.role else 0


@define
class GroupMembers:
    """Living members of one job group, counted by phase and by stage, so that no step walks over all of them."""

    jobs: dict[JobId, None] = Factory(dict)
    """All jobs on record, in order of acceptance."""
    phases: OneToMany[JobPhase, JobId] = Factory(OneToMany)
    """Living jobs by phase."""
    unready_by_stage: dict[int, int] = Factory(dict)
    """Number of living jobs that are not running, by stage."""
    gathered: OrderedSet[JobId] = Factory(OrderedSet)
    """Jobs that only wait to be placed together with the rest."""
    started_stage: int | None = None
    """Latest stage whose jobs have all been allowed to start."""

    def on_phase_changed(self, job_id: JobId, stage: int, before: JobPhase | None, after: JobPhase) -> None:
        """Count a member in its new phase.

        Args:
            before: its last phase; None for a new member.
        """
        if before is not None:
            self.phases.remove(before, job_id)
            self._count_unready(stage, before, -1)
        # Ended members are not counted: a stage is open when its living members run, and ended ones will not run.
        if after is not JobPhase.ENDED:
            self.phases.add(after, job_id)
            self._count_unready(stage, after, 1)

    def _count_unready(self, stage: int, phase: JobPhase, times: int) -> None:
        if phase is not JobPhase.RUNNING:
            count = self.unready_by_stage.pop(stage, 0) + times
            if count:
                self.unready_by_stage[stage] = count

    @property
    def blocking_stage(self) -> int | None:
        """The stage that must run before a later one starts; None if all jobs run."""
        # Stages are few, whatever the number of members.
        return min(self.unready_by_stage, default=None)

    @property
    def living_count(self) -> int:
        return sum(map(len, self.phases.values()))

    @property
    def is_placed(self) -> bool:
        """Return whether any member has machines."""
        return any(phase in self.phases for phase in PLACED)

    @property
    def is_complete(self) -> bool:
        """Return whether all living members have gathered, so that they can be placed together."""
        # Ended members are not waited for: the group is placed without them.
        return bool(self.gathered) and len(self.gathered) == self.living_count
