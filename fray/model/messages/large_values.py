"""Size limit of everything that is pickled and sent, and the parts in which large payloads and results travel. Pure.

A payload or result above `BLOB_LIMIT_BYTES` is not attached to a message: it is cut into parts of `PART_BYTES`, which
are requested and answered one by one, and stored as files. Its id is the hash of its size and of the hashes of its
parts, so a reader that has the list of parts can check each part when it arrives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fray.errors import InvalidRequest, MessageTooLarge
from fray.model.ids import BlobId

SIZE_LIMIT_BYTES = 4 * 1024**3
"""Largest argument list, result or item: of a call, a task or a job, pickle and buffers together."""
PART_BYTES = 1024 * 1024
"""Size of every part of a large value except the last. Other messages wait behind a few of them at most."""


def check_size(size_bytes: int, what: str) -> None:
    """Check the size of what is to be sent: pickle and buffers.

    Raises:
        MessageTooLarge: over `SIZE_LIMIT_BYTES`.
    """
    if size_bytes > SIZE_LIMIT_BYTES:
        raise MessageTooLarge(
            f"{what}: {size_bytes:,} bytes pickled exceed the limit of {SIZE_LIMIT_BYTES:,}: write the data to storage "
            "and send the path, or split it",
            size_bytes=size_bytes,
            limit_bytes=SIZE_LIMIT_BYTES,
        )


def part_sizes(size_bytes: int) -> list[int]:
    """Return the sizes of the parts of a value."""
    return [min(PART_BYTES, size_bytes - at) for at in range(0, size_bytes, PART_BYTES)]


def value_name(size_bytes: int, parts: Sequence[BlobId]) -> BlobId:
    """Return the id of a large value of these parts."""
    return hashlib.sha256(f"{size_bytes} {' '.join(parts)}".encode()).hexdigest()


def check_parts(value: BlobId, size_bytes: int, parts: Sequence[BlobId]) -> None:
    """Check a list of parts that a peer has sent.

    Raises:
        InvalidRequest: it is not that of this value, or the value exceeds the limit.
    """
    if not 0 < size_bytes <= SIZE_LIMIT_BYTES or len(parts) != len(range(0, size_bytes, PART_BYTES)):
        raise InvalidRequest(
            f"a large value has 1 to {SIZE_LIMIT_BYTES:,} bytes in parts of {PART_BYTES:,}, "
            f"not {size_bytes:,} bytes in {len(parts):,} parts"
        )
    if value_name(size_bytes, parts) != value:
        raise InvalidRequest(f"these are not the parts of the value {value}")
