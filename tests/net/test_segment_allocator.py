"""Random operations on the allocator of segments: no segment with readers is filled again."""

from __future__ import annotations

from attrs import define
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fray.net.buffers.segment_allocator import (
    SMALLEST_BYTES,
    STEPS,
    SegmentAllocator,
    capacity_for,
)

LIMIT = 40 * SMALLEST_BYTES
IDLE_S = 5.0


@define(eq=False)
class Looker:
    """A reader of a segment's content: an array here, or a borrower elsewhere."""

    segment: int
    version: int
    is_known: bool = True
    """False: a borrower that will not report again, and may live on."""


class AllocatorMachine(RuleBasedStateMachine):
    """The model records only the readers of each segment's content."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SegmentAllocator(LIMIT, IDLE_S)
        self.now = 0.0
        self.capacities: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.lookers: list[Looker] = []

    def known(self) -> list[Looker]:
        return [each for each in self.lookers if each.is_known]

    def fill(self, number: int) -> None:
        """Write new content: a remaining reader of the old one would see it change."""
        assert not [each for each in self.lookers if each.segment == number]
        self.versions[number] = self.versions.get(number, 0) + 1
        self.lookers.append(Looker(number, self.versions[number]))

    def gone(self, numbers: list[int]) -> None:
        for number in numbers:
            assert not [each for each in self.known() if each.segment == number]
            del self.capacities[number]

    @rule(size=st.integers(1, LIMIT + SMALLEST_BYTES))
    def keep(self, size: int) -> None:
        number = self.allocator.take(size)
        if number is None:
            capacity = capacity_for(size)
            victims = self.allocator.make_room(capacity)
            used = {each.segment for each in self.known()}
            if victims is None:
                assert sum(self.capacities[each] for each in used) + capacity > LIMIT
                return
            self.gone(victims)
            number = self.allocator.add(capacity)
            assert number not in self.versions
            self.capacities[number] = capacity
        assert self.capacities[number] >= size
        self.fill(number)

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        other = data.draw(st.sampled_from(self.known()))
        self.allocator.hold(other.segment)
        self.lookers.append(Looker(other.segment, other.version))

    @precondition(lambda self: self.known())
    @rule(data=st.data(), spoil=st.booleans())
    def end(self, data: st.DataObject, spoil: bool) -> None:
        """End a use: the segment is returned, or its borrower is lost."""
        looker = data.draw(st.sampled_from(self.known()))
        if spoil:
            looker.is_known = False
        else:
            self.lookers.remove(looker)
        if self.allocator.drop(looker.segment, self.now, spoil=spoil):
            self.gone([looker.segment])

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.gone(self.allocator.trim(self.now))

    @invariant()
    def books_are_right(self) -> None:
        assert set(self.allocator.entries) == set(self.capacities)
        assert self.allocator.held_bytes == sum(self.capacities.values()) <= LIMIT
        for number, entry in self.allocator.entries.items():
            assert entry.uses == sum(each.segment == number for each in self.known())


TestSegmentAllocator = AllocatorMachine.TestCase


@given(st.integers(1, 1 << 40))
def test_a_segment_is_large_enough_and_wastes_little(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity < size + max(SMALLEST_BYTES, 2 * size / STEPS)
    assert capacity % SMALLEST_BYTES == 0 or capacity > SMALLEST_BYTES * STEPS


def test_an_idle_segment_is_removed_after_a_while_and_a_used_one_never() -> None:
    allocator = SegmentAllocator(LIMIT, IDLE_S)
    used, idle = allocator.add(SMALLEST_BYTES), allocator.add(SMALLEST_BYTES)
    assert not allocator.drop(idle, 10.0)
    assert allocator.trim(10.0 + IDLE_S - 0.1) == []
    assert allocator.trim(10.0 + IDLE_S) == [idle]
    assert allocator.trim(1e9) == []
    assert list(allocator.entries) == [used]
