"""Who waits for machines, in the tables: a job as one that applies, what it asks for, what is kept for it."""

from __future__ import annotations

from typing import TypeAlias

from fray.model.ids import NodeName
from fray.model.policy.priority import Band
from fray.scheduler.pool.requests import (
    MemberGroup,
    PlacementRequest,
    confine_to,
    request_of,
)
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, PlacementShape
from fray.scheduler.queue.fair_share import Tenant
from fray.scheduler.state.group_members import GroupMembers
from fray.scheduler.state.reservations import ReservedTables
from fray.scheduler.state.rows import CapacityClaim, JobRow
from fray.scheduler.state.start_plans import StartPlan

SearchKey: TypeAlias = tuple[PlacementShape, Band, Tenant | None]


class ApplicantTables(ReservedTables):
    """What `Tables` knows of those that wait for machines."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.feasible_at: dict[MemberGroup, int] = {}
        """What machines that are here, declared or to be had could hold, and at which `Pool.machines_version`."""
        self.group_members: dict[str, GroupMembers] = {}
        """Members of job groups."""
        self.start_plans: dict[str, StartPlan] = {}
        """By applicant, while it is the first that waits, or starves. No index: made anew after a restart."""
        self.search_backoffs: dict[SearchKey, tuple[float, float]] = {}
        """Who found nobody whose place it may take: when it looks again, and after what pause. No index."""

    def applicant(self, job: JobRow) -> Applicant:
        """The job as something that waits for machines."""
        spec = job.spec
        return Applicant(
            job.job_id,
            self._shape(job),
            job.order,
            job.queued_at,
            band=job.band,
            tenant=self.shares.tenant(spec.user, spec.namespace),
            time_limit_s=spec.time_limit_s,
        )

    def _shape(self, job: JobRow) -> PlacementShape:
        if job.spec.job_group:
            return PlacementShape(self.request_of(job), is_child(job), job.spec.reservation_id)
        return self.queue.shape_of(job.spec, is_child(job))

    def job_of(self, applicant: Applicant) -> JobRow | None:
        """The job that waits, or the first of a group; None of what is no job."""
        if applicant.kind is ApplicantKind.GROUP and applicant.id in self.group_members:
            return self.jobs[next(iter(self.group_members[applicant.id].gathered))]
        return self.jobs.get(applicant.id)

    def request_of(self, job: JobRow) -> PlacementRequest:
        """A member of a job group goes where the others are."""
        group = self.job_groups[job.spec.job_group] if job.spec.job_group else None
        if group is None or group.place is None or not group.config.same:
            return request_of(job.spec)
        return confine_to(request_of(job.spec), group.config.same, group.place)

    def preferred_nodes(self, applicant: Applicant) -> tuple[tuple[NodeName, ...], ...]:
        """Where its members would like to be, part by part; empty: anywhere."""
        if applicant.kind is ApplicantKind.GROUP:
            return tuple(job.previous_nodes for job in self.gathered_jobs(applicant.id))
        job = self.jobs.get(applicant.id)
        return (job.previous_nodes,) if job is not None and job.previous_nodes else ()

    def gathered_jobs(self, group_id: str) -> list[JobRow]:
        """Members that are placed together next, in order of acceptance."""
        return sorted(map(self.jobs.__getitem__, self.group_members[group_id].gathered), key=lambda job: job.order)

    def enqueue(self, job: JobRow) -> None:
        self.queue.add(self.applicant(job))
        self._set_wait_limit(job, job.queued_at)

    def _set_wait_limit(self, job: JobRow, since: float) -> None:
        limit_s = job.spec.wait_limit_s
        self.timers.set(("wait", job.job_id), None if limit_s is None else since + limit_s)

    # Claims

    def put_claim(self, claim: CapacityClaim) -> None:
        self.claims[claim.applicant] = claim
        self.touch("claim", claim.applicant)

    def drop_claim(self, applicant_id: str) -> None:
        """What was kept may fit others now."""
        claim = self.claims.pop(applicant_id)
        if not claim.reservation or claim.reservation in self.reservation_pools:
            self.pool_for(claim.reservation).mark_freed(share.node for share in claim.shares)
        if applicant_id in self.queue:
            self.queue.retry(applicant_id)
        self.touch("claim", applicant_id)


def is_child(job: JobRow) -> bool:
    """Launched by a running job, and part of it."""
    return bool(job.owner) and job.owner != job.root
