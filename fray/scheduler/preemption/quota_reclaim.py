"""Taking back what others have borrowed: only from those who have more than their quota, and only as much as that.

The law. Who is within his quota and waits may end jobs of tenants who are beyond theirs (`quotas`), of his own band or
later ones. What is being ended already counts as given back, so nobody is pushed below his quota by two who come at
once: the last job that is ended may cross the line, none after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define, evolve, field

from fray.model.resources import Demand
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.queue.fair_share import TenantAccount, amount_of
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
    """It is within its quota, where there are quotas."""
    want = state.queue.waiting.get(applicant.shape)
    if not state.policy.preemption.reclaim or not state.shares.has_quotas or want is None:
        return False
    if applicant.shape.reservation:
        return False  # what runs there is charged to its holder: its end gives no quota back
    return quota_status(state.shares, applicant.tenant, want)[0] is QuotaStatus.WITHIN


@define
class UsageAfterPending:
    """What tenants have without what these have given back."""

    state: Tables
    accounts: dict[str, TenantAccount] = field(factory=dict)

    def release(self, job: JobRow) -> None:
        """It is over."""
        if job.spec.reservation_id:
            return  # that is charged to whoever holds the reservation
        for attempt in self.state.living_members(job):
            tenant, demand, variant = self.state.attempt_charge(job, attempt)
            for key, _, account in limits_of(self.state.shares, tenant):
                known = self.accounts.get(key, account)
                if known is not None:
                    self.accounts[key] = _minus(known, demand, f"{demand.device_kind}:{variant}")

    def is_borrowing(self, job: JobRow) -> bool:
        """Its tenant has more than his quota of something that it takes."""
        tenant = self.state.shares.tenant(job.spec.user, job.spec.namespace)
        for key, terms, account in limits_of(self.state.shares, tenant):
            known = self.accounts.get(key, account)
            if terms.quota is not None and known is not None:
                demand = self.state.demand(job)
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
    """With what is being ended already given back."""
    given = UsageAfterPending(state)
    for job_id in state.ending_jobs:
        given.release(state.jobs[job_id])
    return given


def first_not_borrowing(state: Tables, jobs: Iterable[JobRow], mine: Callable[[JobRow], bool]) -> JobRow | None:
    """The first of these whose tenant has borrowed nothing any more, once all before it are over.

    Args:
        mine: who may be ended for another reason, whatever he has borrowed.
    """
    given = usage_after_pending(state)
    for job in jobs:
        if not mine(job) and not given.is_borrowing(job):
            return job
        given.release(job)
    return None
