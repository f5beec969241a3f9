"""Which light actors of one host have ended for good. Their numbers are given out in order, so few ranges hold them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last number of each, in order."""
ENDED_HERE = "ended_here"
"""In the details of a refusal: this light actor has ended for good, on a host that lives."""
RAISED = "raised"
"""There too: what its constructor raised, by `remote_errors.dump_error`."""
ENDS_KEPT = 1_000
"""Of so many, the last ones, it is known how they ended; of older ones, only that they did."""
LONG_AGO = "it has ended, and its host does not know any more how"


class RangeSet:
    """A set of whole numbers, small where they are dense."""

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
        """Merge with whatever it overlaps or touches."""
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
