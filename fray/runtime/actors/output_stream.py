"""The items of a generator at its host: produced as far as the caller's credit goes, then not before there is more."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

import trio

from fray.runtime.calls.flow_control import COUNT_BYTES, SendWindow, unpack_count
from fray.runtime.calls.wire import CANCELLED_ANSWER, Answer
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PickledObject

if TYPE_CHECKING:
    from fray.net.codec import Bytes
    from fray.runtime.actors.incoming_call import IncomingCall
    from fray.runtime.actors.threaded_actor import ThreadedActor

SLICE_S = 0.002
"""How long a generator on a thread goes on before other calls of its actor get a turn."""
TURN_ITEMS = 64
"""How many items a generator in the loop yields before others get a turn."""


class OutputStream:
    """The credit of one stream, and the way its items go out."""

    def __init__(self, call: IncomingCall) -> None:
        self.call = call
        self.window = SendWindow(unpack_count(call.body))
        self.on_credit: Callable[[int], object] = self._credited
        call.body = memoryview(call.body)[COUNT_BYTES:]
        self._granted = trio.Event()
        self._sent = 0

    def grant(self, body: Bytes) -> None:
        """The caller has taken items: it may be sent as many more."""
        self.on_credit(unpack_count(body))

    def _credited(self, items: int) -> None:
        self.window.granted(items)
        self._granted.set()

    def pickle_item(self, item: Any) -> bytes | PickledObject:
        packed = pickling.pack(item, f"an item of {self.call.name}.{self.call.method}()")
        del item
        return packed if type(packed) is bytes else self.call.detach(packed, "item")

    async def put(self, item: Any) -> None:
        """Send one item, when there is credit and the channel has room."""
        while not self.window.is_open:
            self._granted = trio.Event()
            await self._granted.wait()
        self.send(self.pickle_item(item))
        await self.call.origin.wait_room()
        self._sent += 1
        if self._sent % TURN_ITEMS == 0:
            await trio.lowlevel.checkpoint()

    def send(self, data: bytes | PickledObject) -> None:
        self.window.sent(len(data))
        self.transmit(data)

    def transmit(self, data: bytes | PickledObject) -> None:
        """Send what `ahead` knows of already."""
        self.call.origin.send_item(self.call, data)

    async def run_in_loop(self, source: Any) -> Any:
        """Iterate over a generator of either kind to its end, and close it whatever happens; what it returns."""
        if isinstance(source, AsyncGenerator):
            async with aclosing(source):
                async for item in source:
                    await self.put(item)
        else:
            with closing(source):
                while True:
                    try:
                        item = next(source)
                    except StopIteration as end:
                        return end.value
                    await self.put(item)
        return None


class ThreadOutputStream:
    """A generator on an actor's thread, as jobs of its executor: each produces what the credit allows, for one slice.

    Between two jobs other calls of the actor get their turn.
    """

    def __init__(self, actor: ThreadedActor, call: IncomingCall, stream: OutputStream) -> None:
        self._actor = actor
        self._call = call
        self._stream = stream
        self._context = actor.context.copy()
        self._source: Generator[Any, Any, Any] | None = None
        self._items: list[bytes | PickledObject] = []
        self._value: Any = None
        self._allowed = 0
        self._allowed_bytes = 0
        self._answer: Answer | None = None
        self._submitted = False
        stream.on_credit = self._credited

    def _credited(self, items: int) -> None:
        self._stream.window.granted(items)
        self.resume()

    def resume(self) -> None:
        """There is credit, or the call was cancelled: go on, in turn."""
        ahead = self._stream.window
        if not self._submitted and self._answer is None and (ahead.is_open or self._call.cancelled):
            self._submitted = True
            self._allowed, self._allowed_bytes = ahead.credit, ahead.room_bytes
            runner = self._actor.executor_of(self._call)
            runner.submit(self)
            runner.flush()

    # On the thread

    def run(self) -> None:
        if self._source is not None or self._actor.claim(self._call):
            self._context.run(self._run)
        else:
            self._answer = CANCELLED_ANSWER

    def _run(self) -> None:
        try:
            if self._call.cancelled:
                self._close()
            elif not self._produce():
                self._answer = self._call.result_answer(self._value)
        except BaseException as error:
            self._answer = self._call.error_answer(error)
            if isinstance(error, KeyboardInterrupt):
                raise

    def _produce(self) -> bool:
        """False: the generator has ended."""
        if self._source is None:
            self._source = self._call.invoke()
        until = time.perf_counter() + SLICE_S
        while len(self._items) < self._allowed and self._allowed_bytes > 0:
            try:
                item = next(self._source)
            except StopIteration as end:
                self._value = end.value
                return False
            self._items.append(self._stream.pickle_item(item))
            self._allowed_bytes -= len(self._items[-1])
            if time.perf_counter() >= until or self._call.cancelled:
                break
        return True

    def _close(self) -> None:
        self._answer = CANCELLED_ANSWER
        if self._source is not None:
            self._source.close()

    # In the loop

    def done(self) -> None:
        self._submitted = False
        items, self._items = self._items, []
        for data in items:
            self._stream.send(data)
        if self._answer is not None:
            self._actor.on_call_ended(self._call, self._answer)
        else:
            self.resume()
