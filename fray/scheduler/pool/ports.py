"""Port numbers of one machine: the ones in use, and the order of the next ones.

A released number is given again last, so that a process gets neither late connections nor closing sockets of the
previous one. Numbers that foreign processes hold come after all others, until a deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import define, field

from fray.model.resources import PortRange

AVOID_S = 300.0
"""Seconds for which a port that a foreign process held is given only if there is no other."""


@define(eq=False)
class Ports:
    """Bookkeeping of ports: `peek` returns what to pass to `take`."""

    range: PortRange
    given: dict[int, None] = field(factory=dict)
    avoided: dict[int, float] = field(factory=dict)
    """Deadlines of avoided numbers."""
    # Not stored: after a restart it follows from the attempts in the order of their placement (`Tables._index_ports`).
    _next: int = 0
    """Offset of the next number in the range."""

    @property
    def free(self) -> int:
        return self.range.count - len(self.given)

    def peek(self, count: int, now: float) -> tuple[int, ...]:
        """Return the next ``count`` free numbers; there must be that many."""
        if not self.given and not self.avoided and count <= self.range.count - self._next:
            start = self.range.first + self._next
            return tuple(range(start, start + count))  # nothing to skip
        found: list[int] = []
        spare: list[int] = []
        for port in self._from_next() if count else ():
            if port in self.given:
                continue
            # Only preferred against: with few ports left a job gets one that may be free again, and its node tries it
            # first.
            (spare if self.avoided.get(port, now) > now else found).append(port)
            if len(found) == count:
                break
        return tuple([*found, *spare][:count])

    def mark(self) -> int:
        """Position for `reset`."""
        return self._next

    def reset(self, mark: int) -> None:
        """Restore the order of the next numbers; numbers in use are not affected."""
        self._next = mark

    def take(self, ports: Iterable[int]) -> None:
        for port in ports:
            self.given[port] = None
        self.advance_past(ports)

    def advance_past(self, ports: Iterable[int]) -> None:
        """Continue after numbers that were given, now or earlier."""
        for port in ports:
            # A machine may have no ports at all.
            self._next = (port - self.range.first + 1) % max(1, self.range.count)

    def release(self, ports: Iterable[int]) -> None:
        for port in ports:
            del self.given[port]

    def _from_next(self) -> Iterator[int]:
        first, count = self.range.first, self.range.count
        return (first + (self._next + step) % count for step in range(count))
