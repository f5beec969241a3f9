"""Streaming calls as their caller sees them: items of a remote generator, or items both ways, each with a window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic

import trio

from fray.errors import OutcomeUnknown
from fray.net.codec import Bytes, check_size
from fray.runtime.calls.flow_control import WINDOW, ReceiveWindow, SendWindow, pack_count
from fray.runtime.calls.futures import CallFuture, CallRoute
from fray.runtime.calls.wire import END, STREAM, TWO_WAY
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PickledObject, ReceivedObject
from fray.type_variables import I_co, T_co

FIRST_CREDIT = pack_count(WINDOW)
"""Stands between the head of the call and its pickle."""


class CallStream(CallFuture[T_co], Generic[I_co, T_co]):
    """``async with`` it, then ``async for`` over it, once. Leaving early closes the remote generator.

    After the last item, `result` is what the generator returned.

    Raises (while iterating): what the generator raised, or the `FrayError` that says why there are no more items.
    """

    __slots__ = ("_end", "_items", "_window")

    def __init__(self, route: CallRoute, method: str, body: bytes | PickledObject, flags: int) -> None:
        super().__init__(route, method, body, flags | STREAM)
        self._items: deque[Bytes | ReceivedObject] = deque()
        self._end: Callable[[], None] | None = None
        """Settles the call with an answer that has overtaken the buffers of items."""
        self._window = ReceiveWindow()

    def __reduce__(self) -> tuple[Any, ...]:
        # The window belongs to this process: a reader elsewhere could not grant credit.
        raise TypeError("a stream is read where it was begun: read it, and send the items")

    async def __aenter__(self) -> CallStream[I_co, T_co]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the remote generator, if it has not ended; bounded like the cancellation of a call."""
        # They hold buffers lent by the host, which are given back when they are released.
        self._items.clear()
        if not self.done():
            await self._leave()

    @property
    def has_item(self) -> bool:
        """Return whether the next item has arrived, with its buffers."""
        return bool(self._items) and _is_complete(self._items[0])

    async def wait(self) -> T_co:
        """Return what the generator returns, once all its items have been taken. Otherwise as awaiting a call."""
        while not self.done():
            try:
                await self._wait_change()
            except trio.Cancelled:
                # As for a call: reading is what owns the remote generator. A `DuplexStream` survives a cancelled
                # receive, like Trio's.
                await self._leave()
                raise
        return self.result()

    def __aiter__(self) -> CallStream[I_co, T_co]:
        return self

    async def __anext__(self) -> I_co:
        # Items that have arrived come before an error: the generator yielded them before it failed.
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
        self._window.waits += 1
        if self.deadline is None:
            await self._park()
        else:
            await self._park_until(self.deadline)

    def _take(self) -> I_co:
        """Return the next item; when half a window has been taken, let the callee send as much again."""
        body = self._items.popleft()
        granted = self._window.took(len(body))
        # After the answer there is nothing left to send, so the grant would only cost a frame.
        if granted and not self._state and self.binding is not None:
            self.binding.connection.send_credit(self, pack_count(granted, self._window.grow()))
        item: I_co = pickling.unpack(body)
        return item

    # For the connection ----------------------------------------------------------------------------------------------

    def add_item(self, body: Bytes | ReceivedObject) -> None:
        """Add the next item; its buffers may still be on their way."""
        # A cancelled reader takes no more items; storing them would keep their buffers.
        if not self.done() and not self.cancelled:
            self._items.append(body)
            self._wake_tasks()
            if isinstance(body, ReceivedObject) and not body.transfer.is_ready:
                # Items are delivered in order: the reader waits for the buffers of the first one even if later ones are
                # complete.
                body.transfer.on_ready = self._on_item_complete

    def has_missing_buffers(self) -> bool:
        """Return whether buffers of items are still on their way: the answer counts after them."""
        return not self.done() and not self.cancelled and not all(map(_is_complete, self._items))

    def defer_answer(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the last buffer has arrived."""
        self._end = end

    def _on_item_complete(self) -> None:
        self._wake_tasks()
        if self._end is not None and not self.has_missing_buffers():
            end, self._end = self._end, None
            end()

    def fail_lost_items(self) -> None:
        """Fail the call because the conversation was restarted: items may have been lost with the old one."""
        text = f"items of {self.description} were lost with the connection: call it again"
        self.fail(OutcomeUnknown(text, method=self.method))


def _is_complete(item: Bytes | ReceivedObject) -> bool:
    return not isinstance(item, ReceivedObject) or item.transfer.is_ready


class DuplexStream(CallStream[I_co, T_co]):
    """``async with`` it: `send` and `receive`, or ``async for``; leaving ends the method if it has not ended.

    Sending and receiving may happen in different tasks. A cancelled `send` or `receive` has done nothing, and the
    stream stays open. ``await stream`` waits for what the method returns; receive its items first.
    """

    __slots__ = ("_done_sending", "_send_window", "_sent", "_unconfirmed")

    def __init__(self, route: CallRoute, method: str, body: bytes | PickledObject, flags: int) -> None:
        super().__init__(route, method, body, flags | TWO_WAY)
        self._send_window = SendWindow()
        self._done_sending = False
        self._sent = 0
        # Until the host has answered once, the call may be refused (NOT_RUN) and go to another incarnation, which needs
        # all items. The window bounds them to 64.
        self._unconfirmed: list[tuple[int, bytes]] | None = []
        """Items sent before the host's first answer, which must be sent again if another host gets the call."""

    async def __aenter__(self) -> DuplexStream[I_co, T_co]:
        return self

    async def send(self, item: Any) -> None:
        """Send one item to the method; wait while 64 items or 4 MiB are on their way and not taken.

        Raises:
            NotPicklable, MessageTooLarge: the item cannot be sent; the stream stays open.
            BaseException: what the method raised, or why it is gone, if it has ended so.
            trio.BrokenResourceError: the method has returned and takes no more items.
            trio.ClosedResourceError: `done_sending` was called.
        """
        if self._done_sending:
            raise trio.ClosedResourceError(f"done_sending() was called for {self.method}()")
        what = f"an item for {self.description}"
        data = pickling.dumps(item, what)
        check_size(len(data), what)
        # Pickled before the wait: a cancelled `send` has done nothing, and an item that cannot be pickled fails at
        # once.
        while not self._send_window.is_open and not self.done():
            await self._wait_change()
        if self.done():
            self.result()
            raise trio.BrokenResourceError(f"{self.description} has returned: it takes no more items")
        self._send_window.sent(len(data))
        self._send_input(0, data)
        self._sent += 1
        # A sender whose credit is always granted in time would otherwise never let other tasks run.
        if self._sent % WINDOW == 0:
            await trio.lowlevel.checkpoint()

    async def done_sending(self) -> None:
        """End the stream that the method reads. Receiving continues. May be called again."""
        if not self._done_sending:
            self._done_sending = True
            if not self.done():
                self._send_input(END, b"")
        await trio.lowlevel.checkpoint()

    async def receive(self) -> I_co:
        """Return the method's next item.

        Raises:
            trio.EndOfChannel: the method has returned; `result` is its return value.
            BaseException: what the method raised, or the `FrayError` that says why there are no more items.
        """
        # No `_leave`: cancelling a receive must not end the conversation.
        while not self.has_item and not self.done():
            await self._wait_change()
        if self.has_item:
            return self._take()
        self.result()
        raise trio.EndOfChannel

    async def __anext__(self) -> I_co:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def _send_input(self, flags: int, data: bytes) -> None:
        if self._unconfirmed is not None:
            self._unconfirmed.append((flags, data))
        # Before the call is sent, the items are only recorded; `on_sent` sends them.
        if self.number and self.binding is not None:
            self.binding.connection.send_input(self, flags, data)

    # For the connection ----------------------------------------------------------------------------------------------

    def on_sent(self) -> None:
        """Send the items after the call itself has gone out (again, if another host refused it)."""
        if self.binding is not None:
            for flags, data in self._unconfirmed or ():
                self.binding.connection.send_input(self, flags, data)

    def add_item(self, body: Bytes | ReceivedObject) -> None:
        # The host runs the call, so it will not be refused any more.
        self._unconfirmed = None
        super().add_item(body)

    def on_credit(self, items: int) -> None:
        """Let as many more items be sent: the method has taken them."""
        self._unconfirmed = None
        self._send_window.on_credit(items)
        self._wake_tasks()
