"""Indexes over the queue, so that a pass examines little of it.

- `WaitingShape`: a shape with which something waits; all of it fits or does not fit together.
- `TenantShapeQueue`: applicants of one tenant, shape and band, in order.
- `TenantQueue`: applicants of one tenant and band: its shape queues by their first entries.
- `ShapeIndex`: finds the shapes that could fit into a given amount of room.
- `SortedBlocks`: sorted list of millions of entries; adding and removing move at most a thousand of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from attrs import Factory, define

from fray.scheduler.queue.applicant import Entry, PlacementShape
from fray.scheduler.queue.fair_share import Amount, Tenant

T = TypeVar("T", bound=Any)
# An insertion moves at most twice as many references, however many applicants wait.
BLOCK = 1000
NEEDS_BLOCK = 64


class SortedBlocks(Generic[T]):
    """Sorted list in blocks.

    `ShapeIndex` and the orders of a pool are sorted lists in blocks, too, but know bounds of each block, by which a
    search skips it. A library of sorted lists could only replace this one.
    """

    __slots__ = ("_blocks", "_lasts", "_size")

    def __init__(self) -> None:
        self._blocks: list[list[T]] = []
        self._lasts: list[T] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for block in self._blocks:
            yield from block

    @property
    def first(self) -> T:
        return self._blocks[0][0]

    def add(self, item: T) -> None:
        self._size += 1
        if not self._blocks:
            self._blocks.append([item])
            self._lasts.append(item)
            return
        at = len(self._blocks) - 1
        if item > self._lasts[-1]:
            last = self._blocks[-1]
            if len(last) < 2 * BLOCK:  # nearly always: a later entry sorts last
                last.append(item)
                self._lasts[-1] = item
                return
        elif at:
            at = bisect_left(self._lasts, item)
        block = self._blocks[at]
        insort(block, item)
        if len(block) > 2 * BLOCK:
            self._blocks[at : at + 1] = block[:BLOCK], block[BLOCK:]
            self._lasts.insert(at, block[BLOCK - 1])
            at += 1
        self._lasts[at] = self._blocks[at][-1]

    def remove(self, item: T) -> None:
        blocks = self._blocks
        # What is placed is mostly the head: no search is needed for it.
        at = 0 if item <= self._lasts[0] else bisect_left(self._lasts, item)
        block = blocks[at]
        del block[0 if block[0] == item else bisect_left(block, item)]
        self._size -= 1
        if not block:
            del blocks[at], self._lasts[at]
        elif item == self._lasts[at]:
            self._lasts[at] = block[-1]

    def count_before(self, item: T) -> int:
        """Return how many items are smaller."""
        at = bisect_left(self._lasts, item)
        if at == len(self._blocks):
            return self._size
        return sum(map(len, self._blocks[:at])) + bisect_left(self._blocks[at], item)


@define(eq=False)
class WaitingShape:
    """Shape with which something waits."""

    shape: PlacementShape
    number: int
    """Order in which the shapes came."""
    is_exempt: bool
    """True if it is never held back: it takes nothing, or belongs to a running job."""
    # A lower bound, as a shape must be found if any of its choices might fit. Upper bounds (`need`) serve quotas, which
    # must hold whichever choice it gets.
    cpu_milli: int
    memory_bytes: int
    """Minimum any choice of a member takes."""
    kind: str
    """Kind of device that every choice takes; each member needs at least ``count`` of it."""
    count: int
    need: Amount
    """Maximum any choice takes of each resource, for all members together."""
    devices: dict[str, int]
    """The same by ``kind:variant``."""
    lanes: dict[tuple[int, Tenant], TenantShapeQueue] = Factory(dict)
    # Numbers instead of flags: a new pass, or a new version of the pool, makes them stale without a walk over all
    # shapes.
    failed_version: int = -1
    """Version of the pool at which it did not fit."""
    refused_in_pass: int = -1
    """Number of the pass in which it was last refused."""
    unchanged_in_pass: int = -1
    """Number of the pass in which nothing had changed for it."""

    @property
    def examined_in_pass(self) -> int:
        """Return the number of the last pass that tried it, or found that nothing had changed for it."""
        return max(self.refused_in_pass, self.unchanged_in_pass)

    def count_waiting(self) -> int:
        """Return how many applicants wait with it."""
        return sum(len(lane.entries) for lane in self.lanes.values())


@define(eq=False)
class TenantShapeQueue:
    """Applicants of one tenant, shape and band."""

    waiting: WaitingShape
    tenant_queue: TenantQueue
    entries: SortedBlocks[Entry] = Factory(SortedBlocks)
    failed_version: int = -1
    """Version of the pool at which its first applicant did not fit."""

    @property
    def head(self) -> Entry:
        return self.entries.first


@define(eq=False)
class TenantQueue:
    """Applicants of one tenant and band."""

    rank: int
    tenant: Tenant
    entries: SortedBlocks[Entry] = Factory(SortedBlocks)
    heads: list[tuple[Entry, TenantShapeQueue]] = Factory(list)
    """Shape queues by their first entries."""

    @property
    def first_order(self) -> int:
        """Return the order of acceptance of its first applicant; one of higher priority comes before earlier ones."""
        return self.heads[0][0][2]

    def add_head(self, head: Entry, lane: TenantShapeQueue) -> None:
        # Entries are unique, so two queues are never compared.
        insort(self.heads, (head, lane))

    def remove_head(self, head: Entry) -> None:
        del self.heads[bisect_left(self.heads, (head,))]


class ShapeIndex:
    """Shapes by the least CPU they need, in blocks with the least memory of each."""

    def __init__(self) -> None:
        self._blocks: list[list[tuple[int, int, int, WaitingShape]]] = []
        self._least: list[int] = []
        """Least memory of a shape in each block."""

    def add(self, want: WaitingShape) -> None:
        # The number is unique, so shapes themselves are never compared.
        item = want.cpu_milli, want.memory_bytes, want.number, want
        at = self._find(item)
        if at == len(self._blocks):
            self._blocks.append([])
            self._least.append(want.memory_bytes)
        block = self._blocks[at]
        insort(block, item)
        self._least[at] = min(self._least[at], want.memory_bytes)
        # Small blocks: their bounds of memory exclude the more, the fewer shapes they have.
        if len(block) > 2 * NEEDS_BLOCK:
            halves = block[:NEEDS_BLOCK], block[NEEDS_BLOCK:]
            self._blocks[at : at + 1] = halves
            self._least[at : at + 1] = (min(one[1] for one in half) for half in halves)

    def remove(self, want: WaitingShape) -> None:
        item = want.cpu_milli, want.memory_bytes, want.number, want
        at = self._find(item)
        block = self._blocks[at]
        del block[bisect_left(block, item)]
        if block:
            # The exact bound, unlike in the pool: shapes come and go much less often than the room of machines changes.
            self._least[at] = min(one[1] for one in block)
        else:
            del self._blocks[at], self._least[at]

    def _find(self, item: tuple[int, int, int, WaitingShape]) -> int:
        """Return the block where it is or belongs."""
        at = bisect_right(self._blocks, item, key=lambda block: block[0])
        return max(0, at - 1) if self._blocks else 0

    def within(self, cpu_milli: int, memory_bytes: int) -> Iterator[WaitingShape]:
        """Yield the shapes that need no more than this."""
        # Sorted by CPU: the first block that needs too much ends the search. Memory only excludes whole blocks.
        for block, least in zip(self._blocks, self._least, strict=True):
            if block[0][0] > cpu_milli:
                return
            if least <= memory_bytes:
                for cpu, memory, _, want in block:
                    if cpu > cpu_milli:
                        break
                    if memory <= memory_bytes:
                        yield want
