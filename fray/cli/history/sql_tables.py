"""Tables of ``fray sql``: their columns, and their rows, made from the answers of the API that the role may see."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fray.api.cluster import Cluster
from fray.errors import Unauthorized
from fray.model.actors import ActorInfo
from fray.model.ids import split_attempt
from fray.model.messages.history import AttemptRecord
from fray.model.messages.people import UserInfo
from fray.model.monitoring.accounting import GIB, HOUR_S, UsageSum
from fray.model.monitoring.served_calls import ActorMetrics

ATTEMPT = (
    *("attempt_id", "job_id", "name", "user", "namespace", "band", "node", "machine"),
    *("cpu_milli", "memory_bytes", "device_kind", "device_variant", "devices"),
    *("queued_at", "placed_at", "started_at", "ended_at", "cause", "exit_code", "cpu_s", "peak_memory_bytes"),
)
"""Fields of `AttemptRecord` that are columns of ``attempts``."""
HOURS = ("cpu_hours", "memory_gib_hours", "chip_hours")

USER = ("user", "role", "created_at", "first_seen", "last_seen", "jobs", "attempts", *HOURS)
ACTOR = (
    *("actor_id", "name", "namespace", "job_id", "node", "status", "restarts", "started_at", "ended_at", "reason"),
    *("calls", "errors", "cancelled", "running", "queued", "latency_p50_s", "latency_p99_s"),
)
RESERVATION = (
    *("reservation_id", "name", "namespace", "user", "owner", "created_by", "band", "priority"),
    *("cpu_milli", "memory_bytes", "device_kind", "device_variant", "devices", "hosts", "min_units", "max_units"),
    *("units_given", "nodes", "created_at", "held_at", "ended_at", "reason", "ended_by"),
)
"""Fields of `RecordedReservation` that are columns of ``reservations``; machines in one text, with commas."""
CAPACITY = ("at", "kind", "zone", "total", "used", "reserved", "idle", "quarantined", "closed")
"""Fields of `CapacitySample` that are columns of ``capacity``."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "jobs": (
        *(
            "job_id",
            "name",
            "namespace",
            "user",
            "state",
            "cause",
            "exit_code",
            "launched_at",
            "started_at",
            "ended_at",
        ),
        *("attempts", "retries", "parent", "job_group"),
        *("ended_by", "reason", "message"),
    ),
    "attempts": (*ATTEMPT, *HOURS),
    "nodes": (
        *("node", "state", "standing", "kind", "cpu_milli", "memory_bytes", "devices", "host", "joined_at", "gone_at"),
        "reason",
    ),
    "events": ("time", "job_id", "what", "text"),
    "usage": ("day", "user", "namespace", "machine", "attempts", *HOURS),
    "users": USER,
    "actors": ACTOR,
    "capacity": CAPACITY,
    "reservations": RESERVATION,
}
"""Tables and their columns. Times are seconds since the epoch, days dates in UTC; what is not known is NULL."""

Rows = Sequence[tuple[Any, ...]]


async def _jobs(cluster: Cluster, since: float) -> Rows:
    return [
        (
            *(info.job_id, info.name, info.namespace, info.user, info.state.value),
            *(info.cause.value if info.cause is not None else None, info.exit_code),
            *(info.launch_time, info.start_time, info.end_time, len(info.attempts), sum(info.retries.values())),
            *(info.parent, info.job_group, info.ended_by, info.reason, info.error_message),
        )
        for info in await cluster.list_jobs("*")
        if info.end_time is None or info.end_time >= since
    ]


async def _attempts(cluster: Cluster, since: float) -> Rows:
    now = time.time()
    return [
        (*(_nullable(getattr(one, field)) for field in ATTEMPT), *_hours(one, now))
        for one in await cluster.attempts(since_s=now - since)
    ]


def _nullable(value: Any) -> Any:
    return None if value == "" else value


def _hours(one: AttemptRecord, now: float) -> tuple[float, float, float]:
    hours = ((now if one.ended_at is None else one.ended_at) - one.placed_at) / HOUR_S
    return one.cpu_milli / 1000 * hours, one.memory_bytes / GIB * hours, one.devices * hours


async def _nodes(cluster: Cluster, since: float) -> Rows:
    present = [
        (
            *(node.name, "alive" if node.alive else "silent", _nullable(node.standing), None, node.cpu_milli),
            *(node.memory_bytes, len(node.devices), node.host, None, None, _nullable(node.standing_reason)),
        )
        for node in await cluster.nodes()
    ]
    gone = [
        (
            *(one.node, "gone", None, one.kind, one.cpu_milli, one.memory_bytes, one.devices, None),
            *(one.joined_at or None, one.gone_at, one.reason),
        )
        for one in await cluster.gone_nodes(since_s=time.time() - since)
    ]
    return [*present, *gone]


async def _events(cluster: Cluster, since: float) -> Rows:
    found = await cluster.find_events(since_s=time.time() - since, limit=0)
    return [(one.time, _nullable(one.job), one.what, one.text) for one in found]


async def _usage(cluster: Cluster, since: float) -> Rows:
    return [
        (one.key, one.user, one.namespace, one.machine, one.attempts, one.cpu, one.memory_gib, one.chips)
        for one in await cluster.daily_use(since_s=time.time() - since)
    ]


async def _users(cluster: Cluster, since: float) -> Rows:
    now = time.time()
    # Times at which each was seen; and those of the users of the cluster, of which only operators get a list.
    seen: dict[str, list[float]] = {}
    try:
        known = {one.user: one for one in await cluster.list_users()}
    except Unauthorized:
        known = {}
    for job in await cluster.list_jobs("*"):
        seen.setdefault(job.user, []).extend(filter(None, (job.launch_time,)))
    for attempt in await cluster.attempts(since_s=now - since):
        seen.setdefault(attempt.user, []).append(attempt.queued_at or attempt.placed_at)
    for reservation in await cluster.reservation_history(since_s=now - since):
        seen.setdefault(reservation.user, []).append(reservation.created_at)
    for user in known.values():
        seen.setdefault(user.user, []).extend(filter(None, (user.created_at, user.seen_at)))
    held = {one.key: one for one in await cluster.history("user", since_s=now - since)}
    return [_user(name, times, known.get(name), held.get(name)) for name, times in sorted(seen.items())]


def _user(name: str, times: Sequence[float], known: UserInfo | None, held: UsageSum | None) -> tuple[Any, ...]:
    used = (held.jobs, held.attempts, held.held.cpu, held.held.memory_gib, held.held.all_chips) if held else (0,) * 5
    role, created_at = (known.role, known.created_at) if known is not None else (None, None)
    return name, role, created_at, min(times, default=None), max(times, default=None), *used


async def _actors(cluster: Cluster, since: float) -> Rows:
    return [
        (
            *(one.actor_id, one.name, one.namespace, _job_of(one), _nullable(one.node), one.status.value, one.restarts),
            *(one.started, one.ended, _nullable(one.reason)),
            *_calls(one.calls),
        )
        for one in await cluster.list_actors(namespace="*", ended=True)
        if one.ended is None or one.ended >= since
    ]


def _job_of(actor: ActorInfo) -> str | None:
    """Return the job in whose process an actor lives; None for one of a driver, and an unknown one."""
    if not actor.served:
        return actor.actor_id
    return split_attempt(actor.incarnation)[0] if ":" in actor.incarnation else None


def _calls(calls: ActorMetrics | None) -> tuple[Any, ...]:
    if calls is None:
        return (None,) * 7
    numbers = calls.calls, calls.errors, calls.cancelled, calls.running, calls.queued
    return (*numbers, calls.latency_s(0.5), calls.latency_s(0.99)) if calls.calls else (*numbers, None, None)


async def _capacity(cluster: Cluster, since: float) -> Rows:
    found = await cluster.capacity_history(since_s=time.time() - since)
    return [tuple(getattr(one, field) for field in CAPACITY) for one in found]


async def _reservations(cluster: Cluster, since: float) -> Rows:
    found = await cluster.reservation_history(since_s=time.time() - since)
    return [tuple(_nullable(_text(getattr(one, field))) for field in RESERVATION) for one in found]


def _text(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, tuple) else value


READERS: Mapping[str, Callable[[Cluster, float], Awaitable[Rows]]] = {
    "jobs": _jobs,
    "attempts": _attempts,
    "nodes": _nodes,
    "events": _events,
    "usage": _usage,
    "users": _users,
    "actors": _actors,
    "capacity": _capacity,
    "reservations": _reservations,
}
"""Functions that return the rows of each table since a time."""
