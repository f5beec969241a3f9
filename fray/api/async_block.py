"""Blocks that are entered with ``async with``: what they say when they are used otherwise."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from fray.runtime.unawaited import add_unawaited_note, warn_of_dropped_coroutines, warn_of_unawaited
from fray.tracebacks import ShortTracebacks

P = ParamSpec("P")
T = TypeVar("T")


class AsyncBlock(ShortTracebacks[T]):
    """Async context manager that errors leave with short tracebacks; used otherwise, it says which line was meant.

    Args:
        line: how to enter it: ``"async with cluster.open_scope(...) as scope"``.
        sync_line: the same for sync code; empty: there is no other.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T], line: str, sync_line: str = "") -> None:
        super().__init__(manager)
        self._line, self._sync_line = line, sync_line

    # Plain functions that return a coroutine: an async one would be a frame in the traceback of what leaves the block.

    def __aenter__(self) -> Coroutine[Any, Any, T]:
        warn_of_dropped_coroutines()
        return super().__aenter__()

    def __aexit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Coroutine[Any, Any, bool | None]:
        if error is not None:
            add_unawaited_note(error)
        else:
            # The variables of the block: this method runs for the frame that has entered it.
            warn_of_unawaited(sys._getframe(1).f_locals, f"`{self._line.removeprefix('async with ')}`")
        return super().__aexit__(cls, error, traceback)

    def _or_sync(self) -> str:
        return f", or in sync code `{self._sync_line}:`" if self._sync_line else ""

    if not TYPE_CHECKING:  # type checkers find these mistakes themselves

        def __enter__(self) -> NoReturn:
            raise TypeError(f"`with` needs `async` here: write `{self._line}:`{self._or_sync()}")

        def __exit__(self, *error: object) -> None:
            """Exist because Python looks for it before it calls `__enter__`."""

        def __await__(self) -> NoReturn:
            raise TypeError(f"this is entered, not awaited: write `{self._line}:`")

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(f"no {name!r} here: this was not entered; write `{self._line}:`{self._or_sync()}")


def async_block(
    line: str, sync_line: str = ""
) -> Callable[[Callable[P, AbstractAsyncContextManager[T]]], Callable[P, AsyncBlock[T]]]:
    """Decorate a function that returns an async context manager with `AsyncBlock`, whose arguments these are."""

    def decorate(make: Callable[P, AbstractAsyncContextManager[T]]) -> Callable[P, AsyncBlock[T]]:
        @functools.wraps(make)
        def open_block(*args: P.args, **kwargs: P.kwargs) -> AsyncBlock[T]:
            return AsyncBlock(make(*args, **kwargs), line, sync_line)

        return open_block

    return decorate
