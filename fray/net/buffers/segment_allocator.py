"""Bookkeeping of a pool of segments: use counts, reuse and removal. Pure.

Invariants: a segment is free when it has no use: no array of this process, no call that may be sent again, no loan to a
peer. A free segment may be filled again, unless it is *spoilt*: one of its loans ended in another way than being
returned by its borrower. Resets and ends of connections prove nothing about remaining readers, so a spoilt segment is
removed, and its memory lives until the last reader unmaps it.
"""

from __future__ import annotations

from attrs import Factory, define

SMALLEST_BYTES = 64 * 1024
STEPS = 8
"""Number of sizes between two powers of two, so that a segment fits many buffers and wastes at most an eighth."""
ROOMY = 2
"""Largest ratio of segment to buffer: larger segments are not used for it."""


def capacity_for(size_bytes: int) -> int:
    """Return the size of a new segment for so many bytes."""
    step = max(SMALLEST_BYTES, (1 << max(0, (size_bytes - 1).bit_length() - 1)) // STEPS)
    return -(-size_bytes // step) * step


@define(eq=False)
class SegmentEntry:
    """One segment."""

    capacity: int
    uses: int = 1
    spoilt: bool = False
    free_since: float = 0.0


@define(eq=False)
class SegmentAllocator:
    """All segments of one process. `take`, `add` and `hold` count a use; each use ends with one `drop`."""

    limit_bytes: int
    idle_s: float
    entries: dict[int, SegmentEntry] = Factory(dict)
    held_bytes: int = 0
    _next: int = 1

    def take(self, size_bytes: int) -> int | None:
        """Return a free segment that fits, now in use; None: create one with `add`."""
        fitting = [
            # The smallest that fits, and of equal ones the last used: it may still be in the CPU's caches, and the
            # others become idle.
            (entry.capacity, -entry.free_since, number)
            for number, entry in self.entries.items()
            if not entry.uses and size_bytes <= entry.capacity <= max(size_bytes, SMALLEST_BYTES) * ROOMY
        ]
        if not fitting:
            return None
        number = min(fitting)[2]
        self.entries[number].uses = 1
        return number

    def make_room(self, capacity: int) -> list[int] | None:
        """Remove free segments to make room for `add` and return them for deletion; None: not enough room."""
        free = sorted((entry.free_since, number) for number, entry in self.entries.items() if not entry.uses)
        removed: list[int] = []
        # Decided before anything is removed: warm segments are not given up for a request that cannot be granted
        # anyway.
        if self.held_bytes - sum(self.entries[number].capacity for _, number in free) + capacity > self.limit_bytes:
            return None
        for _, number in free:
            if self.held_bytes + capacity <= self.limit_bytes:
                break
            self._remove(number)
            removed.append(number)
        return removed

    def add(self, capacity: int) -> int:
        """Return the number of a new segment, in use. Numbers are never reused."""
        # A borrower keeps its mappings by number, so a number must always mean the same file.
        number, self._next = self._next, self._next + 1
        self.entries[number] = SegmentEntry(capacity)
        self.held_bytes += capacity
        return number

    def hold(self, number: int) -> None:
        """Count one more use of a segment that is in use."""
        entry = self.entries[number]
        assert entry.uses > 0, f"segment {number} is free"
        entry.uses += 1

    def drop(self, number: int, now: float, *, spoil: bool = False) -> bool:
        """End a use; return whether the segment was removed and must be deleted."""
        entry = self.entries[number]
        assert entry.uses > 0, f"segment {number} is free"
        entry.uses -= 1
        entry.spoilt = entry.spoilt or spoil
        entry.free_since = now
        # A spoilt one stays while it is used here: its content is still valid, it only must not be filled again.
        if entry.uses or not entry.spoilt:
            return False
        self._remove(number)
        return True

    def trim(self, now: float) -> list[int]:
        """Remove segments that have been free for `idle_s`, and return them for deletion."""
        removed = [n for n, entry in self.entries.items() if not entry.uses and now - entry.free_since >= self.idle_s]
        for number in removed:
            self._remove(number)
        return removed

    def __len__(self) -> int:
        return len(self.entries)

    def _remove(self, number: int) -> None:
        self.held_bytes -= self.entries.pop(number).capacity
