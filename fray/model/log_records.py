"""Log record format: what attempts print, as stored on a node's disk and sent. Pure.

A record is a header of `HEAD_BYTES` characters and the bytes of its lines, each with its newline, as the job wrote
them. The header: ``\\x1e``, the stream (``o`` out, ``e`` err, ``s`` sys), a mark, the number of its first line, how
many lines, when they were read (seconds since the epoch), how many bytes follow. A header per batch instead of per line
means that a million lines cost a few thousand headers, only the last reader looks at single lines, and an operator can
still read the files with `less`. Lines of an attempt are numbered from 0 for ever: a skipped number is a lost line.

The mark ``~`` marks the bytes of an unfinished line: written so that they survive the shim, and written again, whole,
when the line is complete. Readers of lines skip these records.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TypeAlias

from fray.model.frozen import frozen
from fray.model.ids import AttemptId, JobId, split_attempt

HEAD_BYTES = 52
STREAMS = {"out": "o", "err": "e", "sys": "s"}
_NAMES = {letter: name for name, letter in STREAMS.items()}
_MARK = 0x1E
_PENDING = ord("~")

Bytes: TypeAlias = bytes | bytearray | memoryview
Head: TypeAlias = tuple[str, bool, int, int, float, int]
"""(stream, pending, number of the first line, lines, time, bytes)"""


class LogLineKind(StrEnum):
    LINE = "line"
    GAP = "gap"
    """Lines are missing here, for good or for now; the text says why."""


@frozen(kw_only=True)
class LogLine:
    """One line that an attempt wrote, or a gap where lines are missing.

    Attributes:
        time: seconds since the epoch, by its machine's clock, when it was read from the process. For a gap: where it
            begins (the time of the line before it; 0.0 if unknown).
        stream: ``"out"``, ``"err"``, or ``"sys"`` for Fray's own messages about the attempt.
        text: the line without its newline.
        number: line number within its attempt, from 0. For a gap: the number of the first missing line.
        lost: number of lines in a gap; None if unknown, and for lines.
        until: time of the line after a gap; None if unknown, and for lines.
    """

    time: float
    stream: str
    text: str
    attempt_id: AttemptId
    job_id: JobId
    name: str
    number: int
    kind: LogLineKind = LogLineKind.LINE
    lost: int | None = None
    until: float | None = None

    def __str__(self) -> str:
        return self.text


@frozen
class LogChunk:
    """Consecutive records: lines from number ``first`` to before ``end``, some of which may be missing."""

    first: int
    end: int
    data: Bytes = b""


def head(stream: str, first: int, count: int, time: float, size: int, *, pending: bool = False) -> bytes:
    mark = "~" if pending else "-"
    return f"\x1e{STREAMS[stream]}{mark}{first:012d} {count:08d} {time:017.6f} {size:08d}\n".encode()


def record(stream: str, first: int, time: float, lines: Bytes) -> bytes:
    """Return one record of whole lines, each with its newline."""
    count = bytes(lines).count(b"\n")
    return head(stream, first, count, time, len(lines)) + lines


def read_head(data: Bytes, at: int) -> Head | None:
    """Return the header that begins at ``at``; None if none does, or it is truncated."""
    if at + HEAD_BYTES > len(data) or data[at] != _MARK:
        return None
    fields = bytes(data[at + 3 : at + HEAD_BYTES]).split()
    try:
        first, count, time, size = fields
        return _NAMES[chr(data[at + 1])], data[at + 2] == _PENDING, int(first), int(count), float(time), int(size)
    except (ValueError, KeyError):
        return None


def records(data: Bytes, at: int = 0) -> Iterator[tuple[Head, int, int]]:
    """Yield each whole record: header, begin and end. Stops before a truncated or damaged record."""
    while (found := read_head(data, at)) is not None:
        end = at + HEAD_BYTES + found[5]
        if end > len(data):
            return
        yield found, at, end
        at = end


def line_texts(lines: Bytes) -> list[str]:
    """Return the lines of a record, without their newlines."""
    found = bytes(lines).decode("utf-8", "replace").split("\n")
    found.pop()  # the text after the last newline is empty
    return [line.removesuffix("\r") for line in found] if b"\r" in bytes(lines) else found


def unpack(data: Bytes) -> Iterator[tuple[int, str, float, list[str]]]:
    """Yield the records of a chunk: number of the first line, stream, time, lines."""
    for (stream, pending, first, _, time, _), at, end in records(data):
        if not pending:
            yield first, stream, time, line_texts(data[at + HEAD_BYTES : end])


# Archives ------------------------------------------------------------------------------------------------------------

INDEX = "index.json"
"""Name of the index beside the objects of an attempt: ``{"attempt", "objects": [{"object", "first", "end",
"bytes"}]}``."""


def archive_directory(archive: str, attempt_id: AttemptId) -> str:
    """Return the directory of an attempt in an archive: one level for its job (quoted), one for the attempt."""
    from urllib.parse import quote  # slow to import, and only needed with an archive

    job_id, generation, member = split_attempt(attempt_id)
    return f"{archive.rstrip('/')}/{quote(job_id, safe='')}/{generation}.{member}"
