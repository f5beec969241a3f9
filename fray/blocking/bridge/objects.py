"""Objects that are put once and read many times: references to them, for sync code. Part of the bridge.

An object belongs to the job or driver whose code has put it. It lives as long as a reference to it exists, and no
longer than its owner. References may be pickled, also inside other objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
from attrs import frozen

from fray.api import objects
from fray.api.objects import sending as sending
from fray.blocking.bridge import pickling
from fray.blocking.bridge.background_loop import current_runtime, portal_of, runtime_here
from fray.blocking.bridge.portal import refuse_in_loop
from fray.model.resources import parse_bytes
from fray.runtime.actors.methods import has_async_methods
from fray.runtime.current_call import current_actor_var
from fray.runtime.objects.references import references_of
from fray.runtime.objects.store import (
    MEMORY_LIMIT_BYTES,
    Home,
    ObjectStoreSettings,
    Place,
    Spilled,
    StoredObject,
    allocate_now,
    object_store_of,
    packed,
)
from fray.runtime.process.attempt import is_async
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling as payload
from fray.runtime.serialization.function_cache import FunctionPickleCache
from fray.runtime.tasks.task_run import TaskRun

# A pool's answers share messages; from 1 MiB on, an extra round trip costs less than holding up the others.
CARRIED_FROM_BYTES = 1024 * 1024
"""Size from which the result of a task is put as an object, and not sent through the pool."""
# Larger ones may be needed by many tasks of one worker, which fetches them once.
SENT_ALONG_BYTES = 32 * 1024
"""Size up to which an object that is an argument is sent with the call: cheaper than fetching it."""


class ObjectRef(objects.ObjectRef):
    """Reference to an object that was put. Any thread may `get` it, any number of times."""

    __slots__ = ()
    _find_runtime = staticmethod(current_runtime)

    def get(self, timeout: float | None = None) -> Any:
        """Return the object. Large buffers (arrays) in it are read-only: on the owner's host they are the owner's own
        memory.

        Args:
            timeout: seconds until TimeoutError. Default: no limit.

        Raises:
            ObjectLost: its owner has ended, or it was released.
            TimeoutError: the built-in one.
        """
        return payload.unbox(self._box(timeout))

    result = get

    def _box(self, timeout: float | None) -> payload.Boxed:
        holdings = self._holdings
        store = holdings.own_store(self._place[:2])
        # An own object is read where it lies, without a call to the own process.
        if store is not None:
            record = store.find(self._place[2])
            if isinstance(record, Spilled):
                refuse_in_loop("this object is in storage: reading it would wait")
                record = record.read()
            return record.box()
        late = f"{self!r} has not come"
        return portal_of(holdings.runtime).call_within(timeout, late, holdings.fetch, self._place)

    def done(self) -> bool:
        """Return True: the object exists."""
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` at once."""
        callback(self)

    def stats(self) -> objects.ObjectStats:  # type: ignore[override]
        """Return the size of the object, and who has it. Raises ObjectLost."""
        return objects.ObjectStats(*portal_of(self._holdings.runtime).call(self._holdings.stats, self._place))

    def release(self) -> None:  # type: ignore[override]
        """End the object now, although references to it remain; a later read raises `ObjectLost`."""
        portal_of(self._holdings.runtime).call(self._holdings.release, self._place)

    def __enter__(self) -> ObjectRef:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, self._address()


def _unpickle(place: Place, token: str) -> ObjectRef:
    runtime = runtime_here()
    return ObjectRef(None if runtime is None else references_of(runtime), place, token)


# Pickling ------------------------------------------------------------------------------------------------------------


def argument(of: Any) -> Any:
    """Return a reference or future as an argument that arrives as its value; a small object of this process is
    included.
    """
    if isinstance(of, ObjectRef) and of._bound is not None:
        store = of._bound.own_store(of._place[:2])
        record = None if store is None else store.find(of._place[2])
        # Only an object in memory here: reading a spilled or remote one would block the submitting thread.
        if isinstance(record, StoredObject) and record.size <= SENT_ALONG_BYTES:
            pickle, views, first = record.box()
            return PickledArgument(pickle, [memoryview(view) for view in views], first, read_only=True)
    return DereferencedArgument(of)


class DereferencedArgument:
    """Argument that arrives as the value of a reference or future."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __reduce__(self) -> tuple[Any, ...]:
        return _value_of, (self._of,)


def _value_of(of: Any) -> Any:
    if trio.lowlevel.in_trio_run() or runtime_here() is None:
        # In the loop a wait would block the process; the constructor's thread does it instead.
        return payload.DeferredConstruction(of.result)
    if not of.done():
        # The worker takes other tasks meanwhile, or tasks that wait for tasks could occupy all workers.
        release_worker()
    return of.result()


class PickledArgument:
    """Argument that has been pickled already, and arrives as the value itself."""

    __slots__ = ("_box", "_open")

    def __init__(self, pickle: bytes, views: Sequence[memoryview], first: bool, *, read_only: bool = False) -> None:
        self._box = pickle, [payload.PickleBuffer(view) for view in views], first
        self._open = payload.unbox if read_only else payload.unbox_in_place

    def __reduce__(self) -> tuple[Any, ...]:
        return self._open, (self._box,)


@frozen
class BoxedArgument:
    """Placeholder of a value that was put because it is large."""

    ref: ObjectRef


# Putting -------------------------------------------------------------------------------------------------------------


def put(value: Any) -> ObjectRef:
    return ObjectOwner(current_runtime()).put(value)


put.__doc__ = objects.put.__doc__


def allocate(size_bytes: int) -> memoryview:
    return allocate_now(size_bytes)


allocate.__doc__ = objects.allocate.__doc__


class ObjectOwner:
    """Owner of the objects that code puts: its own job or driver, or the one for which it runs a task.

    Args:
        memory_limit: of the owner's process, such as ``"4GB"``; beyond it objects are spilled to ``storage``. Default 1
            GB.
        storage: a directory, or a URL that fsspec supports. Default: a directory below /tmp, removed at the end. Both
            apply only if nothing has been put there before.
        home: address of another process's store, from its `home`.

    Raises:
        InvalidRequest: ``memory_limit`` is not a valid size.
    """

    def __init__(
        self,
        runtime: Runtime,
        memory_limit: str | int | None = None,
        storage: str | None = None,
        home: Home | None = None,
    ) -> None:
        limit = MEMORY_LIMIT_BYTES if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
        self._runtime, self._settings = runtime, ObjectStoreSettings(limit, storage)
        self._holdings = references_of(runtime)
        self._home = home

    @property
    def home(self) -> Home:
        """Address of the object store."""
        if self._home is None:
            # In the loop, as the store starts its task there.
            self._home = pickling.in_loop(
                portal_of(self._runtime), lambda: object_store_of(self._runtime, self._settings)
            ).home
        return self._home

    def put(self, obj: Any, what: str = "the object") -> ObjectRef:
        """Store a copy of ``obj`` and return a reference to it.

        Waits while other objects are spilled to free memory.

        Raises:
            NotPicklable, MessageTooLarge (over 4 GiB).
            ObjectLost: the job or driver that would own it has ended.
        """
        return self._put(*packed(obj, what))

    def _put(self, pickle: bytes, views: list[memoryview], first: bool) -> ObjectRef:
        store = self._holdings.own_store(self.home)
        if store is None:
            place, token = portal_of(self._runtime).call(self._holdings.deposit, self.home, pickle, views, first)
            return ObjectRef(self._holdings, place, token)
        size = len(pickle) + sum(map(len, views))
        # Room is made before the copy, so that a loop of `put` does not run ahead of the disk. In the loop it must not
        # wait.
        if store.refcounts.next_to_spill(size) is not None and not trio.lowlevel.in_trio_run():
            portal_of(self._runtime).call(store.make_room, size)
        return ObjectRef(self._holdings, self._holdings.put(store, pickle, views, first))

    def carry(self, value: Any, what: str) -> Any:
        """Return a task's result as it is sent back: large values are put, and replaced by a reference."""
        if type(value) in _PLAIN:
            return value
        pickle, views, first = packed(value, what)
        # Results travel through the pool, whose messages are limited; large ones are fetched by those that use them.
        if len(pickle) + sum(map(len, views)) < CARRIED_FROM_BYTES:
            return PickledArgument(pickle, views, first)
        return BoxedArgument(self._put(pickle, views, first))

    async def carry_here(self, value: Any, what: str) -> Any:
        """Return what `carry` does; called in the loop."""
        # Pickling a large result would block the loop of the worker.
        return value if type(value) in _PLAIN else await trio.to_thread.run_sync(self.carry, value, what)

    def stats(self) -> tuple[int, int]:
        """Return the number of objects stored in this process, and the bytes of them that are in memory."""
        return portal_of(self._runtime).run(self._counted)

    def _counted(self) -> tuple[int, int]:
        store = object_store_of(self._runtime, self._settings)
        return len(store.refcounts), store.refcounts.memory_bytes


_PLAIN = frozenset({type(None), bool, int, float})


def release_worker() -> None:
    """Let the worker of the running task start other tasks, because this one is about to wait. Does nothing outside of
    tasks.

    Raises:
        FrayError: 1,000 tasks of this worker wait already.
    """
    current = current_actor_var.get()
    if isinstance(current, TaskRun):
        current.mark_blocked()


def lives_in_loop(cls: type) -> bool:
    """Return whether objects of this class have async methods, and so run in their process's loop."""
    return has_async_methods(cls)


def is_async_function(fn: Any) -> bool:
    """Return whether a call of the function returns a coroutine."""
    return is_async(fn)


_closures = FunctionPickleCache()


def closed_function(fn: Any, what: str) -> bytes:
    """Return the pickled function; pickled once until something it refers to changes. Raises NotPicklable."""
    return _closures.dumps(fn, what)


opened = payload.loads


def is_cancelled() -> bool:
    """Return whether the caller has cancelled the running call or task."""
    current = current_actor_var.get()
    return current is not None and current.cancelled
