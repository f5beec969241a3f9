"""Order in which applicants are tried.

By band; then applicants within their quota before borrowing ones; then by the score of the user (`fair_share`), and of
the namespace among those of its user, with ties broken by the earliest acceptance (each command line job has a
namespace of its own: an order by name would let newcomers pass for ever); then by priority; then by acceptance. Growth
of reservations comes last in its band. Scores move while a pass places: a tenant that was given something goes behind
those that have less, so that equal tenants end up with equal halves.
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
"""Shape queues up to which they are found by their shapes; more are found by their tenants."""

OrderKey: TypeAlias = tuple[int, int, float, str, float, int, str, Entry]
"""(band, quota status, score of the user, user, score of the namespace, first acceptance, namespace, entry); the least
is tried first."""


def order_key(queue: Queue, applicant: Applicant) -> OrderKey:
    """Return the sort key of an applicant, whether it waits or not."""
    shares, tenant = queue.shares, applicant.tenant
    # Questions (`what_if`) are about applicants that do not wait.
    want = queue.waiting.get(applicant.shape) or make_waiting_shape(applicant.shape)
    stands, _ = quota_status(shares, tenant, want)
    space = queue.tenants.get(applicant.band.rank, {}).get(tenant.user, {}).get(tenant)
    first = space.first_order if space is not None else applicant.entry[2]
    scores = shares.user_score(tenant.user), tenant.user, shares.score(tenant), first, tenant.namespace
    return applicant.band.rank, stands, *scores, applicant.entry


def in_order(queue: Queue) -> list[Applicant]:
    """Return all applicants in the order in which they would be tried if nothing was placed, for listings."""
    places = [(order_key(queue, applicant), applicant) for applicant in queue.applicants.values()]
    return [applicant for _, applicant in sorted(places, key=lambda pair: pair[0])]


Consider: TypeAlias = Callable[[TenantShapeQueue], bool]
"""Function that returns whether a shape queue is worth a try now; False: not in this round any more."""


class TenantRoundRobin:
    """Shape queues of a band in order, each as often as something of it is placed and it is still worth a try.

    Args:
        wants: only queues of these shapes; None for all.
    """

    def __init__(self, queue: Queue, rank: int, wants: Sequence[WaitingShape] | None, consider: Consider) -> None:
        self._queue = queue
        self._rank = rank
        self._consider = consider
        self._wants = wants
        # Few candidates lead to their users. For many it is cheaper to go through the users, whose order is kept
        # sorted.
        self._by_tenant = (
            _group_by_tenant(rank, wants) if wants is not None and _count_lanes(wants) <= MANY_LANES else None
        )
        """True if there are few queues, which are found by their shapes, not by their tenants."""
        self._users_in_order = self._users()
        """(score, user) at the start, of users of which nothing was placed yet."""
        self._at = 0
        self._served: list[tuple[float, str]] = []
        """Users of which something was placed, by their scores since."""
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
                # It was given something and may come after others now, even in the middle of its queues.
                if shares.users[user].score != score:
                    heapq.heappush(self._served, (shares.users[user].score, user))
                    break

    def _users(self) -> list[tuple[float, str]]:
        if self._by_tenant is None:
            return list(self._queue.shares.ranks.get(self._rank, ()))
        users = self._queue.shares.users
        # Ties are broken by name, so that the order is the same in every run.
        return sorted((users[user].score, user) for user in self._by_tenant)

    def _next_user(self) -> str | None:
        fresh = self._users_in_order[self._at] if self._at < len(self._users_in_order) else None
        # Two sorted sources: users that were not served yet, by the scores at the start, and served ones by their
        # present scores.
        if self._served and (fresh is None or self._served[0] < fresh):
            return heapq.heappop(self._served)[1]
        self._at += 1
        return fresh[1] if fresh is not None else None

    def _lanes_of(self, user: str) -> Iterator[TenantShapeQueue]:
        """Yield the queues of all namespaces of a user, the namespace with the lowest score first."""
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
            # The namespace was given something: its other queues come where its new score puts it.
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
            # From the smaller side: the queues of the tenant, or the candidates.
            if self._wants is None or len(space.heads) < len(self._wants):
                yield tenant, self._lanes_of_tenant(space)
            else:
                key = self._rank, tenant
                yield tenant, self._lanes_among([want.lanes[key] for want in self._wants if key in want.lanes])

    def _lanes_of_tenant(self, space: TenantQueue) -> Iterator[TenantShapeQueue]:
        """Yield queues by their first entries. After a placement a queue moves back or goes, and the next follows."""
        # The list changes meanwhile: a queue whose head was placed moves back, and the same position shows the next
        # one.
        at, heads = 0, space.heads
        while at < len(heads):
            lane = heads[at][1]
            if self._consider(lane):
                yield lane
            else:
                at += 1

    def _lanes_among(self, lanes: list[TenantShapeQueue]) -> Iterator[TenantShapeQueue]:
        """Yield the same from a few queues."""
        line = [(lane.head, lane) for lane in lanes if lane.entries]
        heapq.heapify(line)
        while line:
            head, lane = line[0]
            if not lane.entries:
                heapq.heappop(line)
            # Its head was placed since: the queue comes where its next entry belongs.
            elif lane.head != head:
                heapq.heapreplace(line, (lane.head, lane))
            elif self._consider(lane):
                yield lane
            else:
                heapq.heappop(line)


def _count_lanes(wants: Sequence[WaitingShape]) -> int:
    return sum(len(want.lanes) for want in wants)


def _group_by_tenant(rank: int, wants: Sequence[WaitingShape]) -> dict[str, dict[Tenant, list[TenantShapeQueue]]]:
    """Return shape queues of a band, by user and tenant."""
    found: dict[str, dict[Tenant, list[TenantShapeQueue]]] = {}
    for want in wants:
        for (of, tenant), lane in want.lanes.items():
            if of == rank:
                found.setdefault(tenant.user, {}).setdefault(tenant, []).append(lane)
    return found
