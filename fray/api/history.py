"""Queries about the past of a cluster: attempts that have ended, machines that are gone, and all events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

from attrs import evolve

from fray.errors import InvalidRequest, Unsupported
from fray.model.ids import Namespace, NodeName
from fray.model.messages.client import Event
from fray.model.messages.history import (
    AttemptPage,
    AttemptRecord,
    AttemptSum,
    AttemptSums,
    CapacityHistory,
    CapacitySample,
    EventPage,
    FindEvents,
    GetAttempts,
    GetCapacity,
    GetNodeHistory,
    GetReservationHistory,
    NodeHistory,
    NodeRecord,
    RecordedReservation,
    ReservationPage,
    SumAttempts,
)
from fray.model.messages.usage import GetUsage, UsageInfo
from fray.model.monitoring.accounting import DAY_S, Cost, UsageSum, check_key, cost, join_sums, sums
from fray.runtime.runtime import Runtime

DEFAULT_S = 7 * 86_400.0
"""Default time of `HistoryQueries.history`: a week."""

PERIODS_AT_ONCE = 1_440
"""Periods that the controller is asked for at a time: of a minute, those of a day."""

PageT = TypeVar("PageT", AttemptPage, ReservationPage)


class HistoryQueries:
    """Queries of a `Cluster` about its past. Users with the role ``user`` get what is their own."""

    _runtime: Runtime

    async def attempts(
        self,
        *,
        user: str = "",
        namespace: Namespace = "",
        job: str = "",
        node: NodeName = "",
        since_s: float | None = None,
    ) -> list[AttemptRecord]:
        """Return attempts with what they held of their machines, by the time of placement: those that live, and those
        that have ended, also of jobs that the cluster has forgotten otherwise.

        Args:
            user, namespace, node: only those of these.
            job: only those of jobs of this id or name.
            since_s: only those that lived in the last so many seconds. Default: all on record (200,000, unless the
                controller was started with another ``--keep-history``).
        """
        query = GetAttempts(user=user, namespace=namespace, job=job, node=node, since=_time_before(since_s))
        # By id: one that ends between two pages is on both, with its end on the second.
        pages = await self._pages(query, AttemptPage)
        found = {one.attempt_id: one for page in pages for one in page.attempts}
        in_time = (one for one in found.values() if one.ended_at is None or one.ended_at >= query.since)
        return sorted(in_time, key=lambda one: (one.placed_at, one.attempt_id))

    async def gone_nodes(self, *, node: NodeName = "", since_s: float | None = None) -> list[NodeRecord]:
        """Return machines that have left, died or were given up, the oldest end first; at most the 1,000 newest.

        A ``fray-node`` that was started again is a machine that joined, and its former process one that is gone.

        Args:
            node: only machines of this name.
            since_s: only those that are gone since so many seconds. Default: all on record.
        """
        reply = await self._runtime.client.request(GetNodeHistory(node=node, since=_time_before(since_s)))
        assert isinstance(reply, NodeHistory)
        return list(reply.nodes)

    async def reservation_history(self, *, since_s: float | None = None) -> list[RecordedReservation]:
        """Return reservations by the time of their requests: those that live, and those that have ended, also those
        that the cluster has forgotten otherwise.

        Args:
            since_s: only those that lived in the last so many seconds. Default: all on record.

        Raises:
            Unsupported: the controller is of an earlier release.
        """
        query = GetReservationHistory(since=_time_before(since_s))
        # One that ends between two pages is on both, with its end on the second.
        pages = await self._pages(query, ReservationPage)
        found = {(one.reservation_id, one.created_at): one for page in pages for one in page.reservations}
        return sorted(found.values(), key=lambda one: (one.created_at, one.reservation_id))

    async def _pages(self, query: GetAttempts | GetReservationHistory, kind: type[PageT]) -> list[PageT]:
        pages: list[PageT] = []
        while True:
            page = await self._runtime.client.request(query)
            assert isinstance(page, kind)
            pages.append(page)
            if not page.cursor:
                return pages
            query = evolve(query, cursor=page.cursor)

    async def find_events(
        self, *, user: str = "", node: NodeName = "", since_s: float | None = None, limit: int = 1_000
    ) -> list[Event]:
        """Return events of jobs, reservations and machines, in order.

        Args:
            user: only events of jobs of this user.
            node: only events that name this machine.
            since_s: only those of the last so many seconds. Default: all on record.
            limit: the newest so many; 0: all.
        """
        found: deque[Event] = deque(maxlen=limit or None)
        since, cursor = _time_before(since_s), 0
        while True:
            page = await self._runtime.client.request(FindEvents(user=user, node=node, since=since, cursor=cursor))
            assert isinstance(page, EventPage)
            found += page.events
            cursor = page.cursor
            if not cursor:
                return list(found)

    async def history(
        self,
        by: str = "user",
        *,
        user: str = "",
        namespace: Namespace = "",
        job: str = "",
        node: NodeName = "",
        since_s: float = DEFAULT_S,
        until_s: float = 0.0,
    ) -> list[UsageSum]:
        """Return what attempts held of the cluster, in hours of CPUs, memory and chips, and how much of that was done
        again or not used.

        Args:
            by: ``user``, ``namespace``, ``machine`` (kind of machine), ``node``, ``job`` or ``cause`` (of the end).
            user, namespace, job, node: only attempts of these.
            since_s, until_s: from so many seconds ago until so many seconds ago; default: the last week. Of attempts
                that lived longer the part within that time counts.

        Raises:
            InvalidRequest: an unknown ``by``, or no time between the two.
        """
        if not since_s > until_s >= 0:
            raise InvalidRequest(f"since_s={since_s:g} must be more than until_s={until_s:g}, which is 0 or more")
        check_key(by)
        now = time.time()
        since, until = now - since_s, now - until_s
        rows = await self._sum_rows(
            SumAttempts(by=by, since=since, until=until, user=user, namespace=namespace, job=job, node=node)
        )
        if rows is not None:
            return join_sums(rows)
        attempts = await self.attempts(user=user, namespace=namespace, job=job, node=node, since_s=since_s)
        return sums(attempts, by, since, until)

    async def daily_use(self, *, since_s: float = DEFAULT_S) -> list[AttemptSum]:
        """Return what attempts held on each day (UTC) in the last so many seconds, by user, namespace and kind of
        machine."""
        now = time.time()
        rows = await self._sum_rows(SumAttempts(by="day", since=now - since_s, until=now))
        if rows is not None:
            return rows
        return list(daily(await self.attempts(since_s=since_s), now - since_s, now))

    async def capacity(self) -> list[CapacitySample]:
        """Return the capacity of this moment by kind and zone: in use, reserved, idle, quarantined, closed.

        Raises:
            Unsupported: the controller is of an earlier release.
        """
        now = time.time()
        return list((await self._capacity(GetCapacity(since=now, until=now))).current)

    async def capacity_history(self, *, since_s: float = DAY_S, period_s: float = 60.0) -> list[CapacitySample]:
        """Return the means of the capacity over periods by kind and zone, in order of time.

        It is recorded once a minute while the controller runs, and kept for each tenth minute when it is a day old.

        Args:
            since_s: of the last so many seconds. Default: a day.
            period_s: length of a period in seconds, a minute or more; the first begins at a multiple of it.

        Raises:
            InvalidRequest: a shorter period.
            Unsupported: the controller is of an earlier release.
        """
        now = time.time()
        found: list[CapacitySample] = []
        begin = max(0.0, now - since_s)
        if period_s > 0:
            begin -= begin % period_s
        while begin <= now:
            # In parts: the controller reads all of a part for each of its replies.
            until = begin + PERIODS_AT_ONCE * max(period_s, 1.0)
            while begin:
                page = await self._capacity(GetCapacity(since=begin, until=until, period_s=period_s))
                found += page.samples
                begin = page.next_at
            begin = until
        return found

    async def _capacity(self, query: GetCapacity) -> CapacityHistory:
        reply = await self._runtime.client.request(query)
        assert isinstance(reply, CapacityHistory)
        return reply

    async def _sum_rows(self, query: SumAttempts) -> list[AttemptSum] | None:
        """Return sums that the controller makes; None: they have to be made here, of all attempts."""
        try:
            reply = await self._runtime.client.request(query)
        except Unsupported:  # a controller of the previous release
            return None
        assert isinstance(reply, AttemptSums)
        return list(reply.rows) if reply.is_complete else None

    async def cost(
        self,
        by: str = "user",
        *,
        user: str = "",
        namespace: Namespace = "",
        job: str = "",
        node: NodeName = "",
        since_s: float = DEFAULT_S,
        until_s: float = 0.0,
    ) -> list[Cost]:
        """Return the cost of what attempts held, by the prices of the cluster's policy; arguments as of `history`.

        Raises:
            InvalidRequest: as `history`, or the policy has no prices.
        """
        usage = await self._runtime.client.request(GetUsage())
        assert isinstance(usage, UsageInfo)
        if not usage.prices:
            raise InvalidRequest(
                "the policy of this cluster has no prices: an operator writes them below [prices], see docs/policy.md"
            )
        held = await self.history(
            by, user=user, namespace=namespace, job=job, node=node, since_s=since_s, until_s=until_s
        )
        return sorted((cost(each, usage.prices) for each in held), key=lambda each: (-each.total, each.key))


def _time_before(since_s: float | None) -> float:
    return 0.0 if since_s is None else max(0.0, time.time() - since_s)


def daily(attempts: Sequence[AttemptRecord], since: float, until: float) -> Iterator[AttemptSum]:
    """Yield what was held on each day (UTC) between two times, by user, namespace and kind of machine."""
    groups: dict[tuple[str, str, str], list[AttemptRecord]] = {}
    for one in attempts:
        groups.setdefault((one.user, one.namespace, one.machine), []).append(one)
    begin = since
    while begin < until:
        end = min(until, (begin // DAY_S + 1) * DAY_S)
        day = time.strftime("%Y-%m-%d", time.gmtime(begin))
        for (user, namespace, machine), some in sorted(groups.items()):
            for total in sums(some, "user", begin, end):
                held = total.held
                yield AttemptSum(
                    key=day,
                    user=user,
                    namespace=namespace,
                    machine=machine,
                    attempts=total.attempts,
                    cpu=held.cpu,
                    memory_gib=held.memory_gib,
                    chips=held.all_chips,
                )
        begin = end
