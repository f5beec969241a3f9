"""What attempts print: a bounded ring each, and readers that follow at their own pace.

Law: a reader that is slower than the ring loses the oldest lines and is told how many. Logs are no decisions: they
live in RAM, and a controller that starts again starts with empty rings.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TypeAlias

from attrs import define, field

from fray.model.ids import AttemptId, JobId, split_attempt

Line: TypeAlias = tuple[str, float, str]
"""Stream ``out`` or ``err``, seconds since the epoch, text without its newline."""

RING_LIMIT_BYTES = 1024 * 1024
"""Kept of one attempt."""
ENDS_LIMIT = 10_000
"""Attempts of which only the number of lines is still known."""
BOOK_LIMIT_BYTES = 128 * 1024 * 1024
"""Kept of all attempts together; those that have been quiet longest go first."""
LINE_LIMIT_CHARS = 64 * 1024
"""A longer line is cut, and says so."""
_LINE_COST_BYTES = 96


def _cost_bytes(line: Line) -> int:
    return _LINE_COST_BYTES + len(line[2])


def _cut(line: Line) -> Line:
    stream, time, text = line
    if len(text) <= LINE_LIMIT_CHARS:
        return line
    return stream, time, f"{text[:LINE_LIMIT_CHARS]} … ({len(text) - LINE_LIMIT_CHARS} more characters cut)"


@define
class Ring:
    """The last lines of one attempt. Line numbers grow for ever: ``first`` is the oldest kept, ``end`` the next."""

    limit_bytes: int = RING_LIMIT_BYTES
    lines: deque[Line] = field(factory=deque)
    first: int = 0
    size_bytes: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.lines)

    def add(self, lines: Iterable[Line]) -> None:
        for line in map(_cut, lines):
            self.lines.append(line)
            self.size_bytes += _cost_bytes(line)
        while self.size_bytes > self.limit_bytes and self.lines:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        self.size_bytes -= _cost_bytes(self.lines.popleft())
        self.first += 1

    def read(self, start: int, most_bytes: int) -> tuple[tuple[Line, ...], int]:
        """Lines from number ``start`` on, at least one and about ``most_bytes``, and the number to go on from.

        Lines that are no longer there are replaced by one that counts them.
        """
        taken: list[Line] = []
        if start < self.first:
            taken.append(_gap(self.first - start, self.lines[0][1] if self.lines else 0.0))
            start = self.first
        size_bytes = 0
        for index in range(start - self.first, len(self.lines)):
            line = self.lines[index]
            taken.append(line)
            start += 1
            size_bytes += _cost_bytes(line)
            if size_bytes >= most_bytes:
                break
        return tuple(taken), start


def _gap(count: int, time: float) -> Line:
    return "err", time, f"… {count} line{'s' if count > 1 else ''} not kept: the job prints faster than this is read …"


class LogBook:
    """The rings of all attempts, bounded together."""

    def __init__(self, ring_limit_bytes: int = RING_LIMIT_BYTES, book_limit_bytes: int = BOOK_LIMIT_BYTES) -> None:
        self._ring_limit_bytes = ring_limit_bytes
        self._book_limit_bytes = book_limit_bytes
        self._rings: OrderedDict[AttemptId, Ring] = OrderedDict()  # longest quiet first
        self._ends: OrderedDict[AttemptId, int] = OrderedDict()  # of rings that made room, so that numbers go on
        self._size_bytes = 0

    def __repr__(self) -> str:
        return f"<LogBook {self.statistics()}>"

    def statistics(self) -> dict[str, int]:
        return {"attempts": len(self._rings), "size_bytes": self._size_bytes}

    def ring(self, attempt: AttemptId) -> Ring:
        """Its ring; an empty one, not kept, if it has none."""
        return self._rings.get(attempt) or Ring(self._ring_limit_bytes, first=self._ends.get(attempt, 0))

    def add(self, attempt: AttemptId, lines: Iterable[Line]) -> None:
        ring = self.ring(attempt)
        self._rings[attempt] = ring
        self._rings.move_to_end(attempt)
        self._ends.pop(attempt, None)
        before_bytes = ring.size_bytes
        ring.add(lines)
        self._size_bytes += ring.size_bytes - before_bytes
        while self._size_bytes > self._book_limit_bytes and len(self._rings) > 1:
            self._evict()

    def _evict(self) -> None:
        attempt, ring = self._rings.popitem(last=False)
        self._size_bytes -= ring.size_bytes
        self._ends[attempt] = ring.end
        if len(self._ends) > ENDS_LIMIT:
            self._ends.popitem(last=False)

    def attempts_of(self, jobs: Iterable[JobId]) -> list[AttemptId]:
        """Attempts of these jobs that have lines here."""
        wanted = set(jobs)
        return [attempt for attempt in self._rings if split_attempt(attempt)[0] in wanted]


class Follower:
    """One reader's place in each ring it follows; it begins with the first line."""

    def __init__(self, book: LogBook) -> None:
        self._book = book
        self._places: dict[AttemptId, int] = {}
        self._behind: dict[AttemptId, None] = {}  # in the order in which they got something new

    def poke(self, attempt: AttemptId) -> None:
        """The attempt has new lines, or is followed from now on."""
        self._behind[attempt] = None

    def leave(self, attempt: AttemptId) -> None:
        self._behind.pop(attempt, None)
        self._places.pop(attempt, None)

    def behind(self) -> tuple[AttemptId, ...]:
        """Attempts with lines to read."""
        return tuple(self._behind)

    def read(self, attempt: AttemptId, most_bytes: int) -> tuple[Line, ...]:
        """The next lines of one attempt, about ``most_bytes``; empty when there are none."""
        ring = self._book.ring(attempt)
        lines, place = ring.read(self._places.get(attempt, 0), most_bytes)
        self._places[attempt] = place
        if place >= ring.end:
            self._behind.pop(attempt, None)
        return lines
