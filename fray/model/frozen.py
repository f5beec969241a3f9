"""Decorator of the model's classes: `attrs.frozen` with shared ``==``, ``hash`` and ``repr``.

attrs generates and compiles these three methods for each class, 0.3 of the 0.5 ms that a class takes. There are 170
classes and every process of Fray begins with them: with `attrs.frozen` all names of `fray` take 440 + 40 ms of CPU
instead of 440. Objects of the model are seldom compared or printed, so these methods look at the fields instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from attrs import frozen as frozen
else:

    def frozen(cls: type | None = None, **options: Any) -> Any:
        """Return a class equal to that of `attrs.frozen` in every behavior."""

        def make(cls: type) -> type:
            for name, method in _METHODS.items():
                if name not in vars(cls):
                    setattr(cls, name, method)
            return attrs.frozen(cls, **{"eq": False, "repr": False, **options})

        return make if cls is None else make(cls)


_compared: dict[type, tuple[str, ...]] = {}
"""Names of the fields that count for equality."""


def _values(instance: Any) -> tuple[Any, ...]:
    cls = type(instance)
    names = _compared.get(cls)
    if names is None:
        names = _compared[cls] = tuple(field.name for field in attrs.fields(cls) if field.eq)
    return tuple(getattr(instance, name) for name in names)


def _is_equal(self: object, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _values(self) == _values(other)


def _hash_of(self: object) -> int:
    return hash((type(self), _values(self)))


def _repr(self: Any) -> str:
    parts = []
    for field in attrs.fields(type(self)):
        if field.repr:
            represent: Callable[[Any], str] = repr if field.repr is True else field.repr
            parts.append(f"{field.name}={represent(getattr(self, field.name))}")
    return f"{type(self).__qualname__.rpartition('>.')[2]}({', '.join(parts)})"


_METHODS = {"__eq__": _is_equal, "__hash__": _hash_of, "__repr__": _repr}
