"""Indexes of the queue: sorted blocks and the index of shapes, compared with slow reference implementations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fray.scheduler.pool.requests import MemberGroup, PlacementRequest
from fray.scheduler.queue import indexes
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.queue.indexes import ShapeIndex, SortedBlocks
from fray.scheduler.queue.queue import make_waiting_shape
from tests.support.scheduler import demand

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=300)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 200))
def test_sorted_blocks_are_a_sorted_list(steps: list[tuple[bool, int]], asked: int) -> None:
    before, indexes.BLOCK = indexes.BLOCK, 4
    try:
        blocks: SortedBlocks[int] = SortedBlocks()
        twin: list[int] = []
        for adds, item in steps:
            if adds and item not in twin:
                blocks.add(item)
                twin = sorted([*twin, item])
            elif not adds and item in twin:
                blocks.remove(item)
                twin.remove(item)
            assert (list(blocks), len(blocks)) == (twin, len(twin))
            assert blocks.count_before(asked) == sum(one < asked for one in twin)
            if twin:
                assert blocks.first == twin[0]
    finally:
        indexes.BLOCK = before


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 20), st.integers(0, 10))
def test_the_shape_index_finds_all_that_could_fit_and_nothing_else(
    steps: list[tuple[bool, int]], cpu: int, memory: int
) -> None:
    before, indexes.NEEDS_BLOCK = indexes.NEEDS_BLOCK, 4
    try:
        index, there = ShapeIndex(), {}
        for adds, number in steps:
            if adds and number not in there:
                shape = PlacementShape(PlacementRequest((MemberGroup((demand(number % 20, memory=number // 20),)),)))
                index.add(there.setdefault(number, make_waiting_shape(shape, number)))
            elif not adds and number in there:
                index.remove(there.pop(number))
        found = [want.number for want in index.within(cpu * 1000, memory)]
        fitting = [n for n, want in there.items() if want.cpu_milli <= cpu * 1000 and want.memory_bytes <= memory]
        assert sorted(found) == sorted(fitting)
    finally:
        indexes.NEEDS_BLOCK = before
