"""Pickles of functions, made once as long as nothing has changed that they carry.

A function of a script or of another function travels by value, with all it refers to: 200 µs and more. It is pickled
again only if something it refers to is another object than before, or might have changed inside. So a pickle is always
that of the function as it is now.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from attrs import frozen

from fray.runtime.serialization import pickling

KEPT = 1_000
_REACH = 100
"""Functions looked at, at most, to know whether one has changed."""
_CONSTANT = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range)


@frozen(eq=False)
class _CachedPickle:
    function: FunctionType
    carried: tuple[Any, ...]
    """All it refers to, directly and through functions that travel with it."""
    data: bytes


class FunctionPickleCache:
    """The last pickles of some functions."""

    def __init__(self) -> None:
        self._cached: dict[int, _CachedPickle] = {}

    def dumps(self, fn: Callable[..., Any], what: str) -> bytes:
        """As `payload.dumps`. Raises NotPicklable."""
        if type(fn) is not FunctionType:
            return pickling.dumps(fn, what)
        kept = self._cached.get(id(fn))
        carried = referenced_objects(fn)
        if kept is not None and carried is not None and _same(kept.carried, carried):
            return kept.data
        data = pickling.dumps(fn, what)
        if carried is not None:
            if len(self._cached) >= KEPT:
                self._cached.clear()
            self._cached[id(fn)] = _CachedPickle(fn, carried, data)
        return data


def referenced_objects(fn: FunctionType) -> tuple[Any, ...] | None:
    """Every object whose identity decides what the pickle of ``fn`` is; None if one of them may change inside."""
    found: list[Any] = []
    functions, seen = [fn], {id(fn)}
    while functions:
        function = functions.pop()
        if _travels_by_name(function):
            continue
        found.append(function.__code__)
        for value in _refers_to(function):
            found.append(value)
            if isinstance(value, FunctionType):
                if id(value) not in seen:
                    seen.add(id(value))
                    functions.append(value)
            elif not _is_constant(value):
                return None
        if len(seen) > _REACH:
            return None
    return tuple(found)


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _travels_by_name(fn: FunctionType) -> bool:
    if fn.__module__ == "__main__" or "<" in fn.__qualname__:
        return False
    return getattr(sys.modules.get(fn.__module__), fn.__qualname__, None) is fn


def _refers_to(fn: FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None  # not assigned yet
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    yield from fn.__dict__.values()
    names = fn.__globals__
    yield from (names[name] for name in _global_names(fn.__code__) if name in names)


_names_of: dict[CodeType, tuple[str, ...]] = {}


def _global_names(code: CodeType) -> tuple[str, ...]:
    """Names that the code, and code within it, may look up in its module."""
    names = _names_of.get(code)
    if names is None:
        inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _global_names(const)]
        names = tuple(dict.fromkeys([*code.co_names, *inner]))
        if len(_names_of) >= KEPT:
            _names_of.clear()
        _names_of[code] = names
    return names


def _is_constant(value: Any) -> bool:
    """Whether what it pickles to cannot change while it stays the same object."""
    if isinstance(value, tuple | frozenset):
        return type(value) in (tuple, frozenset) and all(map(_is_constant, value))
    if isinstance(value, type):
        return value.__module__ != "__main__" and "<" not in value.__qualname__
    return type(value) in _CONSTANT or isinstance(value, ModuleType | BuiltinFunctionType)
