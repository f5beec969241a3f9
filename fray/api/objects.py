"""Values that are put once and read by many processes, which share their memory: `put`, `allocate`, references.

An object belongs to the job or driver whose code has put it. It lives as long as a reference to it exists, no longer
than its owner, and no longer than until `ObjectRef.release`. References may be pickled, also inside other objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import trio
from attrs import frozen

from fray.model.ids import mint
from fray.runtime.objects.references import HeldReferences, references_of
from fray.runtime.objects.store import Place, allocate_now, object_store_of, packed
from fray.runtime.runtime import Runtime, current, find, on_next_runtime
from fray.runtime.serialization import pickling


class ObjectRef:
    """Reference to an object that was put: ``await`` it, any number of times, in any process of the cluster.

    ``async with`` releases the object at the end of the block.
    """

    __slots__ = ("__weakref__", "_bound", "_place", "_token")
    _find_runtime: Callable[[], Runtime] = staticmethod(current)

    def __init__(self, holdings: HeldReferences | None, place: Place, token: str = "") -> None:
        self._place = place
        self._bound = holdings
        # Kept for a second pass of the pickler, see `_address`.
        self._token: str | None = None
        if holdings is not None:
            holdings.added(place, token)
        else:
            # Unpickled before any cluster is open, as in a job's payload: the reference counts as held from then on.
            on_next_runtime(_UnresolvedReference(weakref.ref(self), place, token))

    @property
    def _holdings(self) -> HeldReferences:
        """References held by the cluster of the running code; a reference unpickled before the cluster was open is
        bound then.
        """
        if self._bound is None:
            self._find_runtime()
        assert self._bound is not None
        return self._bound

    def __await__(self) -> Generator[Any, Any, Any]:
        """Return the object. Large buffers (arrays, bytes) in it are read-only; processes of one host share them.

        Raises:
            ObjectLost: its owner has ended, or it was released.
        """
        return self._value().__await__()

    async def _value(self) -> Any:
        return pickling.unbox(await self._holdings.read(self._place))

    async def stats(self) -> ObjectStats:
        """Return the size of the object, and who has it. Raises ObjectLost."""
        return ObjectStats(*await self._holdings.stats(self._place))

    async def release(self) -> None:
        """End the object now, although references to it remain; a later read raises `ObjectLost`.

        A process of another host that has a copy, and does not answer within 1 s, may still read it until it does.

        What was read before stays readable where it is.
        """
        await self._holdings.release(self._place)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        # Shielded: also a block that is cancelled frees the memory.
        with trio.move_on_after(RELEASE_WITHIN_S, shield=True):
            await self._holdings.release(self._place)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickle_ref, self._address()

    def _address(self) -> tuple[Place, str]:
        """Return what a pickle of this reference has: the place of the object, and a token while it is in transit."""
        sent = _sent.get()
        if sent is not None:
            # The sender holds what it has sent along until the code has ended, since that may be run again.
            sent.append(self)
        # Not sent, so it must not count as in transit.
        if pickling.passes.compares:
            return self._place, ""
        # The token of the discarded first pickle is used again, or it would count for an hour.
        token, self._token = self._token if pickling.passes.second else None, None
        if token is None:
            token = self._token = self._holdings.sent(self._place)
        return self._place, token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other._place == self._place

    def __hash__(self) -> int:
        return hash(self._place)

    def __del__(self) -> None:
        # `__init__` may have failed before it was set.
        if getattr(self, "_bound", None) is not None:
            self._holdings.removed(self._place)

    def __repr__(self) -> str:
        return f"<ObjectRef {self._place[2]} of {self._place[0]}>"


@frozen
class ObjectStats:
    """Size of an object, and where it is."""

    size_bytes: int
    holders: int
    """Number of processes with a reference to it."""
    copies: int
    """Number of other hosts that have a copy, which their readers share."""
    transfers: int
    """Number of times that it was sent to another host."""


RELEASE_WITHIN_S = 5.0
"""Time limit of the release at the end of an ``async with``."""


def unpickle_ref(place: Place, token: str) -> ObjectRef:
    """Return a reference that has arrived."""
    runtime = find()
    return ObjectRef(None if runtime is None else references_of(runtime), place, token)


@frozen
class _UnresolvedReference:
    """Called with the first runtime, for a reference that was unpickled before any cluster was open."""

    ref: weakref.ref[ObjectRef]
    place: Place
    token: str

    def __call__(self, runtime: Runtime) -> None:
        ref, holdings = self.ref(), references_of(runtime)
        holdings.added(self.place, self.token)
        if ref is None:
            holdings.removed(self.place)  # it has been dropped already
        else:
            ref._bound = holdings


_sent: ContextVar[list[Any] | None] = ContextVar("fray_sent_refs", default=None)


@contextmanager
def sending() -> Iterator[list[Any]]:
    """Collect the references that this thread pickles in the ``with`` block."""
    refs: list[Any] = []
    token = _sent.set(refs)
    try:
        yield refs
    finally:
        _sent.reset(token)
        around = _sent.get()
        if around is not None:
            # Blocks may be nested, when an argument is pickled inside of another one.
            around.extend(refs)


async def put(value: Any) -> ObjectRef:
    """Store a copy of ``value`` in this job or driver and return a reference to it, which any process may await.

    A buffer of `allocate`, or an array over all of it, becomes the object without a copy: do not write to it any more.
    Waits while other objects are spilled to storage (beyond 1 GB).

    Raises:
        NotPicklable, MessageTooLarge (over 4 GiB).
        FrayError: neither in `open_cluster` nor in a job.
    """
    runtime = current()
    store, token = object_store_of(runtime), mint(runtime.rng)
    number = await store.deposit(*packed(value, "the object"), token)
    return ObjectRef(references_of(runtime), (*store.home, number), token)


async def allocate(size_bytes: int) -> memoryview:
    """Return writable shared memory of this host, to be filled and then `put` without a copy.

    The memory is free again when nothing refers to it any more.

    Raises:
        InvalidRequest: the size is not positive.
        MemoryError: no shared memory of this size is free.
    """
    return await trio.to_thread.run_sync(allocate_now, size_bytes)
