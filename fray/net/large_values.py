"""Transfer of large payloads and results to and from the controller, in parts (`fray.model.messages.large_values`)."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from attrs import frozen

from fray.errors import FrayError, InvalidRequest
from fray.model.ids import BlobId
from fray.model.messages.bundles import BundleState, FetchChunk, FetchValue, OfferValue
from fray.model.messages.large_values import PART_BYTES, check_parts, part_sizes, value_name
from fray.net.part_transfers import RequestController, for_each_part, request_when_free, send_missing
from fray.net.transport import Bytes

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

    async def read_part(part: BlobId) -> Bytes:
        if part not in places:
            raise FrayError(f"the controller asks for {part}: not a part of the value {value.name}")
        index = places[part]
        return await read(index * PART_BYTES, sizes[index])

    await send_missing(request, offer, read_part)


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
        _, (data,) = await request_when_free(request, FetchChunk(chunk=part, value=value))
        if hashlib.sha256(data).hexdigest() != part or any(len(data) != sizes[index] for index in places[part]):
            raise InvalidRequest(f"the part {part} of the value {value} arrived damaged from the controller")
        for index in places[part]:
            await write(index * PART_BYTES, data)

    await for_each_part(fetch, tuple(places))
    return state.size_bytes


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
