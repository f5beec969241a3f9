"""Who waits and who has how much, for people to look at. Reads only."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from fray.model.messages.usage import (
    QueueEntry,
    QueueInfo,
    TenantUsage,
    UsageInfo,
    UsageSample,
)
from fray.model.policy.policy import Amounts, TenantPolicy
from fray.scheduler.autoscaler.view import machines_text as fleet_reason
from fray.scheduler.backfill.starvation import blocker
from fray.scheduler.explain.explain import waits_for
from fray.scheduler.pool.requests import MemberGroup
from fray.scheduler.pool.resource_text import needs
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, Entry
from fray.scheduler.queue.fair_share import RESOURCES, Amount
from fray.scheduler.queue.fair_share import TenantAccount as Account
from fray.scheduler.queue.indexes import TenantShapeQueue
from fray.scheduler.queue.queue import Queue
from fray.scheduler.queue.quotas import (
    excess_over,
    hard_limit,
    quota_status,
    quota_text,
)
from fray.scheduler.state.tables import Tables

LINES_LIMIT = 1_000
USERS_SAMPLED = 20
TENANTS_LIMIT = 1_000


# The queue ------------------------------------------------------------------------------------------------------------


def queue_info(state: Tables, limit: int, user: str | None, now: float) -> QueueInfo:
    """The first lines of the queue, as it would be tried if nobody was given anything."""
    found: list[QueueEntry] = []
    for place, applicant in enumerate(in_turn(state.queue), 1):
        if user in (None, applicant.tenant.user):
            found.append(_line(state, applicant, place, now))
        if len(found) >= min(max(0, limit), LINES_LIMIT):
            break
    return QueueInfo(total=len(state.queue), entries=tuple(found), by_user=dict(_waiting_by_user(state.queue)))


def in_turn(queue: Queue) -> Iterator[Applicant]:
    """All that waits, from the head of the line; sorts lanes, not what is in them."""
    shares = queue.shares
    for rank in sorted(queue.tenants):
        groups: dict[tuple[int, float, str, float, int, str], list[TenantShapeQueue]] = {}
        for user, spaces in queue.tenants[rank].items():
            for tenant, space in spaces.items():
                scores = shares.user_score(user), user, shares.score(tenant), space.first_order, tenant.namespace
                for _, lane in space.heads:
                    stands, _ = quota_status(shares, tenant, lane.waiting)
                    key = int(stands), *scores
                    groups.setdefault(key, []).append(lane)
        for key in sorted(groups):
            entries: Iterator[Entry] = heapq.merge(*(lane.entries for lane in groups[key]))
            yield from (queue.applicants[entry[-1]] for entry in entries)


def _line(state: Tables, applicant: Applicant, place: int, now: float) -> QueueEntry:
    stands, _ = quota_status(state.shares, applicant.tenant, state.queue.waiting[applicant.shape])
    return QueueEntry(
        id=applicant.id,
        kind=applicant.kind.value,
        position=place,
        user=applicant.tenant.user,
        namespace=applicant.tenant.namespace,
        band=applicant.band.value,
        standing=stands.name.lower(),
        priority=applicant.priority,
        request=_asks(applicant),
        waiting_s=max(0.0, now - applicant.waiting_since),
        reason=_why(state, applicant),
    )


def _asks(applicant: Applicant) -> str:
    return " and ".join(map(_asks_for, applicant.shape.request.parts))


def _asks_for(part: MemberGroup) -> str:
    asked = needs(*part.choices)
    return f"{part.members} × {asked}" if part.members > 1 else asked


def _why(state: Tables, applicant: Applicant) -> str:
    quota = quota_text(state.queue, applicant)
    if quota:
        return quota
    holder = blocker(state, applicant)
    if holder is not None:
        return f"held back for {holder}"
    if applicant.kind is ApplicantKind.JOB:
        return waits_for(state, state.jobs[applicant.id])
    return fleet_reason(state, applicant.shape)


def _waiting_by_user(queue: Queue) -> Counter[str]:
    found: Counter[str] = Counter()
    for users in queue.tenants.values():
        for user, spaces in users.items():
            found[user] += sum(len(space.entries) for space in spaces.values())
    return found


# Use ------------------------------------------------------------------------------------------------------------------


def usage_info(state: Tables, now: float) -> UsageInfo:
    """What users and their namespaces have and had; at most `TENANTS_LIMIT` of each."""
    shares, waiting = state.shares, _waiting_by_user(state.queue)
    users = [_user(state, account, waiting, now) for account in shares.users.values()]
    spaces = [_namespace(state, account, now) for account in shares.tenants.values()]
    order = lambda one: (one.score, one.user, one.namespace or "")  # noqa: E731
    return UsageInfo(
        now=now,
        half_life_s=state.policy.half_life_s,
        capacity=words_of(shares.capacity),
        used=words_of(_used(state)),
        users=tuple(sorted(users, key=order)[:TENANTS_LIMIT]),
        namespaces=tuple(sorted(spaces, key=order)[:TENANTS_LIMIT]),
    )


def sample(state: Tables, now: float) -> UsageSample:
    """This moment, for a plot."""
    shares = state.shares
    largest = heapq.nlargest(USERS_SAMPLED, shares.users.values(), key=lambda account: (account.share, account.key))
    found = {account.row.user: account.share for account in largest if account.share}
    rest = sum(account.share for account in shares.users.values()) - sum(found.values())
    if rest > 1e-9 and len(shares.users) > USERS_SAMPLED:
        found[""] = found.get("", 0.0) + rest
    used = _used(state)
    pairs = zip(RESOURCES, used, shares.capacity, strict=True)
    return UsageSample(
        at=now,
        utilisation={name: have / whole for name, have, whole in pairs if whole},
        shares=found,
        waiting=len(state.queue),
    )


def _used(state: Tables) -> Amount:
    accounts = [account.used for account in state.shares.users.values()]
    return [sum(used[index] for used in accounts) for index in range(len(RESOURCES))]


def _user(state: Tables, account: Account, waiting: Counter[str], now: float) -> TenantUsage:
    user = account.row.user
    return _tenant(state, account, state.policy.user(user), account, waiting[user], now)


def _namespace(state: Tables, account: Account, now: float) -> TenantUsage:
    user, namespace = account.row.user, account.row.namespace or ""
    tenant = state.shares.tenant(user, namespace)
    spaces = [users.get(user, {}).get(tenant) for users in state.queue.tenants.values()]
    waiting = sum(len(space.entries) for space in spaces if space is not None)
    counted = state.shares.namespaces.get(namespace)
    return _tenant(state, account, state.policy.namespace(namespace), counted, waiting, now)


def _tenant(
    state: Tables, account: Account, terms: TenantPolicy, counted: Account | None, waiting: int, now: float
) -> TenantUsage:
    """``counted``: what its quota counts; that of a namespace is of all its users."""
    most = hard_limit(terms)
    over = excess_over(counted, terms.quota) if counted is not None and terms.quota is not None else {}
    mean = account.mean(now, state.policy.half_life_s)
    return TenantUsage(
        user=account.row.user,
        namespace=account.row.namespace,
        weight=account.weight,
        used=words_of(account.used),
        share=account.share,
        mean=mean,
        score=(account.share + mean) / account.weight,
        waiting=waiting,
        quota=words_of_amounts(terms.quota),
        limit=words_of_amounts(most),
        borrowed={key: amount / 1000 if key == "cpu" else float(amount) for key, amount in over.items()},
    )


def words_of(amount: Amount) -> dict[str, float]:
    """In CPUs, bytes and devices."""
    found = dict(zip(RESOURCES, amount, strict=True))
    return {name: have / 1000 if name == "cpu" else float(have) for name, have in found.items() if have}


def words_of_amounts(amounts: Amounts | None) -> dict[str, float] | None:
    if amounts is None:
        return None
    found: dict[str, float] = {}
    if amounts.cpu_milli is not None:
        found["cpu"] = amounts.cpu_milli / 1000
    if amounts.memory_bytes is not None:
        found["memory"] = float(amounts.memory_bytes)
    return found | {key: float(amount) for key, amount in amounts.devices.items()}
