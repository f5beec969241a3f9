"""How much more each tenant may have by the quotas: machines are asked for what may run, not for all that waits."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field

from fray.model.policy.policy import Amounts
from fray.scheduler.queue.fair_share import (
    KINDS,
    FairShareAccounts,
    Tenant,
    TenantAccount,
)
from fray.scheduler.queue.indexes import WaitingShape
from fray.scheduler.queue.quotas import hard_limit, limits_of


@define
class Headroom:
    """Of one plan: what it has let in counts as had."""

    shares: FairShareAccounts
    taken: dict[tuple[str, str], int] = field(factory=dict)
    """By whose quota, and by what of it."""

    def admit_waiting(self, want: WaitingShape) -> int:
        """How many of those that wait so may be placed, whoever's they are; they are let in."""
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
            count = min(count, max(0, left - self.taken.get((whose, key), 0)) // needed)
        for whose, key, needed, _ in found:
            self.taken[whose, key] = self.taken.get((whose, key), 0) + count * needed
        return count


def _remaining(account: TenantAccount | None, want: WaitingShape, most: Amounts) -> Iterator[tuple[str, int, int]]:
    """Each thing that is limited and asked for: how much of it one takes, and how much is left."""
    used, variants = (account.used, account.variants) if account is not None else ([0, 0, 0, 0], {})
    for at, (key, limit) in enumerate((("cpu", most.cpu_milli), ("memory", most.memory_bytes))):
        if limit is not None and want.need[at]:
            yield key, want.need[at], limit - used[at]
    for key, limit in most.devices.items():
        kind, _, variant = key.partition(":")
        needed = want.devices.get(key, 0) + want.devices.get(f"{kind}:auto", 0) if variant else want.need[KINDS[kind]]
        if needed:
            yield key, needed, limit - (variants.get(key, 0) if variant else used[KINDS[kind]])
