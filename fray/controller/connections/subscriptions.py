"""Who wants to hear of what: an index from keys to links, both ways, so that a link leaves without a search."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from attrs import define, field

from fray.errors import InvalidRequest
from fray.model.ids import JobId, SessionId
from fray.model.reservations import ReservationId

SUBSCRIPTIONS_LIMIT = 100_000
"""Keys one link may follow at a time, per kind."""

K = TypeVar("K", bound=Hashable)
L = TypeVar("L", bound=Hashable)


class Subscriptions(Generic[K, L]):
    """Keys followed by links."""

    def __init__(self) -> None:
        self._links: dict[K, dict[L, None]] = {}
        self._keys: dict[L, set[K]] = {}

    def add(self, key: K, link: L) -> None:
        """Raises InvalidRequest over the limit of one link."""
        keys = self._keys.setdefault(link, set())
        if len(keys) >= SUBSCRIPTIONS_LIMIT and key not in keys:
            raise InvalidRequest(
                f"one connection may follow {SUBSCRIPTIONS_LIMIT} things at a time", limit=SUBSCRIPTIONS_LIMIT
            )
        keys.add(key)
        self._links.setdefault(key, {})[link] = None

    def drop(self, key: K, link: L) -> None:
        links = self._links.get(key, {})
        links.pop(link, None)
        if not links:
            self._links.pop(key, None)
        keys = self._keys.get(link, set())
        keys.discard(key)
        if not keys:
            self._keys.pop(link, None)

    def leave(self, link: L) -> None:
        """Drop all of this link's."""
        for key in list(self._keys.get(link, ())):
            self.drop(key, link)

    def __bool__(self) -> bool:
        return bool(self._links)

    def of(self, key: K) -> Collection[L]:
        """Links that follow ``key``, first come first."""
        return self._links.get(key, {}).keys()

    def follows(self, key: K, link: L) -> bool:
        return link in self._links.get(key, {})


@define(eq=False)
class SubscriptionIndex(Generic[L]):
    """Which client follows what."""

    of_job: Subscriptions[JobId, L] = field(factory=Subscriptions)
    of_reservation: Subscriptions[ReservationId, L] = field(factory=Subscriptions)
    of_name: Subscriptions[str, L] = field(factory=Subscriptions)
    of_log: Subscriptions[JobId | SessionId, L] = field(factory=Subscriptions)
    """By job, or by session for all that it owns: who is sent lines."""
    of_news: Subscriptions[JobId, L] = field(factory=Subscriptions)
    """By job: who reads its logs."""
    of_tree: Subscriptions[JobId, L] = field(factory=Subscriptions)
    """By job: who reads the logs of it and of all below it."""

    def leave(self, link: L) -> None:
        """Drop all that this client follows."""
        self.of_job.leave(link)
        self.of_reservation.leave(link)
        self.of_name.leave(link)
        self.of_log.leave(link)
        self.of_news.leave(link)
        self.of_tree.leave(link)
