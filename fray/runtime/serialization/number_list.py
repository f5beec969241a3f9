"""Lists of whole numbers as bytes: call numbers in SETTLED frames, loan numbers in frames about buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterable


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Return each number as 8 bytes, little-endian."""
    listed = list(numbers)
    return struct.pack(f"<{len(listed)}Q", *listed)


def unpack_numbers(body: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """Return the inverse of `pack_numbers`."""
    return struct.unpack(f"<{len(body) // 8}Q", body)
