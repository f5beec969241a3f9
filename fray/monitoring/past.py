"""Answers about the past: what was held and what it cost, capacity, events, and machines that are gone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Factory, define

from fray.api.cluster import Cluster
from fray.api.history import DEFAULT_S
from fray.errors import InvalidRequest, Unsupported
from fray.model.messages.history import AttemptRecord
from fray.model.monitoring.accounting import DAY_S, HOUR_S, Hours, UsageSum, cost
from fray.monitoring.json_form import plain
from fray.monitoring.rows import Row

ATTEMPTS = 200
"""Newest attempts of one machine that are shown."""
RESERVATIONS = 200
"""Newest reservations that are gone which are shown."""
EVENTS = 500
"""Newest events that are shown."""
PERIODS = 240
"""Periods of a chart."""
YEARS_S = 10 * 365 * DAY_S
LATE_S = 600.0
"""Longest time by which the end of an attempt is known later than it was: that of a machine that fell silent."""

Query = Mapping[str, str]


async def held(cluster: Cluster, query: Query) -> dict[str, Any]:
    """Return the sums of ``fray history``, and of each its cost if the policy has prices.

    Args:
        query: arguments of `Cluster.history`, as text.

    Raises:
        FrayError: the controller refuses, or an argument is invalid.
    """
    chosen = {name: query.get(name, "") for name in ("user", "namespace", "job", "node")}
    since_s, until_s = _seconds(query, "since_s", DEFAULT_S), _seconds(query, "until_s", 0.0)
    found = await cluster.history(query.get("by") or "user", **chosen, since_s=since_s, until_s=until_s)
    prices = (await cluster.usage()).prices
    return {"held": plain(found), "costs": plain([cost(each, prices) for each in found]) if prices else []}


async def reservations(cluster: Cluster) -> list[Any]:
    """Return the reservations that have ended in the last week, also those that the cluster has forgotten otherwise:
    the newest, the last first. Raises FrayError.
    """
    try:
        found = await cluster.reservation_history(since_s=DEFAULT_S)
    except Unsupported:  # by a controller of an earlier release
        return []
    ended = sorted((one for one in found if one.ended_at is not None), key=lambda one: -(one.ended_at or 0.0))
    return [plain(one) for one in ended[:RESERVATIONS]]


async def events(cluster: Cluster, query: Query) -> dict[str, Any]:
    """Return the events of ``fray events --node --user --since``, the newest last. Raises FrayError."""
    since_s = _seconds(query, "since_s", DEFAULT_S)
    user, node = query.get("user", ""), query.get("node", "")
    return {"events": plain(await cluster.find_events(user=user, node=node, since_s=since_s, limit=EVENTS))}


async def capacity(cluster: Cluster, query: Query) -> dict[str, Any]:
    """Return the capacity of this moment, and its means over `PERIODS` parts of the time since ``since_s`` seconds ago.
    Raises FrayError.
    """
    since_s = min(_seconds(query, "since_s", DAY_S), YEARS_S)
    period_s = max(60.0, since_s / PERIODS)
    end = time.time()
    return {
        "begin": end - since_s,
        "end": end,
        "period_s": period_s,
        "samples": plain(await cluster.capacity_history(since_s=since_s, period_s=period_s)),
        "current": plain(await cluster.capacity()),
    }


async def machine(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return the processes of ``fray-node`` of a machine that are gone, what ran there, and the events that name it:
    those of the last week, and the newest of them. Raises FrayError.
    """
    ran = await cluster.attempts(node=name, since_s=DEFAULT_S)
    found = await cluster.find_events(node=name, since_s=DEFAULT_S, limit=EVENTS)
    return {
        "gone": plain(await cluster.gone_nodes(node=name)),
        "attempts": plain(ran[-ATTEMPTS:]),
        "events": plain(found),
    }


@define
class _Held:
    """Amounts that the ended attempts of one job held."""

    hours: Hours = Factory(Hours)
    last_end: float = 0.0


class HeldByJob:
    """Amounts that each job has held, and their cost.

    Attempts that have ended are asked for once, and kept as sums by job.
    """

    def __init__(self) -> None:
        self._ended: dict[str, _Held] = {}
        self._recorded_at = 0.0
        """Time at which the end of the latest of them was decided."""

    async def ask(self, cluster: Cluster) -> Sequence[Row]:
        """Return a row for each job that held something in the last week: CPU-hours, chip-hours, and cost (None:
        nothing has a price). Raises FrayError.
        """
        now = time.time()
        found = await cluster.attempts(since_s=min(DEFAULT_S, now - self._recorded_at + LATE_S))
        prices = (await cluster.usage()).prices
        living: dict[str, Hours] = {}
        before = self._recorded_at
        for one in found:
            if one.ended_at is None:
                living.setdefault(one.job_id, Hours()).add(one, (now - one.placed_at) / HOUR_S)
            elif one.recorded_at > before:
                self._add(one, one.ended_at)
        for job_id in [job_id for job_id, ended in self._ended.items() if ended.last_end < now - DEFAULT_S]:
            del self._ended[job_id]
        jobs = dict.fromkeys([*self._ended, *living])
        return [_held_row(job, [self._ended.get(job, _Held()).hours, living.get(job, Hours())], prices) for job in jobs]

    def _add(self, one: AttemptRecord, ended_at: float) -> None:
        job = self._ended.setdefault(one.job_id, _Held())
        job.hours.add(one, (ended_at - one.placed_at) / HOUR_S)
        job.last_end = max(job.last_end, ended_at)
        self._recorded_at = max(self._recorded_at, one.recorded_at)


def _held_row(job: str, parts: Sequence[Hours], prices: Mapping[str, float]) -> Row:
    costs = [cost(UsageSum(key=job, held=part), prices).total for part in parts]
    cpu_h, chip_h = sum(part.cpu for part in parts), sum(part.all_chips for part in parts)
    return [job, cpu_h, chip_h, sum(costs) if prices else None]


def _seconds(query: Query, name: str, default: float) -> float:
    """Return a number of seconds. Raises InvalidRequest for anything else."""
    try:
        return float(query.get(name) or default)
    except ValueError:
        raise InvalidRequest(f"{name}={query[name]!r} must be a number of seconds") from None
