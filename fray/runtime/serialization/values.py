"""Payloads and results of jobs: pickled bytes, or a container that has large buffers beside their pickle.

A container is a header (`_MAGIC`, size of the pickle, number and sizes of the buffers), the pickle, and the buffers,
each aligned. So arrays are written from where they are, and are views of the memory into which the container was read.
A container begins with other bytes than any pickle. One of up to `BLOB_LIMIT_BYTES` is sent as bytes like any pickle; a
larger one is a `LargeValue`, which is never in memory as a whole where it is made.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

from fray.errors import FrayError
from fray.model.ids import BlobId
from fray.model.messages.large_values import PART_BYTES, part_sizes
from fray.model.specs import BLOB_LIMIT_BYTES
from fray.net.codec import Bytes
from fray.net.large_values import PartList, list_parts
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PickledObject

_MAGIC = b"fraybuf1"
_HEAD = struct.Struct("<8sQQ")
_ALIGNMENT = 64


class LargeValue:
    """Payload or result above `BLOB_LIMIT_BYTES`, as views of the memory where it was made."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = [view for view in views if len(view)]
        self._ends = list(accumulate(map(len, self.views)))

    def __len__(self) -> int:
        """Return its size in bytes."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def parts(self) -> PartList:
        """Parts of the content as it is at the first access; reads all of it."""
        at = range(0, len(self), PART_BYTES)
        return list_parts(len(self), map(self.read, at, part_sizes(len(self))))

    @property
    def name(self) -> BlobId:
        return self.parts.name

    def read(self, at: int, size: int) -> bytes:
        """Return so many bytes from an offset."""
        pieces: list[memoryview] = []
        index = bisect_right(self._ends, at)
        while size:
            view = self.views[index]
            piece = view[at - self._ends[index] + len(view) :][:size]
            pieces.append(piece)
            at, size, index = at + len(piece), size - len(piece), index + 1
        return b"".join(pieces)

    def join(self) -> bytearray:
        """Return a copy of the content in one piece."""
        content = bytearray(len(self))
        at = 0
        for view in self.views:
            content[at : at + len(view)] = view
            at += len(view)
        return content


Value: TypeAlias = bytes | LargeValue


def value_id(value: Value) -> BlobId:
    """Return the id by which messages refer to a payload or result."""
    return value.name if isinstance(value, LargeValue) else pickling.blob_name(value)


def value_of(packed: bytes | PickledObject) -> Value:
    """Return the payload or result of an object that `pickling.pack` has pickled.

    A `LargeValue` refers to the object's buffers: they must not change before it was sent.
    """
    if isinstance(packed, bytes):
        return packed if len(packed) <= BLOB_LIMIT_BYTES else LargeValue([memoryview(packed)])
    views: list[memoryview] = [view for view in packed.sources if isinstance(view, memoryview)]
    pickled = views.pop(0) if packed.pickled_first else memoryview(packed.pickle)
    pieces = [pickled] if not views else list(_container(pickled, views))
    if sum(map(len, pieces)) <= BLOB_LIMIT_BYTES:
        return b"".join(pieces)
    return LargeValue(pieces)


def _container(pickled: memoryview, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    header = _HEAD.pack(_MAGIC, len(pickled), len(buffers)) + struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    for piece in (memoryview(header), pickled, *buffers):
        yield piece
        yield memoryview(bytes(-len(piece) % _ALIGNMENT))


def loads_value(data: Bytes, *, owned: bool = False) -> Any:
    """Return the object of a payload or result.

    Args:
        owned: nothing else uses ``data``, which is writable: arrays are views of it. Default: they are copies.

    Raises:
        FrayError: a truncated container; any error of the constructors of the pickled objects.
    """
    view = memoryview(data)
    if view[: len(_MAGIC)] != _MAGIC:
        return pickling.loads(data)
    pickled, buffers = _open_container(view)
    return pickling.loads(pickled, buffers if owned else [bytearray(buffer) for buffer in buffers])


def _open_container(view: memoryview) -> tuple[memoryview, list[memoryview]]:
    _, pickle_bytes, count = _HEAD.unpack_from(view)
    sizes = struct.unpack_from(f"<{count}Q", view, _HEAD.size)
    found, at = [], _HEAD.size + 8 * count
    for size in (pickle_bytes, *sizes):
        at += -at % _ALIGNMENT
        found.append(view[at : at + size])
        at += size
    if len(view) < at:
        raise FrayError(f"a value of {len(view)} bytes is truncated: its buffers have {at}")
    return found[0], found[1:]
