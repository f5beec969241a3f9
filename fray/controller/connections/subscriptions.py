"""Index of subscribers by key, in both directions, so that a subscriber is removed without a search."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

import trio
from attrs import define, field

from fray.controller.connections.changes import JobChanges, NodeChanges
from fray.controller.connections.waiting_jobs import WaitingJobs
from fray.errors import InvalidRequest
from fray.model.ids import JobId
from fray.model.reservations import ReservationId

SUBSCRIPTIONS_LIMIT = 100_000
"""Keys one subscriber may follow at a time, per kind."""

K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Hashable)


class Subscriptions(Generic[K, S]):
    """Keys and their subscribers."""

    def __init__(self) -> None:
        self.by_key: dict[K, dict[S, None]] = {}
        """Subscribers of each key that has any, in the order in which they came."""
        self._keys: dict[S, set[K]] = {}

    def add(self, key: K, subscriber: S) -> None:
        """Subscribe.

        Raises:
            InvalidRequest: the subscriber follows too many keys.
        """
        keys = self._keys.setdefault(subscriber, set())
        # Pending updates are bounded by subscriptions, so this bounds what one client can make the controller remember.
        if len(keys) >= SUBSCRIPTIONS_LIMIT and key not in keys:
            raise InvalidRequest(
                f"too many subscriptions (limit {SUBSCRIPTIONS_LIMIT} of each kind)", limit=SUBSCRIPTIONS_LIMIT
            )
        keys.add(key)
        self.by_key.setdefault(key, {})[subscriber] = None

    def drop(self, key: K, subscriber: S) -> None:
        subscribers = self.by_key.get(key, {})
        subscribers.pop(subscriber, None)
        if not subscribers:
            self.by_key.pop(key, None)
        keys = self._keys.get(subscriber, set())
        keys.discard(key)
        if not keys:
            self._keys.pop(subscriber, None)

    def remove(self, subscriber: S) -> None:
        """Remove all subscriptions of a subscriber."""
        # A copy: `drop` changes the set.
        for key in list(self._keys.get(subscriber, ())):
            self.drop(key, subscriber)

    def subscribers(self, key: K) -> Collection[S]:
        """Return the subscribers of ``key``, in the order in which they came."""
        return self.by_key.get(key, {}).keys()


class SavedBatches:
    """Count of the saved batches, for those who wait for the next one."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting = trio.lowlevel.ParkingLot()

    def add(self) -> None:
        """Count one, and wake who waits for it."""
        self.count += 1
        self._waiting.unpark_all()

    async def wait_beyond(self, count: int) -> None:
        """Wait until more than ``count`` were saved."""
        if self.count <= count:
            await self._waiting.park()


@define(eq=False)
class SubscriptionIndex(Generic[S]):
    """Subscriptions of all clients, by kind."""

    changes: JobChanges
    node_changes: NodeChanges
    saved: SavedBatches = field(factory=SavedBatches)
    jobs: Subscriptions[JobId, S] = field(factory=Subscriptions)
    reservations: Subscriptions[ReservationId, S] = field(factory=Subscriptions)
    names: Subscriptions[str, S] = field(factory=Subscriptions)
    waiting: WaitingJobs = field(factory=WaitingJobs)

    def remove(self, subscriber: S) -> None:
        """Remove all subscriptions of this client."""
        self.jobs.remove(subscriber)
        self.reservations.remove(subscriber)
        self.names.remove(subscriber)
