"""Whose turn it is: the order in which what waits is tried.

The law. Band; then what is within its quota before what borrows; then the user with the lowest score (`fairness`), and
of his namespaces the one with the lowest, of equals the one of which something was accepted first (jobs of the command
line have a namespace each: names would be an order that lets newcomers pass for ever); then priority; then the order of
acceptance. Growth of reservations comes after all others of its band. Scores move while a pass places:
who has just been given something goes behind those who have less, so that equals end up with equal halves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from fray.scheduler.queue.applicant import Applicant, Entry
from fray.scheduler.queue.fair_share import Tenant
from fray.scheduler.queue.indexes import TenantQueue, TenantShapeQueue, WaitingShape
from fray.scheduler.queue.queue import Queue, make_waiting_shape
from fray.scheduler.queue.quotas import quota_status

MANY_LANES = 200
"""Lanes of the wants in question: with more, they are looked for where their tenants are."""

OrderKey: TypeAlias = tuple[int, int, float, str, float, int, str, Entry]
"""(band, standing, score of the user, user, score of the namespace, acceptance of its first, namespace, entry): the
least is tried first."""


def order_key(queue: Queue, applicant: Applicant) -> OrderKey:
    """Where it stands in the line now, or would stand if it waited."""
    shares, tenant = queue.shares, applicant.tenant
    want = queue.waiting.get(applicant.shape) or make_waiting_shape(applicant.shape)
    stands, _ = quota_status(shares, tenant, want)
    space = queue.tenants.get(applicant.band.rank, {}).get(tenant.user, {}).get(tenant)
    first = space.first_order if space is not None else applicant.entry[2]
    scores = shares.user_score(tenant.user), tenant.user, shares.score(tenant), first, tenant.namespace
    return applicant.band.rank, stands, *scores, applicant.entry


def in_order(queue: Queue) -> list[Applicant]:
    """All that waits, as it would be tried if nobody was given anything: for people to look at."""
    places = [(order_key(queue, applicant), applicant) for applicant in queue.applicants.values()]
    return [applicant for _, applicant in sorted(places, key=lambda pair: pair[0])]


Consider: TypeAlias = Callable[[TenantShapeQueue], bool]
"""Whether a lane is worth a try now; False: not in this round any more."""


class TenantRoundRobin:
    """Lanes of a band in their order, each as often as it is given something and is still worth a try.

    Args:
        wants: only lanes of these; None: all.
    """

    def __init__(self, queue: Queue, rank: int, wants: Sequence[WaitingShape] | None, consider: Consider) -> None:
        self._queue = queue
        self._rank = rank
        self._consider = consider
        self._wants = wants
        self._by_tenant = (
            _group_by_tenant(rank, wants) if wants is not None and _count_lanes(wants) <= MANY_LANES else None
        )
        """Where there are few lanes, they are found by their wants; where there are many, by their tenants."""
        self._users_in_order = self._users()
        """(score, user) as it was; nobody of it has been given anything yet."""
        self._at = 0
        self._served: list[tuple[float, str]] = []
        """Those who have been given something, by their scores since."""
        self._iterators: dict[str, Iterator[TenantShapeQueue]] = {}

    def __iter__(self) -> Iterator[TenantShapeQueue]:
        shares = self._queue.shares
        while (user := self._next_user()) is not None:
            lanes = self._iterators.get(user)
            if lanes is None:
                lanes = self._iterators[user] = self._lanes_of(user)
            score = shares.users[user].score
            for lane in lanes:
                yield lane
                if shares.users[user].score != score:
                    heapq.heappush(self._served, (shares.users[user].score, user))
                    break

    def _users(self) -> list[tuple[float, str]]:
        if self._by_tenant is None:
            return list(self._queue.shares.ranks.get(self._rank, ()))
        users = self._queue.shares.users
        return sorted((users[user].score, user) for user in self._by_tenant)

    def _next_user(self) -> str | None:
        fresh = self._users_in_order[self._at] if self._at < len(self._users_in_order) else None
        if self._served and (fresh is None or self._served[0] < fresh):
            return heapq.heappop(self._served)[1]
        self._at += 1
        return fresh[1] if fresh is not None else None

    def _lanes_of(self, user: str) -> Iterator[TenantShapeQueue]:
        """Those of all his namespaces, of the one that has least first."""
        shares, spaces = self._queue.shares, self._queue.tenants[self._rank].get(user, {})
        line = [
            (shares.score(of), spaces[of].first_order, of.namespace, lanes) for of, lanes in self._lanes_by_tenant(user)
        ]
        if len(line) == 1:
            yield from line[0][3]
            return
        heapq.heapify(line)
        while line:
            score, first, namespace, lanes = line[0]
            now = shares.score(shares.tenant(user, namespace))
            if now != score:
                heapq.heapreplace(line, (now, first, namespace, lanes))
                continue
            lane = next(lanes, None)
            if lane is None:
                heapq.heappop(line)
            else:
                yield lane

    def _lanes_by_tenant(self, user: str) -> Iterator[tuple[Tenant, Iterator[TenantShapeQueue]]]:
        if self._by_tenant is not None:
            yield from ((tenant, self._lanes_among(lanes)) for tenant, lanes in self._by_tenant[user].items())
            return
        for tenant, space in self._queue.tenants[self._rank].get(user, {}).items():
            if self._wants is None or len(space.heads) < len(self._wants):
                yield tenant, self._lanes_of_tenant(space)
            else:
                key = self._rank, tenant
                yield tenant, self._lanes_among([want.lanes[key] for want in self._wants if key in want.lanes])

    def _lanes_of_tenant(self, space: TenantQueue) -> Iterator[TenantShapeQueue]:
        """By their heads. One that is given something moves back or goes, and the next has its place."""
        at, heads = 0, space.heads
        while at < len(heads):
            lane = heads[at][1]
            if self._consider(lane):
                yield lane
            else:
                at += 1

    def _lanes_among(self, lanes: list[TenantShapeQueue]) -> Iterator[TenantShapeQueue]:
        """The same, of a few."""
        line = [(lane.head, lane) for lane in lanes if lane.entries]
        heapq.heapify(line)
        while line:
            head, lane = line[0]
            if not lane.entries:
                heapq.heappop(line)
            elif lane.head != head:
                heapq.heapreplace(line, (lane.head, lane))
            elif self._consider(lane):
                yield lane
            else:
                heapq.heappop(line)


def _count_lanes(wants: Sequence[WaitingShape]) -> int:
    return sum(len(want.lanes) for want in wants)


def _group_by_tenant(rank: int, wants: Sequence[WaitingShape]) -> dict[str, dict[Tenant, list[TenantShapeQueue]]]:
    """Lanes of a band, by user and tenant."""
    found: dict[str, dict[Tenant, list[TenantShapeQueue]]] = {}
    for want in wants:
        for (of, tenant), lane in want.lanes.items():
            if of == rank:
                found.setdefault(tenant.user, {}).setdefault(tenant, []).append(lane)
    return found
