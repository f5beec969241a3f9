"""Transfer of large payloads and results to and from the controller, in parts (`fray.model.messages.large_values`).

Both directions are requests, a few at a time: the next part is read when an earlier one was answered, so neither end
nor the controller holds more than those. A request that a lost connection or a restarted controller leaves unanswered
is repeated by `fray.net.channel.requests`; parts are named by their hash, so a repeated one changes nothing, and an
offer says what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import trio
from attrs import frozen

from fray.errors import ChannelFull, FrayError, InvalidRequest
from fray.model.ids import BlobId
from fray.model.messages.bundles import BundleState, FetchChunk, FetchValue, OfferValue, PutChunk
from fray.model.messages.large_values import PART_BYTES, check_parts, part_sizes, value_name
from fray.net.transport import Bytes

PARTS_AT_ONCE = 4
"""Number of parts of one value on their way: 4 MiB, behind which other messages of the connection wait."""
ROUNDS = 8
"""Maximum number of times the controller may answer that it lacks parts."""
BUSY_S = 0.2
"""Seconds to wait while the controller has too many parts to write."""


class RequestController(Protocol):
    """Sends a request with attachments to the controller; returns the reply and its attachments. Raises FrayError."""

    def __call__(self, message: object, blobs: Sequence[Bytes] = (), /) -> Awaitable[tuple[Any, Sequence[Bytes]]]: ...


ReadPart: TypeAlias = Callable[[int, int], Awaitable[Bytes]]
"""Returns so many bytes of a value, from an offset."""
WritePart: TypeAlias = Callable[[int, Bytes], Awaitable[None]]
"""Stores a part of a value at its offset."""


@frozen
class PartList:
    """Size of a large value, and the hashes of its parts in order."""

    size_bytes: int
    parts: tuple[BlobId, ...]

    @property
    def name(self) -> BlobId:
        return value_name(self.size_bytes, self.parts)


def list_parts(size_bytes: int, pieces: Iterable[Bytes]) -> PartList:
    """Return the list of the parts of a value; ``pieces`` are these parts."""
    return PartList(size_bytes, tuple(hashlib.sha256(piece).hexdigest() for piece in pieces))


async def upload(request: RequestController, value: PartList, read: ReadPart) -> None:
    """Make sure that the controller has a value.

    Raises:
        StoreError: the controller has no room for it.
        FrayError: it does not get it, or the conversation has ended.
        OSError: ``read`` raised it.
    """
    offer = OfferValue(value=value.name, size_bytes=value.size_bytes, parts=value.parts)
    # Equal parts (an array of zeros) are sent once.
    places = {part: index for index, part in enumerate(value.parts)}
    sizes = part_sizes(value.size_bytes)

    async def put(part: BlobId) -> None:
        index = places[part]
        data = await read(index * PART_BYTES, sizes[index])
        await _retry_busy(request, PutChunk(chunk=part), data)

    for _ in range(ROUNDS):
        # The controller keeps no record of uploads: it is asked each time what it lacks. So a restart of it needs no
        # special case.
        state, _ = await request(offer)
        assert isinstance(state, BundleState)
        if state.complete:
            return
        if unknown := set(state.missing) - places.keys():
            raise FrayError(f"the controller asks for {min(unknown)}: not a part of the value {value.name}")
        await _for_each(put, state.missing)
    raise FrayError(f"the controller does not get the value {value.name} together: its log may say why")


async def download(request: RequestController, value: BlobId, allocate: Callable[[int], WritePart]) -> int:
    """Fetch a value; return its size. ``allocate`` is called once with the size, and returns what stores the parts.

    Raises:
        InvalidRequest: the controller does not have the value (any more), or a part arrived damaged.
        FrayError: the conversation has ended.
        OSError: a part could not be stored.
    """
    state, _ = await request(FetchValue(value=value))
    assert isinstance(state, BundleState)
    check_parts(value, state.size_bytes, state.parts)
    write, sizes = allocate(state.size_bytes), part_sizes(state.size_bytes)
    places: dict[BlobId, list[int]] = {}
    for index, part in enumerate(state.parts):
        places.setdefault(part, []).append(index)

    async def fetch(part: BlobId) -> None:
        _, (data,) = await _retry_busy(request, FetchChunk(chunk=part, value=value))
        if hashlib.sha256(data).hexdigest() != part or any(len(data) != sizes[index] for index in places[part]):
            raise InvalidRequest(f"the part {part} of the value {value} arrived damaged from the controller")
        for index in places[part]:
            await write(index * PART_BYTES, data)

    await _for_each(fetch, tuple(places))
    return state.size_bytes


async def _retry_busy(request: RequestController, message: object, *blobs: Bytes) -> tuple[Any, Sequence[Bytes]]:
    while True:
        try:
            return await request(message, blobs)
        # The controller's disk is the limit; it asks its peers to slow down.
        except ChannelFull:
            await trio.sleep(BUSY_S)


async def _for_each(step: Callable[[BlobId], Awaitable[None]], parts: Sequence[BlobId]) -> None:
    """Run ``step`` for each part, a few at a time; raise the first error."""
    # One iterator for all tasks: each takes the next part as soon as it is done with one.
    left = iter(parts)
    failure: Exception | None = None

    async def run_next() -> None:
        nonlocal failure
        try:
            for part in left:
                await step(part)
        except (FrayError, OSError) as error:
            # Kept and raised outside of the nursery, which would wrap it in an ExceptionGroup.
            failure = failure or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(min(PARTS_AT_ONCE, len(parts))):
            nursery.start_soon(run_next)
    if failure is not None:
        raise failure


async def download_to_memory(request: RequestController, value: BlobId) -> bytearray:
    """Fetch a value into memory. Raises as `download`."""
    content = bytearray()

    def allocate(size_bytes: int) -> WritePart:
        nonlocal content
        content = bytearray(size_bytes)
        view = memoryview(content)

        async def write(at: int, data: Bytes) -> None:
            view[at : at + len(data)] = data

        return write

    await download(request, value, allocate)
    return content
