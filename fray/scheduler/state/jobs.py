"""Jobs in the tables: by owner, by name, and by what they wait for or how long they run."""

from __future__ import annotations

from bisect import bisect_left, insort

from fray.model.ids import JobId, Namespace, SessionId
from fray.model.policy.priority import Band
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.state.attempts import GenerationCount
from fray.scheduler.state.base import discard
from fray.scheduler.state.blobs import ValueTables
from fray.scheduler.state.groups import GroupTables
from fray.scheduler.state.rows import JobRow, JobTombstone


class JobTables(ValueTables, GroupTables):
    """What `Tables` knows of jobs."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.children: dict[str, dict[JobId, None]] = {}
        """Living jobs by owner."""
        self.jobs_by_root: dict[SessionId, dict[JobId, None]] = {}
        """Living jobs by the session at the top."""
        self.jobs_by_name: dict[tuple[Namespace, str], dict[JobId, None]] = {}
        """Living jobs by name."""
        self.held_jobs: dict[JobId, None] = {}
        """Jobs that wait for others, and for no time."""
        self.backoffs: list[tuple[float, int, JobId]] = []
        """Jobs in their back-off: (its end, order of acceptance, job), soonest first."""
        self.time_limits: list[tuple[float, int, JobId]] = []
        """Jobs that run and have a time limit: (when it is over, order of acceptance, job), soonest first."""
        self.running_by_band: dict[Band, list[tuple[float, int, JobId]]] = {band: [] for band in Band}
        """Jobs that run, by band: (when placed, order of acceptance, job)."""
        self.ending_jobs: dict[JobId, None] = {}
        """Jobs whose end, or that of their generation, is decided, and which still have machines."""
        self.sibling_groups: dict[str, dict[JobId, None]] = {}
        """Living members of supervised groups, in their order."""
        self.finished_jobs: dict[JobId, None] = {}
        """Ended jobs, oldest end first."""

    def add_job(self, job: JobRow) -> None:
        self.jobs[job.job_id] = job
        self._index_job(job)
        self.retain_blob(job.spec.payload)
        self.touch("job", job.job_id)

    def _index_job(self, job: JobRow) -> None:
        self.generation_counts[job.job_id] = GenerationCount()
        if job.spec.job_group:
            self.group_members[job.spec.job_group].jobs[job.job_id] = None
            self.on_member_phase_changed(job, None)
        if job.ended:
            self._index_ended(job)
            return
        self.jobs_by_name.setdefault((job.spec.namespace, job.spec.name), {})[job.job_id] = None
        if job.owner:
            self.children.setdefault(job.owner, {})[job.job_id] = None
        if job.root:
            self.jobs_by_root.setdefault(job.root, {})[job.job_id] = None
        if job.spec.reservation_id:
            self.jobs_inside.setdefault(job.spec.reservation_id, {})[job.job_id] = None
        if job.spec.siblings is not None:
            self.sibling_groups.setdefault(job.spec.siblings.group_id, {})[job.job_id] = None
        if job.phase is JobPhase.QUEUED:
            self.enqueue(job)
        elif job.phase is JobPhase.HELD:
            self.index_hold(job)
        elif job.phase is JobPhase.CLOSING:
            self.ending_jobs[job.job_id] = None
        else:
            self._index_run(job)

    def _index_run(self, job: JobRow) -> None:
        insort(self.running_by_band[job.band], (job.placed_at or 0.0, job.order, job.job_id))
        if job.time_limit_at is not None:
            insort(self.time_limits, (job.time_limit_at, job.order, job.job_id))

    def _drop_run(self, job: JobRow) -> None:
        _drop(self.running_by_band[job.band], (job.placed_at or 0.0, job.order, job.job_id))
        if job.time_limit_at is not None:
            _drop(self.time_limits, (job.time_limit_at, job.order, job.job_id))

    def on_phase_changed(self, job: JobRow, before: JobPhase) -> None:
        """Its phase has changed: index it by whether it has machines."""
        if before is JobPhase.QUEUED:
            self.timers.set(("wait", job.job_id), None)
        was_run = before in (JobPhase.STARTING, JobPhase.RUNNING)
        if job.is_active and not was_run:
            self._index_run(job)
        elif was_run and not job.is_active:
            self._drop_run(job)
        if job.phase is JobPhase.CLOSING:
            self.ending_jobs[job.job_id] = None
        elif before is JobPhase.CLOSING:
            del self.ending_jobs[job.job_id]

    def index_job_end(self, job: JobRow) -> None:
        """It has ended: it is nobody's living job any more."""
        discard(self.jobs_by_name, (job.spec.namespace, job.spec.name), job.job_id)
        discard(self.children, job.owner, job.job_id)
        discard(self.jobs_by_root, job.root, job.job_id)
        discard(self.jobs_inside, job.spec.reservation_id, job.job_id)
        if job.spec.siblings is not None:
            discard(self.sibling_groups, job.spec.siblings.group_id, job.job_id)
        self._index_ended(job)
        self.touch("job", job.job_id)

    def _index_ended(self, job: JobRow) -> None:
        self.finished_jobs[job.job_id] = None
        self._index_value(job)

    def drop_job(self, job: JobRow) -> None:
        for attempt in list(self.attempt_records(job)):
            self.drop_attempt(attempt)
        self.drop_value(job)
        del self.jobs[job.job_id], self.generation_counts[job.job_id], self.finished_jobs[job.job_id]
        self.touch("job", job.job_id)
        if job.spec.job_group:
            self._drop_group_member(job)

    def index_hold(self, job: JobRow) -> None:
        """It is HELD: index it by what it waits for first."""
        if job.is_gathered:
            self.group_members[job.spec.job_group].gathered[job.job_id] = None
        elif job.held_until is None:
            self.held_jobs[job.job_id] = None
        else:
            insort(self.backoffs, (job.held_until, job.order, job.job_id))

    def unindex_hold(self, job: JobRow) -> None:
        """It is HELD no more, or waits for something else now."""
        if job.is_gathered:
            self._ungather(job)
        elif self.held_jobs.pop(job.job_id, self) is self and job.held_until is not None:
            self.backoffs.remove((job.held_until, job.order, job.job_id))

    def siblings_of(self, job: JobRow) -> list[JobRow]:
        """Its supervised group, living members in order, itself included; itself alone without one."""
        if job.spec.siblings is None:
            return [job]
        mates = [self.jobs[job_id] for job_id in self.sibling_groups.get(job.spec.siblings.group_id, ())]
        return mates if job in mates else [*mates, job]

    def count_living_jobs(self) -> int:
        return len(self.jobs) - len(self.finished_jobs)

    # Jobs of which only a line is kept

    def put_job_tombstone(self, past: JobTombstone) -> None:
        self.job_tombstones[past.job_id] = past
        self.touch("past", past.job_id)

    def drop_job_tombstone(self, job_id: JobId) -> None:
        del self.job_tombstones[job_id]
        self.touch("past", job_id)


def _drop(line: list[tuple[float, int, JobId]], entry: tuple[float, int, JobId]) -> None:
    del line[bisect_left(line, entry)]
