"""Views of the queue, and of the use of users and namespaces."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from fray.model.messages.usage import (
    QueueEntry,
    QueueInfo,
    TenantUsage,
    UsageInfo,
    UsageSample,
)
from fray.model.policy.policy import Amounts, TenantPolicy
from fray.scheduler.autoscaler.view import machine_request_reasons
from fray.scheduler.explain.diagnosis import held_for_earlier, missing_reasons
from fray.scheduler.pool.requests import MemberGroup
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, Entry
from fray.scheduler.queue.fair_share import RESOURCES, Amount, TenantAccount
from fray.scheduler.queue.indexes import TenantShapeQueue
from fray.scheduler.queue.queue import Queue
from fray.scheduler.queue.quotas import (
    excess_over,
    hard_limit,
    quota_reason,
    quota_status,
)
from fray.scheduler.reasons import Reason, demand_text, reasons_text
from fray.scheduler.state.tables import Tables

LINES_LIMIT = 1_000
USERS_SAMPLED = 20
TENANTS_LIMIT = 1_000


# The queue ------------------------------------------------------------------------------------------------------------


def queue_info(
    state: Tables,
    limit: int,
    user: str | None,
    now: float,
    is_visible: Callable[[Applicant], bool] = lambda applicant: True,
) -> QueueInfo:
    """Return the first visible entries of the queue, in the order in which they would be tried if none were placed."""
    found: list[QueueEntry] = []
    # Positions count all applicants, also if only those of one user are listed.
    for position, applicant in enumerate(in_turn(state.queue), 1):
        if user in (None, applicant.tenant.user) and is_visible(applicant):
            found.append(_entry(state, applicant, position, now))
        if len(found) >= min(max(0, limit), LINES_LIMIT):
            break
    return QueueInfo(total=len(state.queue), entries=tuple(found), by_user=dict(_waiting_by_user(state.queue)))


def in_turn(queue: Queue) -> Iterator[Applicant]:
    """Yield everything that waits, from the head of the queue; sorts the lanes, not their entries."""
    shares = queue.shares
    for rank in sorted(queue.tenants):
        groups: dict[tuple[int, float, str, float, int, str], list[TenantShapeQueue]] = {}
        for user, spaces in queue.tenants[rank].items():
            for tenant, space in spaces.items():
                scores = shares.user_score(user), user, shares.score(tenant), space.first_order, tenant.namespace
                for _, lane in space.heads:
                    status, _ = quota_status(shares, tenant, lane.waiting)
                    key = int(status), *scores
                    groups.setdefault(key, []).append(lane)
        for key in sorted(groups):
            # Merged lazily: the first page of a queue of 100,000 does not walk all of it.
            entries: Iterator[Entry] = heapq.merge(*(lane.entries for lane in groups[key]))
            yield from (queue.applicants[entry[-1]] for entry in entries)


def _entry(state: Tables, applicant: Applicant, position: int, now: float) -> QueueEntry:
    status, _ = quota_status(state.shares, applicant.tenant, state.queue.waiting[applicant.shape])
    return QueueEntry(
        id=applicant.id,
        kind=applicant.kind.value,
        position=position,
        user=applicant.tenant.user,
        namespace=applicant.tenant.namespace,
        band=applicant.band.value,
        standing=status.name.lower(),
        priority=applicant.priority,
        request=" and ".join(map(_request_text, applicant.shape.request.parts)),
        waiting_s=max(0.0, now - applicant.waiting_since),
        reason=reasons_text(_waiting_reasons(state, applicant)),
    )


def _request_text(part: MemberGroup) -> str:
    demands = demand_text(*part.choices)
    return f"{part.members} × {demands}" if part.members > 1 else demands


def _waiting_reasons(state: Tables, applicant: Applicant) -> list[Reason]:
    if found := quota_reason(state.queue, applicant) or held_for_earlier(state, applicant):
        return [found]
    if applicant.kind is ApplicantKind.JOB:
        return missing_reasons(state, state.jobs[applicant.id])
    return machine_request_reasons(state, applicant.shape)


def _waiting_by_user(queue: Queue) -> Counter[str]:
    found: Counter[str] = Counter()
    for users in queue.tenants.values():
        for user, spaces in users.items():
            found[user] += sum(len(space.entries) for space in spaces.values())
    return found


# Use ------------------------------------------------------------------------------------------------------------------


def usage_info(state: Tables, now: float) -> UsageInfo:
    """Return present and past use of users and their namespaces; at most `TENANTS_LIMIT` of each."""
    shares, waiting = state.shares, _waiting_by_user(state.queue)
    users = [_user(state, account, waiting, now) for account in shares.users.values()]
    spaces = [_namespace(state, account, now) for account in shares.tenants.values()]
    order = lambda usage: (usage.score, usage.user, usage.namespace or "")  # noqa: E731
    return UsageInfo(
        now=now,
        half_life_s=state.policy.half_life_s,
        capacity=_amount_by_name(shares.capacity),
        used=_amount_by_name(_used(state)),
        users=tuple(sorted(users, key=order)[:TENANTS_LIMIT]),
        namespaces=tuple(sorted(spaces, key=order)[:TENANTS_LIMIT]),
    )


def sample(state: Tables, now: float) -> UsageSample:
    """Return the use at this moment, for a plot."""
    shares = state.shares
    largest = heapq.nlargest(USERS_SAMPLED, shares.users.values(), key=lambda account: (account.share, account.key))
    found = {account.row.user: account.share for account in largest if account.share}
    rest = sum(account.share for account in shares.users.values()) - sum(found.values())
    # The others as one line, so that the sum of a plot is right.
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


def _user(state: Tables, account: TenantAccount, waiting: Counter[str], now: float) -> TenantUsage:
    user = account.row.user
    return _tenant(state, account, state.policy.user(user), account, waiting[user], now)


def _namespace(state: Tables, account: TenantAccount, now: float) -> TenantUsage:
    user, namespace = account.row.user, account.row.namespace or ""
    tenant = state.shares.tenant(user, namespace)
    spaces = [users.get(user, {}).get(tenant) for users in state.queue.tenants.values()]
    waiting = sum(len(space.entries) for space in spaces if space is not None)
    counted = state.shares.namespaces.get(namespace)
    return _tenant(state, account, state.policy.namespace(namespace), counted, waiting, now)


def _tenant(
    state: Tables, account: TenantAccount, terms: TenantPolicy, counted: TenantAccount | None, waiting: int, now: float
) -> TenantUsage:
    """Return the use of a user or namespace.

    Args:
        counted: the account its quota counts; that of a namespace is of all its users.
    """
    most = hard_limit(terms)
    # The quota of a namespace counts all of its users; ``account`` is that of one of them.
    over = excess_over(counted, terms.quota) if counted is not None and terms.quota is not None else {}
    mean = account.mean(now, state.policy.half_life_s)
    return TenantUsage(
        user=account.row.user,
        namespace=account.row.namespace,
        weight=account.weight,
        used=_amount_by_name(account.used),
        share=account.share,
        mean=mean,
        # For this moment: the stored score may be a thousandth of a half-life old.
        score=(account.share + mean) / account.weight,
        waiting=waiting,
        quota=_amounts_by_name(terms.quota),
        limit=_amounts_by_name(most),
        borrowed={key: amount / 1000 if key == "cpu" else float(amount) for key, amount in over.items()},
    )


def _amount_by_name(amount: Amount) -> dict[str, float]:
    """Return the amount in CPUs, bytes and devices."""
    found = dict(zip(RESOURCES, amount, strict=True))
    return {name: have / 1000 if name == "cpu" else float(have) for name, have in found.items() if have}


def _amounts_by_name(amounts: Amounts | None) -> dict[str, float] | None:
    if amounts is None:
        return None
    found: dict[str, float] = {}
    if amounts.cpu_milli is not None:
        found["cpu"] = amounts.cpu_milli / 1000
    if amounts.memory_bytes is not None:
        found["memory"] = float(amounts.memory_bytes)
    return found | {key: float(amount) for key, amount in amounts.devices.items()}
