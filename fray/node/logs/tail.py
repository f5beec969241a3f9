"""Readers of logs on disk: behind the shim as it writes, or from any line.

Nothing here waits for anything but the disk, and no file is assumed to be complete: it ends with its last whole
record.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import define, field

from fray.model.log_records import LogChunk, records
from fray.node.logs.writer import segment

BATCH_LIMIT_BYTES = 256 * 1024
"""Bytes of one batch; larger than any record."""


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Return the files of a log in order, each with the number of its first line."""
    found = [(int(path.name[4:]), path) for path in directory.glob("log.*") if path.name[4:].isdigit()]
    return sorted(found)


def end_of(data: bytes, first: int) -> tuple[int, int]:
    """Return the number after the last line of a segment that begins with line ``first``, and where its whole records
    end."""
    end = 0
    for (_, _, number, count, _, _), _, end in records(data):  # noqa: B007
        first = number + count
    return first, end


@define
class Tail:
    """Follows one log in bounded batches; never waits, and never returns half a record."""

    directory: Path
    next: int = 0
    """Number of the next line to read."""
    _first: int = 0
    _offset: int = 0
    _file: int = field(default=-1, alias="_file")

    def read(self, limit_bytes: int = BATCH_LIMIT_BYTES) -> LogChunk | None:
        """Return the next whole lines, about ``limit_bytes`` of them at most; None when there are none yet."""
        while True:
            later = self._later_segment()
            found = self._records(limit_bytes)  # in this order: a segment with a later one behind it is finished
            if found is None and later is None:
                return None
            if found is None and later is not None:
                self.close()
                self._open(later)
            elif found is not None and found.data:
                return found

    @property
    def place(self) -> tuple[int, int, int]:
        """Number of the next line to read, number of its segment's first line, and offset there."""
        return self.next, self._first, self._offset

    def move(self, place: tuple[int, int, int]) -> None:
        """Continue at a `place`, before the first `read`."""
        if self._open(place[1]):
            self.next, self._first, self._offset = place

    def _records(self, limit_bytes: int) -> LogChunk | None:
        """Return what follows in this segment: a chunk without lines if that is pending only, None at its end."""
        if self._file < 0 and not self._open(self._first):
            return None
        # pread: the offset is this reader's own and moves by whole records only, so half a record is read again when it
        # is complete.
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
        # Empty and not None: pending records were passed, so this is not the end of the segment.
        return LogChunk(first, end, b"".join(parts)) if parts else LogChunk(first, first)

    def _open(self, first: int) -> bool:
        try:
            # Not there: removed by retention, or not created yet.
            self._file = os.open(segment(self.directory, first), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        self._first, self._offset = first, 0
        return True

    def _later_segment(self) -> int | None:
        """Return the segment after this one; None while there is none."""
        later = (first for first, _ in segments(self.directory) if first > self._first or self._file < 0)
        return next(later, None)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
