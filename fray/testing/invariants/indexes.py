"""Invariants of the indexes over the rows, and of shares and quotas (see `check`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from fray.scheduler.queue.quotas import excess_over, hard_limit, limits_of
from fray.scheduler.state.indexes import GenerationCount, GroupMembers
from fray.scheduler.state.rows import TABLES
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import Tables

_TABLES = tuple(TABLES)
_INDEXES = (
    "generation_counts",
    "on_node",
    "children",
    "jobs_by_root",
    "jobs_by_name",
    "living_jobs",
    "held_jobs",
    "time_limits",
    "running_by_band",
    "ending_jobs",
    "sibling_groups",
    "group_names",
    "group_members",
    "finished_jobs",
    "value_sizes",
    "registrations_by_key",
    "registrations_by_incarnation",
    "sessions_of",
    "lost_drivers",
    "closing_sessions",
    "ended_sessions",
    "not_alive",
    "nodes_by_fault",
    "quarantined",
    "jobs_inside",
    "reservations_on",
    "reservations_by_owner",
    "with_surplus",
    "releasing",
    "ended_reservations",
    "lenders",
    "lent_to",
)


def indexes(state: State) -> Iterator[str]:
    """Yield indexes that differ from those of a state built from the same rows."""
    rows = [(table, key, row) for table in _TABLES for key, row in state.rows(table).items()]
    rebuilt = Tables(state.now, state.config)
    rebuilt.load(rows)
    for index in _INDEXES:
        mine, other = _plain(getattr(state, index)), _plain(getattr(rebuilt, index))
        if mine != other:
            yield f"index {index} is {mine}, the rows say {other}"
    if _waiting_children(state) != _waiting_children(rebuilt):
        yield f"waiting children are {_waiting_children(state)}, the rows say {_waiting_children(rebuilt)}"
    if list(state.queue) != list(rebuilt.queue):
        yield f"the queue is {list(state.queue)}, the rows say {list(rebuilt.queue)}"
    if {timed: at for timed, at in state.timers.at.items() if timed[0] not in ("seek", "trapped")} != rebuilt.timers.at:
        yield f"timers are {state.timers.at}, the rows say {rebuilt.timers.at}"
    if state.fleet.pending_orders.keys() != rebuilt.fleet.pending_orders.keys():
        yield f"the orders are {list(state.fleet.pending_orders)}, the rows say {list(rebuilt.fleet.pending_orders)}"
    if state.fleet.nodes_of_unit != rebuilt.fleet.nodes_of_unit:
        yield f"nodes by unit are {state.fleet.nodes_of_unit}, the rows say {rebuilt.fleet.nodes_of_unit}"
    rebuilt.set_policy(state.policy, is_initial=True)
    yield from _shares(state, rebuilt)
    if state.backoffs != rebuilt.backoffs:
        yield f"the back-offs are {state.backoffs}, the rows say {rebuilt.backoffs}"
    if state.blob_refs != state.count_blob_refs():
        yield f"blobs are counted {state.blob_refs}, rows refer to {state.count_blob_refs()}"


def _waiting_children(state: Tables) -> dict[str, list[str]]:
    return {
        owner: sorted(entry[-1] for entries in shapes.values() for entry in entries)
        for owner, shapes in state.queue.children.items()
    }


def _shares(state: State, rebuilt: Tables) -> Iterator[str]:
    """Yield tenants that are not charged with exactly what their living attempts take, except on lost machines."""
    if state.shares.capacity != rebuilt.shares.capacity:
        yield f"the cluster is counted as {state.shares.capacity}, its machines have {rebuilt.shares.capacity}"
    for key in dict.fromkeys([*state.shares.accounts, *rebuilt.shares.accounts]):
        mine, other = (tables.shares.accounts.get(key) for tables in (state, rebuilt))
        used = [(account.used, account.variants) if account else ([0, 0, 0, 0], {}) for account in (mine, other)]
        if used[0] != used[1]:
            yield f"{key} is charged with {used[0]}, its attempts take {used[1]}"
    for rank, ranks in state.shares.ranks.items():
        if ranks != sorted(ranks) or {user for _, user in ranks} != state.queue.tenants.get(rank, {}).keys():
            yield f"in band {rank} {list(state.queue.tenants.get(rank, ()))} wait, and have turns as {ranks}"
        for score, user in ranks:
            if state.shares.users[user].score != score:
                yield f"{user} has score {state.shares.users[user].score}, and its turn is that of {score}"


def quotas(state: State) -> Iterator[str]:
    """Yield tenants with more than their quota and what they may borrow, except what they had when the policy
    changed."""
    shares = state.shares
    for tenant in shares.tenants if shares.has_quotas else ():
        for whose, terms, account in limits_of(shares, tenant):
            most = hard_limit(terms)
            over = excess_over(account, most) if most is not None and account is not None else {}
            for what, more in over.items():
                if more > state.excess_at_policy_change.get((whose, what), 0):
                    yield f"{whose} has {more} of {what} more than its quota and what it may borrow"


def _plain(index: Any) -> Any:
    """Return the index without order, where order has no meaning, and without empty and expired entries."""
    if isinstance(index, list):
        return index
    return {
        key: evolve(value, started_stage=None) if isinstance(value, GroupMembers) else value
        for key, value in index.items()
        if not isinstance(value, GenerationCount) or value.living
    }
