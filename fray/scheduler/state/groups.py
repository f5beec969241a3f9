"""Job groups in the tables: which of their jobs live, and which have gathered to be placed together."""

from __future__ import annotations

from fray.model.ids import Namespace
from fray.model.specs import JobSpec
from fray.scheduler.pool.requests import PlacementRequest, part_of
from fray.scheduler.queue.queue import Applicant, ApplicantKind, PlacementShape
from fray.scheduler.state.applicants import ApplicantTables, is_child
from fray.scheduler.state.base import discard
from fray.scheduler.state.group_members import GroupMembers, stage_of
from fray.scheduler.state.rows import JobGroupRow, JobPhase, JobRow


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
        self.musters[group.group_id] = GroupMembers()
        if group.ended_at is None:
            self.group_names.setdefault((group.namespace, group.config.name), {})[group.group_id] = None

    def bury_group(self, group: JobGroupRow) -> None:
        """Its last job has ended."""
        discard(self.group_names, (group.namespace, group.config.name), group.group_id)
        self.touch("job_group", group.group_id)

    def _forget_member(self, job: JobRow) -> None:
        """A group is on record as long as one of its jobs."""
        muster = self.musters[job.spec.job_group]
        muster.jobs.pop(job.job_id)
        if not muster.jobs:
            del self.job_groups[job.spec.job_group], self.musters[job.spec.job_group]
            self.touch("job_group", job.spec.job_group)

    def mustered(self, job: JobRow, before: JobPhase | None) -> None:
        """A member's phase has changed."""
        self.musters[job.spec.job_group].moved(job.job_id, stage_of(job.spec), before, job.phase)

    def gather(self, job: JobRow) -> None:
        """It waits for nothing any more but to be placed with its group."""
        job.gathered = True
        self.musters[job.spec.job_group].gathered[job.job_id] = None
        self.touch("job", job.job_id)

    def _ungather(self, job: JobRow) -> None:
        job.gathered = False
        self.timers.set(("wait", job.job_id), None)  # the group may be out of the queue by now: it is being placed
        if job.spec.job_group in self.queue:
            self.queue.remove(job.spec.job_group)
            for mate in self.musters[job.spec.job_group].gathered:
                self.timers.set(("wait", mate), None)
        self.musters[job.spec.job_group].gathered.pop(job.job_id, None)

    def assemble(self, group_id: str) -> None:
        """Into the queue with a group all of whose living members have gathered."""
        if self.musters[group_id].complete and group_id not in self.queue:
            self.queue.add(self._applying(self.job_groups[group_id]))
            for job in self.gathered(group_id):
                self._limit_wait(job, self.job_groups[group_id].queued_at)

    def _applying(self, group: JobGroupRow) -> Applicant:
        """The group as something that waits for machines."""
        jobs = self.gathered(group.group_id)
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
            _limit_s([job.spec for job in jobs]),
        )


def _limit_s(specs: list[JobSpec]) -> float | None:
    """After how long, and the ladder of the first, all of them are known to be over; None: nobody knows."""
    ends = [spec.time_limit_s + _rungs_s(spec) for spec in specs if spec.time_limit_s is not None]
    return max(ends) - _rungs_s(specs[0]) if len(ends) == len(specs) else None


def _rungs_s(spec: JobSpec) -> float:
    return spec.termination.cancel_s + spec.termination.term_s
