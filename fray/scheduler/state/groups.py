"""Job groups in the tables: which of their jobs live, and which have gathered to be placed together."""

from __future__ import annotations

from fray.model.ids import Namespace
from fray.model.specs import JobSpec
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.requests import PlacementRequest, part_of
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, PlacementShape
from fray.scheduler.state.applicants import ApplicantTables, is_child
from fray.scheduler.state.base import discard
from fray.scheduler.state.group_members import GroupMembers, stage_of
from fray.scheduler.state.rows import JobGroupRow, JobRow


class GroupTables(ApplicantTables):
    """What `Tables` knows of job groups."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.group_names: dict[tuple[Namespace, str], dict[str, None]] = {}
        """Ids of job groups that are not over, by name."""

    def add_group(self, group: JobGroupRow) -> None:
        self.job_groups[group.group_id] = group
        self._index_group(group)
        self.touch("job_group", group.group_id)

    def _index_group(self, group: JobGroupRow) -> None:
        self.group_members[group.group_id] = GroupMembers()
        if group.ended_at is None:
            self.group_names.setdefault((group.namespace, group.config.name), {})[group.group_id] = None

    def index_group_end(self, group: JobGroupRow) -> None:
        """Its last job has ended."""
        discard(self.group_names, (group.namespace, group.config.name), group.group_id)
        self.touch("job_group", group.group_id)

    def _drop_group_member(self, job: JobRow) -> None:
        """A group is on record as long as one of its jobs."""
        muster = self.group_members[job.spec.job_group]
        muster.jobs.pop(job.job_id)
        if not muster.jobs:
            del self.job_groups[job.spec.job_group], self.group_members[job.spec.job_group]
            self.touch("job_group", job.spec.job_group)

    def on_member_phase_changed(self, job: JobRow, before: JobPhase | None) -> None:
        """A member's phase has changed."""
        self.group_members[job.spec.job_group].on_phase_changed(job.job_id, stage_of(job.spec), before, job.phase)

    def gather(self, job: JobRow) -> None:
        """It waits for nothing any more but to be placed with its group."""
        job.is_gathered = True
        self.group_members[job.spec.job_group].gathered[job.job_id] = None
        self.touch("job", job.job_id)

    def _ungather(self, job: JobRow) -> None:
        job.is_gathered = False
        self.timers.set(("wait", job.job_id), None)  # the group may be out of the queue by now: it is being placed
        if job.spec.job_group in self.queue:
            self.queue.remove(job.spec.job_group)
            for mate in self.group_members[job.spec.job_group].gathered:
                self.timers.set(("wait", mate), None)
        self.group_members[job.spec.job_group].gathered.pop(job.job_id, None)

    def enqueue_group_if_complete(self, group_id: str) -> None:
        """Into the queue with a group all of whose living members have gathered."""
        if self.group_members[group_id].is_complete and group_id not in self.queue:
            self.queue.add(self._group_applicant(self.job_groups[group_id]))
            for job in self.gathered_jobs(group_id):
                self._set_wait_limit(job, self.job_groups[group_id].queued_at)

    def _group_applicant(self, group: JobGroupRow) -> Applicant:
        """The group as something that waits for machines."""
        jobs = self.gathered_jobs(group.group_id)
        spec = jobs[0].spec
        ask = PlacementRequest(tuple(part_of(job.spec) for job in jobs), group.config.same)
        return Applicant(
            group.group_id,
            PlacementShape(ask, is_child(jobs[0]), spec.reservation_id),
            group.order,
            group.queued_at,
            ApplicantKind.GROUP,
            jobs[0].band,
            self.shares.tenant(spec.user, spec.namespace),
            _time_limit_s([job.spec for job in jobs]),
        )


def _time_limit_s(specs: list[JobSpec]) -> float | None:
    """After how long, and the ladder of the first, all of them are known to be over; None: nobody knows."""
    ends = [spec.time_limit_s + _termination_s(spec) for spec in specs if spec.time_limit_s is not None]
    return max(ends) - _termination_s(specs[0]) if len(ends) == len(specs) else None


def _termination_s(spec: JobSpec) -> float:
    return spec.termination.cancel_s + spec.termination.term_s
