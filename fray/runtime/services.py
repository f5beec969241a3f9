"""Services of a runtime under typed keys: parts of Fray attach them, and those with a factory are made on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from attrs import define, field

from fray.model.service_key import ServiceKey

T = TypeVar("T")


@define(eq=False)
class Services:
    """The services attached to one runtime. Every method may be called on any thread."""

    _services: dict[ServiceKey[Any], Any] = field(factory=dict, init=False)
    _factories: dict[ServiceKey[Any], Callable[[], Any]] = field(factory=dict, init=False)
    # An RLock, and one for all keys: with a lock for each, two services that need one another could deadlock between
    # threads.
    _making: threading.RLock = field(factory=threading.RLock, init=False)
    """Lock held while a factory runs; it may ask for other services."""

    def __getitem__(self, key: ServiceKey[T]) -> T:
        """Return the service, made now if it was only provided.

        Raises:
            KeyError: there is no such service.
        """
        # Without the lock: this is on the path of every call, and reading a dictionary is atomic.
        service = self._services.get(key)
        return cast(T, service if service is not None else self._make(key))

    def __setitem__(self, key: ServiceKey[T], service: T) -> None:
        self._services[key] = service

    def provide(self, key: ServiceKey[T], make: Callable[[], T]) -> None:
        """Have ``make`` called when the service is asked for by its key for the first time, once, on that thread."""
        self._factories[key] = make

    def get(self, key: ServiceKey[T]) -> T | None:
        """Return the service, or None if it has not been made yet."""
        return cast("T | None", self._services.get(key))

    def find(self, key: ServiceKey[T]) -> T | None:
        """Return the service, made now if it was only provided; None if there is no such service."""
        service = self._services.get(key)
        if service is None and key in self._factories:
            service = self._make(key)
        return cast("T | None", service)

    def get_or_make(self, key: ServiceKey[T], make: Callable[[], T]) -> T:
        """Return the service; make it if there is none. If two threads make one, both get the one stored first."""
        service = self._services.get(key)
        if service is None:
            # Not under the lock: `make` may wait for the loop, whose thread might be waiting for the lock.
            service = self._services.setdefault(key, make())
        return cast(T, service)

    def _make(self, key: ServiceKey[Any]) -> Any:
        with self._making:
            # Another thread may have made it while this one waited for the lock.
            if key not in self._services:
                self._services[key] = self._factories[key]()
            return self._services[key]
