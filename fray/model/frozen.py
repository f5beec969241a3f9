"""What every word of the model is made with: `attrs.frozen`, with one ``==``, one ``hash`` and one ``repr`` for all.

attrs writes and compiles these three for each class, 0.3 of the 0.5 ms a class takes; there are a hundred classes, and
every process of Fray begins with them. Words are seldom compared or printed, so here they look at their fields instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from attrs import frozen as frozen
else:

    def frozen(cls: type | None = None, **options: Any) -> Any:
        """As `attrs.frozen`; the result cannot be told from its own."""

        def make(cls: type) -> type:
            for name, method in _METHODS.items():
                if name not in vars(cls):
                    setattr(cls, name, method)
            return attrs.frozen(cls, **{"eq": False, "repr": False, **options})

        return make if cls is None else make(cls)


_compared: dict[type, tuple[str, ...]] = {}
"""Names of the fields that count for equality."""


def _values(word: Any) -> tuple[Any, ...]:
    cls = type(word)
    names = _compared.get(cls)
    if names is None:
        names = _compared[cls] = tuple(field.name for field in attrs.fields(cls) if field.eq)
    return tuple(getattr(word, name) for name in names)


def _is_equal(self: object, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _values(self) == _values(other)


def _hash_of(self: object) -> int:
    return hash((type(self), _values(self)))


def _say(self: Any) -> str:
    said = []
    for field in attrs.fields(type(self)):
        if field.repr:
            say: Callable[[Any], str] = repr if field.repr is True else field.repr
            said.append(f"{field.name}={say(getattr(self, field.name))}")
    return f"{type(self).__qualname__.rpartition('>.')[2]}({', '.join(said)})"


_METHODS = {"__eq__": _is_equal, "__hash__": _hash_of, "__repr__": _say}
