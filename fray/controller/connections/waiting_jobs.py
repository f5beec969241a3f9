"""Followed jobs that wait: their reasons are read again, and sent, while the cluster changes.

A job's own changes are effects of the scheduler. What a waiting job waits for also changes with machines, other jobs
and the policy. The scheduler makes no effects of that: with 100,000 waiting jobs each step would have that many.

Invariants: at most `ROUND_LIMIT` jobs are looked at every `ROUND_S`, whatever the number of jobs, changes and clients;
nothing is done while the cluster does not change. After the last change every followed job is looked at once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from fray.model.ids import JobId
from fray.model.specs import JobInfo, JobState

ROUND_S = 1.0
ROUND_LIMIT = 200
"""Jobs in one round: about 10 ms of the controller's time."""


class WaitingJobs:
    """Reasons last sent of the followed jobs that wait."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[JobId, str | None] = OrderedDict()
        """Reason last sent, None if its clients were sent different ones. The job that was looked at least recently
        comes first."""
        self._due_count = 0
        """Jobs that have not been looked at since the last change of the cluster."""
        self._wake = trio.Event()

    def __repr__(self) -> str:
        return f"<WaitingJobs: {len(self._reasons)}, {self._due_count} to be looked at>"

    def follow(self, info: JobInfo) -> None:
        """Take the state of a job that has not ended and is being sent to one client, which follows it from now on."""
        if info.state is JobState.PENDING:
            # Other clients may have been sent another reason, and are to be sent this one, too.
            is_same = self._reasons.get(info.job_id, info.reason) == info.reason
            self._reasons[info.job_id] = info.reason if is_same else None

    def record(self, info: JobInfo) -> None:
        """Take the state of a job that is being sent to all clients that follow it."""
        if info.state is JobState.PENDING:
            self._reasons[info.job_id] = info.reason
        else:
            self._reasons.pop(info.job_id, None)

    def cluster_changed(self) -> None:
        """Look at all jobs again, soon."""
        self._due_count = len(self._reasons)
        if self._due_count:
            self._wake.set()

    async def run(self, refresh: Callable[[JobId, str | None], bool]) -> None:
        """Call ``refresh`` with jobs and the reasons last sent, at most `ROUND_LIMIT` every `ROUND_S`, until cancelled.

        Args:
            refresh: returns False if the job is not followed or does not wait any more.
        """
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            # Sleeping comes after looking: the first change is seen at once, those of the next second together.
            self._run_round(refresh)
            await trio.sleep(ROUND_S)
            if self._due_count:
                self._wake.set()

    def _run_round(self, refresh: Callable[[JobId, str | None], bool]) -> None:
        # Jobs are added at the end, so those that are due are the first ones.
        for _ in range(min(self._due_count, len(self._reasons), ROUND_LIMIT)):
            job_id, reason = self._reasons.popitem(last=False)
            # Entered again before the call, which records what it sends.
            self._reasons[job_id] = reason
            if not refresh(job_id, reason):
                self._reasons.pop(job_id, None)
        self._due_count = max(0, self._due_count - ROUND_LIMIT)
