"""Checks of settings, as validators of attrs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from attrs import Attribute

from fray.model.text import near_text

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
