"""What this process is told of names and actors: who is where, by key, as long as somebody here wants to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from fray.model.messages.client import Names, Unwatch
from fray.net.codec import Bytes

OnNames: TypeAlias = Callable[[Names, Sequence[Bytes]], None]


class NameSubscription:
    """One key."""

    def __init__(self) -> None:
        self.latest: tuple[Names, Sequence[Bytes]] | None = None
        self.listeners: list[OnNames] = []


class NameSubscriptions:
    """Of one conversation with the controller, which tells it of each key as long as it is among those `watched`."""

    def __init__(self, notify: Callable[[Unwatch], None], resubscribe: Callable[[], None]) -> None:
        self._notify = notify
        self._resubscribe = resubscribe
        self.watched: dict[str, NameSubscription] = {}

    def watch(self, key: str, on_names: OnNames) -> Callable[[], None]:
        """Call back with all endpoints under ``key`` (see `Watch`): as known now, then at each change."""
        entry = self.watched.get(key)
        if entry is None:
            entry = self.watched[key] = NameSubscription()
            self._resubscribe()
        entry.listeners.append(on_names)
        if entry.latest is not None:
            on_names(*entry.latest)

        def unwatch() -> None:
            if on_names in entry.listeners:
                entry.listeners.remove(on_names)
            if not entry.listeners and self.watched.get(key) is entry:
                del self.watched[key]
                self._notify(Unwatch(key=key))  # if it is not heard, the controller forgets with the session

        return unwatch

    def on_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        """What the controller says of a key."""
        entry = self.watched.get(names.key)
        if entry is not None:
            entry.latest = (names, [bytes(blob) for blob in blobs])
            for listener in list(entry.listeners):
                listener(*entry.latest)
