"""Services that parts of Fray attach to a runtime under typed keys; the runtime itself does not use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from fray.model.service_key import ServiceKey

T = TypeVar("T")


class Services:
    """The services attached to one runtime. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._services: dict[ServiceKey[Any], object] = {}

    def __getitem__(self, key: ServiceKey[T]) -> T:
        return cast(T, self._services[key])

    def __setitem__(self, key: ServiceKey[T], service: T) -> None:
        self._services[key] = service

    def get(self, key: ServiceKey[T]) -> T | None:
        """Return the service, or None if there is none yet."""
        return cast("T | None", self._services.get(key))

    def get_or_make(self, key: ServiceKey[T], make: Callable[[], T]) -> T:
        """Return the service; make it if there is none. If two threads make one, both get the one stored first."""
        service = self._services.get(key)
        if service is None:
            service = self._services.setdefault(key, make())
        return cast(T, service)
