"""Streams by which methods take part in two-way calls (`open`): `Stream` in the loop, `BlockingStream` on a thread.

An async method receives and sends in the loop. A sync method does the same on its thread and is blocked meanwhile. In a
generator, what it yields is sent.

A method requests its stream by annotation alone: a parameter name would also match every ``predict(self, inputs)``.
Ends and misuse are reported in Trio's terms (`trio.EndOfChannel`, `trio.BrokenResourceError`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import trio

from fray.errors import CallCancelled, DeadlineExceeded, FrayError
from fray.runtime.actors.incoming_call import IncomingCall

if TYPE_CHECKING:
    from fray.runtime.serialization.buffers import PickledObject


class Stream:
    """Two-way stream of an async method, given to a parameter that is annotated ``fray.Stream``.

    ``async for item in stream`` ends when the caller has finished sending. An async generator may yield instead of
    calling `send`.
    """

    def __init__(self, call: IncomingCall) -> None:
        assert call.inputs is not None
        self._call = call
        self._inputs = call.inputs
        self._changed = trio.Event()
        self._inputs.on_change = self._on_change

    def __repr__(self) -> str:
        return f"<stream of {self._call!r}>"

    def _on_change(self) -> None:
        self._changed.set()

    async def receive(self) -> Any:
        """Return the caller's next item. Only one task may wait at a time.

        Raises:
            trio.EndOfChannel: the caller has finished sending.
        """
        while not self._inputs.items:
            if self._inputs.ended:
                raise trio.EndOfChannel
            self._changed = trio.Event()
            await self._changed.wait()
        item, granted = self._inputs.pop()
        # Granted only when half a window was taken; the checkpoint keeps a fast reader from holding the loop.
        if granted:
            self._call.origin.grant_credit(self._call, granted)
            await trio.lowlevel.checkpoint()
        return item

    async def send(self, item: Any) -> None:
        """Send an item to the caller; waits while 64 are in flight.

        Raises:
            NotPicklable, MessageTooLarge: the item cannot be sent.
        """
        assert self._call.stream is not None
        await self._call.stream.put(item)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None


class BlockingStream:
    """Two-way stream of a sync method of an all-sync class. It blocks the method's thread; use it on that thread only.

    ``for item in stream`` ends when the caller has finished sending. A generator may yield instead of calling `send`.
    """

    def __init__(self, call: IncomingCall) -> None:
        """Create the stream; in the loop."""
        assert call.inputs is not None
        assert call.stream is not None
        self._call = call
        self._inputs = call.inputs
        self._output = call.stream
        self._changed = threading.Condition()
        # Frames may only be sent in the loop; items are queued here and sent by `flush`.
        self._outbox: deque[bytes | PickledObject] = deque()
        self._granted = 0
        self._flush_scheduled = False
        self._token = trio.lowlevel.current_trio_token()
        self._loop_thread = threading.get_ident()
        self._inputs.on_change = self.wake
        self._output.on_credit = self._on_credit

    def __repr__(self) -> str:
        return f"<stream of {self._call!r}>"

    # On the thread

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the caller's next item.

        Args:
            timeout_s: longest wait. Default: no limit.

        Raises:
            trio.EndOfChannel: the caller has finished sending.
            CallCancelled: the caller has left.
            DeadlineExceeded: nothing arrived within ``timeout_s``.
        """
        # One lock for items, window and grants: the loop adds to all of them while this thread takes.
        with self._changed:
            self._wait(lambda: bool(self._inputs.items) or self._inputs.ended, timeout_s)
            if not self._inputs.items:
                raise trio.EndOfChannel
            item, granted = self._inputs.pop()
            self._granted += granted
        # Outside of the lock, for which the loop may be waiting.
        if granted:
            self._schedule_flush()
        return item

    def send(self, item: Any) -> None:
        """Send an item to the caller; waits while 64 are in flight.

        Raises:
            NotPicklable, MessageTooLarge: the item cannot be sent.
            CallCancelled: the caller has left.
        """
        data = self._output.pickle_item(item)
        with self._changed:
            self._wait(lambda: self._output.window.is_open, None)
            self._output.window.sent(len(data))
            self._outbox.append(data)
        self._schedule_flush()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.receive()
        except trio.EndOfChannel:
            raise StopIteration from None

    def produce(self, source: Iterator[Any]) -> Any:
        """Send what a generator yields; return what it returns."""
        try:
            while True:
                self.send(next(source))
        except StopIteration as end:
            return end.value
        finally:
            # Whatever ended the loop, the generator's `finally` blocks run on this thread.
            getattr(source, "close", lambda: None)()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        call = self._call
        # A wait here would stop the loop, and with it the frames that could end the wait.
        if threading.get_ident() == self._loop_thread and not ready():
            raise FrayError(f"{call.name}.{call.method}() would block the loop: this stream is for a thread")
        # A cancelled method has no other way to notice that its caller has left.
        if not self._changed.wait_for(lambda: ready() or call.cancelled, timeout_s):
            raise DeadlineExceeded(f"the caller of {call.name}.{call.method}() sent nothing within {timeout_s:g} s")
        if call.cancelled:
            raise CallCancelled(f"the caller of {call.name}.{call.method}() has left", method=call.method)

    def _schedule_flush(self) -> None:
        # One crossing for a burst of items.
        if not self._flush_scheduled:
            self._flush_scheduled = True
            try:
                self._token.run_sync_soon(self.flush)
            except trio.RunFinishedError:
                pass  # the loop has ended, and the caller's connection with it

    # In the loop

    def _on_credit(self, items: int) -> None:
        with self._changed:
            self._output.window.on_credit(items)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let the thread look again: an item has arrived, or the call was cancelled."""
        with self._changed:
            self._changed.notify_all()

    def flush(self) -> None:
        """Send the items and grants that the thread has queued."""
        # First: an item that is queued during the loop below schedules another flush.
        self._flush_scheduled = False
        while self._outbox:
            self._output.transmit(self._outbox.popleft())
        with self._changed:
            granted, self._granted = self._granted, 0
        if granted:
            self._call.origin.grant_credit(self._call, granted)
