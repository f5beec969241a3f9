"""Note for errors of asyncio functions that async code on Trio has called."""

from __future__ import annotations

import inspect
import traceback

_NO_LOOP = "no running event loop"
"""Text of the RuntimeError of `asyncio.get_running_loop`, with which most functions of asyncio begin."""
NOTE = (
    "Fray runs async methods and jobs on Trio, where asyncio has no event loop: write `await trio.sleep(...)` for "
    "`await asyncio.sleep(...)`, use a library that supports Trio or AnyIO, or call `asyncio.run(...)` in a sync method"
)
_ASYNC_CODE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def add_asyncio_note(error: BaseException) -> None:
    """Add `NOTE` to an error of asyncio that an async function has raised, and to such members of a group; once."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            add_asyncio_note(member)
    elif (
        type(error) is RuntimeError
        and error.args == (_NO_LOOP,)
        and NOTE not in getattr(error, "__notes__", ())
        and _is_raised_in_async_code(error)
    ):
        error.add_note(NOTE)


def _is_raised_in_async_code(error: BaseException) -> bool:
    """Return whether the innermost async function in the traceback is not one of Fray or Trio: those also run sync code
    on threads."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [frame.f_globals.get("__name__", "") for frame in frames if frame.f_code.co_flags & _ASYNC_CODE]
    return bool(modules) and modules[-1].split(".")[0] not in ("fray", "trio")
