"""What a caller sends into a conversation (`open`), at its host, and what the method sees of the conversation.

An async method receives and sends in the loop: a `Stream`. A sync method does the same on its thread and is blocked
meanwhile: a `BlockingStream`. In a generator, what it yields is sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import trio

from fray.errors import CallCancelled, DeadlineExceeded, FrayError, ProtocolMismatch
from fray.runtime.calls.flow_control import WINDOW, ReceiveWindow
from fray.runtime.calls.wire import END
from fray.runtime.serialization import pickling

if TYPE_CHECKING:
    from fray.net.codec import Bytes
    from fray.runtime.actors.incoming_call import IncomingCall
    from fray.runtime.serialization.buffers import PickledObject


class InputBuffer:
    """The items that have come and have not been taken. In the loop; `pop` also on the method's thread."""

    def __init__(self, call: IncomingCall) -> None:
        self.call = call
        self.items: deque[Bytes] = deque()
        self.ended = False
        """The caller has said that no more will come."""
        self.on_change: Callable[[], object] = lambda: None
        self.window = ReceiveWindow()

    def on_item(self, flags: int, body: Bytes) -> None:
        """The next item, or the end of all."""
        if flags & END:
            self.ended = True
        elif len(self.items) < WINDOW:
            self.items.append(body)
        else:
            call = self.call
            text = f"the caller of {call.name}.{call.method}() sends more than {WINDOW} items that nobody has taken"
            call.finish(call.error_answer(ProtocolMismatch(text)))
            if call.actor is not None:
                call.actor.cancel(call)
        self.on_change()

    def pop(self) -> tuple[Any, int]:
        """The next item, and how many items to grant to the caller."""
        body = self.items.popleft()
        try:
            return pickling.loads(body), self.window.took(len(body))
        except Exception as error:
            error.add_note(f"while unpickling an item for {self.call.name}.{self.call.method}()")
            raise


class Stream:
    """One conversation, for an async method: a parameter annotated ``fray.Stream`` receives it.

    ``async for item in stream`` ends when the caller has said that it is done. An async generator may yield instead of
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
        """The caller's next item. Only one task may wait at a time.

        Raises:
            trio.EndOfChannel: the caller is done sending.
        """
        while not self._inputs.items:
            if self._inputs.ended:
                raise trio.EndOfChannel
            self._changed = trio.Event()
            await self._changed.wait()
        item, granted = self._inputs.pop()
        if granted:
            self._call.origin.grant_credit(self._call, granted)
            await trio.lowlevel.checkpoint()
        return item

    async def send(self, item: Any) -> None:
        """Send an item to the caller; waits while 64 are on their way.

        Raises:
            NotPicklable, MessageTooLarge: it cannot travel.
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
    """The same for a sync method of an all-sync class: it blocks the method's thread. Use it on that thread only.

    ``for item in stream`` ends when the caller has said that it is done. A generator may yield instead of calling
    `send`.
    """

    def __init__(self, call: IncomingCall) -> None:
        """In the loop."""
        assert call.inputs is not None
        assert call.stream is not None
        self._call = call
        self._inputs = call.inputs
        self._output = call.stream
        self._changed = threading.Condition()
        self._outbox: deque[bytes | PickledObject] = deque()
        self._granted = 0
        self._poked = False
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._inputs.on_change = self.wake
        self._output.on_credit = self._credited

    def __repr__(self) -> str:
        return f"<stream of {self._call!r}>"

    # On the thread

    def receive(self, timeout_s: float | None = None) -> Any:
        """The caller's next item.

        Args:
            timeout_s: default: as long as it takes.

        Raises:
            trio.EndOfChannel: the caller is done sending.
            CallCancelled: the caller has left.
            DeadlineExceeded: nothing came within ``timeout_s``.
        """
        with self._changed:
            self._wait(lambda: bool(self._inputs.items) or self._inputs.ended, timeout_s)
            if not self._inputs.items:
                raise trio.EndOfChannel
            item, granted = self._inputs.pop()
            self._granted += granted
        if granted:
            self._poke()
        return item

    def send(self, item: Any) -> None:
        """Send an item to the caller; waits while 64 are on their way.

        Raises:
            NotPicklable, MessageTooLarge: it cannot travel.
            CallCancelled: the caller has left.
        """
        data = self._output.pickle_item(item)
        with self._changed:
            self._wait(lambda: self._output.window.is_open, None)
            self._output.window.sent(len(data))
            self._outbox.append(data)
        self._poke()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.receive()
        except trio.EndOfChannel:
            raise StopIteration from None

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        call = self._call
        if threading.get_ident() == self._thread and not ready():
            raise FrayError(f"{call.name}.{call.method}() would block the loop: this stream is for a thread")
        if not self._changed.wait_for(lambda: ready() or call.cancelled, timeout_s):
            raise DeadlineExceeded(f"the caller of {call.name}.{call.method}() sent nothing within {timeout_s:g} s")
        if call.cancelled:
            raise CallCancelled(f"the caller of {call.name}.{call.method}() has left", method=call.method)

    def _poke(self) -> None:
        if not self._poked:
            self._poked = True
            try:
                self._token.run_sync_soon(self.flush)
            except trio.RunFinishedError:
                pass  # the loop has ended: nobody waits

    # In the loop

    def _credited(self, items: int) -> None:
        with self._changed:
            self._output.window.granted(items)
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def flush(self) -> None:
        """Send what the thread has left here."""
        self._poked = False
        while self._outbox:
            self._output.transmit(self._outbox.popleft())
        with self._changed:
            granted, self._granted = self._granted, 0
        if granted:
            self._call.origin.grant_credit(self._call, granted)

    def produce(self, source: Iterator[Any]) -> Any:
        """On the thread: send what a generator yields; returns what it returns."""
        try:
            while True:
                self.send(next(source))
        except StopIteration as end:
            return end.value
        finally:
            getattr(source, "close", lambda: None)()
