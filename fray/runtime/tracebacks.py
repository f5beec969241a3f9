"""Tracebacks without the frames of Fray and Trio, so that what a user reads is about the user's program.

Rules: a frame of the user's is never cut. What an error of Fray's own, or one from another process, has passed through
last is cut too; any other error that was raised by Fray or Trio keeps its last frames, as it may be a fault of theirs.
With ``FRAY_FULL_TRACEBACKS=1`` nothing is cut.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import ModuleType, TracebackType
from typing import Generic, TypeVar

import outcome
import trio

import fray.errors
from fray.errors import FrayError, RemoteTraceback

FULL_TRACEBACKS = "FRAY_FULL_TRACEBACKS"
"""Environment variable: if it is set and not empty, tracebacks are complete."""

T = TypeVar("T")


def _directory(module: ModuleType) -> str:
    return os.path.dirname(module.__file__ or "") + os.sep


_INTERNAL = (*map(_directory, (fray.errors, trio, outcome)), contextlib.__file__)


def traceback_text(error: BaseException) -> str:
    """Return the text of an error with its causes and the members of groups, shortened."""
    shorten_traceback(error)
    return "".join(traceback.format_exception(error))


def shorten_traceback(error: BaseException) -> None:
    """Cut the frames of Fray and Trio out of ``error.__traceback__``, and out of those of its causes and members."""
    if os.environ.get(FULL_TRACEBACKS):
        return
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _without_internal_frames(each)
        todo += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions


def _without_internal_frames(error: BaseException) -> TracebackType | None:
    frames: list[TracebackType] = []
    at = error.__traceback__
    while at is not None:
        frames.append(at)
        at = at.tb_next
    kept = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(_INTERNAL)]
    if not _explains_itself(error):
        last = frames.index(kept[-1]) + 1 if kept else 0
        kept += frames[last:]
    return _chain(kept)


def _explains_itself(error: BaseException) -> bool:
    """Return whether the place in Fray where it was raised says nothing that its text does not."""
    if isinstance(error, FrayError | BaseExceptionGroup | KeyboardInterrupt | trio.Cancelled):
        return True
    cause = error.__cause__
    while cause is not None and not isinstance(cause, RemoteTraceback):
        cause = cause.__cause__
    return cause is not None


def _chain(frames: Sequence[TracebackType]) -> TracebackType | None:
    chained: TracebackType | None = None
    for each in reversed(frames):
        chained = TracebackType(chained, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chained


class ShortTracebacks(Generic[T]):
    """Async context manager around another one: errors leave it with short tracebacks."""

    def __init__(self, inner: AbstractAsyncContextManager[T]) -> None:
        self._inner = inner

    async def __aenter__(self) -> T:
        try:
            return await self._inner.__aenter__()
        except BaseException as error:
            shorten_traceback(error)
            raise

    async def __aexit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            is_handled = await self._inner.__aexit__(cls, error, traceback)
        except BaseException as other:
            shorten_traceback(other)
            if other is not error:
                raise
            is_handled = False
        # The interpreter then raises the error again, with the traceback set here and without a frame of this method.
        if error is not None and not is_handled:
            shorten_traceback(error)
        return is_handled
