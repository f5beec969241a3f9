"""Set of integer ranges, for the light actors of one host that have ended: numbered in order, they form few ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last number of each range, in order."""
ENDED_HERE = "ended_here"
"""Key in the details of a refusal: the light actor has ended for good, while its host lives."""
RAISED = "raised"
"""Key in the same details: the error of its constructor, as `errors.dump_error` packs it."""
# A host may make millions of light actors; their reasons would grow without bound, the ranges hardly do.
ENDS_KEPT = 1_000
"""Number of latest ends whose reasons are stored; of older ones, only the numbers."""
LONG_AGO = "it has ended long ago: the reason is no longer stored"


class RangeSet:
    """Set of integers as ranges, compact where they are dense."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def add(self, number: int) -> None:
        if number not in self:
            self._put(number, number)

    def update(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add all numbers of the ranges."""
        for first, last in ranges:
            self._put(first, last)

    def _put(self, first: int, last: int) -> None:
        """Add a range, merged with all ranges it overlaps or touches."""
        # Touching ranges are merged as well: the numbers of ended actors are consecutive, and the set stays a few
        # ranges.
        begin = bisect_right(self._firsts, first)
        if begin and self._lasts[begin - 1] >= first - 1:
            begin -= 1
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end], self._lasts[begin:end] = [first], [last]

    @property
    def ranges(self) -> Ranges:
        return tuple(zip(self._firsts, self._lasts, strict=True))
