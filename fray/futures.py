"""Futures of the native face: results that arrive later, and waiting for the first of many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Any, Protocol

import trio

from fray.runtime.result import Future

__all__ = ["Future", "Waitable", "as_completed", "wait_any"]


class Waitable(Protocol):
    """What `as_completed` and `wait_any` take: `Future`, and the futures of actor calls."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def __await__(self) -> Generator[Any, Any, Any]: ...


async def as_completed(futures: Iterable[Waitable]) -> AsyncIterator[Waitable]:
    """The futures in the order in which they settle; await each for its result or error."""
    waiting = list(futures)
    send, receive = trio.open_memory_channel[Waitable](len(waiting) or 1)
    for future in waiting:
        future.add_done_callback(send.send_nowait)
    for _ in waiting:
        yield await receive.receive()


async def wait_any(futures: Iterable[Waitable]) -> Waitable:
    """The first future to settle.

    Raises:
        ValueError: there is none to wait for.
    """
    async for future in as_completed(futures):
        return future
    raise ValueError("wait_any needs at least one future")
