"""Streams of items that a task yields to a reader in another process. Part of the bridge.

Invariants: a task sends items in order, one message at a time, with all items since the last; the reader replies when
it has room for more. So the task is at most two windows ahead. A task that is repeated, because its worker died, yields
its items again: those that were received are skipped.
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
from fray.blocking.bridge.objects import BoxedArgument, is_cancelled, release_worker
from fray.blocking.bridge.portal import Portal, refuse_in_loop
from fray.errors import FrayError
from fray.model.ids import ActorId
from fray.model.service_key import ServiceKey
from fray.runtime.calls.futures import CallFuture
from fray.runtime.objects.exports import call_export, exports_of
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling

# As for streams of actors: enough to hide a round trip, few enough to bound the memory.
WINDOW = 64
"""Maximum number of items yielded and not taken."""


class ItemBuffer:
    """Items yielded and not taken; `RemoteGenerator` is the interface of their reader."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._has_ended = False
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], object]] = []
        self.is_closed = False

    # The reader ------------------------------------------------------------------------------------------------------

    def take(self) -> Any:
        """Return the next item. Raises StopIteration, or the error of the task, after the last item."""
        # Without the lock in the common case; `_changed` is needed only to wait.
        if not self.done():
            with self.about_to_wait(), self._changed:
                self._changed.wait_for(self.done)
        with self._changed:
            if not self._ready:
                # The error is raised once; after it the iterator has ended, as with any generator.
                error, self._error = self._error, None
                raise error or StopIteration
            item = self._ready.popleft()
            # Half a window at a time, so that not every item causes a message.
            is_half_empty = len(self._ready) == WINDOW // 2 or not self._ready
        if is_half_empty:
            self.has_room()
        return item

    def done(self) -> bool:
        """Return whether the next item, or the end, has arrived."""
        return bool(self._ready) or self._has_ended

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call the callback once, when `done` is true."""
        with self._changed:
            if not self.done():
                # Called outside of the lock: a listener may call back.
                self._listeners.append(callback)
                return
        callback()

    def close(self) -> None:
        """Take no more items, and end the task."""

        def mark_closed() -> None:
            # Both: the reader sees the end, and the task that no more is wanted.
            self.is_closed = self._has_ended = True
            self._ready.clear()

        self._update(mark_closed)
        self.has_room()

    def about_to_wait(self) -> AbstractContextManager[object]:
        """Return a context for a wait of the reader."""
        return nullcontext()

    def has_room(self) -> None:
        """Notify the maker that there is room for more items."""

    # The task -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of items in the buffer."""
        return len(self._ready)

    def offer(self, items: Iterable[Any]) -> None:
        """Add items that have arrived."""
        self._update(lambda: self._ready.extend(items))

    def end(self, error: BaseException | None) -> None:
        """Mark the end of the items, with the task's ``error`` if it has failed."""

        def mark_ended() -> None:
            if not self._has_ended:
                self._has_ended, self._error = True, error

        self._update(mark_ended)

    def _update(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


class RemoteGenerator(Iterator[Any]):
    """Items of a remote generator, as it yields them. Iterate once; `close`, or dropping it, ends the generator."""

    def __init__(self, items: ItemBuffer, what: str) -> None:
        self._items, self._what = items, what

    def __iter__(self) -> RemoteGenerator:
        return self

    def __next__(self) -> Any:
        """Return the next item. Raises the generator's error, or the reason why no more items come, after the items
        that came.
        """
        item = self._items.take()
        # Unpickled on the reader's thread: in the loop a large item would hold up all connections.
        return item.open() if isinstance(item, _PickledItem) else item

    def done(self) -> bool:
        """Return whether the next item, or the end, has arrived."""
        return self._items.done()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` once, when `done` is so."""
        self._items.when_done(lambda: callback(self))

    def close(self) -> None:
        """Take no more items, and end the generator."""
        self._items.close()

    def __del__(self) -> None:
        # `__init__` may have failed before it was set.
        if hasattr(self, "_items"):
            self._items.close()

    def __repr__(self) -> str:
        return f"<RemoteGenerator {self._what}: {len(self._items)} items buffered>"


@frozen
class _PickledItem:
    """Pickled item; unpickled by the thread that takes it."""

    data: bytes

    def open(self) -> Any:
        value = pickling.loads(self.data)
        return value.ref.get() if isinstance(value, BoxedArgument) else value


class RemoteItems(ItemBuffer):
    """Items of a task of a worker pool."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._portal = portal_of(runtime)
        self._registry: StreamRegistry = self._portal.run(stream_registry_of, runtime)
        self._number = self._registry.open(self)
        self._expected = 0
        self._has_room: trio.Event | None = None
        self._cancel: Callable[[], object] = lambda: None

    @property
    def sink(self) -> ItemSender:
        """Sending end, for the task."""
        return ItemSender(*self._registry.place, self._number)

    def follow(self, future: Any) -> None:
        """End the items with the task."""
        self._cancel = future.cancel
        future.add_done_callback(self._task_ended)

    def _task_ended(self, future: Any) -> None:
        # The task has ended, so no more of its messages will come.
        self._registry.forget(self._number)
        self.end(future.exception())

    def about_to_wait(self) -> AbstractContextManager[object]:
        refuse_in_loop("the next item has not arrived, this would wait")
        # A task that reads another task's items must not keep its worker from running that one.
        release_worker()
        return nullcontext()

    def has_room(self) -> None:
        try:
            self._portal.send(self._wake)
        except FrayError:
            pass  # the cluster has ended

    def close(self) -> None:
        # Read first, as closing marks the end itself.
        was_over = self._has_ended
        if not self.is_closed:
            super().close()
        if not was_over:
            try:
                self._cancel()
            except FrayError:
                pass  # the cluster has ended

    # In the loop

    def _wake(self) -> None:
        if self._has_room is not None:
            self._has_room.set()

    async def receive(self, first: int, items: list[bytes]) -> bool:
        """Add items, the first of which has the number ``first``. Returns False if no more are wanted."""
        # A task that was run again sends its items from the start; those that have been received are skipped by number.
        fresh = items[max(0, self._expected - first) :]
        self._expected = max(self._expected, first + len(items))
        if fresh and not self.is_closed:
            self.offer(map(_PickledItem, fresh))
        # The answer is the permission to send more, so it is withheld while the reader has a full window.
        while len(self) >= WINDOW and not self.is_closed:
            self._has_room = trio.Event()
            if len(self) >= WINDOW:  # items may have been taken meanwhile, on another thread
                await self._has_room.wait()
        return not self.is_closed


class StreamRegistry:
    """Receiver of the items of all streams of a process."""

    def __init__(self, runtime: Runtime) -> None:
        exports = exports_of(runtime)
        self.place = exports.actor_id, exports.export_object(self)
        self._numbers = count(1)
        self._open: dict[int, RemoteItems] = {}

    def open(self, items: RemoteItems) -> int:
        """Add a stream; return its number."""
        number = next(self._numbers)
        self._open[number] = items
        return number

    def forget(self, number: int) -> None:
        """Remove a stream that has ended."""
        self._open.pop(number, None)

    async def take(self, number: int, first: int, items: list[bytes]) -> bool:
        """Pass items of a task to their stream. Returns False if the stream has been closed."""
        found = self._open.get(number)
        return found is not None and await found.receive(first, items)


STREAM_REGISTRY: ServiceKey[StreamRegistry] = ServiceKey("stream registry")


def stream_registry_of(runtime: Runtime) -> StreamRegistry:
    """Return the stream registry of a runtime, made on first use. In the loop."""
    return runtime.services.get_or_make(STREAM_REGISTRY, lambda: StreamRegistry(runtime))


class ItemSender:
    """Sending end of a stream, in the task: `send` each item, then `flush`. Picklable until it is used."""

    def __init__(self, owner: ActorId, registry: int, number: int) -> None:
        self._place = owner, registry, number
        self._unsent: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._first = 0
        self._is_sending = False
        self._has_ended = False
        self._error: BaseException | None = None
        self._portal: Portal | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ItemSender, self._place

    # Called on the task's thread; everything below "In the loop" runs in the loop.
    def send(self, item: Any, what: str) -> bool:
        """Send one item, packed already; waits while the reader takes none. Returns False if no more are wanted.

        Raises:
            NotPicklable: it cannot be pickled.
        """
        data = pickling.dumps(item, what)
        if self._portal is None:
            self._portal = portal_of(current_runtime())
        with self._changed:
            self._unsent.append(data)
            # One message at a time: items that are made meanwhile travel together with the next one.
            if not self._is_sending and not self._has_ended:
                self._is_sending = True
                self._portal.send(self._send_batch)
        if len(self._unsent) >= WINDOW:
            self._wait(lambda: len(self._unsent) < WINDOW)
        return not self._has_ended and not is_cancelled()

    def flush(self) -> None:
        """Wait until all items have been received."""
        if self._portal is not None:
            self._wait(lambda: not self._is_sending)

    def _wait(self, until: Callable[[], bool]) -> None:
        if until() or self._has_ended:
            return
        release_worker()
        with self._changed:
            self._changed.wait_for(lambda: until() or self._has_ended)

    # In the loop

    def _send_batch(self) -> None:
        batch = [self._unsent.popleft() for _ in range(len(self._unsent))]
        assert self._portal is not None
        assert self._portal.runtime is not None
        owner, registry, number = self._place
        message = number, self._first, batch
        # Items are numbered from the start of the run, so that the reader can skip those of an earlier one.
        self._first += len(batch)
        try:
            call_export(self._portal.runtime, owner, "use", registry, "take", *message).add_done_callback(
                self._on_reply
            )
        except FrayError:
            self._set_state(has_ended=True)

    def _on_reply(self, call: CallFuture) -> None:
        self._set_state(has_ended=call.exception() is not None or not call.result())

    def _set_state(self, *, has_ended: bool) -> None:
        with self._changed:
            self._has_ended = has_ended
            self._is_sending = bool(self._unsent) and not has_ended
            self._changed.notify_all()
        if self._is_sending:
            self._send_batch()
