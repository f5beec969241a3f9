"""Futures of the native face: results that arrive later, and waiting for the first of many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Any, Protocol

import trio


class Waitable(Protocol):
    """What `as_completed` and `wait_any` take: `Future`, and the futures of actor calls."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def __await__(self) -> Generator[Any, Any, Any]: ...


class Future:
    """A result that arrives later. ``await`` it, any number of times."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._event = trio.Event()
        self._open: Callable[[], Any] | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], None]] = []

    def done(self) -> bool:
        """Whether a result or an error is there."""
        return self._event.is_set()

    def exception(self) -> BaseException | None:
        """The error; None while pending, and for a result."""
        return self._error

    def resolve(self, open_value: Callable[[], Any]) -> None:
        """Settle with a result that is opened where it is awaited. Later settlements change nothing."""
        if not self.done():
            self._open = open_value
            self._settle()

    def fail(self, error: BaseException) -> None:
        """Settle with an error. Later settlements change nothing."""
        if not self.done():
            self._error = error
            self._settle()

    def _settle(self) -> None:
        self._event.set()
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()

    def add_done_callback(self, callback: Callable[[Future], None]) -> None:
        """Call ``callback(self)`` in the loop when settled; at once if it is."""
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    async def _wait(self) -> Any:
        await self._event.wait()
        return self.result()

    def result(self) -> Any:
        """The result of a future that is `done`; raises what awaiting it raises."""
        if self._error is not None:
            raise self._error
        assert self._open is not None
        return self._open()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error is not None else "done"
        return f"<Future of {self._what}: {state}>"


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
