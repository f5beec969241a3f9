"""Futures of the async API: results that arrive later, and waiting for the first of several."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import trio

from fray.errors import InvalidRequest
from fray.runtime import waits
from fray.runtime.calls.futures import Future

__all__ = ["Future", "Waitable", "as_completed", "wait_any"]


class Waitable(Protocol):
    """Argument type of `as_completed` and `wait_any`: `Future`, the futures of actor calls, and `fray.Job`."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def remove_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def __await__(self) -> Generator[Any, Any, Any]: ...


WaitableT = TypeVar("WaitableT", bound=Waitable)


async def as_completed(futures: Iterable[WaitableT]) -> AsyncGenerator[WaitableT, None]:
    """Yield futures (of calls and tasks) and jobs in the order in which they complete; await each for its result or
    error.

    Those that are complete already come first, in the order given. Cancelling the iteration cancels none of them.
    """
    waiting = list(futures)
    ready: deque[WaitableT] = deque()
    came = trio.Event()

    def settled(future: WaitableT) -> None:
        ready.append(future)
        came.set()

    try:
        for future in waiting:
            future.add_done_callback(settled)
        for _ in waiting:
            while not ready:
                came = trio.Event()
                with waits.waiting():
                    await came.wait()
            yield ready.popleft()
    finally:
        for future in waiting:
            if not future.done():
                future.remove_done_callback(settled)


async def wait_any(futures: Iterable[WaitableT]) -> WaitableT:
    """Return the first future or job to complete; of those that are complete already, the first given.

    Raises:
        InvalidRequest: (a ValueError) there is none to wait for.
    """
    async with aclosing(as_completed(futures)) as settled:
        async for future in settled:
            return future
    raise InvalidRequest("wait_any needs at least one future")
