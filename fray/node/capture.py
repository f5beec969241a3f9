"""What an attempt prints: cut into lines, and kept in a spool of files between its keeper and the node.

The spool is a row of segments named by the offset of their first byte (``log.0000000000000000``), each full of JSON
lines ``["out"|"err", seconds since the epoch, text]``. The keeper appends, the node reads behind it and drops what it
has read (`fray.node.tails`), so a long-lived job keeps no more on disk than the node is behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from attrs import define, field

LINE_LIMIT_BYTES = 64 * 1024
SEGMENT_LIMIT_BYTES = 4 * 1024 * 1024
LAG_LIMIT_BYTES = 8 * 1024 * 1024
"""A keeper stops reading the job's pipes while the node is further behind than this."""


@define
class LineCutter:
    """Bytes in, whole lines out; a line over `LINE_LIMIT_BYTES` comes in pieces."""

    rest: bytes = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        found = [piece for line in lines for piece in _pieces(line)]
        while len(self.rest) >= LINE_LIMIT_BYTES:
            head, self.rest = _split(self.rest)
            found.append(_text(head))
        return found

    def flush(self) -> list[str]:
        """The last line if it has no newline."""
        rest, self.rest = self.rest, b""
        return [_text(rest)] if rest else []


def _pieces(line: bytes) -> Iterable[str]:
    while len(line) > LINE_LIMIT_BYTES:
        head, line = _split(line)
        yield _text(head)
    yield _text(line.removesuffix(b"\r"))


def _split(line: bytes) -> tuple[bytes, bytes]:
    """Cut at the limit, but not inside a character of UTF-8."""
    at = LINE_LIMIT_BYTES
    while at > LINE_LIMIT_BYTES - 4 and at < len(line) and line[at] & 0xC0 == 0x80:
        at -= 1
    return line[:at], line[at:]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def segment(directory: Path, offset: int) -> Path:
    return directory / f"log.{offset:016d}"


@define
class Spool:
    """The keeper's end. One `write` is one append, so readers below ``written`` only ever see whole lines."""

    directory: Path
    written: int = 0
    read: int = 0
    """How far the node says it has read."""
    _start: int = 0
    _file: int = field(default=-1, alias="_file")

    @property
    def behind_bytes(self) -> int:
        return self.written - self.read

    def write(self, stream: str, time_s: float, lines: list[str]) -> None:
        if not lines:
            return
        if self._file < 0 or self.written - self._start >= SEGMENT_LIMIT_BYTES:
            self._next_segment()
        records = "".join(json.dumps([stream, time_s, line]) + "\n" for line in lines).encode()
        left = memoryview(records)
        while left:
            left = left[os.write(self._file, left) :]
        self.written += len(records)

    def _next_segment(self) -> None:
        self.close()
        self._start = self.written
        path = segment(self.directory, self._start)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
