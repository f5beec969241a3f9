"""Checks of settings, as validators of attrs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

from attrs import Attribute, fields

from fray.model.text import near_text

T = TypeVar("T")
Check = Callable[[Any, "Attribute[Any]", Any], None]


def fail(instance: object, attribute: Attribute[Any], value: object, expected: str) -> ValueError:
    """Return the error about a value of a setting."""
    return ValueError(f"invalid {attribute.name}={value!r} of {type(instance).__name__}: expected {expected}")


def one_of(names: Collection[str]) -> Check:
    """Return a check that a value is one of the names; its error has the nearest."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value not in names:
            raise fail(instance, attribute, value, f"one of {', '.join(names)}{near_text(str(value), names)}")

    return check


def number(expected: str, is_valid: Callable[[float], bool]) -> Check:
    """Return a check of finite numbers, None included where the default is None."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and attribute.default is None:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not is_valid(value):  # type: ignore[arg-type]
            raise fail(instance, attribute, value, expected)

    return check


def flag(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise fail(instance, attribute, value, "True or False")


def count(least: int) -> Check:
    """Return a check of whole numbers, None included where the default is None."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and attribute.default is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise fail(instance, attribute, value, f"a whole number of {least} or more")

    return check


ABOVE_0 = number("a number above 0", lambda value: value > 0)
FROM_0 = number("a number of 0 or more", lambda value: value >= 0)
BELOW_1 = number("a number of 0 or more and below 1", lambda value: 0 <= value < 1)


def names_similar_arguments(kind: type[T]) -> type[T]:
    """Let the constructor of an attrs class say which arguments are similar to one that it does not have.

    Python's own message names the wrong one alone.
    """
    construct = kind.__init__
    names = [one.alias for one in fields(kind) if one.init]  # type: ignore[arg-type]

    @wraps(construct)
    def __init__(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in names:
                raise TypeError(f"{kind.__name__} has no argument {name!r}{near_text(name, names)}")
        construct(self, *args, **given)

    kind.__init__ = __init__  # type: ignore[method-assign,assignment]
    return kind
