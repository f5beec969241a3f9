"""Items that a task makes one by one and its author takes one by one, in another process. Part of the bridge.

The law. A task sends items in order, one message at a time, with all it has made since; whoever reads answers when it
has room for more. So the task runs at most two windows ahead. A task that is repeated, because its worker died, makes
its items anew: those that were received are skipped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import trio
from attrs import frozen

from fray.blocking.bridge.background_loop import current_runtime, portal_of
from fray.blocking.bridge.objects import BoxedArgument, is_told_to_stop, step_aside
from fray.blocking.bridge.portal import Portal, refuse_in_loop
from fray.errors import FrayError
from fray.model.ids import ActorId
from fray.model.service_key import ServiceKey
from fray.runtime.calls.futures import CallFuture
from fray.runtime.objects.exports import call_export, exports_of
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling

WINDOW = 64
"""Items that were made and not taken."""


class ItemBuffer:
    """Those that were made and not taken, of one maker; `Generated` is what their reader has of it."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._ready: deque[Any] = deque()
        self._over = False
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], object]] = []
        self.is_closed = False

    # The reader ------------------------------------------------------------------------------------------------------

    def take(self) -> Any:
        """The next item. Raises StopIteration, or what ended the maker, behind the last one."""
        if not self.done():
            with self.about_to_wait(), self._came:
                self._came.wait_for(self.done)
        with self._came:
            if not self._ready:
                error, self._error = self._error, None
                raise error or StopIteration
            item = self._ready.popleft()
            is_roomy = len(self._ready) == WINDOW // 2 or not self._ready
        if is_roomy:
            self.has_room()
        return item

    def done(self) -> bool:
        """Whether the next item, or the end, is there."""
        return bool(self._ready) or self._over

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it once, when `done` is so."""
        with self._came:
            if not self.done():
                self._listeners.append(callback)
                return
        callback()

    def close(self) -> None:
        """No more are taken; what makes them is ended."""

        def closed() -> None:
            self.is_closed = self._over = True
            self._ready.clear()

        self._happen(closed)
        self.has_room()

    def about_to_wait(self) -> AbstractContextManager[object]:
        """Around a wait of the reader."""
        return nullcontext()

    def has_room(self) -> None:
        """More may come."""

    # The maker -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Items that are here."""
        return len(self._ready)

    def offer(self, items: Iterable[Any]) -> None:
        """These have come."""
        self._happen(lambda: self._ready.extend(items))

    def end(self, error: BaseException | None) -> None:
        """No more will come, because of ``error`` if there is one."""

        def ended() -> None:
            if not self._over:
                self._over, self._error = True, error

        self._happen(ended)

    def _happen(self, what: Callable[[], object]) -> None:
        with self._came:
            what()
            self._came.notify_all()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


class RemoteGenerator(Iterator[Any]):
    """What a generator makes, item by item, as it makes them. Iterate once; `close`, or dropping it, ends the maker."""

    def __init__(self, items: ItemBuffer, what: str) -> None:
        self._items, self._what = items, what

    def __iter__(self) -> RemoteGenerator:
        return self

    def __next__(self) -> Any:
        """Raises what the generator raised, or why no more items come, behind those that came."""
        item = self._items.take()
        return item.opened() if isinstance(item, _Closed) else item

    def done(self) -> bool:
        """Whether the next item, or the end, is there."""
        return self._items.done()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` once, when `done` is so."""
        self._items.when_done(lambda: callback(self))

    def close(self) -> None:
        """Take no more; what makes the items is ended."""
        self._items.close()

    def __del__(self) -> None:
        if hasattr(self, "_items"):
            self._items.close()

    def __repr__(self) -> str:
        return f"<Generated by {self._what}: {len(self._items)} items are here>"


@frozen
class _Closed:
    """An item as it came; opened by whoever takes it."""

    data: bytes

    def opened(self) -> Any:
        value = pickling.loads(self.data)
        return value.ref.get() if isinstance(value, BoxedArgument) else value


class RemoteItems(ItemBuffer):
    """Those of a task."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._portal = portal_of(runtime)
        self._desk: StreamRegistry = self._portal.run(desk_of, runtime)
        self._number = self._desk.open(self)
        self._expected = 0
        self._room: trio.Event | None = None
        self._cancel: Callable[[], object] = lambda: None

    @property
    def sink(self) -> ItemSender:
        """For the task."""
        return ItemSender(*self._desk.place, self._number)

    def follow(self, future: Any) -> None:
        """The task is on its way: with its end the items end."""
        self._cancel = future.cancel
        future.add_done_callback(self._task_ended)

    def _task_ended(self, future: Any) -> None:
        self._desk.forget(self._number)
        self.end(future.exception())

    def about_to_wait(self) -> AbstractContextManager[object]:
        refuse_in_loop("the next item has not come, this would wait")
        step_aside()
        return nullcontext()

    def has_room(self) -> None:
        try:
            self._portal.send(self._wake)
        except FrayError:
            pass  # the cluster has ended

    def close(self) -> None:
        was_over = self._over
        if not self.is_closed:
            super().close()
        if not was_over:
            try:
                self._cancel()
            except FrayError:
                pass  # the cluster has ended

    # In the loop

    def _wake(self) -> None:
        if self._room is not None:
            self._room.set()

    async def receive(self, first: int, items: list[bytes]) -> bool:
        """Items from number ``first`` on. False: no more are wanted."""
        fresh = items[max(0, self._expected - first) :]
        self._expected = max(self._expected, first + len(items))
        if fresh and not self.is_closed:
            self.offer(map(_Closed, fresh))
        while len(self) >= WINDOW and not self.is_closed:
            self._room = trio.Event()
            if len(self) >= WINDOW:  # it may have been taken meanwhile, on another thread
                await self._room.wait()
        return not self.is_closed


class StreamRegistry:
    """Where the items of all streams of a process come in."""

    def __init__(self, runtime: Runtime) -> None:
        shelf = exports_of(runtime)
        self.place = shelf.actor_id, shelf.export_object(self)
        self._numbers = count(1)
        self._open: dict[int, RemoteItems] = {}

    def open(self, items: RemoteItems) -> int:
        """A new stream."""
        number = next(self._numbers)
        self._open[number] = items
        return number

    def forget(self, number: int) -> None:
        """Nothing comes for it any more."""
        self._open.pop(number, None)

    async def take(self, number: int, first: int, items: list[bytes]) -> bool:
        """From a task. False: nobody reads this stream any more."""
        found = self._open.get(number)
        return found is not None and await found.receive(first, items)


STREAM_REGISTRY: ServiceKey[StreamRegistry] = ServiceKey("stream registry")


def desk_of(runtime: Runtime) -> StreamRegistry:
    """In the loop: that of a runtime, made when first asked for."""
    return runtime.services.get_or_make(STREAM_REGISTRY, lambda: StreamRegistry(runtime))


class ItemSender:
    """The task's end: `send` each item, then `flush`. Picklable, until it is used."""

    def __init__(self, owner: ActorId, tool: int, number: int) -> None:
        self._place = owner, tool, number
        self._made: deque[bytes] = deque()
        self._moved = threading.Condition()
        self._first = 0
        self._under_way = False
        self._over = False
        self._error: BaseException | None = None
        self._portal: Portal | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ItemSender, self._place

    def send(self, item: Any, what: str) -> bool:
        """Send one item, which is packed already; waits while nobody takes them. False: nobody wants more.

        Raises:
            NotPicklable: it cannot travel.
        """
        data = pickling.dumps(item, what)
        if self._portal is None:
            self._portal = portal_of(current_runtime())
        with self._moved:
            self._made.append(data)
            if not self._under_way and not self._over:
                self._under_way = True
                self._portal.send(self._ship)
        if len(self._made) >= WINDOW:
            self._wait(lambda: len(self._made) < WINDOW)
        return not self._over and not is_told_to_stop()

    def flush(self) -> None:
        """Wait until all has been received."""
        if self._portal is not None:
            self._wait(lambda: not self._under_way)

    def _wait(self, until: Callable[[], bool]) -> None:
        if until() or self._over:
            return
        step_aside()
        with self._moved:
            self._moved.wait_for(lambda: until() or self._over)

    # In the loop

    def _ship(self) -> None:
        batch = [self._made.popleft() for _ in range(len(self._made))]
        assert self._portal is not None
        assert self._portal.runtime is not None
        owner, tool, number = self._place
        about = number, self._first, batch
        self._first += len(batch)
        try:
            call_export(self._portal.runtime, owner, "use", tool, "take", *about).add_done_callback(self._shipped)
        except FrayError:
            self._moves(over=True)

    def _shipped(self, call: CallFuture) -> None:
        self._moves(over=call.exception() is not None or not call.result())

    def _moves(self, *, over: bool) -> None:
        with self._moved:
            self._over = over
            self._under_way = bool(self._made) and not over
            self._moved.notify_all()
        if self._under_way:
            self._ship()
