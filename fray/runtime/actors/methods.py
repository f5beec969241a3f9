"""What of an object may be called from outside, and how; `fray.method` says more about a method."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from attrs import frozen

from fray.errors import InvalidRequest, NoSuchMethod
from fray.model.monitoring.health import HealthCheck
from fray.runtime.actors.input_stream import BlockingStream, Stream

F = TypeVar("F", bound=Callable[..., Any])
_GROUP = "__fray_concurrency_group__"
NO_GROUP = ""
"""The group of the methods that name none; its limit is ``max_concurrency``."""


def method(*, concurrency_group: str) -> Callable[[F], F]:
    """Decorator of a method of an actor class.

    Args:
        concurrency_group: its calls share the limit of this group (`ActorConfig.concurrency_groups`), apart from
            all others; in an all-sync class they share threads of their own.

    Raises:
        InvalidRequest: the name is empty.
    """
    if not isinstance(concurrency_group, str) or not concurrency_group:
        raise InvalidRequest(f"a concurrency group has a name, such as 'io', not {concurrency_group!r}")

    def mark(function: F) -> F:
        setattr(_unwrap(function), _GROUP, concurrency_group)
        return function

    return mark


def check_concurrency(cls: type, max_concurrency: int | None, groups: Mapping[str, int]) -> None:
    """Raises: InvalidRequest, when a limit is no number of calls or a method names a group that has no limit."""
    for name, limit in {"max_concurrency": max_concurrency or 1, **groups}.items():
        if not isinstance(limit, int) or limit < 1:
            raise InvalidRequest(f"{cls.__name__}: the limit of {name!r} must be 1 or more calls, not {limit!r}")
    if max_concurrency is not None and max_concurrency < 1:
        raise InvalidRequest(f"{cls.__name__}: max_concurrency must be 1 or more calls, not {max_concurrency!r}")
    for name in public_names(cls):
        group = group_of(_static(cls, name))
        if group and group not in groups:
            raise InvalidRequest(
                f"{cls.__name__}.{name}() is of the concurrency group {group!r}, which has no limit; known groups: "
                f"{', '.join(groups) or 'none'}. Give it one: concurrency_groups={{{group!r}: 4}}"
            )


def check_kill_after(cls: type, kill_after_s: float | None) -> None:
    """Raises: InvalidRequest, when there is no thread to kill for, or the time is below 0."""
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
    """Raises: InvalidRequest, when there is no such method, or the check asks for a path."""
    if check is None:
        return
    if check.actor is None:
        raise InvalidRequest(f"{cls.__name__}: an actor is asked by a method of its own: HealthCheck(actor='ping')")
    if hasattr(cls, "__getattr__"):
        return
    names = public_names(cls)
    if check.actor not in names:
        near = difflib.get_close_matches(check.actor, names) or names
        raise InvalidRequest(
            f"{cls.__name__} has no public method {check.actor!r} to ask for its health"
            + (f"; it has {', '.join(near[:5])}" if near else "")
        )
    if _style(_unwrap(_static(cls, check.actor))) in (Style.GENERATOR, Style.ASYNC_GENERATOR):
        raise InvalidRequest(f"{cls.__name__}.{check.actor}() is a generator: its health needs a method that returns")


def group_of(function: Any) -> str:
    """The concurrency group that a method names, or `NO_GROUP`."""
    return str(getattr(function, _GROUP, NO_GROUP))


class Style(Enum):
    SYNC = "sync"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"


@frozen
class Method:
    """One public method of a hosted object."""

    name: str
    function: Callable[..., Any]
    """Bound."""
    style: Style
    wants_context: bool
    """Its first parameter is named ``ctx`` or annotated ``ActorContext``: it gets the context in front."""
    is_generator: bool = False
    """It is a generator of either kind."""
    stream_type: type[Stream | BlockingStream] | None = None
    """It takes a stream: what its parameter of this name, at this place, is given."""
    stream_parameter: str = ""
    stream_position: int = 0
    group: str = NO_GROUP
    """Whose limit its calls share."""


_RECIPES: WeakKeyDictionary[Any, dict[Any, tuple[Any, ...]]] = WeakKeyDictionary()
"""What has been found out about plain functions, for the next object of their class: looking costs 0.1 ms each."""


def has_async_methods(cls: type) -> bool:
    """Whether any method of the class is async: then all of them run in the loop."""
    return _has_async_methods(cls)


@lru_cache(maxsize=1024)
def _has_async_methods(cls: Any) -> bool:
    return any(_style(_unwrap(value)) in (Style.ASYNC, Style.ASYNC_GENERATOR) for value in _members(cls))


def find_method(instance: Any, name: str, stream_type: type[Stream | BlockingStream] = Stream) -> Method:
    """The public method ``name`` of ``instance``.

    Raises:
        NoSuchMethod: it is private, a plain attribute, or not there; the message names the near ones.
        InvalidRequest: it takes a stream of the wrong kind for where it runs, which is ``talk_type``.
    """
    cls = type(instance)
    if name.startswith("_"):
        raise NoSuchMethod(f"{name!r} of {cls.__name__} begins with an underscore: it cannot be called from outside")
    plain = getattr(cls, name, None)
    if type(plain) is FunctionType and (known := _RECIPES.get(plain, {}).get(stream_type)) is not None:
        return Method(name, getattr(instance, name), *known)
    raw = _static(cls, name)
    if raw is None and _makes_attributes_up(cls):
        raw = getattr(instance, name, None)
    if not callable(raw):
        raise NoSuchMethod(_explain(instance, name, raw), near=_near(cls, name))
    function = getattr(instance, name)
    style = _style(function)
    streams = style in (Style.GENERATOR, Style.ASYNC_GENERATOR)
    talk = _talk_parameter(function)
    if talk is not None:
        _check_talk(f"{cls.__name__}.{name}()", talk[2], stream_type, style)
    recipe = (
        style,
        _wants_context(function),
        streams,
        stream_type if talk else None,
        talk[0] if talk else "",
        talk[1] if talk else 0,
        group_of(raw),
    )
    if getattr(function, "__func__", None) is plain and type(plain) is FunctionType:
        _RECIPES.setdefault(plain, {})[stream_type] = recipe
    return Method(name, function, *recipe)


def public_names(cls: type) -> list[str]:
    """Names of the public methods of a class."""
    return [name for name in dir(cls) if not name.startswith("_") and callable(_static(cls, name))]


def _members(cls: type) -> Iterable[Any]:
    """All that it and its bases define, but `object`; asking for one name after the other takes a millisecond."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        found.update(vars(base))
    return found.values()


def _plain(cls: type, name: str) -> Any:
    """What the class says of a name, without asking a descriptor."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _static(cls: type, name: str) -> Any:
    return _unwrap(_plain(cls, name))


def _unwrap(value: Any) -> Any:
    """The function in a staticmethod, classmethod or ``functools.partialmethod``."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return getattr(value, "func", value) if type(value).__name__ == "partialmethod" else value


def _makes_attributes_up(cls: type) -> bool:
    return any("__getattr__" in vars(base) for base in cls.__mro__)


def _style(function: Any) -> Style:
    if inspect.iscoroutinefunction(function):
        return Style.ASYNC
    if inspect.isasyncgenfunction(function):
        return Style.ASYNC_GENERATOR
    return Style.GENERATOR if inspect.isgeneratorfunction(function) else Style.SYNC


def _wants_context(function: Any) -> bool:
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):  # builtins without a signature
        return False
    if first is None or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD, first.KEYWORD_ONLY):
        return False
    annotation = first.annotation
    said = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return first.name == "ctx" or said.rpartition(".")[2] == "ActorContext"


def _talk_parameter(function: Any) -> tuple[str, int, type] | None:
    """Name, place and annotation of the parameter that is annotated `Stream` or `BlockingStream`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return None
    for place, parameter in enumerate(parameters):
        annotation = parameter.annotation
        if isinstance(annotation, str):
            annotation = _meant_by(annotation, function) if "Stream" in annotation else None
        if annotation is Stream or annotation is BlockingStream:
            return parameter.name, place, annotation
    return None


def _meant_by(annotation: str, function: Any) -> Any:
    """What a postponed annotation means where the function was written; None if that cannot be told.

    A class of a script travels by value, with those names alone that its code uses: then the words must do.
    """
    try:
        return eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    except Exception:  # noqa: BLE001 - names that exist for type checkers only
        return _SAID.get(annotation)


_SAID = {said: cls for cls in (Stream, BlockingStream) for said in (cls.__name__, f"fray.{cls.__name__}")}


def _check_talk(what: str, asked: type, given: type, style: Style) -> None:
    in_loop = given is Stream
    if in_loop and style in (Style.SYNC, Style.GENERATOR):
        raise InvalidRequest(f"{what} would block the loop, where its class lives: make it async to take a stream")
    if asked is not given:
        where = "in the loop" if in_loop else "on a thread"
        raise InvalidRequest(f"{what} runs {where}: annotate its stream fray.{given.__name__}")


def _near(cls: type, name: str) -> list[str]:
    return difflib.get_close_matches(name, public_names(cls), 3)


def _explain(instance: Any, name: str, raw: Any) -> str:
    cls = type(instance)
    if raw is not None or name in getattr(instance, "__dict__", {}):
        return f"{name!r} of {cls.__name__} is an attribute, no method: write a method that returns it"
    near = _near(cls, name)
    known = public_names(cls)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known[:10]) or 'no public methods'}"
    return f"{cls.__name__} has no public method {name!r}; {hint}"
