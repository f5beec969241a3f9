"""The items of a generator at its host: produced as far as the caller's credit goes, then not before there is more."""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

import trio

from fray.net.codec import MESSAGE_LIMIT_BYTES
from fray.runtime import payload
from fray.runtime.calls import CANCELLED_ANSWER, Answer

if TYPE_CHECKING:
    from fray.net.codec import Bytes
    from fray.runtime.host_call import HostCall
    from fray.runtime.thread_actor import ThreadActor

_COUNT = struct.Struct("<I")
SLICE_S = 0.002
"""How long a generator on a thread goes on before other calls of its actor get a turn."""
TURN_ITEMS = 64
"""How many items a generator in the loop yields before others get a turn."""


class HostStream:
    """The credit of one stream, and the way its items go out."""

    def __init__(self, call: HostCall) -> None:
        self.call = call
        self.credit: int = _COUNT.unpack_from(call.body)[0]
        self.waiting_thread: ThreadStream | None = None
        call.body = memoryview(call.body)[_COUNT.size :]
        self._granted = trio.Event()
        self._sent = 0

    def grant(self, body: Bytes) -> None:
        """The caller has taken items: it may be sent as many more."""
        self.credit += _COUNT.unpack_from(body)[0]
        self._granted.set()
        if self.waiting_thread is not None:
            self.waiting_thread.resume()

    def pickled(self, item: Any) -> bytes:
        call = self.call
        data = payload.dumps(item, f"an item of {call.name}.{call.method}()")
        if len(data) > MESSAGE_LIMIT_BYTES:
            raise payload.too_large(f"an item of {call.name}.{call.method}()", len(data), MESSAGE_LIMIT_BYTES)
        return data

    async def put(self, item: Any) -> None:
        """Send one item, when there is credit and the channel has room."""
        while self.credit <= 0:
            self._granted = trio.Event()
            await self._granted.wait()
        self.send(self.pickled(item))
        await self.call.guest.wait_room()
        self._sent += 1
        if self._sent % TURN_ITEMS == 0:
            await trio.lowlevel.checkpoint()

    def send(self, data: bytes) -> None:
        self.credit -= 1
        self.call.guest.item(self.call, data)

    async def run_in_loop(self, source: Any) -> None:
        """Iterate over a generator of either kind to its end, and close it whatever happens."""
        if isinstance(source, AsyncGenerator):
            async with aclosing(source):
                async for item in source:
                    await self.put(item)
        else:
            with closing(source):
                for item in source:
                    await self.put(item)


class ThreadStream:
    """A generator on an actor's thread, as jobs of its executor: each produces what the credit allows, for one slice.

    Between two jobs other calls of the actor get their turn.
    """

    def __init__(self, actor: ThreadActor, call: HostCall, stream: HostStream) -> None:
        self._actor = actor
        self._call = call
        self._stream = stream
        self._context = actor.context.copy()
        self._source: Generator[Any, Any, Any] | None = None
        self._items: list[bytes] = []
        self._allowed = 0
        self._answer: Answer | None = None
        self._submitted = False

    def resume(self) -> None:
        """There is credit, or the call was cancelled: go on, in turn."""
        if not self._submitted and self._answer is None and (self._stream.credit > 0 or self._call.cancelled):
            self._submitted = True
            self._allowed = self._stream.credit
            runner = self._actor.runner_of(self._call)
            runner.submit(self)
            runner.flush()

    # On the thread

    def run(self) -> None:
        self._call.began = True
        self._context.run(self._run)

    def _run(self) -> None:
        try:
            if self._call.cancelled:
                self._close()
            elif not self._produce():
                self._answer = self._call.returned(None)
        except BaseException as error:
            self._answer = self._call.raised(error)
            if isinstance(error, KeyboardInterrupt):
                raise

    def _produce(self) -> bool:
        """False: the generator has ended."""
        if self._source is None:
            self._source = self._call.invoke()
        until = time.perf_counter() + SLICE_S
        while len(self._items) < self._allowed:
            try:
                item = next(self._source)
            except StopIteration:
                return False
            self._items.append(self._stream.pickled(item))
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
            self._actor.ended(self._call, self._answer)
        else:
            self.resume()
