"""The items of a remote generator as its caller sees them; at most `WINDOW` of them are on their way."""

from __future__ import annotations

import struct
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio

from fray.errors import OutcomeUnknown
from fray.runtime import payload
from fray.runtime.calls import STREAM
from fray.runtime.future import CallFuture

if TYPE_CHECKING:
    from fray.net.codec import Bytes
    from fray.runtime.route import Route

WINDOW = 64
"""Items the callee may send ahead of the caller."""
_COUNT = struct.Struct("<I")
FIRST_CREDIT = _COUNT.pack(WINDOW)
"""Stands between the head of the call and its pickle."""


class CallStream(CallFuture):
    """``async with`` it, then ``async for`` over it, once. Leaving early closes the remote generator.

    Raises (while iterating): what the generator raised, or the `FrayError` that says why there are no more items.
    """

    __slots__ = ("_items", "_taken")

    def __init__(self, route: Route, method: str, body: bytes, flags: int) -> None:
        super().__init__(route, method, body, flags | STREAM)
        self._items: deque[Bytes] = deque()
        self._taken = 0

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

    def __aiter__(self) -> CallStream:
        return self

    async def __anext__(self) -> Any:
        while not self._items and not self.done():
            try:
                await self._wait_change()
            except trio.Cancelled:
                await self._leave()
                raise
        if self._items:
            item = payload.loads(self._items.popleft())
            self._count()
            return item
        self.result()
        raise StopAsyncIteration

    async def _wait_change(self) -> None:
        if self.deadline is None:
            await self._park()
        else:
            await self._park_until(self.deadline)

    def _count(self) -> None:
        """Half a window has been taken: let the callee send as much again."""
        self._taken += 1
        if self._taken * 2 >= WINDOW and not self.done() and self.binding is not None:
            self.binding.peer.grant(self, _COUNT.pack(self._taken))
            self._taken = 0

    # For the caller's tables -----------------------------------------------------------------------------------------

    def item(self, body: Bytes) -> None:
        """The next item has come."""
        if not self.done() and not self.cancelled:
            self._items.append(body)
            self._wake_tasks()

    def lost_items(self) -> None:
        """The conversation began anew: items may have been lost with the old one."""
        text = f"items of {self.route.label}.{self.method}() were lost with the connection: call it again"
        self.cancel()
        self.fail(OutcomeUnknown(text, method=self.method))
