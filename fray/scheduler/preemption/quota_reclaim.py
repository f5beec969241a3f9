"""Reclaiming of quota: only from tenants that use more than their quota, and only as much as that.

A waiting applicant within its quota may end jobs of tenants that are beyond theirs (`quotas`), of its own band or later
ones. What is being ended already counts as released, so that two applicants at once do not push a tenant below its
quota: the last job that is ended may cross the line, but no job after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, evolve, field

from fray.model.resources import Demand
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.queue.fair_share import TenantAccount, amount_of
from fray.scheduler.queue.queue import make_waiting_shape
from fray.scheduler.queue.quotas import (
    QuotaStatus,
    counts_towards,
    excess_over,
    limits_of,
    quota_status,
)
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.tables import Tables


def may_reclaim(state: Tables, applicant: Applicant) -> bool:
    """Return whether there are quotas and the applicant is within its own."""
    if not state.policy.preemption.reclaim or not state.shares.has_quotas:
        return False
    if applicant.shape.reservation:
        return False  # a reservation is charged to its tenant: ending its jobs gives no quota back
    # A request that is only tried out may have a shape with which nothing waits.
    want = state.queue.waiting.get(applicant.shape) or make_waiting_shape(applicant.shape)
    return quota_status(state.shares, applicant.tenant, want)[0] is QuotaStatus.WITHIN


@define
class UsageAfterPending:
    """Usage of tenants without what is already being released."""

    state: Tables
    accounts: dict[str, TenantAccount] = field(factory=dict)

    def release(self, job: JobRow) -> None:
        """Count a job as ended."""
        if job.spec.reservation_id:
            return  # charged to the reservation's tenant
        for attempt in self.state.living_members(job):
            tenant, demand, variant = self.state.attempt_charge(job, attempt)
            for key, _, account in limits_of(self.state.shares, tenant):
                # Accounts are copied when they change first: those of the state must not move during a search.
                known = self.accounts.get(key, account)
                if known is not None:
                    self.accounts[key] = _minus(known, demand, f"{demand.device_kind}:{variant}")

    def is_borrowing(self, job: JobRow) -> bool:
        """Return whether the job's tenant exceeds its quota of a resource that the job takes."""
        tenant = self.state.shares.tenant(job.spec.user, job.spec.namespace)
        for key, terms, account in limits_of(self.state.shares, tenant):
            known = self.accounts.get(key, account)
            if terms.quota is not None and known is not None:
                demand = self.state.demand(job)
                # An excess of GPUs does not shrink by the end of a job that has only CPUs.
                if any(counts_towards(demand, what) for what in excess_over(known, terms.quota)):
                    return True
        return False


def _minus(account: TenantAccount, demand: Demand, key: str) -> TenantAccount:
    used = [have - gone for have, gone in zip(account.used, amount_of(demand), strict=True)]
    variants = dict(account.variants)
    if demand.device_count:
        variants[key] = variants.get(key, 0) - demand.device_count
    return evolve(account, used=used, variants=variants)


def usage_after_pending(state: Tables) -> UsageAfterPending:
    """Return the usage with everything that is being ended already released."""
    given = UsageAfterPending(state)
    for job_id in state.ending_jobs:
        given.release(state.jobs[job_id])
    return given


def first_not_borrowing(state: Tables, jobs: Sequence[JobRow], exempt: Callable[[JobRow], bool]) -> JobRow | None:
    """Return the first of these jobs whose tenant does not borrow any more once all jobs before it have ended.

    Args:
        exempt: test for jobs that may be ended for another reason, whatever their tenant has borrowed.
    """
    if all(map(exempt, jobs)):
        return None  # before the usage is computed, which goes through all that is ending
    given = usage_after_pending(state)
    for job in jobs:
        if not exempt(job) and not given.is_borrowing(job):
            return job
        # Each job is judged with all before it counted as ended: one may take its tenant below the quota, no further
        # one.
        given.release(job)
    return None
