"""Writer of an attempt's log: from bytes of two streams to records of whole lines on disk (`fray.model.log_records`).

Invariants: one read of a pipe is one record and one write; lines are not examined. Everything read is on disk before
the next read, unfinished lines too, marked as pending; so nothing that a killed shim had read is lost. The files of an
attempt are segments named by the number of their first line; each begins with the lines that are unfinished then, and
the oldest are removed when the total exceeds the attempt's limit.
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
"""Length beyond which a line is split."""
SEGMENT_LIMIT_BYTES = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
MESSAGE_LIMIT_CHARS = 16_000
"""Characters of one message of Fray's own in a log."""


Seam: TypeAlias = Callable[[bytes, int], int]
"""Returns where to cut, at a position or before it."""


def _anywhere(line: bytes, at: int) -> int:
    return at


@define
class LineSplitter:
    """Splits bytes into whole lines, each with its newline."""

    rest: bytes = b""
    """Beginning of a line whose end has not been read."""
    seam: Seam = _anywhere
    """Returns where a line that is too long may be cut."""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete with this data."""
        cut = data.rfind(b"\n") + 1
        if cut:
            # a read is no longer than the limit, so only the line that began before it can be over it
            is_long = len(self.rest) + data.index(b"\n") > LINE_LIMIT_BYTES or len(data) > READ_BYTES
            whole, self.rest = self.rest + data[:cut], data[cut:]
            if is_long:
                whole = b"".join(self._split_long(line + b"\n") for line in whole[:-1].split(b"\n"))
        else:
            whole, self.rest = b"", self.rest + data
        # A line without an end must not fill the memory of the shim.
        while len(self.rest) >= LINE_LIMIT_BYTES:
            piece, self.rest = self._split(self.rest)
            whole += piece + b"\n"
        return whole

    def flush(self) -> bytes:
        """Return the last line if it has no newline."""
        rest, self.rest = self.rest, b""
        return rest + b"\n" if rest else b""

    def _split_long(self, line: bytes) -> bytes:
        pieces = []
        while len(line) > LINE_LIMIT_BYTES + 1:
            piece, line = self._split(line)
            pieces.append(piece + b"\n")
        return b"".join((*pieces, line))

    def _split(self, line: bytes) -> tuple[bytes, bytes]:
        """Cut at the limit, but not inside a UTF-8 character or a secret."""
        at = LINE_LIMIT_BYTES
        # A UTF-8 character has at most three bytes after its first; other encodings are cut anywhere.
        while at > LINE_LIMIT_BYTES - 4 and at < len(line) and line[at] & 0xC0 == 0x80:
            at -= 1
        # Each piece is searched for secrets by itself: one that is cut in two would be written.
        at = self.seam(line, at)
        return line[:at], line[at:]


def system_lines(text: str) -> bytes:
    """Return a message of Fray's own as whole lines."""
    if len(text) > MESSAGE_LIMIT_CHARS:
        text = f"{text[:MESSAGE_LIMIT_CHARS]} … ({len(text) - MESSAGE_LIMIT_CHARS} more characters)"
    return "".join(f"{line}\n" for line in text.splitlines() or [""]).encode("utf-8", "replace")


def segment(directory: Path, first: int) -> Path:
    """Return the path of the segment whose first line has this number."""
    return directory / f"log.{first:012d}"


@define
class LogWriter:
    """Writes the log of one attempt. Each `write` is one append, so readers only see whole records, except the last.

    A write that fails (the disk is full) loses its lines, which their numbers show.
    """

    directory: Path
    lines: int = 0
    """Number that the next line gets."""
    limit_bytes: int = 1 << 62
    """Limit for all segments together; the oldest are removed, the last one never."""
    hide: Hide | None = None
    """Removes secrets from whole lines; unfinished lines are not written then."""
    seam: Seam = _anywhere
    """Returns where a line may be cut without splitting a secret."""
    _file: int = field(default=-1, alias="_file")
    _size: int = 0
    _segments: deque[tuple[Path, int]] = field(factory=deque)
    _pending: dict[str, bytes] = field(factory=dict)
    _first: int = 0

    def write(self, stream: str, time_s: float, lines: bytes, rest: bytes = b"") -> None:
        """Append whole lines, and the beginning of the next line of this stream."""
        if self.hide is not None:
            # A secret cannot be recognized in an unfinished line, so that is not written before its end.
            lines, rest = self.hide(lines), b""
        count = lines.count(b"\n")
        parts: list[Bytes] = [head(stream, self.lines, count, time_s, len(lines)), lines] if count else []
        # Counted even if the write fails: the gap in the numbers shows the loss to readers.
        self.lines += count
        if rest:
            parts += self._pending_record(stream, time_s, b"" if count else self._pending.get(stream, b""), rest)
        if parts:
            self._append(parts, self.lines - count, time_s)
        self._pending[stream] = rest

    def _pending_record(self, stream: str, time_s: float, before: bytes, rest: bytes) -> list[Bytes]:
        """Return a record of what is new in it: earlier pending records since the last whole line precede it."""
        # Only what is new: a progress bar without newlines would otherwise be written again with each read.
        new = rest[len(before) :] if rest.startswith(before) else rest
        return [head(stream, self.lines, 0, time_s, len(new), pending=True), new] if new else []

    def _unfinished_lines(self, first: int, time_s: float) -> list[Bytes]:
        """Return pending records of all of them, for the beginning of a segment."""
        # The segment in which such a line began may be removed before its end is read.
        parts: list[Bytes] = []
        for stream, rest in self._pending.items():
            parts += [head(stream, first, 0, time_s, len(rest), pending=True), rest] if rest else []
        return parts

    @classmethod
    def reopen(cls, directory: Path, first: int, lines: int, size: int) -> LogWriter:
        """Return a writer that continues behind the last whole record, which ends at ``size``, of the segment that
        begins with ``first``."""
        writer = cls(directory, lines=lines)
        writer._first, writer._size = first, size
        writer._file = os.open(segment(directory, first), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        # Half a record of a shim that was killed in its write.
        os.ftruncate(writer._file, size)
        return writer

    def _append(self, parts: list[Bytes], first: int, time_s: float) -> None:
        try:
            # Not before a segment has a whole line: the next one would get its name.
            if self._file < 0 or (self._size >= SEGMENT_LIMIT_BYTES and first > self._first):
                self._next_segment(first)
            if not self._size:
                parts = [*self._unfinished_lines(first, time_s), *parts]
            size = sum(map(len, parts))
            # One call for header and lines: a reader at any moment sees whole records, but for the last one.
            if os.writev(self._file, parts) != size:
                raise OSError("no room")
        except OSError:
            if self._file >= 0:
                os.ftruncate(self._file, self._size)  # no reader must find half a record with another behind it
        else:
            self._size += size

    def _next_segment(self, first: int) -> None:
        if self._file >= 0:
            self._segments.append((segment(self.directory, self._first), self._size))
            self.close()
        self._first, self._size = first, 0
        path = segment(self.directory, first)
        self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # By the writer: at 12 MB a second an attempt would exceed its limit between two sweeps of the node.
        total = sum(size for _, size in self._segments)
        while self._segments and total > self.limit_bytes - SEGMENT_LIMIT_BYTES:
            path, size = self._segments.popleft()
            path.unlink(missing_ok=True)
            total -= size

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
