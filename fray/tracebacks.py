"""Tracebacks without the frames of Fray and Trio, so that what a user reads is about the user's program.

Rules: a frame of the user's is never cut. What an error of Fray's own, one from another process, one that Fray has
raised with a message, or one about the arguments of a user's call has passed through last is cut too; any other error
that was raised by Fray or Trio keeps its last frames, as it may be a fault of theirs.
With ``FRAY_FULL_TRACEBACKS=1`` nothing is cut.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Generic, TypeVar

from fray.errors import FrayError, RemoteTraceback

FULL_TRACEBACKS = "FRAY_FULL_TRACEBACKS"
"""Environment variable: if it is set and not empty, tracebacks are complete."""

REMOTE_FRAME = "__fray_remote_frame__"
"""Global variable of the frames that came from another process (`fray.runtime.serialization.frames`)."""

notes_before_cut: list[Callable[[BaseException], None]] = []
"""Functions that add notes to an error by what its frames hold; called, maybe several times, before some are cut."""

T = TypeVar("T")


def _directory(package: str) -> str:
    # Without an import: modules that do not use Trio import this one.
    spec = importlib.util.find_spec(package)
    return os.path.dirname(spec.origin or "") + os.sep if spec is not None else os.devnull


_INTERNAL = (*map(_directory, ("fray", "trio", "outcome")), contextlib.__file__, "<attrs generated ")
_FUTURES = _directory("concurrent.futures")

_EXPLAINED = "__fray_explained__"
"""Entry of the ``__dict__`` of errors of other classes than Fray's of which `_explains_itself` is known."""
_RAISE = dis.opmap["RAISE_VARARGS"]

_wrapper_codes: set[CodeType] = set()
"""Code of the wrappers of public functions: a TypeError raised there is about the arguments of a user's call."""


def traceback_text(error: BaseException) -> str:
    """Return the text of an error with its causes and the members of groups, shortened."""
    shorten_traceback(error)
    return "".join(traceback.format_exception(error))


def shorten_traceback(error: BaseException) -> None:
    """Cut the frames of Fray and Trio out of ``error.__traceback__``, and out of those of its causes and members."""
    for note in notes_before_cut:
        note(error)
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
    entries, kept, is_internal = traceback_entries(error), [], False
    for entry in entries:
        # A future's own frames where Fray waits for it; those of a future for which a user's code waits are kept.
        in_future = is_internal and entry.tb_frame.f_code.co_filename.startswith(_FUTURES)
        is_internal = in_future or _is_internal(entry.tb_frame)
        if not is_internal:
            kept.append(entry)
    if not _explains_itself(error, entries):
        last = entries.index(kept[-1]) + 1 if kept else 0
        kept += entries[last:]
    return _chain(kept)


def _is_internal(frame: FrameType) -> bool:
    # The process that sent a frame has cut what was to be cut.
    if REMOTE_FRAME in frame.f_globals:
        return False
    name = frame.f_code.co_filename
    # The methods that `dataclasses` makes have no file; their globals are those of the module of the class.
    is_generated = name == "<string>" and str(frame.f_globals.get("__name__")).partition(".")[0] == "fray"
    return is_generated or name.startswith(_INTERNAL)


def _explains_itself(error: BaseException, entries: Sequence[TracebackType]) -> bool:
    """Return whether the place in Fray where it was raised says nothing that its text does not."""
    if isinstance(error, FrayError | BaseExceptionGroup) or not isinstance(error, Exception):
        return True
    if _EXPLAINED in error.__dict__:
        return True
    if entries and (_is_about_arguments(error, entries[-1]) or _has_message_of_fray(error, entries[-1])):
        # Kept, as its last frames are cut now, and it may pass through the portal of another thread afterwards.
        error.__dict__[_EXPLAINED] = True
        return True
    cause = error.__cause__
    while cause is not None and not isinstance(cause, RemoteTraceback):
        cause = cause.__cause__
    return cause is not None


def _is_about_arguments(error: Exception, last: TracebackType) -> bool:
    return isinstance(error, TypeError) and last.tb_frame.f_code in _wrapper_codes


def _has_message_of_fray(error: Exception, last: TracebackType) -> bool:
    """Return whether a ``raise`` of Fray's has raised it, and not an operation that has failed, or an assertion."""
    code = last.tb_frame.f_code
    is_of_fray = code.co_filename.startswith(_INTERNAL[0]) and REMOTE_FRAME not in last.tb_frame.f_globals
    return is_of_fray and code.co_code[last.tb_lasti] == _RAISE and not isinstance(error, AssertionError)


def traceback_entries(error: BaseException) -> list[TracebackType]:
    """Return the entries of its traceback, outermost first."""
    entries: list[TracebackType] = []
    at = error.__traceback__
    while at is not None:
        entries.append(at)
        at = at.tb_next
    return entries


def line_number(entry: TracebackType) -> int:
    """Return the line of an entry.

    Instructions that a compiler has added have none, and an interrupt may come in one: theirs is the first line of the
    function, as text and numbers are made of it.
    """
    lineno: int | None = entry.tb_lineno
    return entry.tb_frame.f_code.co_firstlineno if lineno is None else lineno


def traceback_of(entries: Sequence[tuple[FrameType, int]]) -> TracebackType | None:
    """Return the traceback of frames and their line numbers, outermost first."""
    chained: TracebackType | None = None
    for frame, lineno in reversed(entries):
        chained = TracebackType(chained, frame, 0, lineno)
    return chained


def _chain(entries: Sequence[TracebackType]) -> TracebackType | None:
    chained: TracebackType | None = None
    for each in reversed(entries):
        chained = TracebackType(chained, each.tb_frame, each.tb_lasti, line_number(each))
    return chained


def innermost(error: BaseException) -> BaseException:
    """Return the only error of a group, of groups in it, too; a group of several errors is returned as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@contextlib.contextmanager
def single_errors() -> Iterator[None]:
    """Raise the only error of a group itself. For tasks of Fray's own, whose group says nothing that it does not."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = innermost(group)
        if error is group:
            raise
        raise error from error.__cause__


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group, of groups in it, too."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def failure_text(error: BaseException) -> str:
    """Return the text of the first error, and after a colon that of the error which was the cause of it all."""
    error = cause = first_error(error)
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(error) if cause is error else f"{error}: {cause}"


def prepend_traceback(error: BaseException, outer: BaseException) -> None:
    """Continue the traceback of ``outer`` with that of ``error``, which it carries; a frame in both is shown once."""
    inner = traceback_entries(error)
    frames = {entry.tb_frame for entry in inner}
    before = [entry for entry in traceback_entries(outer) if entry.tb_frame not in frames]
    error.__traceback__ = _chain([*before, *inner])


def is_same_error(one: BaseException, other: BaseException) -> bool:
    """Return whether both are one error: Trio makes a new group where it takes Cancelled out of one."""
    if one is other:
        return True
    if not isinstance(one, BaseExceptionGroup) or not isinstance(other, BaseExceptionGroup):
        return False
    same_length = len(one.exceptions) == len(other.exceptions)
    return one.message == other.message and same_length and all(map(is_same_error, one.exceptions, other.exceptions))


C = TypeVar("C", bound=type)

_PUBLIC_SPECIAL_METHODS = ("__init__", "__call__", "__enter__", "__exit__")


def short_tracebacks(cls: C) -> C:
    """Decorate a class: errors leave its public methods with short tracebacks."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in _PUBLIC_SPECIAL_METHODS:
            continue
        if isinstance(member, FunctionType):
            setattr(cls, name, short_traceback(member))
        elif isinstance(member, classmethod):
            setattr(cls, name, classmethod(short_traceback(member.__func__)))
        elif isinstance(member, staticmethod):
            setattr(cls, name, staticmethod(short_traceback(member.__func__, is_static=True)))
    return cls


F = TypeVar("F", bound=Callable[..., Any])


def short_traceback(function: F, is_static: bool = False) -> F:
    """Decorate a method: errors leave it with short tracebacks. Methods on the path of every call do it themselves.

    Args:
        is_static: it is a sync function without ``self`` or ``cls``.
    """

    # Not Cancelled and KeyboardInterrupt: they pass through many frames of Fray's, and a block cuts them at the end.
    # A `raise` without operand adds no entry for this frame, so that none of Fray's is left.
    # The names of the parameters are read by `fray.runtime.unawaited`.
    async def call_async(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return await function(self, *args, **kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise

    def call_static(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise

    wrapper: Any = call_static if is_static else call_async if inspect.iscoroutinefunction(function) else call
    # At the place of the method, where profilers and the warning of a call that was not awaited look for it.
    code = function.__code__
    wrapper.__code__ = wrapper.__code__.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )
    _wrapper_codes.add(wrapper.__code__)
    return functools.wraps(function)(wrapper)  # type: ignore[return-value]


def print_interrupt_short() -> None:
    """Let a KeyboardInterrupt that ends the program be printed as the place where it was interrupted, in three lines.

    By Python's hook for this, as Trio adds a frame of its own when no code of Fray runs any more. A hook that is not
    Python's own is left alone, and so is the traceback of the exception.
    """
    if sys.excepthook is sys.__excepthook__ and not os.environ.get(FULL_TRACEBACKS):
        sys.excepthook = _print_interrupt


def _print_interrupt(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    entries = [entry for entry in traceback_entries(error) if not _is_internal(entry.tb_frame)]
    if cls is not KeyboardInterrupt or not entries or sys.stderr is None:
        sys.__excepthook__(cls, error, trace)
        return
    code = entries[-1].tb_frame.f_code
    place = traceback.FrameSummary(code.co_filename, line_number(entries[-1]), code.co_name)
    print("".join(traceback.format_list([place])), "KeyboardInterrupt", sep="", file=sys.stderr)


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
            if isinstance(other, KeyboardInterrupt):
                print_interrupt_short()
            if error is None or not is_same_error(other, error):
                raise
            is_handled = False
        # The interpreter then raises the error again, with the traceback set here and without a frame of this method.
        if error is not None and not is_handled:
            shorten_traceback(error)
            if isinstance(error, KeyboardInterrupt):
                print_interrupt_short()
        return is_handled
