"""Jobs in the tables: by owner, by name, and by what they wait for or how long they run."""

from __future__ import annotations

from bisect import bisect_left, insort

from fray.model.ids import JobId, Namespace, SessionId
from fray.model.policy.priority import Band
from fray.scheduler.state.attempts import GenerationCount
from fray.scheduler.state.base import discard
from fray.scheduler.state.blobs import ValueTables
from fray.scheduler.state.groups import GroupTables
from fray.scheduler.state.rows import JobPhase, JobRow, JobTombstone


class JobTables(ValueTables, GroupTables):
    """What `Tables` knows of jobs."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.children: dict[str, dict[JobId, None]] = {}
        """Living jobs by owner."""
        self.rooted: dict[SessionId, dict[JobId, None]] = {}
        """Living jobs by the session at the top."""
        self.named: dict[tuple[Namespace, str], dict[JobId, None]] = {}
        """Living jobs by name."""
        self.held: dict[JobId, None] = {}
        """Jobs that wait for others, and for no time."""
        self.alarms: list[tuple[float, int, JobId]] = []
        """Jobs in their back-off: (its end, order of acceptance, job), soonest first."""
        self.limits: list[tuple[float, int, JobId]] = []
        """Jobs that run and have a time limit: (when it is over, order of acceptance, job), soonest first."""
        self.runs: dict[Band, list[tuple[float, int, JobId]]] = {band: [] for band in Band}
        """Jobs that run, by band: (when placed, order of acceptance, job)."""
        self.ending: dict[JobId, None] = {}
        """Jobs whose end, or that of their generation, is decided, and which still have machines."""
        self.groups: dict[str, dict[JobId, None]] = {}
        """Living members of supervised groups, in their order."""
        self.finished: dict[JobId, None] = {}
        """Ended jobs, oldest end first."""

    def add_job(self, job: JobRow) -> None:
        self.jobs[job.job_id] = job
        self._index_job(job)
        self.retain(job.spec.payload)
        self.touch("job", job.job_id)

    def _index_job(self, job: JobRow) -> None:
        self.tally[job.job_id] = GenerationCount()
        if job.spec.job_group:
            self.musters[job.spec.job_group].jobs[job.job_id] = None
            self.mustered(job, None)
        if job.ended:
            self._index_ended(job)
            return
        self.named.setdefault((job.spec.namespace, job.spec.name), {})[job.job_id] = None
        if job.owner:
            self.children.setdefault(job.owner, {})[job.job_id] = None
        if job.root:
            self.rooted.setdefault(job.root, {})[job.job_id] = None
        if job.spec.reservation_id:
            self.inside.setdefault(job.spec.reservation_id, {})[job.job_id] = None
        if job.spec.siblings is not None:
            self.groups.setdefault(job.spec.siblings.group_id, {})[job.job_id] = None
        if job.phase is JobPhase.QUEUED:
            self.enqueue(job)
        elif job.phase is JobPhase.HELD:
            self.hold(job)
        elif job.phase is JobPhase.CLOSING:
            self.ending[job.job_id] = None
        else:
            self._index_run(job)

    def _index_run(self, job: JobRow) -> None:
        insort(self.runs[job.band], (job.placed_at or 0.0, job.order, job.job_id))
        if job.over_at is not None:
            insort(self.limits, (job.over_at, job.order, job.job_id))

    def _drop_run(self, job: JobRow) -> None:
        _drop(self.runs[job.band], (job.placed_at or 0.0, job.order, job.job_id))
        if job.over_at is not None:
            _drop(self.limits, (job.over_at, job.order, job.job_id))

    def turned(self, job: JobRow, before: JobPhase) -> None:
        """Its phase has changed: index it by whether it has machines."""
        if before is JobPhase.QUEUED:
            self.timers.set(("wait", job.job_id), None)
        was_run = before in (JobPhase.STARTING, JobPhase.RUNNING)
        if job.runs and not was_run:
            self._index_run(job)
        elif was_run and not job.runs:
            self._drop_run(job)
        if job.phase is JobPhase.CLOSING:
            self.ending[job.job_id] = None
        elif before is JobPhase.CLOSING:
            del self.ending[job.job_id]

    def bury_job(self, job: JobRow) -> None:
        """It has ended: it is nobody's living job any more."""
        discard(self.named, (job.spec.namespace, job.spec.name), job.job_id)
        discard(self.children, job.owner, job.job_id)
        discard(self.rooted, job.root, job.job_id)
        discard(self.inside, job.spec.reservation_id, job.job_id)
        if job.spec.siblings is not None:
            discard(self.groups, job.spec.siblings.group_id, job.job_id)
        self._index_ended(job)
        self.touch("job", job.job_id)

    def _index_ended(self, job: JobRow) -> None:
        self.finished[job.job_id] = None
        self._index_value(job)

    def drop_job(self, job: JobRow) -> None:
        for attempt in list(self.records(job)):
            self.drop_attempt(attempt)
        self.unvalue(job)
        del self.jobs[job.job_id], self.tally[job.job_id], self.finished[job.job_id]
        self.touch("job", job.job_id)
        if job.spec.job_group:
            self._forget_member(job)

    def hold(self, job: JobRow) -> None:
        """It is HELD: index it by what it waits for first."""
        if job.gathered:
            self.musters[job.spec.job_group].gathered[job.job_id] = None
        elif job.held_until is None:
            self.held[job.job_id] = None
        else:
            insort(self.alarms, (job.held_until, job.order, job.job_id))

    def unhold(self, job: JobRow) -> None:
        """It is HELD no more, or waits for something else now."""
        if job.gathered:
            self._ungather(job)
        elif self.held.pop(job.job_id, self) is self and job.held_until is not None:
            self.alarms.remove((job.held_until, job.order, job.job_id))

    def group_of(self, job: JobRow) -> list[JobRow]:
        """Its supervised group, living members in order, itself included; itself alone without one."""
        if job.spec.siblings is None:
            return [job]
        mates = [self.jobs[job_id] for job_id in self.groups.get(job.spec.siblings.group_id, ())]
        return mates if job in mates else [*mates, job]

    def living_jobs(self) -> int:
        return len(self.jobs) - len(self.finished)

    # Jobs of which only a line is kept

    def put_past(self, past: JobTombstone) -> None:
        self.past[past.job_id] = past
        self.touch("past", past.job_id)

    def drop_past(self, job_id: JobId) -> None:
        del self.past[job_id]
        self.touch("past", job_id)


def _drop(line: list[tuple[float, int, JobId]], entry: tuple[float, int, JobId]) -> None:
    del line[bisect_left(line, entry)]
