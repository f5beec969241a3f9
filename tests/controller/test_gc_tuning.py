"""Blocks in which no collection of garbage begins."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fray.gc_tuning import gc_paused


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    if was_enabled:
        gc.enable()
    else:
        gc.disable()


def test_no_collection_begins_in_a_paused_block_and_one_that_is_due_begins_after_it() -> None:
    gc.enable()
    gc.collect()
    gc.set_threshold(100)
    kept: list[list[int]] = []

    def collections() -> int:
        return sum(generation["collections"] for generation in gc.get_stats())

    with gc_paused():
        before = collections()
        kept.extend([] for _ in range(1000))
        assert collections() == before
    kept.extend([] for _ in range(10))
    assert collections() > before


def test_the_collector_is_enabled_after_an_error_and_stays_disabled_if_it_was() -> None:
    gc.enable()
    with pytest.raises(ZeroDivisionError), gc_paused():
        assert 1 / 0
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
