"""A conversation with a method, as its caller sees it: items go both ways, each way with a window of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from fray.net.codec import check_size
from fray.runtime.calls.flow_control import WINDOW, SendWindow
from fray.runtime.calls.item_stream import CallStream
from fray.runtime.calls.wire import END, TWO_WAY
from fray.runtime.serialization import pickling

if TYPE_CHECKING:
    from fray.net.codec import Bytes
    from fray.runtime.calls.route import Route
    from fray.runtime.serialization.buffer_transfer import ReceivedObject
    from fray.runtime.serialization.buffers import PickledObject


class DuplexStream(CallStream):
    """``async with`` it: `send` and `receive`, or ``async for``; leaving ends the method if it has not ended.

    Sending and receiving may happen in different tasks. A cancelled `send` or `receive` has done nothing, and the
    conversation goes on. ``await conversation`` waits for what the method returns; receive its items first.
    """

    __slots__ = ("_ahead", "_done_sending", "_early", "_sent")

    def __init__(self, route: Route, method: str, body: bytes | PickledObject, flags: int) -> None:
        super().__init__(route, method, body, flags | TWO_WAY)
        self._ahead = SendWindow()
        self._done_sending = False
        self._sent = 0
        self._early: list[tuple[int, bytes]] | None = []
        """What was sent before the host gave its first sign: another host may have to be told again."""

    async def __aenter__(self) -> DuplexStream:
        return self

    async def send(self, item: Any) -> None:
        """Send one item to the method; waits while 64 items or 4 MiB are on their way and not taken.

        Raises:
            NotPicklable, MessageTooLarge: it cannot travel; the conversation goes on.
            BaseException: what the method raised, or why it is gone, if it has ended so.
            trio.BrokenResourceError: the method has returned and takes nothing more.
            trio.ClosedResourceError: you have said `done_sending`.
        """
        if self._done_sending:
            raise trio.ClosedResourceError(f"done_sending() was said to {self.method}()")
        what = f"an item for {self.route.label}.{self.method}()"
        data = pickling.dumps(item, what)
        check_size(len(data), what)
        while not self._ahead.is_open and not self.done():
            await self._wait_change()
        if self.done():
            self.result()
            raise trio.BrokenResourceError(f"{self.route.label}.{self.method}() has returned: it takes nothing more")
        self._ahead.sent(len(data))
        self._post(0, data)
        self._sent += 1
        if self._sent % WINDOW == 0:
            await trio.lowlevel.checkpoint()

    async def done_sending(self) -> None:
        """Tell the method that nothing more comes: its stream ends. Receiving goes on. May be said again."""
        if not self._done_sending:
            self._done_sending = True
            if not self.done():
                self._post(END, b"")
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Any:
        """The method's next item.

        Raises:
            trio.EndOfChannel: the method has returned; `result` is what.
            BaseException: what the method raised, or the `FrayError` that says why there are no more items.
        """
        while not self.has_item and not self.done():
            await self._wait_change()
        if self.has_item:
            return self._take()
        self.result()
        raise trio.EndOfChannel

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def _post(self, flags: int, data: bytes) -> None:
        if self._early is not None:
            self._early.append((flags, data))
        if self.number and self.binding is not None:
            self.binding.peer.input(self, flags, data)

    # For the caller's tables -----------------------------------------------------------------------------------------

    def transmitted(self) -> None:
        """The call itself has gone out (again, if another host refused it): what was sent follows it."""
        if self.binding is not None:
            for flags, data in self._early or ():
                self.binding.peer.input(self, flags, data)

    def item(self, body: Bytes | ReceivedObject) -> None:
        self._early = None
        super().item(body)

    def granted(self, items: int) -> None:
        """The method has taken items: as many more may be sent."""
        self._early = None
        self._ahead.granted(items)
        self._wake_tasks()
