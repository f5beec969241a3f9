"""Release of Marin's packages that the flat modules follow, and the errors for names that it does not have."""

from __future__ import annotations

import functools
import inspect
import opcode
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from fray.model.text import near_text

VERSION = "0.2.227"
"""Release of `marin-fray` whose interface the flat modules have."""

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


class SameInstances(type):
    """Metaclass of a subclass that differs from a class of `fray.v2` in a few lines: instances of either are instances
    of both, as callers of both interfaces share clients and requests."""

    def __instancecheck__(cls, instance: object) -> bool:
        # Only the classes that name it: a caller's own subclass is a class of its own.
        return type.__instancecheck__(cls.__dict__.get("_same_as", cls), instance)


def marin_parameters(text: str) -> Callable[[T], T]:
    """Return a class decorator that gives the constructor its parameters in Marin's order.

    A keyword that is not one of them is a TypeError that names it and `VERSION`.

    Args:
        text: all parameters of the constructor, separated by blanks. A dataclass has those of its base class first,
            wherever Marin has them, and type checkers know that order only.
    """
    names = tuple(text.split())

    def decorate(cls: T) -> T:
        init = cls.__init__  # type: ignore[misc]
        signature = inspect.signature(init)
        first, *others = signature.parameters.values()
        by_name = {each.name: each for each in others}
        # Marin has defaults for all after the first one without, so that the order is a signature.
        marins = signature.replace(parameters=[first, *(by_name[name] for name in names)])

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            _refuse_unknown(cls.__name__, kwargs, names)
            if len(args) > len(names):
                raise TypeError(f"{cls.__name__} takes {len(names)} arguments, and {len(args)} are given")
            if twice := [name for name in names[: len(args)] if name in kwargs]:
                raise TypeError(f"{cls.__name__} has two values of {twice[0]!r}: by position and by name")
            init(self, **dict(zip(names, args, strict=False)), **kwargs)

        checked.__signature__ = marins  # type: ignore[attr-defined]
        cls.__init__ = checked  # type: ignore[misc]
        cls.__match_args__ = names  # type: ignore[misc, attr-defined]
        return cls

    return decorate


def marin_function(fn: F) -> F:
    """Return the function with a TypeError that names `VERSION` for a keyword that it does not have."""
    names = tuple(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_unknown(fn.__qualname__, kwargs, names)
        return fn(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _refuse_unknown(where: str, kwargs: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in kwargs:
        if name not in names:
            raise TypeError(f"{where} has no parameter {name!r}{near_text(name, names)}{_followed()}")


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
