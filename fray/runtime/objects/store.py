"""Object store of one owner process: stores objects, serves them to other processes, drops them with their last holder.

The owner is the job or driver whose code has put the objects; they end with it, and later fetches raise `ObjectLost`.
Large buffers lie in segments (`fray.net.buffers.shared_memory`): any number of processes of the host map them
read-only and copy nothing. Objects above the memory limit are written to storage and read from there at each fetch.
Reference counting is in `fray.runtime.objects.refcount`; the holders' side in `fray.runtime.objects.references`.

`store` and `find` may be called on any thread, everything else in the loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

import trio
from attrs import define, frozen

from fray.errors import FrayError, InvalidRequest, ObjectLost
from fray.model.ids import ActorId
from fray.model.messages.client import Names
from fray.model.messages.large_values import check_size
from fray.model.service_key import ServiceKey
from fray.net import storage
from fray.net.buffers import segment_directories, shared_memory
from fray.net.buffers.shared_memory import SEGMENT_FROM_BYTES, Snapshot
from fray.runtime.calls.futures import CallFuture
from fray.runtime.current_call import current_actor_var
from fray.runtime.objects.exports import call_export, exports_of, wait_settled
from fray.runtime.objects.refcount import ReferenceCounts
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PickledObject, copy_to_heap, is_large

log = logging.getLogger("fray.objects")

# Segments are RAM of the whole machine (/dev/shm), which other processes need as well.
MEMORY_LIMIT_BYTES = 1024**3
"""Total size of the objects that one process holds in memory; above it, they are spilled to storage."""
# Each process makes a locked directory below it. The lock is free once its owner is dead, so that a sweep can tell
# which directories are left over.
SPILL_DIRECTORIES = ("/tmp",)
SHARE_WITHIN_S = 0.05
"""Seconds a fetch waits to learn whether the caller can map shared memory; after that a large object goes as chunks."""
DROPPED_WITHIN_S = 1.0
"""Longest wait at the end of an object until processes of other hosts have dropped their copies."""
REMOVE_S = 5.0
"""Time limit, at the end, for removing the objects that are left in the user's storage."""
EXPIRE_EVERY_S = 60.0
"""Seconds between two searches for references that never arrived."""
_LENGTH = struct.Struct("<Q")

Home: TypeAlias = tuple[ActorId, int]
"""Address of a store: the exports of its process, and its number there."""
Place: TypeAlias = tuple[ActorId, int, int]
"""Address of an object: its home, and its number there."""
Piece: TypeAlias = "Snapshot | memoryview"
ReferenceUpdate: TypeAlias = tuple[str, int, str]
"""HOLD, RELEASE, IN_TRANSIT or ARRIVED; the number of the object; the token (empty for the first two)."""
HOLD, RELEASE, IN_TRANSIT, ARRIVED = "hold", "release", "in transit", "arrived"


@frozen(eq=False)
class StoredObject:
    """One object in memory: its pickle, and its out-of-band buffers."""

    pickle: bytes
    buffers: tuple[Piece, ...]
    pickled_first: bool

    @property
    def size(self) -> int:
        """Return the bytes of the pickle and all buffers."""
        return len(self.pickle) + sum(len(buffer_view(piece)) for piece in self.buffers)

    def boxed(self, wrap: Callable[[pickling.Boxed], Any] = lambda box: box) -> PickledObject:
        """Return the object as it is sent to another process; see `pickling.box_object`."""
        views = [buffer_view(piece) for piece in self.buffers]
        return pickling.box_object(self.pickle, views, self.buffers, self.pickled_first, wrap)

    def box(self) -> pickling.Boxed:
        """Return the object for `pickling.unbox` in this process, which then shares these buffers."""
        return self.pickle, [buffer_view(piece) for piece in self.buffers], self.pickled_first


@frozen
class CopyAt:
    """Answer to a reader: a process of its host has the object, at this address of its `HostCopies`."""

    home: Home


@frozen(eq=False)
class CopyToKeep:
    """Answer to a reader that is the first of its host: it shall keep the object for the others."""

    box: pickling.Boxed


@frozen(eq=False)
class Spilled:
    """One object in storage."""

    location: str
    pickled_first: bool

    def read(self) -> StoredObject:
        """Read the object. Blocks. Raises ObjectLost."""
        try:
            data = memoryview(_read(self.location))
        except Exception as error:  # storages raise any exception
            raise ObjectLost(f"an object that was spilled to {self.location} cannot be read: {error!r}") from error
        pieces: list[memoryview] = []
        at = 0
        while at < len(data):
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            pieces.append(data[at : at + size])
            at += size
        return StoredObject(bytes(pieces[0]), tuple(pieces[1:]), self.pickled_first)


def buffer_view(piece: Piece) -> memoryview:
    return piece.view if isinstance(piece, Snapshot) else piece


@define
class ObjectStoreSettings:
    """Limits of one store.

    ``storage`` is a directory or an fsspec URL; default: a private directory, removed at exit.
    """

    limit_bytes: int = MEMORY_LIMIT_BYTES
    storage: str | None = None


class ObjectStore:
    """Store of the objects of one owner."""

    def __init__(self, runtime: Runtime, settings: ObjectStoreSettings) -> None:
        self.refcounts = ReferenceCounts(settings.limit_bytes)
        self._runtime = runtime
        self._storage = settings.storage
        self._directory: str | None = None
        self._directory_lock = -1
        self._stored: set[str] = set()
        """Locations in the user's storage that are written, being written, or being removed."""
        self._records: dict[int, StoredObject | Spilled] = {}
        self._numbers = count(1)
        # One spill at a time: two would choose the same object.
        self._spilling = trio.Lock()
        self._ended = False
        exports = exports_of(runtime)
        # The store is reached through the exports, whose registration also proves that this process lives.
        self.home: Home = (exports.actor_id, exports.export_object(self))
        runtime.nursery.start_soon(self._live)

    def __repr__(self) -> str:
        return f"<ObjectStore: {len(self.refcounts)} objects, {self.refcounts.memory_bytes} bytes in memory>"

    async def _live(self) -> None:
        try:
            while True:
                # Two periods in one task: idle segments are returned to the system often, lost references searched for
                # rarely.
                for _ in range(round(EXPIRE_EVERY_S / shared_memory.IDLE_S)):
                    await trio.sleep(shared_memory.IDLE_S)
                    if (pool := shared_memory.known_pool()) is not None:
                        pool.trim()
                self._remove_records(self.refcounts.expire(trio.current_time()))
        finally:
            self._ended = True
            # Segments are given back to the pool; readers in other processes keep their mappings.
            self._records.clear()
            if self._stored:
                await self._remove_stored()
            if self._directory is not None:
                # The lock is released last: until then another process takes the directory for one in use.
                shutil.rmtree(self._directory, ignore_errors=True)
                os.close(self._directory_lock)

    # Storing ---------------------------------------------------------------------------------------------------------

    def store(self, pickle: bytes, views: Sequence[memoryview], first: bool) -> tuple[int, int]:
        """Store copies of what `packed` returned; return (number, size in bytes). `add` then counts it. Any thread."""
        # A copy: what `put` returned is immutable, while the author may change the array.
        record = StoredObject(pickle, tuple(copy_buffer(view) for view in views), first)
        number, size = next(self._numbers), len(pickle) + sum(map(len, views))
        self._records[number] = record
        return number, size

    def add(self, number: int, size: int) -> None:
        self.refcounts.add(number, size)
        if self.refcounts.next_to_spill() is not None and not self._ended:
            # Not awaited: `put` does not wait for the disk, so the limit may be exceeded for a moment.
            self._runtime.nursery.start_soon(self.make_room)

    async def deposit(self, pickle: bytes, buffers: Sequence[Any], first: bool, token: str) -> int:
        """Store an object of another process; the reference that is returned to that process counts as in transit."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size = len(pickle) + sum(map(len, views))
        # A deposit comes from another process, which can be made to wait.
        await self.make_room(size)
        pieces = [await copy_buffer_in_loop(view) for view in views]
        number = next(self._numbers)
        self._records[number] = StoredObject(pickle, tuple(pieces), first)
        self.add(number, size)
        # Without it the object would have no holder until the depositor's HOLD arrives.
        self.refcounts.add_token(number, token, trio.current_time())
        return number

    # Fetching --------------------------------------------------------------------------------------------------------

    def find(self, number: int) -> StoredObject | Spilled:
        """Return the object or its place in storage. Any thread. Raises ObjectLost."""
        record = self._records.get(number)
        if record is None:
            raise ObjectLost("object no longer exists: it or all its references were released, or its owner ended")
        # The order of use belongs to the loop, and this may be any thread.
        self._runtime.token.run_sync_soon(self.refcounts.touch, number)
        return record

    async def fetch(self, number: int) -> PickledObject:
        """Return the object, for `pickling.unbox` in the process that calls. Raises ObjectLost."""
        boxed = (await self._loaded(number)).boxed()
        await wait_to_share(boxed)
        return boxed

    async def fetch_for_host(
        self, number: int, host: str, reader: str, home: Home, failed: Home | None = None
    ) -> PickledObject | CopyAt:
        """Return the object as `fetch`, but a large one only once for each other host.

        Args:
            host: of the caller, as `segment_directories.host_key` names it.
            reader: process that calls, as it is named as a holder.
            home: address of the caller's `HostCopies`.
            failed: address at which the caller has not found a copy.

        Returns:
            The object, as `CopyToKeep` if the caller shall keep it for its host; or `CopyAt`.

        Raises:
            ObjectLost: it no longer exists.
        """
        record = await self._loaded(number)
        if not host or host == segment_directories.host_key() or not is_large(record.boxed()):
            return await self.fetch(number)
        known = self.refcounts.copy_on(number, host)
        if known is not None and known != failed:
            return CopyAt(known)
        self.refcounts.add_copy(number, host, reader, home)
        return record.boxed(CopyToKeep)

    async def stats(self, number: int) -> tuple[int, int, int, int]:
        """Return the size in bytes, the holders, the hosts with a copy, and how often it was sent to other hosts.

        Raises ObjectLost.
        """
        self.find(number)
        entry = self.refcounts.entries[number]
        return entry.size, len(entry.holders), len(entry.copies), entry.transfers

    async def _loaded(self, number: int) -> StoredObject:
        record = self.find(number)
        # Storage may be slow or remote; the loop must not wait for it.
        return await trio.to_thread.run_sync(record.read) if isinstance(record, Spilled) else record

    async def read(self, number: int) -> pickling.Boxed:
        """Return an object to code of this process. Raises ObjectLost."""
        return (await self._loaded(number)).box()

    # Holders ---------------------------------------------------------------------------------------------------------

    async def update(self, holder: str, updates: Sequence[ReferenceUpdate]) -> None:
        """Apply the updates of a process that holds objects, in order. Called by that process."""
        self.apply_updates(holder, updates)

    def apply_updates(self, holder: str, updates: Sequence[ReferenceUpdate]) -> None:
        """Apply the updates of ``holder``, in order."""
        counts = self.refcounts
        for kind, number, token in updates:
            # HOLD of an object that is gone is ignored: its holder finds out when it fetches.
            if kind == HOLD:
                counts.hold(number, holder)
            elif kind == RELEASE:
                self._remove_records(counts.release(number, holder))
            elif kind == IN_TRANSIT:
                counts.add_token(number, token, trio.current_time())
            else:
                self._remove_records(counts.remove_token(number, token))

    async def end_object(self, number: int) -> None:
        """End an object, although references remain; wait until processes of other hosts have dropped their copies."""
        drops = self._remove_records(self.refcounts.end(number))
        # One that is frozen must not hold up the caller, and the call must reach it nevertheless.
        with trio.move_on_after(DROPPED_WITHIN_S):
            for drop in drops:
                await wait_settled(drop)

    async def watch_holder(self, holder: str, exports: str) -> None:
        """Wait for the end of the process ``holder``, which calls this, then remove it from all its objects.

        The registry notices that end first, since the holder's ``exports`` are registered there as long as it lives;
        a lost connection cancels this call later.
        """
        gone, seen = trio.Event(), False

        def on_names(names: Names, blobs: Sequence[Any]) -> None:
            nonlocal seen
            # The holder registers its exports at about the same time, so "not there" means nothing before it was seen
            # once.
            if names.endpoints:
                seen = True
            elif seen:
                gone.set()

        unwatch = self._runtime.client.names.watch(f"actor:{exports}", on_names)
        try:
            await gone.wait()
        finally:
            # Also on cancellation, which comes when the connection of the holder is given up.
            unwatch()
            self._remove_records(self.refcounts.remove_holder(holder))

    def _remove_records(self, numbers: Sequence[int]) -> list[CallFuture]:
        """Remove objects; return the calls by which processes of other hosts drop their copies."""
        for number in numbers:
            record = self._records.pop(number, None)
            # At the end the directory is removed as a whole, and so is what lies in a user's storage.
            if isinstance(record, Spilled) and not self._ended:
                self._runtime.nursery.start_soon(self._remove, record.location)
        copies, self.refcounts.ended_copies = self.refcounts.ended_copies, []
        drops = []
        for home, number in copies:
            # If the cluster has ended, so has that process.
            with contextlib.suppress(FrayError):
                drops.append(call_export(self._runtime, home[0], "use", home[1], "drop", [(*self.home, number)]))
        return drops

    # Storage ---------------------------------------------------------------------------------------------------------

    async def make_room(self, more_bytes: int = 0) -> None:
        """Spill objects to storage until ``more_bytes`` fit into memory, or nothing is left to spill."""
        async with self._spilling:
            # Looked up again after each write, during which objects may be released, added or used.
            while not self._ended and (number := self.refcounts.next_to_spill(more_bytes)) is not None:
                record = self._records[number]
                assert isinstance(record, StoredObject)
                location = self._location(number)
                if self._storage is not None:
                    self._stored.add(location)
                await trio.to_thread.run_sync(_write, location, record)
                if number in self._records:
                    # Only after the file is complete; until then readers use the copy in memory.
                    self._records[number] = Spilled(location, record.pickled_first)
                    self.refcounts.mark_spilled(number)
                else:
                    await self._remove(location)  # its last reference was released meanwhile

    async def _remove(self, location: str) -> None:
        try:
            if "://" in location:
                await storage.delete(location)
            else:
                os.unlink(location)
        except FileNotFoundError:
            pass  # its write was cancelled before it began
        except Exception as error:  # noqa: BLE001 - storages raise any exception, and no task waits for this
            log.warning("could not remove %s: %r", location, error)
        self._stored.discard(location)

    async def _remove_stored(self) -> None:
        """Remove the objects in the user's storage, as far as that is done within `REMOVE_S`."""
        # Shielded: this process is ending. With the lock, so that the last write has ended.
        with trio.move_on_after(REMOVE_S, shield=True):
            async with self._spilling, trio.open_nursery() as nursery:
                for location in list(self._stored):
                    nursery.start_soon(self._remove, location)
        if self._stored:
            log.warning("%d objects stay in %s: removing them takes too long", len(self._stored), self._storage)

    def _location(self, number: int) -> str:
        if self._storage is not None:
            return f"{self._storage.rstrip('/')}/{self._runtime.session}/{number}.object"
        if self._directory is None:
            self._directory, self._directory_lock = segment_directories.make(SPILL_DIRECTORIES)
        return f"{self._directory}/{number}"


def allocate_now(size_bytes: int) -> memoryview:
    """Return writable shared memory of this host, which an object takes over without a copy. May take milliseconds.

    Raises:
        InvalidRequest: the size is not positive.
        MemoryError: no shared memory of this size is free.
    """
    if size_bytes < 1:
        raise InvalidRequest(f"allocate({size_bytes!r}): write a size in bytes that is at least 1")
    pool = shared_memory.pool()
    view = None if pool is None else pool.allocate(size_bytes)
    if view is None:
        limit = "0 bytes" if pool is None else f"{pool.limit_bytes:,} bytes, {pool.held_bytes:,} in use"
        raise MemoryError(
            f"allocate({size_bytes:,}): no shared memory of this size is free here (limit of this process: {limit}). "
            "Release objects, raise FRAY_SEGMENT_POOL_BYTES, or give the host a larger /dev/shm"
        )
    return view


def packed(obj: Any, what: str) -> tuple[bytes, list[memoryview], bool]:
    """Return (pickle, views of its out-of-band buffers, pickled_first). Raises NotPicklable, MessageTooLarge."""
    if type(obj) is memoryview:
        obj = pickling.PickleBuffer(obj)  # a memoryview cannot be pickled; it arrives as one
    pickled = pickling.pack(obj, what)
    if isinstance(pickled, bytes):
        return pickled, [], False
    check_size(pickled.bulk_bytes, what)
    views = [source for source in pickled.sources if isinstance(source, memoryview)]
    return pickled.pickle, views, pickled.pickled_first


def copy_buffer(view: memoryview) -> Piece:
    """Return a copy, in a segment if it is large enough and the pool has room; an allocated buffer is not copied."""
    if (sealed := shared_memory.seal(view)) is not None:
        return sealed
    pool = shared_memory.pool() if len(view) >= SEGMENT_FROM_BYTES else None
    snapshot = pool.store(view) if pool is not None else None
    return copy_to_heap(view) if snapshot is None else snapshot


async def copy_buffer_in_loop(view: memoryview) -> Piece:
    """Copy as `copy_buffer`, with checkpoints in between so that other tasks run."""
    if (sealed := shared_memory.seal(view)) is not None:
        return sealed
    pool = shared_memory.pool() if len(view) >= SEGMENT_FROM_BYTES else None
    for snapshot in pool.store_in_steps(view) if pool is not None else ():
        # The generator yields None between steps, and at last the snapshot, if the pool has room.
        if snapshot is not None:
            return snapshot
        await trio.lowlevel.checkpoint()
    return copy_to_heap(view)


def _write(location: str, record: StoredObject) -> None:
    pieces: list[bytes | memoryview] = []
    for piece in (memoryview(record.pickle), *map(buffer_view, record.buffers)):
        pieces += [_LENGTH.pack(len(piece)), piece]
    if "://" in location:
        storage.write_parts_now(location, pieces)
        return
    os.makedirs(os.path.dirname(location), exist_ok=True)
    # Exclusive: a number is never reused, so an existing file would be of another process.
    with open(location, "xb", opener=segment_directories.private) as file:
        file.writelines(pieces)


def _read(location: str) -> bytes:
    if "://" in location:
        return storage.read_now(location)
    with open(location, "rb") as file:
        return file.read()


async def wait_to_share(boxed: PickledObject) -> None:
    """Wait briefly, for a large object, until the calling process has answered whether it can map this one's segments.

    Only the first large object of a connection waits, so that it is not a gigabyte through a socket.
    """
    if not is_large(boxed):
        return
    transfer = getattr(getattr(current_actor_var.get(), "origin", None), "buffer_transfer", None)
    with trio.move_on_after(SHARE_WITHIN_S):
        while transfer is not None and transfer.must_wait():  # noqa: ASYNC110 (its one listener is the peer)
            await trio.sleep(SHARE_WITHIN_S / 50)


OBJECT_STORE: ServiceKey[ObjectStore] = ServiceKey("object store")


def object_store_of(runtime: Runtime, settings: ObjectStoreSettings | None = None) -> ObjectStore:
    """Return the object store of a runtime; the first call makes it, with its ``settings``."""
    return runtime.services.get_or_make(OBJECT_STORE, lambda: ObjectStore(runtime, settings or ObjectStoreSettings()))
