"""Objects that are put once and read by many: references to them, for sync code. Part of the bridge.

An object belongs to the job or driver whose code has put it, lives as long as anybody has a reference, and no longer
than its owner. References may be pickled, also inside other objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import trio
from attrs import frozen

from fray.blocking.bridge import pickling
from fray.blocking.bridge.background_loop import current_runtime, portal_of, runtime_here
from fray.blocking.bridge.portal import refuse_in_loop
from fray.model.resources import parse_bytes
from fray.runtime.actors.methods import has_async_methods
from fray.runtime.current_call import current_actor_var
from fray.runtime.objects.references import HeldReferences, Place, references_of
from fray.runtime.objects.store import (
    MEMORY_LIMIT_BYTES,
    Home,
    ObjectStoreSettings,
    Spilled,
    StoredObject,
    object_store_of,
    packed,
)
from fray.runtime.process.attempt import is_async
from fray.runtime.runtime import Runtime, on_next_runtime
from fray.runtime.serialization import pickling as payload
from fray.runtime.serialization.function_cache import FunctionPickleCache
from fray.runtime.tasks.task_run import TaskRun

CARRIED_FROM_BYTES = 1024 * 1024
"""Results of tasks from this size on go where objects are put, and not through the pool."""
SENT_ALONG_BYTES = 32 * 1024
"""An object up to this size that is an argument goes with the message: that costs less than asking for it."""


class ObjectRef:
    """A reference to an object that was put. Any thread may `get` it, any number of times."""

    __slots__ = ("__weakref__", "_bound", "_place", "_token")

    def __init__(self, holdings: HeldReferences | None, place: Place, token: str = "") -> None:
        self._place = place
        self._bound = holdings
        self._token: str | None = None
        if holdings is not None:
            holdings.added(place, token)
        else:
            on_next_runtime(_UnresolvedReference(weakref.ref(self), place, token))

    @property
    def _holdings(self) -> HeldReferences:
        """Of the cluster of the running code. A reference that came before that was there is told when it is."""
        if self._bound is None:
            current_runtime()
        assert self._bound is not None
        return self._bound

    def get(self, timeout: float | None = None) -> Any:
        """The object. Large buffers (arrays) in it are read-only: on the owner's host they are the owner's own memory.

        Args:
            timeout: seconds; after them TimeoutError. Default: no end.

        Raises:
            ObjectLost: its owner has ended.
            TimeoutError: the built-in one.
        """
        return payload.unbox(self._box(timeout))

    result = get

    def _box(self, timeout: float | None) -> payload.Boxed:
        holdings = self._holdings
        store = holdings.own_store(self._place[:2])
        if store is not None:
            record = store.find(self._place[2])
            if isinstance(record, Spilled):
                refuse_in_loop("this object is in storage: reading it waits")
                record = record.read()
            return record.box()
        late = f"{self!r} has not come"
        return portal_of(holdings.runtime).call_within(timeout, late, holdings.fetch, self._place)

    def done(self) -> bool:
        """It is there."""
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` at once."""
        callback(self)

    def __reduce__(self) -> tuple[Any, ...]:
        sent = _sent.get()
        if sent is not None:
            sent.append(self)
        if payload.passes.compares:
            return _arrived, (self._place, "")
        token, self._token = self._token if payload.passes.second else None, None
        if token is None:
            token = self._token = self._holdings.sent(self._place)
        return _arrived, (self._place, token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other._place == self._place

    def __hash__(self) -> int:
        return hash(self._place)

    def __del__(self) -> None:
        if getattr(self, "_bound", None) is not None:
            self._holdings.removed(self._place)

    def __repr__(self) -> str:
        return f"<ObjectRef {self._place[2]} of {self._place[0]}>"


def _arrived(place: Place, token: str) -> ObjectRef:
    runtime = runtime_here()
    return ObjectRef(None if runtime is None else references_of(runtime), place, token)


@frozen
class _UnresolvedReference:
    """What a reference waits for that was unpickled before the cluster was there."""

    ref: weakref.ref[ObjectRef]
    place: Place
    token: str

    def __call__(self, runtime: Runtime) -> None:
        ref, holdings = self.ref(), references_of(runtime)
        holdings.added(self.place, self.token)
        if ref is None:
            holdings.removed(self.place)  # it has come and gone
        else:
            ref._bound = holdings


# Those that travel ---------------------------------------------------------------------------------------------------

_sent: ContextVar[list[ObjectRef] | None] = ContextVar("fray_sent_refs", default=None)


@contextmanager
def sending() -> Iterator[list[ObjectRef]]:
    """Which references are pickled in this ``with``, by this thread."""
    refs: list[ObjectRef] = []
    token = _sent.set(refs)
    try:
        yield refs
    finally:
        _sent.reset(token)
        around = _sent.get()
        if around is not None:
            around.extend(refs)


def argument(of: Any) -> Any:
    """A reference or future as an argument that arrives as its value; a small object of this process goes along."""
    if isinstance(of, ObjectRef) and of._bound is not None:
        store = of._bound.own_store(of._place[:2])
        record = None if store is None else store.find(of._place[2])
        if isinstance(record, StoredObject) and record.size <= SENT_ALONG_BYTES:
            pickle, views, first = record.box()
            return PickledArgument(pickle, [memoryview(view) for view in views], first, read_only=True)
    return DereferencedArgument(of)


class DereferencedArgument:
    """Something that arrives as the value it stands for."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __reduce__(self) -> tuple[Any, ...]:
        return _value_of, (self._of,)


def _value_of(of: Any) -> Any:
    if trio.lowlevel.in_trio_run() or runtime_here() is None:
        return payload.DeferredConstruction(of.result)
    if not of.done():
        step_aside()
    return of.result()


class PickledArgument:
    """A value that has been pickled already, and arrives as what it is."""

    __slots__ = ("_box", "_open")

    def __init__(self, pickle: bytes, views: Sequence[memoryview], first: bool, *, read_only: bool = False) -> None:
        self._box = pickle, [payload.PickleBuffer(view) for view in views], first
        self._open = payload.unbox if read_only else payload.unbox_in_place

    def __reduce__(self) -> tuple[Any, ...]:
        return self._open, (self._box,)


@frozen
class BoxedArgument:
    """Stands for a value that was put because it is large."""

    ref: ObjectRef


# Putting -------------------------------------------------------------------------------------------------------------


class ObjectOwner:
    """Where code puts its objects: with its own job or driver, or with the one it works for.

    Args:
        memory_limit: of the owner's process, such as ``"4GB"``; beyond, objects lie in ``storage``. Default 1 GB.
        storage: a directory, or an address that fsspec knows. Default: a directory of its own below /tmp, removed at
            the end. Both count only if nothing has been put there before.
        home: another process's place, as `home` of it says.

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
        """Where it is."""
        if self._home is None:
            self._home = pickling.in_loop(
                portal_of(self._runtime), lambda: object_store_of(self._runtime, self._settings)
            ).home
        return self._home

    def put(self, obj: Any, what: str = "the object") -> ObjectRef:
        """Keep a copy of ``obj`` and return a reference to it.

        It waits while other objects are written to storage for want of memory.

        Raises:
            NotPicklable, MessageTooLarge (over 4 GiB).
            ObjectLost: the job or driver that would own it is gone.
        """
        return self._put(*packed(obj, what))

    def _put(self, pickle: bytes, views: list[memoryview], first: bool) -> ObjectRef:
        store = self._holdings.own_store(self.home)
        if store is None:
            place, token = portal_of(self._runtime).call(self._holdings.deposit, self.home, pickle, views, first)
            return ObjectRef(self._holdings, place, token)
        size = len(pickle) + sum(map(len, views))
        if store.refcounts.next_to_spill(size) is not None and not trio.lowlevel.in_trio_run():
            portal_of(self._runtime).call(store.make_room, size)
        return ObjectRef(self._holdings, self._holdings.put(store, pickle, views, first))

    def carry(self, value: Any, what: str) -> Any:
        """A task's value on its way back: what is large is put, and a reference goes."""
        if type(value) in _PLAIN:
            return value
        pickle, views, first = packed(value, what)
        if len(pickle) + sum(map(len, views)) < CARRIED_FROM_BYTES:
            return PickledArgument(pickle, views, first)
        return BoxedArgument(self._put(pickle, views, first))

    async def carry_here(self, value: Any, what: str) -> Any:
        """The same in the loop."""
        return value if type(value) in _PLAIN else await trio.to_thread.run_sync(self.carry, value, what)

    def stats(self) -> tuple[int, int]:
        """How many objects are kept in this process, and how many of their bytes are in memory."""
        return portal_of(self._runtime).run(self._counted)

    def _counted(self) -> tuple[int, int]:
        store = object_store_of(self._runtime, self._settings)
        return len(store.refcounts), store.refcounts.memory_bytes


_PLAIN = frozenset({type(None), bool, int, float})


def step_aside() -> None:
    """The running code is about to wait: if it is a task of a pool, its worker takes others beside it.

    Raises:
        FrayError: 1,000 tasks of this worker wait already.
    """
    inside = current_actor_var.get()
    if isinstance(inside, TaskRun):
        inside.mark_blocked()


def lives_in_loop(cls: type) -> bool:
    """Whether objects of this class have async methods, and so live in their process's loop."""
    return has_async_methods(cls)


def is_async_function(fn: Any) -> bool:
    """Whether calling it gives a coroutine."""
    return is_async(fn)


_closures = FunctionPickleCache()


def closed_function(fn: Any, what: str) -> bytes:
    """A function, pickled; as long as nothing changes that it carries, once. Raises NotPicklable."""
    return _closures.dumps(fn, what)


opened = payload.loads


def is_told_to_stop() -> bool:
    """Whoever wanted what the running code does, wants it no more."""
    inside = current_actor_var.get()
    return inside is not None and inside.cancelled
