"""What attempts have printed lately: a cache for those who follow, so that many readers cost a node one.

Law: the truth is on the nodes' disks. What is here came by as it was printed, and may have holes where a node was
behind; each chunk knows its numbers, so a reader sees a hole as it sees an end. Nothing is stored: a controller that
starts again starts with an empty book, and readers are sent to the nodes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from attrs import define, field

from fray.model.ids import AttemptId, JobId, split_attempt
from fray.model.log_records import LogChunk

RING_LIMIT_BYTES = 1024 * 1024
"""Kept of one attempt."""
CACHE_LIMIT_BYTES = 128 * 1024 * 1024
"""Kept of all attempts together; those that have been quiet longest go first."""
_CHUNK_COST_BYTES = 300


def _cost_bytes(chunk: LogChunk) -> int:
    return _CHUNK_COST_BYTES + len(chunk.data)


@define
class LogRing:
    """The last chunks of one attempt."""

    limit_bytes: int = RING_LIMIT_BYTES
    chunks: deque[LogChunk] = field(factory=deque)
    end: int = 0
    """The number of the line that comes next, as far as is known here."""
    size_bytes: int = 0
    is_closed: bool = False
    """Nothing comes after ``end``."""

    @property
    def first(self) -> int:
        """The oldest line that is kept."""
        return self.chunks[0].first if self.chunks else self.end

    def append(self, chunk: LogChunk) -> None:
        """What is known already is left out (a node says again what it is not sure we have)."""
        if chunk.end <= self.end and self.end:
            return
        self.end = max(self.end, chunk.end)
        if chunk.data:
            self.chunks.append(chunk)
            self.size_bytes += _cost_bytes(chunk)
        while self.size_bytes > self.limit_bytes and len(self.chunks) > 1:
            self.size_bytes -= _cost_bytes(self.chunks.popleft())

    def read(self, line: int, limit_bytes: int) -> LogChunk | None:
        """Chunks from that line on up to the next hole, at least one and about ``limit_bytes``.

        The first may begin before it; an empty one at the end. None: the line is not here.
        """
        if line >= self.end:
            return LogChunk(line, line)
        found: list[LogChunk] = []
        size = 0
        for chunk in self.chunks:
            if chunk.end <= line:
                continue
            if chunk.first > (found[-1].end if found else line) or (found and size >= limit_bytes):
                break
            found.append(chunk)
            size += len(chunk.data)
        return LogChunk(found[0].first, found[-1].end, b"".join(one.data for one in found)) if found else None

    def next_after(self, line: int) -> int:
        """Where to go on after a hole: the first line from there on that is here, or the end."""
        return next((max(line, chunk.first) for chunk in self.chunks if chunk.end > line), max(line, self.end))


class LogCache:
    """The rings of all attempts, bounded together."""

    def __init__(self, ring_limit_bytes: int = RING_LIMIT_BYTES, cache_limit_bytes: int = CACHE_LIMIT_BYTES) -> None:
        self._ring_limit_bytes = ring_limit_bytes
        self._cache_limit_bytes = cache_limit_bytes
        self._rings: OrderedDict[AttemptId, LogRing] = OrderedDict()  # longest quiet first
        self._size_bytes = 0

    def __repr__(self) -> str:
        return f"<LogCache {self.statistics()}>"

    def statistics(self) -> dict[str, int]:
        return {"attempts": len(self._rings), "size_bytes": self._size_bytes}

    def ring(self, attempt: AttemptId) -> LogRing | None:
        """None: nothing has come of it, or it was quiet too long."""
        return self._rings.get(attempt)

    def add(self, attempt: AttemptId, chunk: LogChunk, *, closed: bool = False) -> None:
        """Keep what has come; ``closed``: it is the last of this attempt."""
        ring = self._rings.get(attempt)
        if ring is None:
            ring = self._rings[attempt] = LogRing(self._ring_limit_bytes)
            self._size_bytes += _CHUNK_COST_BYTES
        self._rings.move_to_end(attempt)
        old_bytes = ring.size_bytes
        ring.append(chunk)
        ring.is_closed = ring.is_closed or closed
        self._size_bytes += ring.size_bytes - old_bytes
        while self._size_bytes > self._cache_limit_bytes and len(self._rings) > 1:
            _, quiet = self._rings.popitem(last=False)
            self._size_bytes -= quiet.size_bytes + _CHUNK_COST_BYTES

    def attempts_of(self, jobs: Iterable[JobId]) -> list[AttemptId]:
        """Attempts of these jobs that have lines here."""
        wanted = set(jobs)
        return [attempt for attempt in self._rings if split_attempt(attempt)[0] in wanted]


class LogCursor:
    """One reader's position in each ring it follows; it begins with the first line, and skips what is not here."""

    def __init__(self, cache: LogCache) -> None:
        self._cache = cache
        self._positions: dict[AttemptId, int] = {}
        self._pending: dict[AttemptId, None] = {}  # those whose turn it is first

    def mark_pending(self, attempt: AttemptId) -> None:
        """The attempt has new lines, or is followed from now on."""
        self._pending[attempt] = None

    def remove(self, attempt: AttemptId) -> None:
        self._pending.pop(attempt, None)
        self._positions.pop(attempt, None)

    def pending(self) -> tuple[AttemptId, ...]:
        """Attempts with lines to read."""
        return tuple(self._pending)

    def read(self, attempt: AttemptId, limit_bytes: int) -> tuple[LogChunk, int]:
        """The next lines of one attempt, about ``limit_bytes``, and how many before them are skipped.

        Who is still behind then gets in line again, behind the others.
        """
        self._pending.pop(attempt, None)
        ring, position = self._cache.ring(attempt), self._positions.get(attempt, 0)
        if ring is None:
            return LogChunk(position, position), 0
        start = ring.next_after(position)
        chunk = ring.read(start, limit_bytes) or LogChunk(start, start)
        self._positions[attempt] = chunk.end
        if chunk.end < ring.end:
            self._pending[attempt] = None
        return chunk, start - position
