"""Typed key under which an object is attached to a runtime: see `fray.runtime.services`."""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import frozen

T = TypeVar("T")


@frozen
class ServiceKey(Generic[T]):
    """Typed name of a service of type ``T`` in `Services`. Keys are values: equal names are the same key."""

    name: str
