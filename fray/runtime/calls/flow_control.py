"""How far the sender of a stream may run ahead of its receiver. Pure; both directions of both ends use it.

The law: at most `WINDOW` items are sent and not yet granted back, and no item is sent while `WINDOW_BYTES` or more are.
The receiver grants what it has taken once that is half of either, so a receiver that goes on taking never leaves a
sender waiting.
"""

from __future__ import annotations

import struct
from collections import deque

from attrs import define, field

WINDOW = 64
"""Items on their way, at most."""
WINDOW_BYTES = 4 * 1024 * 1024
"""Bytes on their way, at most, and one item more."""
_COUNT = struct.Struct("<I")
COUNT_BYTES = _COUNT.size


def pack_count(items: int) -> bytes:
    """The body of a CREDIT frame; the first credit stands between the head of a call and its pickle."""
    return _COUNT.pack(items)


def unpack_count(body: bytes | bytearray | memoryview) -> int:
    count: int = _COUNT.unpack_from(body)[0]
    return count


@define(eq=False)
class SendWindow:
    """The sender's side."""

    credit: int = WINDOW
    room_bytes: int = WINDOW_BYTES
    _sizes: deque[int] = field(factory=deque, init=False)

    @property
    def is_open(self) -> bool:
        """One more item may be sent."""
        return self.credit > 0 and self.room_bytes > 0

    def sent(self, size: int) -> None:
        self.credit -= 1
        self.room_bytes -= size
        self._sizes.append(size)

    def granted(self, items: int) -> None:
        """The receiver has taken the oldest so many."""
        self.credit += items
        for _ in range(min(items, len(self._sizes))):
            self.room_bytes += self._sizes.popleft()


@define(eq=False)
class ReceiveWindow:
    """The receiver's side: what it has taken and not granted yet."""

    items: int = 0
    size: int = 0

    def took(self, size: int) -> int:
        """One item more; returns how many to grant now."""
        self.items += 1
        self.size += size
        if self.items * 2 < WINDOW and self.size * 2 < WINDOW_BYTES:
            return 0
        granted, self.items, self.size = self.items, 0, 0
        return granted
