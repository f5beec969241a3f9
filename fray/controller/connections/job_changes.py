"""Order in which jobs have last changed, for clients that keep a list of all jobs up to date.

Invariants: an answer costs what has changed, not what there is; a number is of one epoch of the controller, so that one
of an earlier epoch is recognized, and the client gets everything again.
"""

from __future__ import annotations

from collections.abc import Collection

from fray.model.ids import JobId

FORGOTTEN_LIMIT = 10_000
"""Jobs that are remembered as forgotten; a client that was away for longer gets everything again."""


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
