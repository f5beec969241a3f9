"""Subscriptions to the registry: the endpoints of actors and names, by key, as long as this process watches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from fray.model.messages.client import Names, Unwatch
from fray.net.codec import Bytes

OnNames: TypeAlias = Callable[[Names, Sequence[Bytes]], None]


class NameSubscription:
    """Latest answer and listeners of one key."""

    def __init__(self) -> None:
        self.latest: tuple[Names, Sequence[Bytes]] | None = None
        self.listeners: list[OnNames] = []


class NameSubscriptions:
    """Registry subscriptions of one session; the controller sends changes of the keys in `watched`."""

    def __init__(self, notify: Callable[[Unwatch], None], resubscribe: Callable[[], None]) -> None:
        self._notify = notify
        self._resubscribe = resubscribe
        self.watched: dict[str, NameSubscription] = {}
        self.is_away = False
        """Flag: the controller was connected, and is not now, or does not answer."""

    def watch(self, key: str, on_names: OnNames) -> Callable[[], None]:
        """Call ``on_names`` with all endpoints under ``key`` (see `Watch`), now if known, then at each change.

        Returns the function that unsubscribes.
        """
        entry = self.watched.get(key)
        # One subscription for all watchers of a key.
        if entry is None:
            entry = self.watched[key] = NameSubscription()
            self._resubscribe()
        entry.listeners.append(on_names)
        if entry.latest is not None:
            # At once: a watcher that comes later would otherwise wait for a change that may never happen.
            on_names(*entry.latest)

        def unwatch() -> None:
            if on_names in entry.listeners:
                entry.listeners.remove(on_names)
            # It may have been removed and made again by another watcher.
            if not entry.listeners and self.watched.get(key) is entry:
                del self.watched[key]
                self._notify(Unwatch(key=key))  # may be lost: the controller drops it with the session

        return unwatch

    def on_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        """Handle the endpoints of a key in a notice or reply."""
        entry = self.watched.get(names.key)
        if entry is not None:
            entry.latest = (names, [bytes(blob) for blob in blobs])
            # A listener may unwatch itself.
            for listener in list(entry.listeners):
                listener(*entry.latest)
