"""Who has had how much of the cluster, and so who goes first among those of one band.

The law. A user's *share* is what his running attempts take of the one resource of which they take most, as a part of
all machines: CPUs, memory, GPUs or TPU chips (dominant resource fairness: Ghodsi et al., NSDI 2011). His *mean* is the
share he had, averaged over the past with weights that halve every ``half_life_s`` (Kay and Lauder, "A fair share
scheduler", CACM 1988). The lowest ``score = (share + mean) / weight`` goes first. Among the namespaces of one user the
same is done again with what each of them has.

The share makes equals equal within one burst of placements; the mean makes up for what was before: who waited while
another had the cluster goes first until it is made up for, and nobody saves up more than the mean of the other.

The mean is a row, written when a share changes; the share follows from the attempts. Between changes the mean follows
from the clock. Scores are those of the last change, or `RANK_S` of a half-life old, so that time alone does not put all
tenants into another order in every step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import TypeAlias

from attrs import Factory, define, frozen

from fray.model.ids import Namespace, NodeName
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, Demand

RESOURCES = ("cpu", "memory", "gpu", "tpu")
"""Of which shares are counted, in the order of an `Amount`."""
Amount: TypeAlias = list[int]
"""milli-CPUs, bytes, GPUs, chips"""
RANK_AGE = 0.001
"""Of a half-life: so old may a score be whose tenant has neither taken nor given back anything."""
FORGOTTEN_MEAN = 1e-4
"""A tenant that has nothing, and had less than this of the cluster, is forgotten."""
KINDS = {"gpu": 2, "tpu": 3}


@define(kw_only=True)
class Usage:
    """What a user had of the cluster, or (with ``namespace``) one namespace of his."""

    user: str
    namespace: Namespace | None = None
    mean: float = 0.0
    """Of its dominant share, decayed, up to ``at``."""
    at: float = 0.0


@frozen(cache_hash=True)
class Tenant:
    """Who is given shares of the cluster."""

    user: str = ""
    namespace: Namespace = ""


def zero_amount() -> Amount:
    return [0, 0, 0, 0]


def amount_of(demand: Demand, members: int = 1) -> Amount:
    """What so many members take."""
    found = [demand.cpu_milli * members, demand.memory_bytes * members, 0, 0]
    if demand.device_kind in KINDS:
        found[KINDS[demand.device_kind]] = demand.device_count * members
    return found


def capacity_of(capacity: Capacity) -> Amount:
    """What a machine has."""
    kinds = [device.kind for device in capacity.devices]
    return [capacity.cpu_milli, capacity.memory_bytes, kinds.count("gpu"), kinds.count("tpu")]


def dominant_share(used: Amount, whole: Amount) -> float:
    """The largest part of anything; of what no machine has (any more), all of it."""
    cpu, memory, gpu, tpu = used
    share = _part(cpu, whole[0])
    if memory:
        share = max(share, _part(memory, whole[1]))
    if gpu or tpu:
        share = max(share, _part(gpu, whole[2]), _part(tpu, whole[3]))
    return share


def _part(have: int, of: int) -> float:
    return have / of if of > have else 1.0 if have else 0.0


@define(eq=False)
class TenantAccount:
    """What one tenant has and had."""

    row: Usage
    key: str
    weight: float = 1.0
    used: Amount = Factory(zero_amount)
    variants: dict[str, int] = Factory(dict)
    """Devices by ``kind:variant``."""
    share: float = 0.0
    score: float = 0.0

    def mean(self, now: float, half_life_s: float) -> float:
        """The decayed mean of its share up to now."""
        since = now - self.row.at
        if since <= 0:
            return self.row.mean
        return float(self.share + (self.row.mean - self.share) * 2.0 ** (-since / half_life_s))


def _count_devices(accounts: Iterable[TenantAccount], demand: Demand, variant: str, count: int) -> None:
    key = f"{demand.device_kind}:{variant}"
    for account in accounts:
        if demand.device_kind in KINDS:
            account.used[KINDS[demand.device_kind]] += count
        account.variants[key] = account.variants.get(key, 0) + count
        if not account.variants[key]:
            del account.variants[key]


def user_key(user: str) -> str:
    return f"user:{user}"


def tenant_key(tenant: Tenant) -> str:
    return f"tenant:{len(tenant.user)}:{tenant.user}:{tenant.namespace}"


class FairShareAccounts:
    """Accounts of users, of their namespaces, and (for quotas) of namespaces with all their users together."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.has_quotas = False
        self.capacity = zero_amount()
        """Of all machines that are not lost."""
        self.accounts: dict[str, TenantAccount] = {}
        """By the key of their row."""
        self.users: dict[str, TenantAccount] = {}
        self.tenants: dict[Tenant, TenantAccount] = {}
        self.namespaces: dict[Namespace, TenantAccount] = {}
        """Their rows are not stored."""
        self.ranked_at = 0.0
        self._tenants_by_name: dict[tuple[str, Namespace], Tenant] = {}
        self._machines: dict[NodeName, Amount] = {}
        self.ranks: dict[int, list[tuple[float, str]]] = {}
        """Rank of a band: (score, user) of those who wait in it, in order."""

    # Accounts

    def tenant(self, user: str, namespace: Namespace) -> Tenant:
        """One object for all that is of the same."""
        found = self._tenants_by_name.get((user, namespace))
        if found is None:
            if len(self._tenants_by_name) > 2 * len(self.tenants) + 1000:
                self._tenants_by_name = {(tenant.user, tenant.namespace): tenant for tenant in self.tenants}
            found = self._tenants_by_name[user, namespace] = Tenant(user, namespace)
        return found

    def account(self, tenant: Tenant, now: float) -> tuple[TenantAccount, TenantAccount, TenantAccount]:
        """The user's, that of his namespace, and the namespace's own."""
        found = self.tenants.get(tenant)
        if found is None:
            found = self.open_account(Usage(user=tenant.user, namespace=tenant.namespace, at=now))
        user = self.users.get(tenant.user) or self.open_account(Usage(user=tenant.user, at=now))
        space = self.namespaces.get(tenant.namespace)
        if space is None:
            space = self.namespaces[tenant.namespace] = TenantAccount(Usage(user="", at=now), "")
        return user, found, space

    def score(self, tenant: Tenant) -> float:
        """Of one namespace among those of its user."""
        account = self.tenants.get(tenant)
        return account.score if account is not None else 0.0

    def user_score(self, user: str) -> float:
        account = self.users.get(user)
        return account.score if account is not None else 0.0

    def open_account(self, row: Usage) -> TenantAccount:
        """An account for a row, which has nothing yet."""
        if row.namespace is None:
            account = self.users[row.user] = TenantAccount(row, user_key(row.user), self.policy.user(row.user).weight)
        else:
            tenant = Tenant(row.user, row.namespace)
            weight = self.policy.namespace(row.namespace).weight
            account = self.tenants[tenant] = TenantAccount(row, tenant_key(tenant), weight)
        self.accounts[account.key] = account
        self._score(account, row.at)
        return account

    def forget_account(self, account: TenantAccount) -> None:
        del self.accounts[account.key]
        if account.row.namespace is None:
            del self.users[account.row.user]
        else:
            del self.tenants[Tenant(account.row.user, account.row.namespace)]

    # Use

    def count_members(self, tenant: Tenant, demand: Demand, variant: str, times: int, now: float) -> None:
        """So many members more (or fewer) run; nothing is settled by that."""
        accounts = self.account(tenant, now)
        cpu, memory = demand.cpu_milli * times, demand.memory_bytes * times
        for account in accounts:
            used = account.used
            used[0] += cpu
            used[1] += memory
        if demand.device_count:
            _count_devices(accounts, demand, variant, demand.device_count * times)
        space = accounts[2]
        if not any(space.used):
            del self.namespaces[tenant.namespace]  # it has no past

    def accrue(self, account: TenantAccount, now: float) -> None:
        """Its mean up to now goes into its row: its share is about to change."""
        account.row.mean = account.mean(now, self.policy.half_life_s)
        account.row.at = max(now, account.row.at)

    def update_share(self, account: TenantAccount, now: float) -> None:
        """What it has is another amount now: so are its share and its score."""
        account.share = dominant_share(account.used, self.capacity)
        self._score(account, now)

    def _score(self, account: TenantAccount, now: float) -> None:
        row = account.row
        mean = row.mean if row.at >= now else account.mean(now, self.policy.half_life_s)
        score = (account.share + mean) / account.weight
        if score != account.score and account.row.namespace is None:
            self._rank(account.row.user, account.score, score)
        account.score = score

    # Machines and policy

    def node_capacity(self, node: NodeName) -> Amount | None:
        return self._machines.get(node)

    def set_node_capacity(self, node: NodeName, capacity: Amount | None) -> None:
        """A machine has come, is another one, or (None) is gone."""
        before = self._machines.pop(node, None) or zero_amount()
        if capacity is not None:
            self._machines[node] = capacity
        after = capacity or zero_amount()
        self.capacity = [have - b + a for have, b, a in zip(self.capacity, before, after, strict=True)]

    def accrue_all(self, now: float) -> None:
        for account in self.accounts.values():
            self.accrue(account, now)

    def rank_all(self, now: float) -> None:
        """All shares and scores anew."""
        self.ranked_at = now
        for account in self.accounts.values():
            self.update_share(account, now)

    def rank_by_time(self, now: float) -> bool:
        """All scores anew, if they are too old."""
        if now - self.ranked_at <= self.policy.half_life_s * RANK_AGE:
            return False
        self.ranked_at = now
        for account in self.accounts.values():
            self._score(account, now)
        return True

    def set_policy(self, policy: Policy) -> None:
        """Other weights, and another half-life; settle before, rank after."""
        self.policy = policy
        terms_of_all = [*policy.users.values(), *policy.namespaces.values()]
        self.has_quotas = any(terms.quota is not None for terms in terms_of_all)
        for account in self.accounts.values():
            row = account.row
            terms = policy.user(row.user) if row.namespace is None else policy.namespace(row.namespace)
            account.weight = terms.weight

    # Who waits, by score

    def add_waiting(self, rank: int, user: str) -> None:
        """Somebody of this user's waits in this band now."""
        account = self.users.get(user) or self.open_account(Usage(user=user))
        insort(self.ranks.setdefault(rank, []), (account.score, user))

    def remove_waiting(self, rank: int, user: str) -> None:
        ranks = self.ranks[rank]
        del ranks[bisect_left(ranks, (self.users[user].score, user))]

    def _rank(self, user: str, old: float, new: float) -> None:
        for ranks in self.ranks.values():
            at = bisect_left(ranks, (old, user))
            if at < len(ranks) and ranks[at] == (old, user):
                del ranks[at]
                insort(ranks, (new, user))
