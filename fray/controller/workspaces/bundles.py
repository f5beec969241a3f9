"""Workspaces and large values on the controller: uploaded in chunks, fetched in chunks, kept while they are needed.

Invariants: a bundle is complete once all its chunks are on disk, and jobs can be launched only with complete ones. A
bundle that a living job names is kept. Of the others those used longest ago are removed when there are too many bytes,
and any that has been unused for long; one that was used within the last ten minutes stays, since a launch may be on its
way. Chunks of no complete bundle are left from an upload: they stay for an hour, in case it is resumed.

A large value (a payload or result, see `fray.model.messages.large_values`) is a bundle without a manifest. It is
removed once no row names it any more, or an hour after it was uploaded if none ever did.

The controller's loop never waits for this: each request has a task, which waits for a thread, which waits for the disk;
the number of waiting requests is limited.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio
from attrs import frozen

from fray.controller.workspaces.chunks import ChunkStore, CompleteBundle
from fray.controller.workspaces.possession import Possession
from fray.errors import ChannelClosed, ChannelFull, FrayError, InvalidRequest, StoreError
from fray.model.ids import BlobId
from fray.model.messages.bundles import (
    CHUNK_LIMIT_BYTES,
    BundleState,
    FetchBundle,
    FetchChunk,
    FetchValue,
    OfferBundle,
    OfferValue,
    PutChunk,
)
from fray.model.messages.client import Done
from fray.model.messages.large_values import check_parts, part_sizes
from fray.net.channel.public import Channel
from fray.net.transport import Bytes

if TYPE_CHECKING:
    from fray.model.workspace import Manifest

T = TypeVar("T")

WAITING_LIMIT = 256
"""Requests that wait for the disk; one more is refused and may be retried."""
THREADS = 4
PARTS_LIMIT = 128
SWEEP_S = 60.0
RELEASE_WAIT_S = 1.0
"""Seconds from the release of a value to the sweep that removes it, so that one sweep serves many."""
OFFERED_S = 60.0
"""Seconds that a value stays after it was offered, although a row has released it: a launch may be on its way."""
_TOUCH_S = 60.0

_log = logging.getLogger("fray.controller.workspaces.bundles")


@frozen(kw_only=True)
class BundleRetention:
    """Limits of what is kept."""

    limit_bytes: int = 20 * 1000**3
    """Size of all bundles; those that living jobs need may exceed it."""
    unused_s: float = 7 * 86_400.0
    in_use_s: float = 600.0
    upload_s: float = 3_600.0
    reserve_bytes: int = 256 * 1000**2
    """Free space on the disk that is left for the controller's own decisions."""


class RequestOrigin(Protocol):
    """Connection from which a request came."""

    channel: Channel

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None: ...
    def refuse(self, ref: int, error: FrayError) -> None: ...


class BundleStore:
    """Store of all bundles of the controller.

    Args:
        needed: returns the bundles that living jobs name, and the values that any row names.
    """

    def __init__(
        self, chunks: ChunkStore, needed: Callable[[], set[BlobId]], retention: BundleRetention | None = None
    ) -> None:
        self.retention = retention or BundleRetention()
        self._chunks, self._needed = chunks, needed
        self._complete: set[BlobId] = set(chunks.bundles())
        self.possession = Possession()
        self._touched: dict[BlobId, float] = {}
        self._offered: dict[BlobId, float] = {}
        """Times of the last offers of values."""
        self._released: set[BlobId] = set()
        self._last_value: tuple[BlobId, frozenset[BlobId]] = ("", frozenset())
        """The value of which a part was fetched last, and its parts."""
        self._wake = trio.Event()
        self._waiting = 0
        self._limiter = trio.CapacityLimiter(THREADS)
        self._changing = trio.Lock()

    def __repr__(self) -> str:
        return f"<BundleStore: {len(self._complete)} complete, {self._waiting} requests waiting>"

    def has(self, bundle: BlobId) -> bool:
        """Return whether jobs can be launched with a bundle, or a value is complete."""
        return bundle in self._complete

    def release(self, value: BlobId) -> None:
        """Remove a value soon: no row names it any more."""
        if value in self._complete:
            self._released.add(value)
            self._wake.set()

    async def _blocking(self, function: Callable[..., T], *args: Any) -> T:
        # Chunks in memory: under a virtual clock a thread's time would not pass, and timeouts would fire at once.
        if not self._chunks.blocks:
            await trio.lowlevel.checkpoint()
            return function(*args)
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)

    # Requests

    def admit(self, message: object, blobs: Sequence[Bytes]) -> None:
        """Count a request as waiting.

        Raises:
            ChannelFull: too many requests are waiting.
            InvalidRequest: the request is invalid.
        """
        # Each waiting upload holds its chunk in memory.
        if self._waiting >= WAITING_LIMIT:
            raise ChannelFull("too many requests about workspaces are pending; retry later", limit=WAITING_LIMIT)
        if isinstance(message, PutChunk) and (len(blobs) != 1 or len(blobs[0]) > CHUNK_LIMIT_BYTES):
            raise InvalidRequest(f"a chunk is one attachment of at most {CHUNK_LIMIT_BYTES} bytes")
        if isinstance(message, OfferBundle) and not 0 < len(message.parts) <= PARTS_LIMIT:
            raise InvalidRequest(f"a manifest has 1 to {PARTS_LIMIT} parts, not {len(message.parts)}")
        if isinstance(message, OfferValue):
            check_parts(message.value, message.size_bytes, message.parts)
        self._waiting += 1

    async def serve(
        self, origin: RequestOrigin, ref: int, message: object, blobs: Sequence[Bytes], owner: str | None = None
    ) -> None:
        """Answer a request that was admitted.

        Args:
            owner: client that has to send what it offers although it is stored (`Possession`). None: it need not.
        """
        try:
            # Before the chunk is read: what a slow client has requested stays on the disk.
            await origin.channel.wait_room()
            origin.reply(ref, *await self.answer(message, blobs, owner))
        except ChannelClosed:
            pass
        except FrayError as error:
            origin.refuse(ref, error)
        except OSError as error:
            origin.refuse(ref, await self._no_room(error))
        finally:
            self._waiting -= 1

    async def answer(
        self, message: object, blobs: Sequence[Bytes], owner: str | None = None
    ) -> tuple[object, Sequence[Bytes]]:
        match message:
            case OfferBundle():
                return await self._offer(message, owner), ()
            case OfferValue():
                return await self._offer_value(message, owner), ()
            case FetchValue(value=value):
                return await self._value_state(value), ()
            case PutChunk(chunk=chunk):
                await self._blocking(self._put, chunk, bytes(blobs[0]))
                if owner is not None:
                    self.possession.add_chunk(owner, chunk)
                return Done(), ()
            case FetchBundle(bundle=bundle):
                return BundleState(complete=True, parts=await self._parts_of(bundle)), ()
            case FetchChunk(chunk=chunk, value=value):
                if value and chunk not in await self._parts_of_value(value):
                    raise InvalidRequest(f"chunk {chunk} is not a part of the value {value}")
                return Done(), [await self._fetch(chunk)]
        raise InvalidRequest(f"{type(message).__name__} is not about workspaces")

    async def _no_room(self, error: OSError) -> StoreError:
        """Remove unfinished uploads, so that they do not take the room of others."""
        # Whatever is incomplete goes at once, and not after its hour: without that, one upload that does not fit would
        # keep all others out.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            await self.sweep(upload_s=0.0)
        _log.error("cannot store a workspace: %s", error)
        return StoreError(f"the controller cannot store the workspace: {error.strerror}; free space on its disk")

    # Uploads

    async def _offer(self, message: OfferBundle, owner: str | None) -> BundleState:
        bundle = message.bundle
        if bundle in self._complete and (owner is None or self.possession.has(owner, bundle)):
            await self._touch(bundle)
            return BundleState(complete=True)
        # The manifest's own parts first: only from them it is known which chunks of contents to ask for.
        lacks = await self._missing_of(owner, message.parts)
        if lacks:
            await self._make_room(message.size_bytes)
            return BundleState(complete=False, missing=lacks)
        async with self._changing:  # a sweep must not remove what is found here
            manifest, lacks = await self._blocking(self._find_missing, message)
            if manifest is not None and owner is not None:
                lacks = await self._missing_of(owner, [chunk.blob for chunk in manifest.chunks])
            if manifest is None or lacks:
                return BundleState(complete=False, missing=lacks)
            # The record comes last: a bundle that has one is complete, whatever was interrupted before.
            record = CompleteBundle(message.parts, frozenset(chunk.blob for chunk in manifest.chunks))
            await self._blocking(self._chunks.complete, bundle, record)
            self._complete.add(bundle)
        if owner is not None:
            self.possession.add(owner, bundle)
        _log.info("workspace uploaded", extra={"bundle": bundle, "files": len(manifest.files)})
        return BundleState(complete=True)

    async def _offer_value(self, message: OfferValue, owner: str | None) -> BundleState:
        value = message.value
        self._offered[value] = trio.current_time()
        if value in self._complete and (owner is None or self.possession.has(owner, value)):
            await self._touch(value)
            return BundleState(complete=True)
        lacks = await self._missing_of(owner, message.parts)
        if lacks:
            await self._make_room(sum(part_sizes(message.size_bytes)))
            return BundleState(complete=False, missing=lacks)
        async with self._changing:  # a sweep must not remove what is found here
            lacks = await self._blocking(self._missing_chunks, message.parts)
            if not lacks:
                record = CompleteBundle(message.parts, frozenset(), message.size_bytes)
                await self._blocking(self._chunks.complete, value, record)
                self._complete.add(value)
        if not lacks and owner is not None:
            self.possession.add(owner, value)
        return BundleState(complete=not lacks, missing=lacks)

    async def _value_state(self, value: BlobId) -> BundleState:
        record = await self._blocking(self._chunks.record, value) if value in self._complete else None
        if record is None or not record.size_bytes:
            raise InvalidRequest(f"the value {value} is not stored (any more)")
        return BundleState(complete=True, parts=record.parts, size_bytes=record.size_bytes)

    async def _parts_of_value(self, value: BlobId) -> frozenset[BlobId]:
        # Kept for the next part: a record of 4 GiB names 2,000 of them, and is read from the disk.
        if self._last_value[0] != value:
            self._last_value = (value, frozenset((await self._value_state(value)).parts))
        return self._last_value[1]

    async def _missing_of(self, owner: str | None, chunks: Sequence[BlobId]) -> tuple[BlobId, ...]:
        """Return the chunks that are not stored, or that this client has not sent yet."""
        lacks = set(await self._blocking(self._missing_chunks, chunks))
        if owner is not None:
            lacks |= {chunk for chunk in chunks if not self.possession.has_chunk(owner, chunk)}
        return tuple(chunk for chunk in dict.fromkeys(chunks) if chunk in lacks)

    def _missing_chunks(self, chunks: Iterable[BlobId]) -> tuple[BlobId, ...]:
        return tuple(chunk for chunk in dict.fromkeys(chunks) if not self._chunks.has(_check_name(chunk)))

    def _find_missing(self, offer: OfferBundle) -> tuple[Manifest | None, tuple[BlobId, ...]]:
        """Return the manifest and which of its chunks are missing; without a manifest, which of its own parts."""
        from fray.model.workspace import join_parts  # most controllers start without workspaces

        parts = [self._chunks.get(part) for part in offer.parts]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None, self._missing_chunks(offer.parts)
        try:
            manifest = join_parts(offer.bundle, whole)
        except InvalidRequest:
            # The parts have the hashes that were announced, but are not a manifest: sent again they would be the same.
            self._chunks.drop(offer.parts)
            raise
        return manifest, self._missing_chunks(chunk.blob for chunk in manifest.chunks)

    async def _make_room(self, size_bytes: int) -> None:
        """Make room for so many bytes.

        Raises:
            StoreError: the disk has no room.
        """
        needed = size_bytes + self.retention.reserve_bytes
        if await self._blocking(self._chunks.free_bytes) >= needed:
            return
        # Only when the disk is short: old workspaces make the next launch fast as long as they are not in the way.
        await self.sweep(room_bytes=size_bytes)
        free = await self._blocking(self._chunks.free_bytes)
        if free < needed:
            raise StoreError(
                f"the controller's disk has {free / 1e6:,.0f} MB free: this workspace of {size_bytes / 1e6:,.1f} MB "
                f"would leave less than {self.retention.reserve_bytes / 1e6:,.0f} MB: free space there",
                free_bytes=free,
                size_bytes=size_bytes,
            )

    def _put(self, chunk: BlobId, data: bytes) -> None:
        # The name is trusted from here on, also for chunks that other users' workspaces share.
        if hashlib.sha256(data).hexdigest() != chunk:
            raise InvalidRequest(f"chunk {chunk} was damaged: send it again")
        # Two drivers may upload the same workspace at the same time.
        if self._chunks.has(chunk):
            return
        if (
            self._chunks.free_bytes() < len(data) + self.retention.reserve_bytes
        ):  # whatever the offer of its bundle said
            raise OSError(errno.ENOSPC, "No space left on device except what the controller needs itself")
        self._chunks.put(chunk, data)

    # Downloads

    async def _parts_of(self, bundle: BlobId) -> tuple[BlobId, ...]:
        record = await self._blocking(self._chunks.record, bundle) if bundle in self._complete else None
        if record is None:
            raise InvalidRequest(f"no such bundle: {bundle} (or no longer stored): launch the job again")
        await self._touch(bundle)
        return record.parts

    async def _fetch(self, chunk: BlobId) -> bytes:
        data = await self._blocking(self._chunks.get, _check_name(chunk))
        if data is None:
            await self._forget_lost_chunk(chunk)
            raise InvalidRequest(f"chunk {chunk} is damaged or missing on the controller: launch again")
        return data

    async def _forget_lost_chunk(self, chunk: BlobId) -> None:
        """Forget the bundles that contain a lost chunk; a driver that offers one again is asked for the chunk."""
        async with self._changing:
            for bundle in list(self._complete):
                record = await self._blocking(self._chunks.record, bundle)
                if record is None or chunk in record.chunks or chunk in record.parts:
                    self._complete.discard(bundle)
                    await self._blocking(self._chunks.forget, bundle)

    async def _touch(self, bundle: BlobId) -> None:
        now = trio.current_time()
        # At most once a minute: a gang on 1,000 machines fetches the same bundle, and each touch is a write to the
        # disk.
        if now - self._touched.get(bundle, -_TOUCH_S) >= _TOUCH_S:
            self._touched[bundle] = now
            await self._blocking(self._chunks.touch, bundle)

    # Retention

    async def run(self) -> None:
        """Sweep once a minute, and soon after values were released, until cancelled."""
        while True:
            with trio.move_on_after(SWEEP_S):
                await self._wake.wait()
                await trio.sleep(RELEASE_WAIT_S)
            self._wake = trio.Event()
            try:
                await self.sweep()
            except OSError as error:
                _log.warning("cannot remove old workspaces: %s", error)

    async def sweep(self, *, room_bytes: int = 0, upload_s: float | None = None) -> int:
        """Remove what is not needed; return the number of removed bundles.

        Args:
            room_bytes: additional room to make.
            upload_s: age from which chunks of no complete bundle are removed. Default: as configured.
        """
        async with self._changing:
            # In the loop's thread, as it walks over the scheduler's state; everything after it is for a thread.
            needed = self._needed()
            now = trio.current_time()
            self._offered = {value: at for value, at in self._offered.items() if now - at < OFFERED_S}
            released = self._released - needed - self._offered.keys()
            gone = await self._blocking(self._choose_evictions, needed, released, room_bytes)
            for bundle in gone:
                self._complete.discard(bundle)
                self._touched.pop(bundle, None)
                self._released.discard(bundle)
            await self._blocking(self._drop, gone, self.retention.upload_s if upload_s is None else upload_s)
        if gone:
            _log.info("removed old workspaces", extra={"bundles": len(gone)})
        return len(gone)

    def _choose_evictions(self, needed: set[BlobId], released: set[BlobId], room_bytes: int) -> list[BlobId]:
        """Choose the bundles to remove: released values, bundles unused for too long, then those used longest ago while
        there is too much."""
        ages = self._chunks.bundles()
        records = {bundle: self._chunks.record(bundle) for bundle in ages}
        sizes = {chunk: size for chunk, (size, _) in self._chunks.ages().items()}
        # A chunk that several bundles share is freed only with the last of them.
        users: dict[BlobId, int] = {}
        for record in records.values():
            for chunk in _blobs_of(record):
                users[chunk] = users.get(chunk, 0) + 1
        # Values have a limit of their own (`SchedulerConfig.results_limit_bytes`), and evict no workspace.
        of_values = {chunk for record in records.values() if record and record.size_bytes for chunk in record.parts}
        size_bytes = sum(size for chunk, size in sizes.items() if chunk not in of_values)
        over = size_bytes + room_bytes - self.retention.limit_bytes
        short = room_bytes + self.retention.reserve_bytes - self._chunks.free_bytes() if room_bytes else 0
        over, gone = max(over, short), []
        for bundle in sorted(ages, key=lambda each: -ages[each]):
            record = records[bundle]
            # Its record cannot be read, so it cannot be served either.
            if record is None:
                gone.append(bundle)
            elif record.size_bytes:
                if bundle in released or (bundle not in needed and ages[bundle] >= self.retention.upload_s):
                    gone.append(bundle)
            elif bundle in needed or ages[bundle] < self.retention.in_use_s:
                continue
            elif over > 0 or ages[bundle] > self.retention.unused_s:
                gone.append(bundle)
                for chunk in _blobs_of(record):
                    users[chunk] -= 1
                    over -= sizes.get(chunk, 0) if not users[chunk] else 0
        return gone

    def _drop(self, gone: Sequence[BlobId], upload_s: float) -> None:
        """Remove the records of these bundles, and every chunk that no other record names, unless it may belong to an
        upload."""
        freed: set[BlobId] = set()
        for bundle in gone:
            freed.update(_blobs_of(self._chunks.record(bundle)))
            self._chunks.forget(bundle)
        # What the remaining records name: a chunk may be shared with a bundle that stays.
        named = {chunk for bundle in self._chunks.bundles() for chunk in _blobs_of(self._chunks.record(bundle))}
        for chunk, (_, age_s) in self._chunks.ages().items():
            if chunk not in named and (chunk in freed or age_s >= upload_s):
                self._chunks.drop((chunk,))


def _blobs_of(record: CompleteBundle | None) -> Iterable[BlobId]:
    return () if record is None else {*record.parts, *record.chunks}


def _check_name(chunk: BlobId) -> BlobId:
    """Return the name of a chunk if it is valid: it becomes the name of a file."""
    # It becomes part of a path: no dots, no slashes.
    if len(chunk) != 64 or not chunk.isalnum():
        raise InvalidRequest(f"invalid name of a chunk: {chunk!r}")
    return chunk
