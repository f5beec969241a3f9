"""Shares in the tables: who is charged for what runs, of how large a cluster, and when that is written down."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.ids import NodeName
from fray.model.policy.policy import Policy
from fray.model.resources import Demand
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.queue.fair_share import (
    FORGOTTEN_MEAN,
    Amount,
    FairShareAccounts,
    Tenant,
    TenantAccount,
    capacity_of,
)
from fray.scheduler.queue.queue import Queue
from fray.scheduler.queue.quotas import excess_over, hard_limit, limits_of
from fray.scheduler.state.base import TableBase
from fray.scheduler.state.rows import JobRow, Node


class UsageTables(TableBase):
    """What `Tables` knows of shares."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.shares = FairShareAccounts()
        self.queue = Queue(self.shares)
        self.excess_at_policy_change: dict[tuple[str, str], int] = {}
        """What users and namespaces had beyond what they may have, when the policy was set that says so."""
        self.policy = Policy()

    # Use

    def charge(self, tenant: Tenant, demand: Demand, variant: str, times: int) -> None:
        """So many members of a tenant's run from now on (or, less than 0, no longer).

        Args:
            variant: of the devices they were given (`variant_of`).
        """
        shares, now = self.shares, self.now
        accounts = shares.account(tenant, now)[:2]
        for account in accounts:
            if now > account.row.at:
                shares.accrue(account, now)
        shares.count_members(tenant, demand, variant, times, now)
        for account in accounts:
            shares.update_share(account, now)
            self.usage[account.key] = account.row
            self.touch("usage", account.key)
        if times < 0 and self.queue.over_quota:
            self.queue.retry_after_quota_change(f"user:{tenant.user}")
            self.queue.retry_after_quota_change(f"space:{tenant.namespace}")

    def demand(self, job: JobRow) -> Demand:
        """What each of its members takes of a machine, or will: of any-of devices those it was given last."""
        return (job.spec.demand, *job.spec.alternatives)[job.choice]

    def variant_of(self, node: NodeName, devices: tuple[str, ...]) -> str:
        """Of what devices of a machine are; empty for none."""
        return self.pool.machines[node].device_places[devices[0]][0][1] if devices else ""

    # The cluster

    def _set_node_capacity(self, name: NodeName, size: Amount | None) -> None:
        """The cluster is larger or smaller: what it was until now goes into the means."""
        if self.shares.node_capacity(name) != size:
            self._accrue_all()
            self.shares.set_node_capacity(name, size)
            self.shares.rank_all(self.now)

    def _accrue_all(self) -> None:
        self.shares.accrue_all(self.now)
        for key in self.usage:
            self.touch("usage", key)

    def set_policy(self, policy: Policy, *, is_initial: bool = False) -> None:
        """What was until now counts by the old one.

        Args:
            anew: nobody knows the old one, as the controller has just begun.
        """
        if not is_initial:
            self._accrue_all()
        self.policy = policy
        self.shares.set_policy(policy)
        self.shares.rank_all(self.now)
        self.excess_at_policy_change = dict(self._excess_over_ceilings())
        self.pool.version += 1  # what was kept back may start now

    def _excess_over_ceilings(self) -> Iterator[tuple[tuple[str, str], int]]:
        for tenant in self.shares.tenants if self.shares.has_quotas else ():
            for whose, terms, account in limits_of(self.shares, tenant):
                most = hard_limit(terms)
                if most is not None and account is not None:
                    yield from (((whose, what), more) for what, more in excess_over(account, most).items())

    # Time

    def rank_by_time(self) -> None:
        """Scores are of now, about; and tenants of which nothing is left are forgotten."""
        if self.shares.rank_by_time(self.now):
            for account in self._forgettable_accounts():
                self.shares.forget_account(account)
                if self.usage.pop(account.key, None) is not None:
                    self.touch("usage", account.key)

    def _forgettable_accounts(self) -> list[TenantAccount]:
        half_life_s = self.policy.half_life_s
        unused = [account for account in self.shares.accounts.values() if not self._is_busy(account)]
        unused.sort(key=lambda account: account.mean(self.now, half_life_s))
        surplus = len(self.shares.accounts) - self.config.tenants_limit
        small = sum(account.mean(self.now, half_life_s) < FORGOTTEN_MEAN for account in unused)
        return unused[: max(small, surplus)]

    def _is_busy(self, account: TenantAccount) -> bool:
        row = account.row
        users = [users[row.user] for users in self.queue.tenants.values() if row.user in users]
        if row.namespace is None:
            return bool(users) or any(account.used)
        tenant = self.shares.tenant(row.user, row.namespace)
        return any(tenant in spaces for spaces in users) or any(account.used)


def counted_capacity(node: Node) -> Amount | None:
    """What of the cluster it is; a lost machine is none of it."""
    return capacity_of(node.capacity) if node.phase is not NodePhase.LOST else None
