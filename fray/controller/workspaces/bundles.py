"""Workspaces on the controller: taken from drivers, handed to nodes, record while somebody needs them.

Law: a bundle is complete once all its pieces are on disk, and only complete ones can be launched with. One that a
living job names stays. Of the others those used longest ago go when there are too many bytes, and any that nobody has
used for long; a bundle that was used within the last ten minutes stays, since a launch may be on its way. Pieces
of no complete bundle are what is left of an upload: they stay for an hour, in case that one is taken up again.

The loop of the controller never waits for this: each request has a task, which waits for a thread, which waits for the
disk; and the number of pieces that wait is limited.
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
from fray.errors import ChannelClosed, ChannelFull, FrayError, InvalidRequest, StoreError
from fray.model.ids import BlobId
from fray.model.messages.bundles import (
    CHUNK_LIMIT_BYTES,
    BundleState,
    FetchBundle,
    FetchChunk,
    OfferBundle,
    PutChunk,
)
from fray.model.messages.client import Done
from fray.model.text import byte_size_text
from fray.net.channel.public import Channel
from fray.net.transport import Bytes

if TYPE_CHECKING:
    from fray.model.workspace import Manifest

T = TypeVar("T")

WAITING_LIMIT = 256
"""Requests that wait for the disk; one more is told to come later."""
THREADS = 4
PARTS_LIMIT = 128
SWEEP_S = 60.0
_TOUCH_S = 60.0

_log = logging.getLogger("fray.controller.workspaces.bundles")


@frozen(kw_only=True)
class BundleRetention:
    """How much is record, and for how long."""

    limit_bytes: int = 20 * 1000**3
    """Of all bundles; those that living jobs need may go beyond."""
    unused_s: float = 7 * 86_400.0
    in_use_s: float = 600.0
    upload_s: float = 3_600.0
    reserve_bytes: int = 256 * 1000**2
    """Free on the disk, for the controller's own decisions."""


class RequestOrigin(Protocol):
    """The conversation a request came by."""

    channel: Channel

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None: ...
    def refuse(self, ref: int, error: FrayError) -> None: ...


class BundleStore:
    """All bundles of one life of the controller.

    Args:
        needed: the bundles that living jobs name.
    """

    def __init__(
        self, pieces: ChunkStore, needed: Callable[[], set[BlobId]], retention: BundleRetention | None = None
    ) -> None:
        self.retention = retention or BundleRetention()
        self._pieces, self._needed = pieces, needed
        self._complete: set[BlobId] = set(pieces.bundles())
        self._touched: dict[BlobId, float] = {}
        self._waiting = 0
        self._limiter = trio.CapacityLimiter(THREADS)
        self._changing = trio.Lock()

    def __repr__(self) -> str:
        return f"<Bundles: {len(self._complete)} complete, {self._waiting} requests waiting>"

    def has(self, bundle: BlobId) -> bool:
        """Whether jobs can be launched with it."""
        return bundle in self._complete

    async def _blocking(self, function: Callable[..., T], *args: Any) -> T:
        if not self._pieces.blocks:
            await trio.lowlevel.checkpoint()
            return function(*args)
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)

    # Requests

    def admit(self, message: object, blobs: Sequence[Bytes]) -> None:
        """Raises ChannelFull or InvalidRequest: this is not to be served."""
        if self._waiting >= WAITING_LIMIT:
            raise ChannelFull(
                "the controller has too many pieces of workspaces to write: try again", limit=WAITING_LIMIT
            )
        if isinstance(message, PutChunk) and (len(blobs) != 1 or len(blobs[0]) > CHUNK_LIMIT_BYTES):
            raise InvalidRequest(f"a piece is one attachment of at most {CHUNK_LIMIT_BYTES} bytes")
        if isinstance(message, OfferBundle) and not 0 < len(message.parts) <= PARTS_LIMIT:
            raise InvalidRequest(f"a manifest has 1 to {PARTS_LIMIT} parts, not {len(message.parts)}")
        self._waiting += 1

    async def serve(self, origin: RequestOrigin, ref: int, message: object, blobs: Sequence[Bytes]) -> None:
        """Answer one request that was admitted."""
        try:
            await origin.channel.wait_room()
            origin.reply(ref, *await self.answer(message, blobs))
        except ChannelClosed:
            pass
        except FrayError as error:
            origin.refuse(ref, error)
        except OSError as error:
            origin.refuse(ref, await self._no_room(error))
        finally:
            self._waiting -= 1

    async def answer(self, message: object, blobs: Sequence[Bytes]) -> tuple[object, Sequence[Bytes]]:
        match message:
            case OfferBundle():
                return await self._offer(message), ()
            case PutChunk(chunk=piece):
                await self._blocking(self._put, piece, bytes(blobs[0]))
                return Done(), ()
            case FetchBundle(bundle=bundle):
                return BundleState(complete=True, parts=await self._parts(bundle)), ()
            case FetchChunk(chunk=piece):
                return Done(), [await self._piece(piece)]
        raise InvalidRequest(f"{type(message).__name__} is not about workspaces")

    async def _no_room(self, error: OSError) -> StoreError:
        """What is half-done goes: it would only take the room of others."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            await self.sweep(upload_s=0.0)
        _log.error("a workspace cannot be record", extra={"why": str(error)})
        return StoreError(f"the controller cannot keep the workspace: {error.strerror}; make room on its disk")

    # Taking

    async def _offer(self, message: OfferBundle) -> BundleState:
        bundle = message.bundle
        if bundle in self._complete:
            await self._touch(bundle)
            return BundleState(complete=True)
        lacks = await self._blocking(self._absent, message.parts)
        if lacks:
            await self._make_room(message.size_bytes)
            return BundleState(complete=False, missing=lacks)
        async with self._changing:  # a sweep must not take what is found here
            manifest, lacks = await self._blocking(self._look, message)
            if manifest is None or lacks:
                return BundleState(complete=False, missing=lacks)
            record = CompleteBundle(message.parts, frozenset(piece.blob for piece in manifest.chunks))
            await self._blocking(self._pieces.complete, bundle, record)
            self._complete.add(bundle)
        _log.info("workspace is here", extra={"bundle": bundle, "files": len(manifest.files)})
        return BundleState(complete=True)

    def _absent(self, pieces: Iterable[BlobId]) -> tuple[BlobId, ...]:
        return tuple(piece for piece in dict.fromkeys(pieces) if not self._pieces.has(_check_name(piece)))

    def _look(self, offer: OfferBundle) -> tuple[Manifest | None, tuple[BlobId, ...]]:
        """The manifest, and what is missing of its pieces; without it, what is missing of itself."""
        from fray.model.workspace import join_parts  # most controllers begin without workspaces

        parts = [self._pieces.get(part) for part in offer.parts]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None, self._absent(offer.parts)
        try:
            manifest = join_parts(offer.bundle, whole)
        except InvalidRequest:
            self._pieces.drop(offer.parts)
            raise
        return manifest, self._absent(piece.blob for piece in manifest.chunks)

    async def _make_room(self, size_bytes: int) -> None:
        """Raises StoreError: the disk has no room for so many bytes."""
        needed = size_bytes + self.retention.reserve_bytes
        if await self._blocking(self._pieces.free_bytes) >= needed:
            return
        await self.sweep(room_bytes=size_bytes)
        free = await self._blocking(self._pieces.free_bytes)
        if free < needed:
            raise StoreError(
                f"the controller's disk has {byte_size_text(free)} free: this workspace of "
                f"{byte_size_text(size_bytes)} would leave less than "
                f"{byte_size_text(self.retention.reserve_bytes)}: make room there",
                free_bytes=free,
                size_bytes=size_bytes,
            )

    def _put(self, piece: BlobId, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != piece:
            raise InvalidRequest(f"the piece {piece} came damaged: send it again")
        if self._pieces.has(piece):
            return
        if self._pieces.free_bytes() < len(data) + self.retention.reserve_bytes:  # whatever its bundle's offer said
            raise OSError(errno.ENOSPC, "No space left on device but what the controller needs for itself")
        self._pieces.put(piece, data)

    # Giving

    async def _parts(self, bundle: BlobId) -> tuple[BlobId, ...]:
        record = await self._blocking(self._pieces.record, bundle) if bundle in self._complete else None
        if record is None:
            raise InvalidRequest(f"the controller keeps no bundle {bundle} (any more): launch the job again")
        await self._touch(bundle)
        return record.parts

    async def _piece(self, piece: BlobId) -> bytes:
        data = await self._blocking(self._pieces.get, _check_name(piece))
        if data is None:
            await self._lost(piece)
            raise InvalidRequest(f"the piece {piece} of a workspace is damaged or gone on the controller: launch again")
        return data

    async def _lost(self, piece: BlobId) -> None:
        """What it was part of is complete no more; who offers it again is asked for the piece."""
        async with self._changing:
            for bundle in list(self._complete):
                record = await self._blocking(self._pieces.record, bundle)
                if record is None or piece in record.pieces or piece in record.parts:
                    self._complete.discard(bundle)
                    await self._blocking(self._pieces.forget, bundle)

    async def _touch(self, bundle: BlobId) -> None:
        now = trio.current_time()
        if now - self._touched.get(bundle, -_TOUCH_S) >= _TOUCH_S:
            self._touched[bundle] = now
            await self._blocking(self._pieces.touch, bundle)

    # Keeping

    async def run(self) -> None:
        """Sweep now and then, until cancelled."""
        while True:
            await trio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except OSError as error:
                _log.warning("old workspaces cannot be removed", extra={"why": str(error)})

    async def sweep(self, *, room_bytes: int = 0, upload_s: float | None = None) -> int:
        """Drop what nobody needs; how many bundles.

        Args:
            room_bytes: so much more is to fit.
            upload_s: how old pieces of no complete bundle may be. Default: as configured.
        """
        async with self._changing:
            needed = self._needed()
            gone = await self._blocking(self._choose, needed, room_bytes)
            for bundle in gone:
                self._complete.discard(bundle)
                self._touched.pop(bundle, None)
            await self._blocking(self._drop, gone, self.retention.upload_s if upload_s is None else upload_s)
        if gone:
            _log.info("old workspaces were removed", extra={"bundles": len(gone)})
        return len(gone)

    def _choose(self, needed: set[BlobId], room_bytes: int) -> list[BlobId]:
        """Which go: too long unused, then those used longest ago while there is too much."""
        ages = self._pieces.bundles()
        records = {bundle: self._pieces.record(bundle) for bundle in ages}
        sizes = {piece: size for piece, (size, _) in self._pieces.ages().items()}
        users: dict[BlobId, int] = {}
        for record in records.values():
            for piece in _all(record):
                users[piece] = users.get(piece, 0) + 1
        over = sum(sizes.values()) + room_bytes - self.retention.limit_bytes
        short = room_bytes + self.retention.reserve_bytes - self._pieces.free_bytes() if room_bytes else 0
        over, gone = max(over, short), []
        for bundle in sorted(ages, key=lambda each: -ages[each]):
            if records[bundle] is None:
                gone.append(bundle)
            elif bundle in needed or ages[bundle] < self.retention.in_use_s:
                continue
            elif over > 0 or ages[bundle] > self.retention.unused_s:
                gone.append(bundle)
                for piece in _all(records[bundle]):
                    users[piece] -= 1
                    over -= sizes.get(piece, 0) if not users[piece] else 0
        return gone

    def _drop(self, gone: Sequence[BlobId], upload_s: float) -> None:
        """The records of these, and every piece that no other record names, unless it may be of an upload."""
        freed: set[BlobId] = set()
        for bundle in gone:
            freed.update(_all(self._pieces.record(bundle)))
            self._pieces.forget(bundle)
        named = {piece for bundle in self._pieces.bundles() for piece in _all(self._pieces.record(bundle))}
        for piece, (_, age_s) in self._pieces.ages().items():
            if piece not in named and (piece in freed or age_s >= upload_s):
                self._pieces.drop((piece,))


def _all(record: CompleteBundle | None) -> Iterable[BlobId]:
    return () if record is None else {*record.parts, *record.pieces}


def _check_name(piece: BlobId) -> BlobId:
    """Names of pieces become names of files."""
    if len(piece) != 64 or not piece.isalnum():
        raise InvalidRequest(f"{piece!r} is no name of a piece")
    return piece
