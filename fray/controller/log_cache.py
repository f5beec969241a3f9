"""Cache of the lines that attempts have printed lately, so that many readers cost a node one transfer.

Invariants: the nodes' disks are authoritative. The cache has what was received, and may have holes where a node was
behind; each chunk carries its line numbers, so a reader recognizes a hole as it recognizes the end. Nothing is stored:
a new controller starts with an empty cache and reads from the nodes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from attrs import define, field

from fray.model.ids import AttemptId, JobId, split_attempt
from fray.model.log_records import LogChunk

RING_LIMIT_BYTES = 1024 * 1024
"""Limit of the lines of one attempt."""
CACHE_LIMIT_BYTES = 128 * 1024 * 1024
"""Limit of the lines of all attempts together; those of the attempts that have been quiet longest are dropped first."""
# Roughly the Python objects around the bytes: without it, an attempt that prints one short line at a time would hold
# several times its limit.
_CHUNK_COST_BYTES = 300


def _cost_bytes(chunk: LogChunk) -> int:
    return _CHUNK_COST_BYTES + len(chunk.data)


@define
class LogRing:
    """Last chunks of one attempt."""

    limit_bytes: int = RING_LIMIT_BYTES
    chunks: deque[LogChunk] = field(factory=deque)
    end: int = 0
    """Number of the next line, as far as is known here."""
    size_bytes: int = 0
    is_closed: bool = False
    """True if ``end`` is the end of the log."""

    @property
    def first(self) -> int:
        """Number of the oldest line in the ring."""
        return self.chunks[0].first if self.chunks else self.end

    def append(self, chunk: LogChunk) -> None:
        """Append a chunk, unless it is known: a node repeats what it is not sure that we have."""
        # Line numbers tell a repetition from something new, so a node may send a chunk again after a reconnection.
        if chunk.end <= self.end and self.end:
            return
        self.end = max(self.end, chunk.end)
        if chunk.data:
            self.chunks.append(chunk)
            self.size_bytes += _cost_bytes(chunk)
        # The newest chunk stays even if it alone exceeds the limit: a reader that waits for it finds it.
        while self.size_bytes > self.limit_bytes and len(self.chunks) > 1:
            self.size_bytes -= _cost_bytes(self.chunks.popleft())

    def read(self, line: int, limit_bytes: int) -> LogChunk | None:
        """Return the chunks from a line up to the next hole: at least one, about ``limit_bytes``.

        The first may begin before the line. At the end the result is empty; None if the line is not in the ring.
        """
        if line >= self.end:
            return LogChunk(line, line)
        found: list[LogChunk] = []
        size = 0
        for chunk in self.chunks:
            if chunk.end <= line:
                continue
            # Never across a hole: a `LogChunk` claims to have all lines from its first to its end.
            if chunk.first > (found[-1].end if found else line) or (found and size >= limit_bytes):
                break
            found.append(chunk)
            size += len(chunk.data)
        return LogChunk(found[0].first, found[-1].end, b"".join(one.data for one in found)) if found else None

    def next_after(self, line: int) -> int:
        """Return where to continue after a hole: the first line from there that is in the ring, or the end."""
        # In a page the lines before this one are marked as a gap; the reader continues behind it and does not stall.
        return next((max(line, chunk.first) for chunk in self.chunks if chunk.end > line), max(line, self.end))


class LogCache:
    """Rings of all attempts, limited together."""

    def __init__(self, ring_limit_bytes: int = RING_LIMIT_BYTES, cache_limit_bytes: int = CACHE_LIMIT_BYTES) -> None:
        self._ring_limit_bytes = ring_limit_bytes
        self._cache_limit_bytes = cache_limit_bytes
        self._rings: OrderedDict[AttemptId, LogRing] = OrderedDict()  # quiet for longest first
        self._size_bytes = 0

    def __repr__(self) -> str:
        return f"<LogCache {self.statistics()}>"

    def statistics(self) -> dict[str, int]:
        return {"attempts": len(self._rings), "size_bytes": self._size_bytes}

    def ring(self, attempt: AttemptId) -> LogRing | None:
        """Return the ring of an attempt; None if nothing has been received or it was dropped."""
        return self._rings.get(attempt)

    def add(self, attempt: AttemptId, chunk: LogChunk, *, closed: bool = False) -> None:
        """Add what was received. ``closed``: it is the last of this attempt."""
        ring = self._rings.get(attempt)
        if ring is None:
            ring = self._rings[attempt] = LogRing(self._ring_limit_bytes)
            self._size_bytes += _CHUNK_COST_BYTES
        # Ordered by the last line, not by the last reader: readers find older lines on the node's disk anyway.
        self._rings.move_to_end(attempt)
        old_bytes = ring.size_bytes
        ring.append(chunk)
        ring.is_closed = ring.is_closed or closed
        self._size_bytes += ring.size_bytes - old_bytes
        # Whole rings are dropped, those of the quietest attempts: nearly all of them have ended. The one just written
        # to stays.
        while self._size_bytes > self._cache_limit_bytes and len(self._rings) > 1:
            _, quiet = self._rings.popitem(last=False)
            self._size_bytes -= quiet.size_bytes + _CHUNK_COST_BYTES

    def attempts_of(self, jobs: Iterable[JobId]) -> list[AttemptId]:
        """Return the attempts of these jobs that have lines here."""
        wanted = set(jobs)
        return [attempt for attempt in self._rings if split_attempt(attempt)[0] in wanted]


class LogCursor:
    """Position of one reader in each ring that it follows. It starts at the first line and skips what is not cached."""

    def __init__(self, cache: LogCache) -> None:
        self._cache = cache
        self._positions: dict[AttemptId, int] = {}
        self.pending: dict[AttemptId, None] = {}
        """Attempts with lines to read, in the order in which they will be read."""

    def mark_pending(self, attempt: AttemptId) -> None:
        """Note that the attempt has new lines, or is followed from now on."""
        self.pending[attempt] = None

    def remove(self, attempt: AttemptId) -> None:
        self.pending.pop(attempt, None)
        self._positions.pop(attempt, None)

    def read(self, attempt: AttemptId, limit_bytes: int) -> tuple[LogChunk, int]:
        """Return the next lines of one attempt, about ``limit_bytes``, and how many before them were skipped.

        An attempt with still more lines is queued again behind the others.
        """
        # Popped, and entered again below if lines are left: round robin, so that one attempt that prints without end
        # does not keep the lines of the others back.
        self.pending.pop(attempt, None)
        ring, position = self._cache.ring(attempt), self._positions.get(attempt, 0)
        if ring is None:
            return LogChunk(position, position), 0
        # A terminal that is slower than the job skips what has left the ring; only readers of pages get every line.
        start = ring.next_after(position)
        chunk = ring.read(start, limit_bytes) or LogChunk(start, start)
        self._positions[attempt] = chunk.end
        if chunk.end < ring.end:
            self.pending[attempt] = None
        return chunk, start - position
