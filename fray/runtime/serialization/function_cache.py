"""Cache of the pickles of functions that are sent by value.

Pickling a function of a script, or a nested function, by value with all it refers to takes 200 µs and more. It is
pickled again only if something it refers to is another object than before, or might have changed inside: so a cached
pickle always equals a new one, and functions of ``__main__`` are not slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from attrs import frozen

from fray.runtime.serialization import pickling

CACHE_LIMIT = 1_000
_REACH = 100
"""Maximum number of functions examined to decide whether one has changed; beyond it, the cache is not used."""
_CONSTANT = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range)


@frozen(eq=False)
class _CachedPickle:
    function: FunctionType
    carried: tuple[Any, ...]
    """All objects the function refers to, directly and through functions pickled with it."""
    data: bytes


class FunctionPickleCache:
    """Latest pickle of each function."""

    def __init__(self) -> None:
        self._cached: dict[int, _CachedPickle] = {}

    def dumps(self, fn: Callable[..., Any], what: str) -> bytes:
        """Pickle a function as `pickling.dumps`. Raises NotPicklable."""
        if type(fn) is not FunctionType:
            return pickling.dumps(fn, what)
        # The entry holds the function, so its id is not reused.
        cached = self._cached.get(id(fn))
        carried = referenced_objects(fn)
        if cached is not None and carried is not None and _are_identical(cached.carried, carried):
            return cached.data
        data = pickling.dumps(fn, what)
        if carried is not None:
            if len(self._cached) >= CACHE_LIMIT:
                # Programs that reach the limit make functions in a loop, of which none is used again.
                self._cached.clear()
            self._cached[id(fn)] = _CachedPickle(fn, carried, data)
        return data


def referenced_objects(fn: FunctionType) -> tuple[Any, ...] | None:
    """Return all objects that determine the pickle of ``fn`` by their identity; None if one of them is mutable."""
    found: list[Any] = []
    functions, seen = [fn], {id(fn)}
    while functions:
        function = functions.pop()
        # Only its name is in the pickle, so what it refers to does not matter.
        if _is_pickled_by_name(function):
            continue
        found.append(function.__code__)
        for value in _refers_to(function):
            found.append(value)
            if isinstance(value, FunctionType):
                if id(value) not in seen:
                    seen.add(id(value))
                    functions.append(value)
            # A list or an object may have changed inside although it is the same one.
            elif not _is_constant(value):
                return None
        if len(seen) > _REACH:
            return None
    return tuple(found)


def _are_identical(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _is_pickled_by_name(fn: FunctionType) -> bool:
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
    """Return the names that the code, and code nested in it, may look up in its module."""
    names = _names_of.get(code)
    if names is None:
        inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _global_names(const)]
        names = tuple(dict.fromkeys([*code.co_names, *inner]))
        if len(_names_of) >= CACHE_LIMIT:
            _names_of.clear()
        _names_of[code] = names
    return names


def _is_constant(value: Any) -> bool:
    """Return whether the pickle of ``value`` cannot change while it is the same object."""
    if isinstance(value, tuple | frozenset):
        return type(value) in (tuple, frozenset) and all(map(_is_constant, value))
    if isinstance(value, type):
        return value.__module__ != "__main__" and "<" not in value.__qualname__
    return type(value) in _CONSTANT or isinstance(value, ModuleType | BuiltinFunctionType)
