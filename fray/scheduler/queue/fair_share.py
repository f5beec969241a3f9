"""Fair shares: past and present usage of each tenant, and the scores by which tenants of one band are ordered.

A user's *share* is the part of the cluster its running attempts take of the one resource of which they take most: CPUs,
memory, GPUs or TPU chips (dominant resource fairness: Ghodsi et al., NSDI 2011). The *mean* is its share averaged over
the past with weights that halve every ``half_life_s`` (Kay and Lauder, "A fair share scheduler", CACM 1988). The lowest
``score = (share + mean) / weight`` goes first. The namespaces of one user are ordered in the same way among themselves.

The share evens out tenants within one burst of placements, the mean evens out the past: a tenant that waited while
another one had the cluster goes first until both have had as much, and cannot save up more than the other's mean.

The mean is a row, written when a share changes; the share follows from the attempts. Between changes the mean follows
from the clock. Scores are computed at changes, or when they are `RANK_AGE` of a half-life old, so that time alone does
not reorder all tenants in every step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from attrs import Factory, define

from fray.model.ids import Namespace, NodeName
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, Demand

RESOURCES = ("cpu", "memory", "gpu", "tpu")
"""Resources of shares, in the order of an `Amount`."""
Amount: TypeAlias = list[int]
"""milli-CPUs, bytes, GPUs, chips"""
# Each refresh of all scores costs a look at all accounts and makes a placement pass due.
RANK_AGE = 0.001
"""Part of a half-life after which scores are computed again, even if nothing was placed or ended."""
FORGOTTEN_MEAN = 1e-4
"""Mean below which a tenant that has nothing is dropped."""
KINDS = {"gpu": 2, "tpu": 3}


@define(kw_only=True)
class Usage:
    """Past usage of the cluster by a user, or (with ``namespace``) by one namespace of a user."""

    user: str
    namespace: Namespace | None = None
    mean: float = 0.0
    """Decayed mean of its dominant share up to ``at``."""
    at: float = 0.0


# A key of many dictionaries in each pass: tuples are hashed and compared without a call of Python.
class Tenant(NamedTuple):
    """User and namespace to which usage is charged."""

    user: str = ""
    namespace: Namespace = ""


def zero_amount() -> Amount:
    return [0, 0, 0, 0]


def amount_of(demand: Demand, members: int = 1) -> Amount:
    """Return what that many members take."""
    found = [demand.cpu_milli * members, demand.memory_bytes * members, 0, 0]
    if demand.device_kind in KINDS:
        found[KINDS[demand.device_kind]] = demand.device_count * members
    return found


def capacity_of(capacity: Capacity) -> Amount:
    """Return what a machine has."""
    kinds = [device.kind for device in capacity.devices]
    return [capacity.cpu_milli, capacity.memory_bytes, kinds.count("gpu"), kinds.count("tpu")]


def dominant_share(used: Amount, whole: Amount) -> float:
    """Return the largest part of any resource; all of it for a resource that no machine has (any more)."""
    cpu, memory, gpu, tpu = used
    share = _part(cpu, whole[0])
    # Called at each start and end, mostly for CPUs: the other resources are looked at only if they are used.
    if memory:
        share = max(share, _part(memory, whole[1]))
    if gpu or tpu:
        share = max(share, _part(gpu, whole[2]), _part(tpu, whole[3]))
    return share


def _part(have: int, of: int) -> float:
    return have / of if of > have else 1.0 if have else 0.0


@define(eq=False)
class TenantAccount:
    """Usage of one tenant, past and present."""

    row: Usage
    key: str
    weight: float = 1.0
    used: Amount = Factory(zero_amount)
    variants: dict[str, int] = Factory(dict)
    """Devices in use by ``kind:variant``."""
    share: float = 0.0
    score: float = 0.0

    def mean(self, now: float, half_life_s: float) -> float:
        """Return the decayed mean of its share up to now."""
        # The average in closed form, as the share has been constant since: nothing is sampled, and an idle cluster
        # writes no rows.
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
        # Absent, not zero, so that a rebuild from the attempts gives the same account.
        if not account.variants[key]:
            del account.variants[key]


def user_key(user: str) -> str:
    return f"user:{user}"


def tenant_key(tenant: Tenant) -> str:
    # With the length of the user's name, which may contain colons.
    return f"tenant:{len(tenant.user)}:{tenant.user}:{tenant.namespace}"


class FairShareAccounts:
    """Accounts of users, of their namespaces, and (for quotas) of namespaces with all their users together."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.has_quotas = False
        self.capacity = zero_amount()
        """Capacity of all machines that are not lost."""
        self.accounts: dict[str, TenantAccount] = {}
        """Accounts by key of their row."""
        self.users: dict[str, TenantAccount] = {}
        self.tenants: dict[Tenant, TenantAccount] = {}
        self.namespaces: dict[Namespace, TenantAccount] = {}
        """Accounts of namespaces with all their users, whose rows are not stored."""
        self.ranked_at = 0.0
        self._tenants_by_name: dict[tuple[str, Namespace], Tenant] = {}
        self._machines: dict[NodeName, Amount] = {}
        self.ranks: dict[int, list[tuple[float, str]]] = {}
        """Waiting users by rank of the band: (score, user) in order."""

    # Accounts

    def tenant(self, user: str, namespace: Namespace) -> Tenant:
        """Return the tenant; equal tenants are one object."""
        found = self._tenants_by_name.get((user, namespace))
        if found is None:
            if len(self._tenants_by_name) > 2 * len(self.tenants) + 1000:
                self._tenants_by_name = {(tenant.user, tenant.namespace): tenant for tenant in self.tenants}
            found = self._tenants_by_name[user, namespace] = Tenant(user, namespace)
        return found

    def account(self, tenant: Tenant, now: float) -> tuple[TenantAccount, TenantAccount, TenantAccount]:
        """Return the accounts of the user, of its namespace, and of the namespace with all users."""
        found = self.tenants.get(tenant)
        if found is None:
            found = self.open_account(Usage(user=tenant.user, namespace=tenant.namespace, at=now))
        user = self.users.get(tenant.user) or self.open_account(Usage(user=tenant.user, at=now))
        # Quotas of a namespace count all users, but scores do not: this account has no stored mean.
        space = self.namespaces.get(tenant.namespace)
        if space is None:
            space = self.namespaces[tenant.namespace] = TenantAccount(Usage(user="", at=now), "")
        return user, found, space

    def score(self, tenant: Tenant) -> float:
        """Return the score of a namespace among those of its user."""
        account = self.tenants.get(tenant)
        # A tenant without any usage, past or present, comes first.
        return account.score if account is not None else 0.0

    def user_score(self, user: str) -> float:
        account = self.users.get(user)
        return account.score if account is not None else 0.0

    def open_account(self, row: Usage) -> TenantAccount:
        """Make an account for a row, without present usage."""
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

    # Usage

    def count_members(
        self, tenant: Tenant, demand: Demand, variant: str, times: int, now: float
    ) -> tuple[TenantAccount, TenantAccount]:
        """Count that many members more (or fewer), and return the accounts whose shares change by that: the caller
        accrues their means."""
        accounts = self.account(tenant, now)
        cpu, memory = demand.cpu_milli * times, demand.memory_bytes * times
        for account in accounts:
            used = account.used
            used[0] += cpu
            used[1] += memory
        if demand.device_count:
            _count_devices(accounts, demand, variant, demand.device_count * times)
        user, found, space = accounts
        if not any(space.used):
            del self.namespaces[tenant.namespace]  # nothing of it is stored
        return user, found

    def accrue(self, account: TenantAccount, now: float) -> None:
        """Add the share up to now to the mean; call it before the share changes."""
        account.row.mean = account.mean(now, self.policy.half_life_s)
        account.row.at = max(now, account.row.at)

    def update_share(self, account: TenantAccount, now: float) -> None:
        """Compute share and score after its usage has changed."""
        account.share = dominant_share(account.used, self.capacity)
        self._score(account, now)

    def _score(self, account: TenantAccount, now: float) -> None:
        row = account.row
        mean = row.mean if row.at >= now else account.mean(now, self.policy.half_life_s)
        score = (account.share + mean) / account.weight
        # Waiting users are kept in order (`ranks`), so that no pass has to sort them.
        if score != account.score and account.row.namespace is None:
            self._rank(account.row.user, account.score, score)
        account.score = score

    # Machines and policy

    def node_capacity(self, node: NodeName) -> Amount | None:
        return self._machines.get(node)

    def set_node_capacity(self, node: NodeName, capacity: Amount | None) -> None:
        """Set the capacity of a node; None when it is gone or lost."""
        before = self._machines.pop(node, None) or zero_amount()
        if capacity is not None:
            self._machines[node] = capacity
        after = capacity or zero_amount()
        # A running sum: a sum over all machines for each one that joins would be quadratic.
        self.capacity = [have - b + a for have, b, a in zip(self.capacity, before, after, strict=True)]

    def accrue_all(self, now: float) -> None:
        for account in self.accounts.values():
            self.accrue(account, now)

    def rank_all(self, now: float) -> None:
        """Compute all shares and scores."""
        self.ranked_at = now
        for account in self.accounts.values():
            self.update_share(account, now)

    def rank_by_time(self, now: float) -> bool:
        """Compute all scores if they are too old; return whether they were."""
        # Time alone changes the order slowly. With the default half-life of a day this is every 86 s.
        if now - self.ranked_at <= self.policy.half_life_s * RANK_AGE:
            return False
        self.ranked_at = now
        for account in self.accounts.values():
            self._score(account, now)
        return True

    def set_policy(self, policy: Policy) -> None:
        """Set weights and half-life; call `accrue_all` before it and `rank_all` after it."""
        self.policy = policy
        terms_of_all = [*policy.users.values(), *policy.namespaces.values()]
        self.has_quotas = any(terms.quota is not None for terms in terms_of_all)
        for account in self.accounts.values():
            row = account.row
            terms = policy.user(row.user) if row.namespace is None else policy.namespace(row.namespace)
            account.weight = terms.weight

    # Waiting users, by score

    def add_waiting(self, rank: int, user: str) -> None:
        """Add a user of which something waits in this band."""
        account = self.users.get(user) or self.open_account(Usage(user=user))
        # `_rank` moves the entry with the score, so that `remove_waiting` finds it by the present one.
        insort(self.ranks.setdefault(rank, []), (account.score, user))

    def remove_waiting(self, rank: int, user: str) -> None:
        ranks = self.ranks[rank]
        del ranks[bisect_left(ranks, (self.users[user].score, user))]

    def _rank(self, user: str, old: float, new: float) -> None:
        for ranks in self.ranks.values():
            at = bisect_left(ranks, (old, user))
            # The user may have nothing waiting in this band.
            if at < len(ranks) and ranks[at] == (old, user):
                del ranks[at]
                insort(ranks, (new, user))
