"""Flow control: the windows of streams, and the budget for large buffers of calls.

Invariants of a window: at most `WINDOW` items are sent and not yet granted back, and no item is sent while
`WINDOW_BYTES` or more are. The receiver grants what it has taken once that is half of either, so a receiver that keeps
taking never leaves a sender waiting. Both directions of both ends use the same windows, which are pure.

A caller that reads a stream over a long path lets its window grow, up to `WINDOW_MOST`: items then come in bursts with
waits between them, since the sender waits for credit for a round trip. A sender that is slower than its reader sends no
bursts, and its window stays.
"""

from __future__ import annotations

import struct
from collections import deque

import trio
from attrs import define, field

from fray.errors import ChannelFull
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.runtime.serialization.buffers import PickledObject

# Two limits, because either alone fails: 64 items of 8 MiB are too much memory, and 4 MiB of empty items too many
# objects.
WINDOW = 64
"""Most items on their way."""
WINDOW_MOST = 4096
"""Most items on their way in a window that has grown: 80,000 a second at a round trip of 50 ms."""
BURST_WAITS = 16
"""Part of a window: a reader that waits for fewer of its items than this is sent bursts."""
WINDOW_BYTES = 4 * 1024 * 1024
"""Most bytes on their way, plus one item."""
# The caller keeps buffers until the answer, as a reset may require them again. The largest allowed transfer always
# fits.
BULK_LIMIT_BYTES = SIZE_LIMIT_BYTES
"""Most bytes of large buffers in unanswered calls of one caller."""
_COUNT = struct.Struct("<I")
COUNT_BYTES = _COUNT.size


def pack_count(items: int, more: int = 0) -> bytes:
    """Return the body of a CREDIT frame; ``more``: items by which the window grows.

    The first credit stands between the head of a call and its pickle.
    """
    return _COUNT.pack(items) + (_COUNT.pack(more) if more else b"")


def unpack_count(body: bytes | bytearray | memoryview) -> int:
    """Return the number at the start of ``body``."""
    count: int = _COUNT.unpack_from(body)[0]
    return count


def unpack_growth(body: bytes | bytearray | memoryview) -> int:
    """Return by how many items the window grows with a CREDIT frame."""
    return unpack_count(body[COUNT_BYTES:]) if len(body) >= 2 * COUNT_BYTES else 0


@define(eq=False)
class SendWindow:
    """Sender's side of a stream."""

    credit: int = WINDOW
    room_bytes: int = WINDOW_BYTES
    _sizes: deque[int] = field(factory=deque, init=False)

    @property
    def is_open(self) -> bool:
        """Return whether one more item may be sent."""
        # Room may become negative by one item: an item larger than the window could otherwise never be sent.
        return self.credit > 0 and self.room_bytes > 0

    def sent(self, size: int) -> None:
        """Count an item of ``size`` bytes as sent."""
        self.credit -= 1
        self.room_bytes -= size
        self._sizes.append(size)

    def on_credit(self, items: int) -> None:
        """Record that the receiver has taken the oldest ``items``."""
        self.credit += items
        # The receiver grants counts only. The sizes are known here, in the order in which the items were sent.
        for _ in range(min(items, len(self._sizes))):
            self.room_bytes += self._sizes.popleft()


@define(eq=False)
class ReceiveWindow:
    """Receiver's side of a stream: what it has taken and not granted yet."""

    items: int = 0
    size: int = 0
    limit: int = WINDOW
    waits: int = 0
    """Number of times that the reader has waited since the last grant."""

    def grow(self) -> int:
        """Return by how many items to let the sender's window grow with the grant that `took` has returned."""
        waits, self.waits = self.waits, 0
        if not 0 < waits < self.limit // BURST_WAITS or self.limit >= WINDOW_MOST:
            return 0
        self.limit *= 2
        return self.limit // 2

    def took(self, size: int) -> int:
        """Count an item of ``size`` bytes as taken; return how many items to grant now."""
        self.items += 1
        self.size += size
        # Half a window at a time: one CREDIT frame for 32 items, and the sender still has the other half to continue
        # with.
        if self.items * 2 < self.limit and self.size * 2 < WINDOW_BYTES:
            return 0
        granted, self.items, self.size = self.items, 0, 0
        return granted


@define(eq=False)
class BufferBudget:
    """Large buffers of all unanswered calls of one caller: at most `BULK_LIMIT_BYTES`, or one call."""

    held_bytes: int = 0
    _lot: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def check(self, more_bytes: int, what: str) -> None:
        """Check that ``more_bytes`` have room. May be called on any thread.

        Raises:
            ChannelFull: they have not.
        """
        if not self.has_room(more_bytes):
            text = (
                f"{what} has {more_bytes} bytes in large buffers, and {self.held_bytes} of unanswered calls are held "
                f"already (limit {BULK_LIMIT_BYTES}): await some of those first"
            )
            raise ChannelFull(text, held_bytes=self.held_bytes, limit_bytes=BULK_LIMIT_BYTES)

    def has_room(self, more_bytes: int) -> bool:
        # A single call may exceed the limit, or a call of the largest allowed size could wait for ever.
        return not self.held_bytes or self.held_bytes + more_bytes <= BULK_LIMIT_BYTES

    def reserve(self, pickled: PickledObject) -> None:
        """Count the buffers of a call that is sent."""
        pickled.reserved_bytes = pickled.bulk_bytes
        self.held_bytes += pickled.reserved_bytes

    def release(self, pickled: PickledObject) -> None:
        """Give back what `reserve` took; the call has been answered."""
        self.held_bytes -= pickled.reserved_bytes
        # All are woken, since each needs another amount; those that still do not fit park again.
        self._lot.unpark_all()

    async def wait_for_room(self) -> None:
        """Wait until some buffers have been released."""
        await self._lot.park()
