"""Release of Marin's packages that the flat modules follow, and the errors for names that it does not have."""

from __future__ import annotations

import functools
import inspect
import opcode
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from fray.model.text import near_text

VERSION = "0.2.227"
"""Release of `marin-fray` whose interface the flat modules have."""

T = TypeVar("T", bound=type)
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


class SameInstances(type):
    """Metaclass of a subclass that differs from a class of `fray.v2` in a few lines: instances of either are instances
    of both, as callers of both interfaces share clients and requests."""

    def __instancecheck__(cls, instance: object) -> bool:
        # Only the classes that name it: a caller's own subclass is a class of its own.
        return type.__instancecheck__(cls.__dict__.get("_same_as", cls), instance)


def check_keywords(cls: T) -> T:
    """Class decorator: a keyword that the constructor does not have is a TypeError that names it and `VERSION`."""
    init = cls.__init__  # type: ignore[misc]
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{cls.__name__} has no parameter {name!r}{near_text(name, names)}{_followed()}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def unknown_name(module: str, names: Sequence[str]) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a flat module.

    It raises AttributeError, and ImportError for ``from module import name``, whose own message would say nothing of
    the release.
    """

    def missing(name: str) -> NoReturn:
        text = f"module {module!r} has no attribute {name!r}{near_text(name, list(names))}{_followed()}"
        caller = sys._getframe(1)
        if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
            raise ImportError(text, name=module)
        raise AttributeError(text, obj=None)

    return missing


def _followed() -> str:
    return f"; the flat modules of Fray follow marin-fray {VERSION}"
