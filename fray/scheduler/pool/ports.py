"""The port numbers of one machine: which are given, and which come next.

A number that was given back comes again last, so that a process meets neither the late connections nor the closing
sockets of the one before it. Numbers that strangers hold come after all others, until their time is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import define, field

from fray.model.resources import PortRange

AVOID_S = 300.0
"""For so long a port that a stranger held is given only if there is no other."""


@define(eq=False)
class Ports:
    """Plain bookkeeping: `peek` says what `take` shall be told."""

    range: PortRange
    given: dict[int, None] = field(factory=dict)
    avoided: dict[int, float] = field(factory=dict)
    """Until when."""
    _next: int = 0
    """Counted from the first of the range."""

    @property
    def free(self) -> int:
        return self.range.count - len(self.given)

    def peek(self, count: int, now: float) -> tuple[int, ...]:
        """The next ``count`` free ones; there must be so many."""
        if not self.given and not self.avoided and count <= self.range.count - self._next:
            start = self.range.first + self._next
            return tuple(range(start, start + count))  # nothing is in the way
        found: list[int] = []
        spare: list[int] = []
        for port in self._from_next() if count else ():
            if port in self.given:
                continue
            (spare if self.avoided.get(port, now) > now else found).append(port)
            if len(found) == count:
                break
        return tuple([*found, *spare][:count])

    def mark(self) -> int:
        """For `reset`."""
        return self._next

    def reset(self, mark: int) -> None:
        """Numbers come in the order in which they would have come then; what is given is not its business."""
        self._next = mark

    def take(self, ports: Iterable[int]) -> None:
        for port in ports:
            self.given[port] = None
        self.advance_past(ports)

    def advance_past(self, ports: Iterable[int]) -> None:
        """They were given, now or earlier: others come before them."""
        for port in ports:
            self._next = (port - self.range.first + 1) % max(1, self.range.count)

    def release(self, ports: Iterable[int]) -> None:
        for port in ports:
            del self.given[port]

    def _from_next(self) -> Iterator[int]:
        first, count = self.range.first, self.range.count
        return (first + (self._next + step) % count for step in range(count))
