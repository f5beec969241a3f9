"""Search for the part of a value that cannot be pickled, for error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from fray.errors import FrayError

WALK_DEPTH = 6
WALK_LIMIT = 2_000
"""Maximum number of objects tried."""

TryPickle: TypeAlias = Callable[[Any], BaseException | None]
"""Function that tries to pickle one object alone and returns the error, or None."""


def find_unpicklable(obj: Any, error: BaseException, try_pickle: TryPickle) -> tuple[str, BaseException]:
    """Return the path to the innermost part that cannot be pickled alone, and the error of pickling it."""
    path, seen = "", {id(obj)}
    for _ in range(WALK_DEPTH):
        # An object of Fray that refuses to be sent says what to send instead: its attributes are of no interest.
        refuses = type(obj).__reduce__ is not object.__reduce__  # type: ignore[comparison-overlap]
        if refuses and isinstance(error, FrayError):
            break
        found = _unpicklable_part(obj, seen, try_pickle)
        # It fails as a whole although each part can be pickled alone.
        if found is None:
            break
        step, obj, error = found
        path += f"{step}: "
    return path, error


def _unpicklable_part(obj: Any, seen: set[int], try_pickle: TryPickle) -> tuple[str, Any, BaseException] | None:
    for step, part in _parts(obj):
        # Each attempt pickles a part again; an error message is not worth minutes.
        if id(part) in seen or len(seen) > WALK_LIMIT:
            continue
        seen.add(id(part))
        error = try_pickle(part)
        if error is not None:
            return step, part, error
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield (description, part) for the parts of ``obj``."""
    if isinstance(obj, Mapping):
        yield from ((f"item {key!r}", value) for key, value in list(obj.items()))
        yield from ((f"key {key!r}", key) for key in list(obj))
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"item {index}", value) for index, value in enumerate(list(obj)))
    elif hasattr(obj, "__self__") and hasattr(obj, "__func__"):
        yield "its object", obj.__self__
    elif hasattr(obj, "__closure__") and hasattr(obj, "__code__"):
        yield from _parts_of_function(obj)
    else:
        kind = obj.__name__ if isinstance(obj, type) else type(obj).__name__
        yield from ((f"attribute {name!r} of {kind}", value) for name, value in _attributes(obj))


def _parts_of_function(function: Any) -> Iterator[tuple[str, Any]]:
    code, name = function.__code__, function.__name__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"variable {variable!r} of {name}()", cell.cell_contents
        except ValueError:
            pass  # an empty cell: not assigned yet
    for variable in code.co_names:
        if variable in function.__globals__:
            yield f"global {variable!r} of {name}()", function.__globals__[variable]


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(obj, "__dict__", {}).items())
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield name, getattr(obj, name)
