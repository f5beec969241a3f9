"""Coroutines of Fray that were not awaited: warnings and notes with the line that was meant.

Python warns of such a coroutine by the name of Fray's method (``ActorMethod.__call__``), and an operation on one fails
with a `TypeError` about a ``coroutine``; neither shows what to write. A call stays a plain coroutine, which costs
nothing more: all that is said here is found afterwards, in its frame.
"""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import CoroutineType
from typing import Any

import fray.errors
from fray.runtime.user_warning import warn_user
from fray.tracebacks import notes_before_cut

_DIRECTORY = os.path.dirname(fray.errors.__file__) + os.sep
_REPORTED = "<reported>"
_HOOK = "_warn_unawaited_coroutine"
"""Function of `warnings` that the interpreter calls when a coroutine that has not begun is dropped."""


def meant_expression(value: object) -> str:
    """Return ``await counter.add(...)`` for a coroutine of Fray's that has not begun; empty for anything else."""
    if type(value) is not CoroutineType or not value.cr_code.co_filename.startswith(_DIRECTORY):
        return ""
    if inspect.getcoroutinestate(value) != inspect.CORO_CREATED or value.cr_frame is None:
        return ""
    given = dict(value.cr_frame.f_locals)
    owner, name = given.pop("self", None), value.__name__
    if owner is None or (name.startswith("_") and name != "__call__"):
        return ""
    whose = type(owner).__name__.lower()
    if name == "__call__":  # a method of an actor
        handle, name = getattr(owner, "_handle", None), getattr(owner, "_name", "")
        whose = getattr(handle, "_label", "actor").partition("-")[0].lower()
    arguments = "..." if any(each not in ((), {}) for each in _positional(value, given)) else ""
    return f"await {whose}.{name}({arguments})"


def _positional(coroutine: CoroutineType[Any, Any, Any], given: Mapping[str, object]) -> Iterator[object]:
    """Yield the arguments that have no default, as most calls give no others."""
    code = coroutine.cr_code
    names = code.co_varnames[1 : code.co_argcount] if code.co_argcount else ()
    yield from (given[name] for name in (*names, "args", "kwargs") if given.get(name) is not None)


def warn_of_dropped_coroutines() -> None:
    """Make the interpreter's warning of a dropped coroutine of Fray's say what to write; idempotent."""
    before: Callable[[Any], None] | None = getattr(warnings, _HOOK, None)
    if before is None or hasattr(before, "is_of_fray"):
        return

    def warn(coroutine: CoroutineType[Any, Any, Any]) -> None:
        if coroutine.__qualname__ == _REPORTED:
            return
        expression = meant_expression(coroutine)
        if expression:
            warn_user(f"a call of Fray was never awaited, so it was not made: write `{expression}`")
        elif coroutine.cr_origin is None:
            # As the interpreter's function does, which would show this line instead of the one it was called for.
            text = f"coroutine '{coroutine.__qualname__}' was never awaited"
            warnings.warn(text, RuntimeWarning, stacklevel=2, source=coroutine)
        else:
            before(coroutine)

    warn.is_of_fray = True  # type: ignore[attr-defined]
    setattr(warnings, _HOOK, warn)


def warn_of_unawaited(names: Mapping[str, object], what: str) -> None:
    """Warn of coroutines among local variables at the end of ``what``: their calls were never made."""
    for name, value in names.items():
        if (expression := meant_expression(value)) and value.__qualname__ != _REPORTED:  # type: ignore[attr-defined]
            warn_user(f"{what} ends and `{name}` was never awaited: write `{name} = {expression}`")
            value.__qualname__ = _REPORTED  # type: ignore[attr-defined]


def add_unawaited_note(error: BaseException) -> None:
    """Add the line that was meant to an error about an operation on a coroutine, if a variable of Fray's holds it."""
    if not isinstance(error, TypeError | AttributeError) or "coroutine" not in str(error):
        return
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name, value in frame.f_locals.items():
            if expression := meant_expression(value):
                is_argument = frame.f_code.co_filename.startswith(_DIRECTORY)
                what, meant = ("an argument", "") if is_argument else (f"`{name}`", f"{name} = ")
                note = f"{what} is a coroutine, not a result: write `{meant}{expression}`"
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
                return


notes_before_cut.append(add_unawaited_note)  # its frames of Fray tell that a coroutine was an argument
