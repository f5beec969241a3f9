"""Objects that were put: kept by the process that owns them, lent to whoever asks, gone with their last holder.

The owner is the job or driver whose code has put them; when it ends they are gone, and who asks then is told so. Large
buffers lie in segments (`fray.net.buffers.shared_memory`), so that processes of the host map them and copy nothing;
what memory has
no room for is written to storage. Who holds what is the law of `fray.runtime.objects.refcount`; the holders' side is
`fray.runtime.objects.references`.

`keep` and `find` may be called on any thread. All else happens in the loop.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
from collections.abc import Sequence
from itertools import count
from typing import Any, TypeAlias

import trio
from attrs import define, frozen

from fray.errors import ObjectLost
from fray.model.ids import ActorId
from fray.model.messages.client import Names
from fray.model.service_key import ServiceKey
from fray.net import storage
from fray.net.buffers import segment_directories, shared_memory
from fray.net.buffers.chunks import check_transfer
from fray.net.buffers.shared_memory import SEGMENT_FROM_BYTES, Snapshot
from fray.runtime.current_call import current_actor_var
from fray.runtime.objects.exports import exports_of
from fray.runtime.objects.refcount import ReferenceCounts
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PickledObject, is_large

log = logging.getLogger("fray.objects")

MEMORY_LIMIT_BYTES = 1024**3
"""Of the objects that one process keeps in memory; beyond, they are in storage."""
SPILL_ROOMS = ("/tmp",)
SHARE_WITHIN_S = 0.05
"""Else a large object goes as chunks."""
LOOK_EVERY_S = 60.0
"""How often references that never arrive are looked for."""
_LENGTH = struct.Struct("<Q")

Home: TypeAlias = tuple[ActorId, int]
"""Where a store is: the shelf of its process, and its number there."""
Piece: TypeAlias = "Snapshot | memoryview"
ReferenceUpdate: TypeAlias = tuple[str, int, str]
"""HOLD, LET_GO, TRAVELS or ARRIVED; the object; the token of the last two."""
HOLD, LET_GO, TRAVELS, ARRIVED = "hold", "let go", "travels", "arrived"


@frozen(eq=False)
class StoredObject:
    """One object as it lies here: its pickle, and the buffers that stayed outside."""

    pickle: bytes
    buffers: tuple[Piece, ...]
    pickled_first: bool

    @property
    def size(self) -> int:
        """Bytes of all."""
        return len(self.pickle) + sum(len(buffer_view(piece)) for piece in self.buffers)

    def boxed(self) -> PickledObject:
        """On its way to somebody; see `payload.boxed`."""
        return pickling.box_object(
            self.pickle, [buffer_view(piece) for piece in self.buffers], self.buffers, self.pickled_first
        )

    def box(self) -> pickling.Boxed:
        """For `payload.unboxed` here: its buffers are these very ones."""
        return self.pickle, [buffer_view(piece) for piece in self.buffers], self.pickled_first


@frozen(eq=False)
class Spilled:
    """One object that is in storage."""

    location: str
    pickled_first: bool

    def read(self) -> StoredObject:
        """Blocks. Raises ObjectLost: it cannot be read."""
        try:
            data = memoryview(_read(self.location))
        except Exception as error:  # storages raise what they like
            raise ObjectLost(f"an object that was written to {self.location} cannot be read: {error!r}") from error
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
    """``storage``: a directory, or an address that fsspec knows. Default: one of its own, removed at the end."""

    limit_bytes: int = MEMORY_LIMIT_BYTES
    storage: str | None = None


class ObjectStore:
    """The objects of one owner."""

    def __init__(self, runtime: Runtime, settings: ObjectStoreSettings) -> None:
        self.refcounts = ReferenceCounts(settings.limit_bytes)
        self._runtime = runtime
        self._storage = settings.storage
        self._directory: str | None = None
        self._directory_lock = -1
        self._records: dict[int, StoredObject | Spilled] = {}
        self._numbers = count(1)
        self._spilling = trio.Lock()
        self._ended = False
        shelf = exports_of(runtime)
        self.home: Home = (shelf.actor_id, shelf.export_object(self))
        runtime.nursery.start_soon(self._live)

    def __repr__(self) -> str:
        return f"<ObjectStore: {len(self.refcounts)} objects, {self.refcounts.memory_bytes} bytes in memory>"

    async def _live(self) -> None:
        try:
            while True:
                for _ in range(round(LOOK_EVERY_S / shared_memory.IDLE_S)):
                    await trio.sleep(shared_memory.IDLE_S)
                    if (pool := shared_memory.known_pool()) is not None:
                        pool.trim()
                self._forget(self.refcounts.expire(trio.current_time()))
        finally:
            self._ended = True
            self._records.clear()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                os.close(self._directory_lock)

    # Putting ---------------------------------------------------------------------------------------------------------

    def store(self, pickle: bytes, views: Sequence[memoryview], first: bool) -> tuple[int, int]:
        """On any thread: keep copies of what `packed` gave; number and size. It is entered in the books by `add`."""
        record = StoredObject(pickle, tuple(kept(view) for view in views), first)
        number, size = next(self._numbers), len(pickle) + sum(map(len, views))
        self._records[number] = record
        return number, size

    def add(self, number: int, size: int) -> None:
        self.refcounts.add(number, size)
        if self.refcounts.next_to_spill() is not None and not self._ended:
            self._runtime.nursery.start_soon(self.make_room)

    async def deposit(self, pickle: bytes, buffers: Sequence[Any], first: bool, token: str) -> int:
        """Another process puts an object here; a reference to it is on its way to that process."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size = len(pickle) + sum(map(len, views))
        await self.make_room(size)
        pieces = [await _kept(view) for view in views]
        number = next(self._numbers)
        self._records[number] = StoredObject(pickle, tuple(pieces), first)
        self.add(number, size)
        self.refcounts.add_token(number, token, trio.current_time())
        return number

    # Asking ----------------------------------------------------------------------------------------------------------

    def find(self, number: int) -> StoredObject | Spilled:
        """On any thread: where it is. Raises ObjectLost."""
        record = self._records.get(number)
        if record is None:
            raise ObjectLost("this object is gone: nobody held it any more, or its owner has ended")
        self._runtime.token.run_sync_soon(self.refcounts.touch, number)
        return record

    async def fetch(self, number: int) -> PickledObject:
        """The object, for `payload.unboxed` at whoever asks. Raises ObjectLost."""
        record = self.find(number)
        if isinstance(record, Spilled):
            record = await trio.to_thread.run_sync(record.read)
        parcel = record.boxed()
        if is_large(parcel):
            await _share()
        return parcel

    # Holders ---------------------------------------------------------------------------------------------------------

    async def update(self, holder: str, told: Sequence[ReferenceUpdate]) -> None:
        """What a process that holds objects says of them, in order."""
        self.apply_updates(holder, told)

    def apply_updates(self, holder: str, told: Sequence[ReferenceUpdate]) -> None:
        """As `tell`."""
        books = self.refcounts
        for what, number, token in told:
            if what == HOLD:
                books.hold(number, holder)
            elif what == LET_GO:
                self._forget(books.release(number, holder))
            elif what == TRAVELS:
                books.add_token(number, token, trio.current_time())
            else:
                self._forget(books.remove_token(number, token))

    async def watch_holder(self, holder: str, shelf: str) -> None:
        """Open as long as that process lives: then it holds nothing any more.

        The registry hears of its end first (``shelf`` is registered there as long as it lives); a lost connection ends
        this call later.
        """
        gone, seen = trio.Event(), False

        def on_names(names: Names, blobs: Sequence[Any]) -> None:
            nonlocal seen
            if names.endpoints:
                seen = True
            elif seen:
                gone.set()

        unwatch = self._runtime.link.names.watch(f"actor:{shelf}", on_names)
        try:
            await gone.wait()
        finally:
            unwatch()
            self._forget(self.refcounts.remove_holder(holder))

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            record = self._records.pop(number, None)
            if isinstance(record, Spilled) and not self._ended:
                self._runtime.nursery.start_soon(_remove, record.location)

    # Storage ---------------------------------------------------------------------------------------------------------

    async def make_room(self, more_bytes: int = 0) -> None:
        """Write objects to storage until ``more_bytes`` have room in memory, as far as that can be."""
        async with self._spilling:
            while (number := self.refcounts.next_to_spill(more_bytes)) is not None:
                record = self._records[number]
                assert isinstance(record, StoredObject)
                location = self._location(number)
                await trio.to_thread.run_sync(_write, location, record)
                if number in self._records:
                    self._records[number] = Spilled(location, record.pickled_first)
                    self.refcounts.mark_spilled(number)
                else:
                    await _remove(location)  # it went meanwhile

    def _location(self, number: int) -> str:
        if self._storage is not None:
            return f"{self._storage.rstrip('/')}/{self._runtime.session}/{number}.object"
        if self._directory is None:
            self._directory, self._directory_lock = segment_directories.make(SPILL_ROOMS)
        return f"{self._directory}/{number}"


def packed(obj: Any, what: str) -> tuple[bytes, list[memoryview], bool]:
    """Its pickle, and views of the buffers that stayed outside. Raises NotPicklable, MessageTooLarge."""
    parcel = pickling.pack(obj, what)
    if isinstance(parcel, bytes):
        return parcel, [], False
    check_transfer(parcel.bulk_bytes, what)
    return parcel.pickle, [memory for memory in parcel.sources if isinstance(memory, memoryview)], parcel.pickled_first


def kept(view: memoryview) -> Piece:
    """A copy, in a segment if it is worth one and there is room."""
    pool = shared_memory.pool() if len(view) >= SEGMENT_FROM_BYTES else None
    snapshot = pool.store(view) if pool is not None else None
    return _copied(view) if snapshot is None else snapshot


async def _kept(view: memoryview) -> Piece:
    """The same in the loop: others run meanwhile."""
    pool = shared_memory.pool() if len(view) >= SEGMENT_FROM_BYTES else None
    for snapshot in pool.store_in_steps(view) if pool is not None else ():
        if snapshot is not None:
            return snapshot
        await trio.lowlevel.checkpoint()
    return _copied(view)


def _copied(view: memoryview) -> memoryview:
    copy = memoryview(shared_memory.allocate_receive_buffer(len(view)))
    copy[:] = view
    return copy


def _write(location: str, record: StoredObject) -> None:
    pieces: list[bytes | memoryview] = []
    for piece in (memoryview(record.pickle), *map(buffer_view, record.buffers)):
        pieces += [_LENGTH.pack(len(piece)), piece]
    if "://" in location:
        storage.write_pieces_now(location, pieces)
        return
    os.makedirs(os.path.dirname(location), exist_ok=True)
    with open(location, "xb", opener=segment_directories.private) as file:
        file.writelines(pieces)


def _read(location: str) -> bytes:
    if "://" in location:
        return storage.read_now(location)
    with open(location, "rb") as file:
        return file.read()


async def _share() -> None:
    """The first time: whoever asks is offered our segments, and a moment to say whether they can be read there."""
    exchange = getattr(getattr(current_actor_var.get(), "origin", None), "buffer_transfer", None)
    with trio.move_on_after(SHARE_WITHIN_S):
        while exchange is not None and exchange.must_wait():  # noqa: ASYNC110 (its one listener is the peer)
            await trio.sleep(SHARE_WITHIN_S / 50)


async def _remove(location: str) -> None:
    try:
        if "://" in location:
            await storage.delete(location)
        else:
            os.unlink(location)
    except Exception as error:  # noqa: BLE001 - storages raise what they like, and nobody waits for this
        log.warning("%s could not be removed: %r", location, error)


OBJECT_STORE: ServiceKey[ObjectStore] = ServiceKey("object store")


def object_store_of(runtime: Runtime, settings: ObjectStoreSettings | None = None) -> ObjectStore:
    """The store of a runtime, made when first asked for (then ``settings`` count)."""
    return runtime.services.get_or_make(OBJECT_STORE, lambda: ObjectStore(runtime, settings or ObjectStoreSettings()))
