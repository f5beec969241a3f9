"""The shim's part of logs: from a job's two pipes to records of whole lines on the node's disk
(`fray.model.log_records`).

Law. One read of a pipe is one record and one write; no line is looked at. A stream is read at most once in `BREATH_S`,
`READ_BYTES` each time: so a thousand small prints a second cost a few writes, and a job that prints more than about
12 MB a second waits in its ``print``. Everything read is on disk before the next read, an unfinished line too, marked
as pending; so what a killed shim had read is not lost. The files of an attempt are segments named by the number of
their first line; the oldest go when together they are over the attempt's limit.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from attrs import define, field

from fray.model.log_records import Bytes, head
from fray.node.logs.redact import Hide

LINE_LIMIT_BYTES = 64 * 1024
"""A longer line comes in pieces."""
SEGMENT_LIMIT_BYTES = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
MESSAGE_LIMIT_CHARS = 16_000
"""Of one thing that Fray says in an attempt's log."""


Seam: TypeAlias = Callable[[bytes, int], int]
"""Where to cut at a place or before it."""


def _anywhere(line: bytes, at: int) -> int:
    return at


@define
class LineSplitter:
    """Bytes in, whole lines out, each with its newline."""

    rest: bytes = b""
    """Of a line whose end has not been read."""
    seam: Seam = _anywhere
    """Where a line that is too long may be cut."""

    def feed(self, data: bytes) -> bytes:
        cut = data.rfind(b"\n") + 1
        if cut:
            # a read is no longer than the limit, so only the line that began before it can be over it
            is_long = len(self.rest) + data.index(b"\n") > LINE_LIMIT_BYTES or len(data) > READ_BYTES
            whole, self.rest = self.rest + data[:cut], data[cut:]
            if is_long:
                whole = b"".join(self._pieces(line + b"\n") for line in whole[:-1].split(b"\n"))
        else:
            whole, self.rest = b"", self.rest + data
        while len(self.rest) >= LINE_LIMIT_BYTES:
            piece, self.rest = self._split(self.rest)
            whole += piece + b"\n"
        return whole

    def flush(self) -> bytes:
        """The last line if it has no newline."""
        rest, self.rest = self.rest, b""
        return rest + b"\n" if rest else b""

    def _pieces(self, line: bytes) -> bytes:
        pieces = []
        while len(line) > LINE_LIMIT_BYTES + 1:
            piece, line = self._split(line)
            pieces.append(piece + b"\n")
        return b"".join((*pieces, line))

    def _split(self, line: bytes) -> tuple[bytes, bytes]:
        """Cut at the limit, but not inside a character of UTF-8, nor inside a secret."""
        at = LINE_LIMIT_BYTES
        while at > LINE_LIMIT_BYTES - 4 and at < len(line) and line[at] & 0xC0 == 0x80:
            at -= 1
        at = self.seam(line, at)
        return line[:at], line[at:]


def system_lines(text: str) -> bytes:
    """Whole lines of what Fray itself says."""
    if len(text) > MESSAGE_LIMIT_CHARS:
        text = f"{text[:MESSAGE_LIMIT_CHARS]} … ({len(text) - MESSAGE_LIMIT_CHARS} more characters)"
    return "".join(f"{line}\n" for line in text.splitlines() or [""]).encode("utf-8", "replace")


def segment(directory: Path, first: int) -> Path:
    """The file whose first line has this number."""
    return directory / f"log.{first:012d}"


@define
class LogWriter:
    """Writes the log of one attempt. Each `write` is one append, so readers only ever see whole records, but the last.

    A write that fails (a full disk) costs its lines, and their numbers show it.
    """

    directory: Path
    lines: int = 0
    """The number the next line gets."""
    limit_bytes: int = 1 << 62
    """Of all segments together; the oldest are removed, the last one never."""
    hide: Hide | None = None
    """Takes secrets out of whole lines; what is there of an unfinished one is not written then."""
    seam: Seam = _anywhere
    """Where lines may be cut so that it finds them."""
    _file: int = field(default=-1, alias="_file")
    _size: int = 0
    _segments: deque[tuple[Path, int]] = field(factory=deque)
    _pending: dict[str, bytes] = field(factory=dict)
    _first: int = 0

    def write(self, stream: str, time_s: float, lines: bytes, rest: bytes = b"") -> None:
        """Append whole lines, and what is there of the next one of this stream."""
        if self.hide is not None:
            lines, rest = self.hide(lines), b""
        count = lines.count(b"\n")
        parts: list[Bytes] = [head(stream, self.lines, count, time_s, len(lines)), lines] if count else []
        self.lines += count
        if rest:
            parts += self._pend(stream, time_s, b"" if count else self._pending.get(stream, b""), rest)
        self._pending[stream] = rest
        if parts:
            self._append(parts, self.lines - count)

    def _pend(self, stream: str, time_s: float, before: bytes, rest: bytes) -> list[Bytes]:
        """Only what is new of it: those before it since the last whole line stand in front of it."""
        new = rest[len(before) :] if rest.startswith(before) else rest
        return [head(stream, self.lines, 0, time_s, len(new), pending=True), new] if new else []

    @classmethod
    def reopen(cls, directory: Path, first: int, lines: int, size: int) -> LogWriter:
        """Go on behind the last whole record, which ends at ``size``, of the segment that begins with ``first``."""
        writer = cls(directory, lines=lines)
        writer._first, writer._size = first, size
        writer._file = os.open(segment(directory, first), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(writer._file, size)
        return writer

    def _append(self, parts: list[Bytes], first: int) -> None:
        size = sum(map(len, parts))
        try:
            if self._file < 0 or self._size >= SEGMENT_LIMIT_BYTES:
                self._next_segment(first)
            if os.writev(self._file, parts) != size:
                raise OSError("no room")
        except OSError:
            if self._file >= 0:
                os.ftruncate(self._file, self._size)  # no reader may find half a record with another behind it
        else:
            self._size += size

    def _next_segment(self, first: int) -> None:
        if self._file >= 0:
            self._segments.append((segment(self.directory, self._first), self._size))
            self.close()
        self._first, self._size = first, 0
        path = segment(self.directory, first)
        self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        total = sum(size for _, size in self._segments)
        while self._segments and total > self.limit_bytes - SEGMENT_LIMIT_BYTES:
            path, size = self._segments.popleft()
            path.unlink(missing_ok=True)
            total -= size

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
