"""The items of a remote generator as its caller sees them; at most a window of them is on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio

from fray.errors import OutcomeUnknown
from fray.runtime.calls.call_future import CallFuture
from fray.runtime.calls.flow_control import WINDOW, ReceiveWindow, pack_count
from fray.runtime.calls.wire import STREAM
from fray.runtime.serialization.buffer_transfer import ReceivedObject, unpack

if TYPE_CHECKING:
    from fray.net.codec import Bytes
    from fray.runtime.calls.route import Route
    from fray.runtime.serialization.buffers import PickledObject

FIRST_CREDIT = pack_count(WINDOW)
"""Stands between the head of the call and its pickle."""


class CallStream(CallFuture):
    """``async with`` it, then ``async for`` over it, once. Leaving early closes the remote generator.

    After the last item, `result` is what the generator returned.

    Raises (while iterating): what the generator raised, or the `FrayError` that says why there are no more items.
    """

    __slots__ = ("_end", "_items", "_taken")

    def __init__(self, route: Route, method: str, body: bytes | PickledObject, flags: int) -> None:
        super().__init__(route, method, body, flags | STREAM)
        self._items: deque[Bytes | ReceivedObject] = deque()
        self._end: Callable[[], None] | None = None
        """What to do with the answer, which has overtaken the buffers of items."""
        self._taken = ReceiveWindow()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a stream is read where it was begun: read it, and send the items")

    async def __aenter__(self) -> CallStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the remote generator, if it has not ended; bounded like the cancellation of a call."""
        self._items.clear()
        if not self.done():
            await self._leave()

    @property
    def has_item(self) -> bool:
        """The next item is there, with its buffers."""
        return bool(self._items) and _is_there(self._items[0])

    async def wait(self) -> Any:
        """What the generator returns: there once all its items have been taken. Otherwise as awaiting a call."""
        while not self.done():
            try:
                await self._wait_change()
            except trio.Cancelled:
                await self._leave()
                raise
        return self.result()

    def __aiter__(self) -> CallStream:
        return self

    async def __anext__(self) -> Any:
        while not self.has_item and not self.done():
            try:
                await self._wait_change()
            except trio.Cancelled:
                await self._leave()
                raise
        if self.has_item:
            return self._take()
        self.result()
        raise StopAsyncIteration

    async def _wait_change(self) -> None:
        if self.deadline is None:
            await self._park()
        else:
            await self._park_until(self.deadline)

    def _take(self) -> Any:
        """The next item; when half a window has been taken, the callee may send as much again."""
        body = self._items.popleft()
        granted = self._taken.took(len(body))
        if granted and not self._state and self.binding is not None:
            self.binding.peer.grant(self, pack_count(granted))
        return unpack(body)

    # For the caller's tables -----------------------------------------------------------------------------------------

    def item(self, body: Bytes | ReceivedObject) -> None:
        """The next item has come; its buffers may be on their way."""
        if not self.done() and not self.cancelled:
            self._items.append(body)
            self._wake_tasks()
            if isinstance(body, ReceivedObject) and not body.arrival.is_ready:
                body.arrival.on_ready = self._item_landed

    def awaits_items(self) -> bool:
        """Whether items are on their way: the answer comes after them."""
        return not self.done() and not self.cancelled and not all(map(_is_there, self._items))

    def answer_later(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the last item has landed."""
        self._end = end

    def _item_landed(self) -> None:
        self._wake_tasks()
        if self._end is not None and not self.awaits_items():
            end, self._end = self._end, None
            end()

    def lost_items(self) -> None:
        """The conversation began anew: items may have been lost with the old one."""
        text = f"items of {self.route.label}.{self.method}() were lost with the connection: call it again"
        self.cancel()
        self.fail(OutcomeUnknown(text, method=self.method))


def _is_there(item: Bytes | ReceivedObject) -> bool:
    return not isinstance(item, ReceivedObject) or item.arrival.is_ready
