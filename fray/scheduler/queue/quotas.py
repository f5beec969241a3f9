"""Quotas: whether an applicant is within its quota, borrows, or has to wait.

What exceeds a quota is placed after everything of its band that is within, as far as ``borrow`` allows. Both the user's
quota and that of its namespace count. Nothing is stored here. `Headroom` bounds the requests for
machines: they are made for what may run, not for all that waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

from attrs import define, field

from fray.model.policy.policy import Amounts, TenantPolicy
from fray.model.resources import Demand
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.queue.fair_share import (
    KINDS,
    Amount,
    FairShareAccounts,
    Tenant,
    TenantAccount,
)
from fray.scheduler.queue.indexes import WaitingShape
from fray.scheduler.queue.queue import Queue
from fray.scheduler.reasons import Quantity, Reason, ReasonKind


class QuotaStatus(IntEnum):
    """Status of an applicant, in the order in which they are tried."""

    WITHIN = 0
    BORROWS = 1
    GROWS = 2
    """One more unit of a reservation: after everything else."""
    WAITS = 3
    """More than may be borrowed."""


def exceeded_resource(
    used: Amount, variants: Mapping[str, int], more: Amount, devices: Mapping[str, int], most: Amounts
) -> str:
    """Return the resource of which it would be more than allowed; empty for none. What is not requested cannot exceed.

    Args:
        devices: of ``more``, by ``kind:variant``; ``kind:auto`` counts against every variant of the kind.
    """
    # A quota that was lowered below the usage must not hold back what takes nothing of that resource.
    if most.cpu_milli is not None and more[0] and used[0] + more[0] > most.cpu_milli:
        return "cpu"
    if most.memory_bytes is not None and more[1] and used[1] + more[1] > most.memory_bytes:
        return "memory"
    for key, amount in most.devices.items():
        kind, _, variant = key.partition(":")
        # Devices of any variant count against each quota they might touch: whichever is given, no quota is exceeded
        # unnoticed. The price is a wait where another variant would have been given.
        wanted = devices.get(key, 0) + devices.get(f"{kind}:auto", 0) if variant else more[KINDS[kind]]
        have = variants.get(key, 0) if variant else used[KINDS[kind]]
        if wanted and have + wanted > amount:
            return key
    return ""


def hard_limit(terms: TenantPolicy) -> Amounts | None:
    """Return the most that may be used at all; None without a limit."""
    if terms.quota is None or terms.borrow is True:
        return None
    if terms.borrow is False:
        return terms.quota
    quota, more = terms.quota, terms.borrow
    return Amounts(
        cpu_milli=_sum(quota.cpu_milli, more.cpu_milli),
        memory_bytes=_sum(quota.memory_bytes, more.memory_bytes),
        # A resource without a limit on borrowing has no hard limit.
        devices={key: amount + more.devices[key] for key, amount in quota.devices.items() if key in more.devices},
    )


def _sum(quota: int | None, more: int | None) -> int | None:
    return None if quota is None or more is None else quota + more


def limits_of(shares: FairShareAccounts, tenant: Tenant) -> Iterator[tuple[str, TenantPolicy, TenantAccount | None]]:
    """Yield the owners of the quotas of a tenant, with their terms and accounts."""
    policy = shares.policy
    # Both have to be kept: a namespace is shared by users, and a user has several namespaces.
    yield f"user:{tenant.user}", policy.user(tenant.user), shares.users.get(tenant.user)
    yield f"space:{tenant.namespace}", policy.namespace(tenant.namespace), shares.namespaces.get(tenant.namespace)


def quota_status(shares: FairShareAccounts, tenant: Tenant, want: WaitingShape) -> tuple[QuotaStatus, str]:
    """Return the status of a shape of a tenant, and the owner of the quota it waits for."""
    # Growth stays behind all others, even within its quota.
    found = QuotaStatus.GROWS if want.shape.is_growth else QuotaStatus.WITHIN
    if not shares.has_quotas or want.shape.reservation:  # a reservation is charged as a whole
        return found, ""
    # Computed at each look: usage changes with each placement of a pass.
    for key, terms, account in limits_of(shares, tenant):
        if terms.quota is None or not _exceeded_by(account, want, terms.quota):
            continue
        most = hard_limit(terms)
        # The stricter of the two quotas decides, that of the user or that of the namespace.
        if most is not None and _exceeded_by(account, want, most):
            return QuotaStatus.WAITS, key
        found = max(found, QuotaStatus.BORROWS)
    return found, ""


def quota_reason(queue: Queue, applicant: Applicant) -> Reason | None:
    """Return the quota for which an applicant waits; None: it does not wait for a quota."""
    want = queue.waiting[applicant.shape]
    status, exceeded = quota_status(queue.shares, applicant.tenant, want)
    if status is not QuotaStatus.WAITS:
        return None
    for key, terms, account in limits_of(queue.shares, applicant.tenant):
        most = hard_limit(terms)
        what = _exceeded_by(account, want, most) if key == exceeded and most is not None else ""
        if most is not None and what:
            kind, _, name = key.partition(":")
            whose = {"user": "user", "space": "namespace"}[kind]
            # Compared with no usage at all: no end of other jobs would help.
            if never := _exceeded_by(None, want, most):
                return Reason(
                    ReasonKind.QUOTA_TOO_SMALL, name, whose=whose, limit=_quantity(never, _limit(most, never))
                )
            used, limit = _quantity(what, _amount(account, what)), _quantity(what, _limit(most, what))
            return Reason(ReasonKind.QUOTA_EXCEEDED, name, whose=whose, used=used, limit=limit)
    return None


def _quantity(what: str, amount: int | None) -> Quantity:
    return Quantity(what, amount or 0)


def _amount(account: TenantAccount | None, what: str) -> int:
    if account is None:
        return 0
    if what in ("cpu", "memory"):
        return account.used[what == "memory"]
    return account.variants.get(what, 0) if ":" in what else account.used[KINDS[what]]


def _limit(most: Amounts, what: str) -> int:
    return {"cpu": most.cpu_milli, "memory": most.memory_bytes}.get(what) or most.devices.get(what, 0)


def _exceeded_by(account: TenantAccount | None, want: WaitingShape, most: Amounts) -> str:
    used, variants = (account.used, account.variants) if account is not None else (_NOTHING, {})
    return exceeded_resource(used, variants, want.need, want.devices, most)


_NOTHING = [0, 0, 0, 0]


def excess_over(account: TenantAccount, most: Amounts) -> dict[str, int]:
    """Return the excess over an amount: ``cpu`` (thousandths), ``memory``, ``gpu``, ``gpu:h100``."""
    if not any(account.used):
        return {}
    found = {"cpu": (account.used[0], most.cpu_milli), "memory": (account.used[1], most.memory_bytes)}
    for key, amount in most.devices.items():
        found[key] = (account.variants.get(key, 0) if ":" in key else account.used[KINDS[key]]), amount
    return {key: have - limit for key, (have, limit) in found.items() if limit is not None and have > limit}


def counts_towards(demand: Demand, key: str) -> bool:
    """Return whether the demand counts towards a quota's key."""
    kind, _, variant = key.partition(":")
    if kind in KINDS:
        wanted = demand.device_variant.lower()
        return demand.device_kind == kind and demand.device_count > 0 and wanted in (variant or wanted, "auto")
    return bool(demand.cpu_milli if key == "cpu" else demand.memory_bytes)


@define
class Headroom:
    """Headroom during one plan: what it has admitted counts as used."""

    shares: FairShareAccounts
    taken: dict[tuple[str, str], int] = field(factory=dict)
    """Used amounts by owner of the quota and resource."""

    def admit_waiting(self, want: WaitingShape) -> int:
        """Admit as many waiting applicants of this shape as quotas allow, and return their number."""
        if not self.shares.has_quotas:
            return want.count_waiting()
        return sum(self._admit(lane.tenant_queue.tenant, want, len(lane.entries)) for lane in want.lanes.values())

    def _admit(self, tenant: Tenant, want: WaitingShape, count: int) -> int:
        found = [
            (whose, key, needed, left)
            for whose, terms, account in limits_of(self.shares, tenant)
            if (most := hard_limit(terms)) is not None
            for key, needed, left in _remaining(account, want, most)
        ]
        for whose, key, needed, left in found:
            # Shapes share the headroom of their tenant: what was admitted for one is not left for the next.
            count = min(count, max(0, left - self.taken.get((whose, key), 0)) // needed)
        # Charged after the count is known: user and namespace limit it together.
        for whose, key, needed, _ in found:
            self.taken[whose, key] = self.taken.get((whose, key), 0) + count * needed
        return count


def _remaining(account: TenantAccount | None, want: WaitingShape, most: Amounts) -> Iterator[tuple[str, int, int]]:
    """Yield each limited resource that is requested, with what one applicant takes and what is left."""
    used, variants = (account.used, account.variants) if account is not None else ([0, 0, 0, 0], {})
    for at, (key, limit) in enumerate((("cpu", most.cpu_milli), ("memory", most.memory_bytes))):
        if limit is not None and want.need[at]:
            yield key, want.need[at], limit - used[at]
    for key, limit in most.devices.items():
        kind, _, variant = key.partition(":")
        needed = want.devices.get(key, 0) + want.devices.get(f"{kind}:auto", 0) if variant else want.need[KINDS[kind]]
        if needed:
            yield key, needed, limit - (variants.get(key, 0) if variant else used[KINDS[kind]])
