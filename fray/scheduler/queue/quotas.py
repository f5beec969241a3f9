"""What a quota leaves to an applicant: it goes first, it borrows, or it waits. Pure, and nothing is kept here.

A quota says what goes before all that is borrowed. What exceeds it is placed behind everything of its band that is
within, as far as ``borrow`` allows. Both the user's quota and that of his namespace count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

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
    """In the order in which they are tried."""

    WITHIN = 0
    BORROWS = 1
    GROWS = 2
    """It is a unit more for a reservation: behind everybody else."""
    WAITS = 3
    """It would take more than may be borrowed."""


def exceeded_resource(
    used: Amount, variants: Mapping[str, int], more: Amount, devices: Mapping[str, int], most: Amounts
) -> str:
    """What of it would be more than allowed, in a word; empty: nothing. What is not asked for cannot exceed.

    Args:
        devices: of ``more``, by ``kind:variant``; ``kind:auto`` counts against every variant of the kind.
    """
    if most.cpu_milli is not None and more[0] and used[0] + more[0] > most.cpu_milli:
        return "cpu"
    if most.memory_bytes is not None and more[1] and used[1] + more[1] > most.memory_bytes:
        return "memory"
    for key, amount in most.devices.items():
        kind, _, variant = key.partition(":")
        wanted = devices.get(key, 0) + devices.get(f"{kind}:auto", 0) if variant else more[KINDS[kind]]
        have = variants.get(key, 0) if variant else used[KINDS[kind]]
        if wanted and have + wanted > amount:
            return key
    return ""


def hard_limit(terms: TenantPolicy) -> Amounts | None:
    """The most that may be had at all; None: there is no limit."""
    if terms.quota is None or terms.borrow is True:
        return None
    if terms.borrow is False:
        return terms.quota
    quota, more = terms.quota, terms.borrow
    return Amounts(
        cpu_milli=_sum(quota.cpu_milli, more.cpu_milli),
        memory_bytes=_sum(quota.memory_bytes, more.memory_bytes),
        devices={key: amount + more.devices[key] for key, amount in quota.devices.items() if key in more.devices},
    )


def _sum(quota: int | None, more: int | None) -> int | None:
    return None if quota is None or more is None else quota + more


def limits_of(shares: FairShareAccounts, tenant: Tenant) -> Iterator[tuple[str, TenantPolicy, TenantAccount | None]]:
    """Whose terms bind a tenant, and what they count."""
    policy = shares.policy
    yield f"user:{tenant.user}", policy.user(tenant.user), shares.users.get(tenant.user)
    yield f"space:{tenant.namespace}", policy.namespace(tenant.namespace), shares.namespaces.get(tenant.namespace)


def quota_status(shares: FairShareAccounts, tenant: Tenant, want: WaitingShape) -> tuple[QuotaStatus, str]:
    """How a want of a tenant stands to the quotas now; and if it waits, for whose."""
    found = QuotaStatus.GROWS if want.shape.is_growth else QuotaStatus.WITHIN
    if not shares.has_quotas or want.shape.reservation:  # that has been charged as a whole
        return found, ""
    for key, terms, account in limits_of(shares, tenant):
        if terms.quota is None or not _exceeded_by(account, want, terms.quota):
            continue
        most = hard_limit(terms)
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
    """What of it is more than so much, and by how much: ``cpu`` (thousandths), ``memory``, ``gpu``, ``gpu:h100``."""
    if not any(account.used):
        return {}
    found = {"cpu": (account.used[0], most.cpu_milli), "memory": (account.used[1], most.memory_bytes)}
    for key, amount in most.devices.items():
        found[key] = (account.variants.get(key, 0) if ":" in key else account.used[KINDS[key]]), amount
    return {key: have - limit for key, (have, limit) in found.items() if limit is not None and have > limit}


def counts_towards(demand: Demand, key: str) -> bool:
    """It is of what a quota counts under this key."""
    kind, _, variant = key.partition(":")
    if kind in KINDS:
        wanted = demand.device_variant.lower()
        return demand.device_kind == kind and demand.device_count > 0 and wanted in (variant or wanted, "auto")
    return bool(demand.cpu_milli if key == "cpu" else demand.memory_bytes)
