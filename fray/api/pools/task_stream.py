"""Results of many tasks as they come, from items that are taken as they are needed: what `WorkerPool.imap` returns."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, TypeAlias

import trio

from fray.api.futures import Future
from fray.errors import InvalidRequest, MessageTooLarge, NotPicklable

OnProgress: TypeAlias = Callable[[int, int | None], object]
"""Called with (results taken, how many there will be or None)."""


class TaskStream:
    """``async for`` over it, once; ``async with`` it to cancel what is under way when leaving early.

    At most ``max_in_flight`` items are taken whose results have not been taken, so a slow consumer holds the source.
    """

    def __init__(
        self,
        start: Callable[[Any], Future],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool,
        max_in_flight: int,
        return_exceptions: bool,
        on_progress: OnProgress | None,
        total: int | None,
        start_soon: Callable[..., Any],
    ) -> None:
        if not isinstance(items, Iterable | AsyncIterable):
            raise InvalidRequest(f"imap needs something to iterate over, not {items!r}")
        self._start, self._ordered, self._limit = start, ordered, max_in_flight
        self._return_exceptions, self._on_progress = return_exceptions, on_progress
        self._total = len(items) if total is None and isinstance(items, Sized) else total
        self._source: Iterator[Any] | None = iter(items) if isinstance(items, Iterable) else None
        self._feed_scope: trio.CancelScope | None = None
        self._flight: dict[Future, None] = {}
        """Items taken, results not taken, in the order of the items."""
        self._ready: deque[Future] = deque()
        """Of those, the settled ones in the order in which they settled; kept only if nobody asks for order."""
        self._exhausted = False
        self._broken: BaseException | None = None
        """What the source raised; it is raised after all that came before."""
        self._taken = 0
        self._changed: trio.Event | None = None
        if self._source is None:
            start_soon(self._feed, items)

    # Iterating -------------------------------------------------------------------------------------------------------

    def __aiter__(self) -> TaskStream:
        return self

    async def __anext__(self) -> Any:
        self._fill()
        while (future := self._next()) is None:
            if self._exhausted and not self._flight:
                self._end()
            self._changed = trio.Event()
            await self._changed.wait()
        del self._flight[future]
        self._taken += 1
        self._wake()  # a source that waits for room
        if self._on_progress is not None:
            self._on_progress(self._taken, self._total)
        try:
            return future.result()
        except Exception as error:
            if self._return_exceptions:
                return error
            raise

    def _next(self) -> Future | None:
        """The future whose result comes next, if it is there."""
        if not self._ordered:
            return self._ready.popleft() if self._ready else None
        first = next(iter(self._flight), None)
        return first if first is not None and first.done() else None

    def _end(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            raise broken
        raise StopAsyncIteration

    async def __aenter__(self) -> TaskStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take no more items, cancel what is under way, and do not wait for it."""
        self._exhausted, self._source = True, None
        if self._feed_scope is not None:
            self._feed_scope.cancel()
        flight, self._flight = self._flight, {}
        self._ready.clear()
        for future in flight:
            future.cancel()
        self._wake()

    # Items -----------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Take items of a plain iterable, as far as there is room."""
        while self._source is not None and len(self._flight) < self._limit:
            try:
                item = next(self._source)
            except StopIteration:
                self._exhausted, self._source = True, None
            except Exception as error:  # noqa: BLE001 - raised at its place
                self._break(error)
            else:
                self._begin(item)

    async def _feed(self, items: AsyncIterable[Any]) -> None:
        """Take items of an async iterable, as far as there is room. Lives in the pool."""
        with trio.CancelScope() as self._feed_scope:
            if self._exhausted:
                return
            try:
                iterator = aiter(items)
                while not self._exhausted:
                    while len(self._flight) >= self._limit:
                        await self._room()
                    self._begin(await anext(iterator))
            except StopAsyncIteration:
                pass
            except Exception as error:  # noqa: BLE001 - raised at its place
                self._break(error)
        self._exhausted = True
        self._wake()

    async def _room(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _begin(self, item: Any) -> None:
        if self._exhausted:
            return
        try:
            future = self._start(item)
        except (NotPicklable, MessageTooLarge) as error:  # this item's own fault
            future = Future("an item")
            future.fail(error)
        except Exception as error:  # noqa: BLE001 - raised at its place
            self._break(error)
            return
        self._flight[future] = None
        future.add_done_callback(self._settled)

    def _settled(self, future: Future) -> None:
        if future not in self._flight:
            return
        if not self._ordered:
            self._ready.append(future)
        elif next(iter(self._flight)) is not future:
            return
        self._wake()

    def _break(self, error: BaseException) -> None:
        self._broken, self._exhausted, self._source = error, True, None
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    def __repr__(self) -> str:
        return f"<TaskStream: {self._taken} results taken, {len(self._flight)} in flight>"
