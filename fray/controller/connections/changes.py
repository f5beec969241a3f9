"""Order in which jobs and machines have last changed, for clients that keep a list of all of them up to date.

Invariants: an answer costs what has changed, not what there is; a number is of one epoch of the controller, so that one
of an earlier epoch is recognized, and the client gets everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

from fray.model.ids import JobId, NodeName
from fray.scheduler.effects import (
    CordonRequested,
    DesiredAttemptsChanged,
    Effect,
    Event,
    NodeDied,
    NodeJoined,
    NodeLeaving,
    NodeProbed,
    NodeReported,
    NodeSilent,
    ReservationInfoChanged,
    UncordonRequested,
)

FORGOTTEN_LIMIT = 10_000
"""Jobs, and machines, that are remembered as forgotten; a client that was away for longer gets everything again."""
ABOUT_ONE = (NodeReported, NodeProbed, NodeSilent, NodeDied, NodeLeaving, DesiredAttemptsChanged)
ABOUT_ANY = (NodeJoined, CordonRequested, UncordonRequested, ReservationInfoChanged)
"""Events and effects that may have changed any machine; those above, one."""
COMPARE_EVERY_S = 1.0
"""Time after which all machines are compared at the next look, in seconds: a thousand take 2 ms."""


class JobChanges:
    """Numbers of the last changes of jobs, ascending.

    Args:
        epoch: of the controller.
    """

    def __init__(self, epoch: int) -> None:
        self._known_since = self._last = epoch << 32
        self._changed: dict[JobId, int] = {}
        self._forgotten: dict[JobId, int] = {}

    def record(self, job_id: JobId) -> None:
        """Note that a job has changed."""
        self._last += 1
        self._changed.pop(job_id, None)
        self._changed[job_id] = self._last

    def since(self, number: int, jobs: Collection[JobId]) -> tuple[bool, list[tuple[JobId, int]], list[JobId]]:
        """Return whether the number is unknown (then the rest is everything), jobs that have changed after it with
        their numbers, and jobs that were forgotten after it.

        Args:
            jobs: those on record.
        """
        # Jobs of the store have not changed in this epoch, and to be forgotten is not a change of a job.
        if len(jobs) != len(self._changed):
            self._compare(jobs)
        is_unknown = not self._known_since <= number <= self._last
        found = []
        for job_id in reversed(self._changed):
            if self._changed[job_id] <= number and not is_unknown:
                break
            found.append((job_id, self._changed[job_id]))
        found.reverse()
        gone = [] if is_unknown else [job_id for job_id, when in self._forgotten.items() if when > number]
        return is_unknown, found, gone

    @property
    def last(self) -> int:
        """Number of the last change."""
        return self._last

    def has_since(self, number: int, jobs: Collection[JobId]) -> bool:
        """Return whether `since` has something to say of that number."""
        return number != self._last or len(jobs) != len(self._changed)

    def _compare(self, jobs: Collection[JobId]) -> None:
        for job_id in jobs:
            if job_id not in self._changed:
                self.record(job_id)
        for job_id in [job_id for job_id in self._changed if job_id not in jobs]:
            del self._changed[job_id]
            self._last += 1
            self._forgotten[job_id] = self._last
        while len(self._forgotten) > FORGOTTEN_LIMIT:
            self._known_since = self._forgotten.pop(next(iter(self._forgotten)))


class NodeChanges:
    """Numbers of the last changes of machines, found by comparison when a client asks.

    What is free on a machine changes with every attempt, and what may have changed is in the events and effects of a
    batch; all machines are compared every `COMPARE_EVERY_S`, too, for what is in neither.

    Args:
        epoch: of the controller.
    """

    def __init__(self, epoch: int) -> None:
        self._first = self._last = epoch << 32
        self._marks: dict[NodeName, object] = {}
        self._changed: dict[NodeName, int] = {}
        self._gone: dict[NodeName, int] = {}
        self._suspects: dict[NodeName, None] | None = None
        """Machines that may have changed since they were compared; None: any."""
        self._compare_at = 0.0

    def note(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        """Take what a batch was about."""
        for each in chain(events, effects):
            if self._suspects is None:
                return  # as long as no client asks
            if isinstance(each, ABOUT_ANY):
                self._suspects = None
            elif isinstance(each, ABOUT_ONE):
                self._suspects[each.node] = None

    def look(self, marks_of: Callable[[Collection[NodeName] | None], Mapping[NodeName, object]], now: float) -> int:
        """Compare, and return the number of the last change.

        Args:
            marks_of: returns for each of these machines that is there (None: for all) something that differs once the
                machine has changed.
            now: time in seconds.
        """
        if now >= self._compare_at:
            self._suspects, self._compare_at = None, now + COMPARE_EVERY_S
        if self._suspects is None or self._suspects:
            marks = marks_of(self._suspects)
            for name, mark in marks.items():
                if self._marks.get(name) != mark:
                    self._marks[name] = mark
                    self._last += 1
                    self._changed[name] = self._last
                    self._gone.pop(name, None)
            compared = self._marks if self._suspects is None else self._suspects
            for name in [name for name in compared if name not in marks and name in self._marks]:
                self._last += 1
                self._gone[name] = self._last
                del self._changed[name], self._marks[name]
        self._suspects = {}
        while len(self._gone) > FORGOTTEN_LIMIT:
            self._first = self._gone.pop(next(iter(self._gone)))
        return self._last

    def since(self, number: int) -> tuple[bool, list[NodeName], list[NodeName]]:
        """Return whether the number is unknown (then the rest is everything), machines that had changed after it at the
        last look, and those that had gone.
        """
        is_unknown = not self._first <= number <= self._last
        changed = [name for name, when in self._changed.items() if is_unknown or when > number]
        gone = [] if is_unknown else [name for name, when in self._gone.items() if when > number]
        return is_unknown, changed, gone
