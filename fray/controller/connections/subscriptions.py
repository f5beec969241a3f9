"""Index of subscribers by key, in both directions, so that a subscriber is removed without a search."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from attrs import define, field

from fray.errors import InvalidRequest
from fray.model.ids import JobId, SessionId
from fray.model.reservations import ReservationId

SUBSCRIPTIONS_LIMIT = 100_000
"""Keys one subscriber may follow at a time, per kind."""

K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Hashable)


class Subscriptions(Generic[K, S]):
    """Keys followed by subscribers."""

    def __init__(self) -> None:
        self._subscribers: dict[K, dict[S, None]] = {}
        self._keys: dict[S, set[K]] = {}

    def add(self, key: K, subscriber: S) -> None:
        """Raises InvalidRequest over the limit of one subscriber."""
        keys = self._keys.setdefault(subscriber, set())
        if len(keys) >= SUBSCRIPTIONS_LIMIT and key not in keys:
            raise InvalidRequest(
                f"one connection may follow {SUBSCRIPTIONS_LIMIT} things at a time", limit=SUBSCRIPTIONS_LIMIT
            )
        keys.add(key)
        self._subscribers.setdefault(key, {})[subscriber] = None

    def drop(self, key: K, subscriber: S) -> None:
        subscribers = self._subscribers.get(key, {})
        subscribers.pop(subscriber, None)
        if not subscribers:
            self._subscribers.pop(key, None)
        keys = self._keys.get(subscriber, set())
        keys.discard(key)
        if not keys:
            self._keys.pop(subscriber, None)

    def remove(self, subscriber: S) -> None:
        """Drop all of this subscriber's."""
        for key in list(self._keys.get(subscriber, ())):
            self.drop(key, subscriber)

    def __bool__(self) -> bool:
        return bool(self._subscribers)

    def subscribers(self, key: K) -> Collection[S]:
        """Links that follow ``key``, first come first."""
        return self._subscribers.get(key, {}).keys()

    def follows(self, key: K, subscriber: S) -> bool:
        return subscriber in self._subscribers.get(key, {})


@define(eq=False)
class SubscriptionIndex(Generic[S]):
    """Which client follows what."""

    jobs: Subscriptions[JobId, S] = field(factory=Subscriptions)
    reservations: Subscriptions[ReservationId, S] = field(factory=Subscriptions)
    names: Subscriptions[str, S] = field(factory=Subscriptions)
    lines: Subscriptions[JobId | SessionId, S] = field(factory=Subscriptions)
    """By job, or by session for all that it owns: who is sent lines."""
    job_logs: Subscriptions[JobId, S] = field(factory=Subscriptions)
    """By job: who reads its logs."""
    tree_logs: Subscriptions[JobId, S] = field(factory=Subscriptions)
    """By job: who reads the logs of it and of all below it."""

    def remove(self, subscriber: S) -> None:
        """Drop all that this client follows."""
        self.jobs.remove(subscriber)
        self.reservations.remove(subscriber)
        self.names.remove(subscriber)
        self.lines.remove(subscriber)
        self.job_logs.remove(subscriber)
        self.tree_logs.remove(subscriber)
