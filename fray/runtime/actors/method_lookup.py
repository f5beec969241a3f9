"""Lookup of the method that a call names: its style, its parameters, and what to say if there is none."""

from __future__ import annotations

import difflib
import inspect
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from fray.errors import InvalidRequest, NoSuchMethod
from fray.runtime.actors.method_streams import BlockingStream, Stream
from fray.runtime.actors.methods import Method, Style, group_of, public_names, static_attribute, style_of

_METHOD_CACHE: WeakKeyDictionary[Any, dict[Any, tuple[Any, ...]]] = WeakKeyDictionary()
"""Fields of `Method` by plain function, for the next object of its class: inspecting one costs 0.1 ms."""


def find_method(instance: Any, name: str, stream_type: type[Stream | BlockingStream] = Stream) -> Method:
    """Return the public method ``name`` of ``instance``.

    Raises:
        NoSuchMethod: it is private, a plain attribute, or missing; the message names close matches.
        InvalidRequest: it takes a stream of the wrong class for where it runs, which needs ``stream_type``.
    """
    cls = type(instance)
    # Hooks and helpers are not part of what a class offers to other processes.
    if name.startswith("_"):
        raise NoSuchMethod(f"{name!r} of {cls.__name__} begins with an underscore: it cannot be called from outside")
    # By function, so that the next object of the class finds it. Weak keys: classes that were pickled by value come and
    # go.
    plain = getattr(cls, name, None)
    if type(plain) is FunctionType and (known := _METHOD_CACHE.get(plain, {}).get(stream_type)) is not None:
        return Method(name, getattr(instance, name), *known)
    raw = static_attribute(cls, name)
    # Proxies answer for names that their class does not define; only the object can tell.
    if raw is None and any("__getattr__" in vars(base) for base in cls.__mro__):
        raw = getattr(instance, name, None)
    if not callable(raw):
        raise NoSuchMethod(_no_method_text(instance, name, raw), near=_close_names(cls, name))
    function = getattr(instance, name)
    style = style_of(function)
    stream = _find_stream_parameter(function)
    if stream is not None:
        _check_stream(f"{cls.__name__}.{name}()", stream[2], stream_type, style)
    fields = (
        style,
        _wants_context(function),
        style in (Style.GENERATOR, Style.ASYNC_GENERATOR),
        stream_type if stream else None,
        stream[0] if stream else "",
        stream[1] if stream else 0,
        group_of(raw),
    )
    # Only an ordinary method may be cached: a descriptor or a callable attribute may be another one for the next
    # object.
    if getattr(function, "__func__", None) is plain and type(plain) is FunctionType:
        _METHOD_CACHE.setdefault(plain, {})[stream_type] = fields
    return Method(name, function, *fields)


def _wants_context(function: Any) -> bool:
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):  # builtins without a signature
        return False
    if first is None or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD, first.KEYWORD_ONLY):
        return False
    annotation = first.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    # By name only: annotations may be strings, and importing the class for a comparison is not worth it.
    return first.name == "ctx" or text.rpartition(".")[2] == "ActorContext"


def _find_stream_parameter(function: Any) -> tuple[str, int, type] | None:
    """Return name, position and annotation of the parameter that is annotated `Stream` or `BlockingStream`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return None
    for position, parameter in enumerate(parameters):
        annotation = parameter.annotation
        if isinstance(annotation, str):
            # Evaluating annotations runs user code and costs time, so only candidates are.
            annotation = _resolve_annotation(annotation, function) if "Stream" in annotation else None
        if annotation is Stream or annotation is BlockingStream:
            return parameter.name, position, annotation
    return None


def _resolve_annotation(annotation: str, function: Any) -> Any:
    """Return the object that a postponed annotation names where the function was written; None if it is unknown.

    A class of a script is pickled by value, with those globals alone that its code uses; then the text must do.
    """
    try:
        return eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    except Exception:  # noqa: BLE001 - names that exist for type checkers only
        return _ANNOTATION_TEXTS.get(annotation)


_ANNOTATION_TEXTS = {text: cls for cls in (Stream, BlockingStream) for text in (cls.__name__, f"fray.{cls.__name__}")}


def _check_stream(what: str, annotated: type, needed: type, style: Style) -> None:
    in_loop = needed is Stream
    # A sync method in the loop could never receive: it would block the task that brings its items.
    if in_loop and style in (Style.SYNC, Style.GENERATOR):
        raise InvalidRequest(f"{what} would block the loop, where its class lives: make it async to take a stream")
    if annotated is not needed:
        where = "in the loop" if in_loop else "on a thread"
        raise InvalidRequest(f"{what} runs {where}: annotate its stream fray.{needed.__name__}")


def _close_names(cls: type, name: str) -> list[str]:
    return difflib.get_close_matches(name, public_names(cls), 3)


def _no_method_text(instance: Any, name: str, raw: Any) -> str:
    cls = type(instance)
    if raw is not None or name in getattr(instance, "__dict__", {}):
        return f"{name!r} of {cls.__name__} is an attribute, not a method: write a method that returns it"
    near = _close_names(cls, name)
    known = public_names(cls)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known[:10]) or 'no public methods'}"
    return f"{cls.__name__} has no public method {name!r}; {hint}"
