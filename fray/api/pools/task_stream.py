"""Stream of the results of many tasks, with a bounded number in flight: `WorkerPool.imap`."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, Generic, TypeAlias

import trio

from fray.api.futures import Future
from fray.errors import ChannelFull, InvalidRequest, MessageTooLarge, NotPicklable
from fray.runtime import waits
from fray.type_variables import T_co

OnProgress: TypeAlias = Callable[[int, int | None], object]
"""Called with (results taken, total or None)."""


class TaskStream(Generic[T_co]):
    """Async iterator over results, to be iterated once; with ``async with``, leaving early cancels running tasks.

    At most ``max_in_flight`` items are taken whose results have not been taken, so a slow consumer holds back the
    source.
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
        """Tasks in flight (items taken, results not taken), in the order of the items."""
        self._ready: deque[Future] = deque()
        """Completed tasks in flight, in the order of completion; used only for ``ordered=False``."""
        self._held: list[Any] = []
        """Item that found no room in the pool beside the others of this stream."""
        self._exhausted = False
        self._broken: BaseException | None = None
        """Exception that the source raised; raised here after all results before it."""
        self._taken = 0
        self._changed: trio.Event | None = None
        if self._source is None:
            start_soon(self._feed, items)

    # Iterating -------------------------------------------------------------------------------------------------------

    def __aiter__(self) -> TaskStream[T_co]:
        return self

    async def __anext__(self) -> T_co:
        self._fill()
        while (future := self._next()) is None:
            if self._exhausted and not self._flight:
                self._end()
            self._changed = trio.Event()
            with waits.waiting():
                await self._changed.wait()
        del self._flight[future]
        self._taken += 1
        self._wake()  # the source, if it waits for a free place
        if self._on_progress is not None:
            self._on_progress(self._taken, self._total)
        try:
            result: T_co = future.result()
            return result
        except Exception as error:
            if self._return_exceptions:
                return error  # type: ignore[return-value]  # then `T_co` is Any
            raise

    def _next(self) -> Future | None:
        """Return the future whose result comes next, if it is complete."""
        if not self._ordered:
            return self._ready.popleft() if self._ready else None
        first = next(iter(self._flight), None)
        return first if first is not None and first.done() else None

    def _end(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            raise broken
        raise StopAsyncIteration

    async def __aenter__(self) -> TaskStream[T_co]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take no more items and cancel running tasks, without waiting for them."""
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
        """Take items of a plain iterable, up to the limit."""
        while self._source is not None and len(self._flight) < self._limit:
            try:
                item = self._held.pop() if self._held else next(self._source)
            except StopIteration:
                self._exhausted, self._source = True, None
            except Exception as error:  # noqa: BLE001 - raised to the consumer in its place
                self._break(error)
            else:
                self._start_task(item)
            if self._held:  # until the next result makes room
                break

    async def _feed(self, items: AsyncIterable[Any]) -> None:
        """Take items of an async iterable, up to the limit. A task of the pool."""
        with trio.CancelScope() as self._feed_scope:
            if self._exhausted:
                return
            try:
                iterator = aiter(items)
                while not self._exhausted:
                    while len(self._flight) >= self._limit:
                        await self._wait_changed()
                    self._start_task(await anext(iterator))
                    while self._held:
                        await self._wait_changed()
                        self._start_task(self._held.pop())
            except StopAsyncIteration:
                pass
            except Exception as error:  # noqa: BLE001 - raised to the consumer in its place
                self._break(error)
        self._exhausted = True
        self._wake()

    async def _wait_changed(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _start_task(self, item: Any) -> None:
        if self._exhausted:
            return
        try:
            future = self._start(item)
        except (NotPicklable, MessageTooLarge) as error:  # an error of this item only
            future = Future("an item")
            future.fail(error)
        except ChannelFull as error:
            if self._flight:
                self._held.append(item)
            else:  # what fills the pool is not of this stream
                self._break(error)
            return
        except Exception as error:  # noqa: BLE001 - raised to the consumer in its place
            self._break(error)
            return
        self._flight[future] = None
        future.add_done_callback(self._on_done)

    def _on_done(self, future: Future) -> None:
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
