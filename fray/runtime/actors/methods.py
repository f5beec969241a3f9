"""Public methods of actor classes: how they are called, their concurrency groups, and the checks of a class.

`fray.runtime.actors.method_lookup` finds the method of one call.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from attrs import frozen

from fray.errors import InvalidRequest
from fray.model.monitoring.health import HealthCheck

F = TypeVar("F", bound=Callable[..., Any])
_GROUP = "__fray_concurrency_group__"
NO_GROUP = ""
"""Group of the methods that name none; its limit is ``max_concurrency``."""


class Style(Enum):
    """Kind of a function: what calling it returns."""

    SYNC = "sync"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"


@frozen
class Method:
    """Public method of a hosted object."""

    name: str
    function: Callable[..., Any]
    """Bound method."""
    style: Style
    wants_context: bool
    """True if the first parameter is named ``ctx`` or annotated ``ActorContext``: it gets the context."""
    is_generator: bool = False
    """True for a generator of either kind."""
    stream_type: Callable[[Any], Any] | None = None
    """`Stream` or `BlockingStream` if it takes a stream, at `stream_position` or as `stream_parameter`."""
    stream_parameter: str = ""
    stream_position: int = 0
    group: str = NO_GROUP
    """Concurrency group whose limit its calls share."""


def method(*, concurrency_group: str) -> Callable[[F], F]:
    """Decorate a method of an actor class with its concurrency group.

    Args:
        concurrency_group: its calls share the limit of this group (`ActorConfig.concurrency_groups`), apart from
            all others; in an all-sync class they share threads of their own.

    Raises:
        InvalidRequest: the name is empty.
    """
    if not isinstance(concurrency_group, str) or not concurrency_group:
        raise InvalidRequest(f"a concurrency group has a name, such as 'io', not {concurrency_group!r}")

    def mark(function: F) -> F:
        # On the function itself, so that the mark survives `staticmethod` and `classmethod` around it.
        setattr(unwrap(function), _GROUP, concurrency_group)
        return function

    return mark


def check_concurrency(cls: type, max_concurrency: int | None, groups: Mapping[str, int]) -> None:
    """Check the limits of a class.

    Raises:
        InvalidRequest: a limit is not 1 or more calls, or a method names a group that has no limit.
    """
    for name, limit in {"max_concurrency": max_concurrency or 1, **groups}.items():
        if not isinstance(limit, int) or limit < 1:
            raise InvalidRequest(f"{cls.__name__}: the limit of {name!r} must be 1 or more calls, not {limit!r}")
    if max_concurrency is not None and max_concurrency < 1:
        raise InvalidRequest(f"{cls.__name__}: max_concurrency must be 1 or more calls, not {max_concurrency!r}")
    for name in public_names(cls):
        group = group_of(static_attribute(cls, name))
        if group and group not in groups:
            raise InvalidRequest(
                f"{cls.__name__}.{name}() is of the concurrency group {group!r}, which has no limit; known groups: "
                f"{', '.join(groups) or 'none'}. Set its limit: concurrency_groups={{{group!r}: 4}}"
            )


def check_kill_after(cls: type, kill_after_s: float | None) -> None:
    """Check ``kill_after_s`` of a class.

    Raises:
        InvalidRequest: it is below 0, or the class has async methods and so no thread to kill for.
    """
    if kill_after_s is None:
        return
    if not kill_after_s >= 0:
        raise InvalidRequest(f"{cls.__name__}: kill_after_s must be 0 seconds or more, not {kill_after_s!r}")
    if has_async_methods(cls):
        raise InvalidRequest(
            f"{cls.__name__} has async methods, so all of its methods run in the loop, where a cancelled one is "
            "interrupted as it awaits: kill_after_s is for classes with sync methods only"
        )


def check_health(cls: type, check: HealthCheck | None) -> None:
    """Check the health method of a class.

    Raises:
        InvalidRequest: the class has no such method, it is a generator, or the check names a path.
    """
    if check is None:
        return
    if check.actor is None:
        raise InvalidRequest(f"{cls.__name__}: health checks of actors call a method: HealthCheck(actor='ping')")
    # Its methods are only known at the object.
    if hasattr(cls, "__getattr__"):
        return
    names = public_names(cls)
    if check.actor not in names:
        near = difflib.get_close_matches(check.actor, names) or names
        raise InvalidRequest(
            f"{cls.__name__} has no public method {check.actor!r} for its health check"
            + (f"; it has {', '.join(near[:5])}" if near else "")
        )
    if style_of(static_attribute(cls, check.actor)) in (Style.GENERATOR, Style.ASYNC_GENERATOR):
        raise InvalidRequest(f"{cls.__name__}.{check.actor}() is a generator: its health needs a method that returns")


def group_of(function: Any) -> str:
    """Return the concurrency group that a method names, or `NO_GROUP`."""
    return str(getattr(function, _GROUP, NO_GROUP))


def has_async_methods(cls: type) -> bool:
    """Return whether any method of the class is async: then all of them run in the loop."""
    return _has_async_methods(cls)


@lru_cache(maxsize=1024)
def _has_async_methods(cls: Any) -> bool:
    return any(style_of(unwrap(value)) in (Style.ASYNC, Style.ASYNC_GENERATOR) for value in _members(cls))


def public_names(cls: type) -> list[str]:
    """Return the names of the public methods of a class."""
    # Without `getattr`: a property or another descriptor would run user code here.
    return [name for name in dir(cls) if not name.startswith("_") and callable(static_attribute(cls, name))]


def _members(cls: type) -> Iterable[Any]:
    """Return all that it and its bases define, without `object`; looking up name after name takes a millisecond."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        found.update(vars(base))
    return found.values()


def static_attribute(cls: type, name: str) -> Any:
    """Return the function behind an attribute of the class without running descriptors; None if it has none."""
    return unwrap(next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None))


def unwrap(value: Any) -> Any:
    """Return the function in a staticmethod, classmethod or ``functools.partialmethod``."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return getattr(value, "func", value) if type(value).__name__ == "partialmethod" else value


def style_of(function: Any) -> Style:
    """Return the kind of a function."""
    if inspect.iscoroutinefunction(function):
        return Style.ASYNC
    if inspect.isasyncgenfunction(function):
        return Style.ASYNC_GENERATOR
    return Style.GENERATOR if inspect.isgeneratorfunction(function) else Style.SYNC
