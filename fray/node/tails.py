"""The node's end of an attempt's log spool (`fray.node.capture`): reads behind the keeper, drops what it has read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeAlias

from attrs import define, field

from fray.node.capture import segment

Lines: TypeAlias = tuple[tuple[str, float, str], ...]
"""(stream ``out`` or ``err``, seconds since the epoch, text)"""
BATCH_LIMIT_BYTES = 128 * 1024


@define
class Tail:
    """Reads one spool in bounded batches; never waits, and never sees half a line."""

    directory: Path
    offset: int = 0
    """How far it has read."""
    _start: int = 0
    _file: int = field(default=-1, alias="_file")

    def read(self, until: int, limit_bytes: int = BATCH_LIMIT_BYTES) -> Lines:
        """The next lines below the offset ``until`` (which the keeper has told), about ``limit_bytes`` of them at most.

        Empty once ``until`` is reached, or when the spool is damaged or gone (then the rest is skipped).
        """
        while self.offset < until:
            data = self._whole_lines(min(until - self.offset, limit_bytes))
            if data:
                self.offset += len(data)
                return _parse(data)
            if not self._next_segment():
                self.offset = until
        return ()

    def _whole_lines(self, size: int) -> bytes:
        if self._file < 0 and not self._open():
            return b""
        data = os.pread(self._file, size, self.offset - self._start)
        cut = data.rfind(b"\n") + 1
        while not cut and len(data) == size:  # one line longer than a batch
            size *= 2
            data = os.pread(self._file, size, self.offset - self._start)
            cut = data.find(b"\n") + 1
        return data[:cut]

    def _open(self) -> bool:
        try:
            self._file = os.open(segment(self.directory, self._start), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        return True

    def _next_segment(self) -> bool:
        """Go on to the segment that starts where this one ended; False if there is none."""
        if self.offset == self._start:
            return False
        self.close()
        segment(self.directory, self._start).unlink(missing_ok=True)
        self._start = self.offset
        return self._open()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _parse(data: bytes) -> Lines:
    found = []
    for line in data.splitlines():
        stream, time_s, text = json.loads(line)
        found.append((stream, time_s, text))
    return tuple(found)
