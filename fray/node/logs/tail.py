"""Reading the logs on a node's disk: behind the shim as it writes, or from any place in them.

Nothing here waits for anything but the disk, and nothing assumes that a file is whole: it ends with its last whole
record.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import define, field

from fray.model.log_records import LogChunk, records
from fray.node.logs.writer import segment

BATCH_LIMIT_BYTES = 256 * 1024
"""Larger than any record."""


def segments(directory: Path) -> list[tuple[int, Path]]:
    """The files of a log, with the number of the first line of each, in order."""
    found = [(int(path.name[4:]), path) for path in directory.glob("log.*") if path.name[4:].isdigit()]
    return sorted(found)


def end_of(data: bytes, first: int) -> tuple[int, int]:
    """Of a segment that begins with line ``first``: the number after its last line, and where its whole records end."""
    end = 0
    for (_, _, number, count, _, _), _, end in records(data):  # noqa: B007
        first = number + count
    return first, end


@define
class Tail:
    """Follows one log in bounded batches; never waits, and never sees half a record."""

    directory: Path
    next: int = 0
    """The number of the next line it reads."""
    _first: int = 0
    _offset: int = 0
    _file: int = field(default=-1, alias="_file")

    def read(self, limit_bytes: int = BATCH_LIMIT_BYTES) -> LogChunk | None:
        """The next whole lines, about ``limit_bytes`` of them at most; None when there are none yet."""
        while True:
            later = self._later_segment()
            found = self._records(limit_bytes)  # after the look: a segment with another behind it is finished
            if found is None and later is None:
                return None
            if found is None and later is not None:
                self.close()
                self._open(later)
            elif found is not None and found.data:
                return found

    def _records(self, limit_bytes: int) -> LogChunk | None:
        """What follows in this segment; a chunk without lines if that is only what is pending, None at its end."""
        if self._file < 0 and not self._open(self._first):
            return None
        data = os.pread(self._file, limit_bytes, self._offset)
        first, end, parts, at = self.next, self.next, [], 0
        for (_, pending, number, count, _, _), start, stop in records(data):
            at = stop
            if not pending:
                end = number + count
                parts.append(data[start:stop])
        self._offset += at
        if not at:
            return None
        self.next = end
        return LogChunk(first, end, b"".join(parts)) if parts else LogChunk(first, first)

    def _open(self, first: int) -> bool:
        try:
            self._file = os.open(segment(self.directory, first), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        self._first, self._offset = first, 0
        return True

    def _later_segment(self) -> int | None:
        """The segment after this one; None while there is none."""
        later = (first for first, _ in segments(self.directory) if first > self._first or self._file < 0)
        return next(later, None)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
