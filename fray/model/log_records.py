"""What attempts print, as it lies on a node's disk and travels: records of whole lines. Pure.

A record is a head of `HEAD_BYTES` characters and the bytes of its lines, each with its newline, as the job wrote them:
``\\x1e``, the stream (``o`` out, ``e`` err, ``s`` sys), a mark, the number of its first line, how many lines, when
they were read (seconds since the epoch), how many bytes follow. So a million lines cost a few thousand heads on their
way, nobody but the last reader looks at a line, and an operator can still read the files with `less`. Lines of an
attempt are numbered from 0 for ever: a number that is skipped is a line that is lost.

The mark ``~`` stands for the bytes of a line that is not finished yet: written down so that they outlive the keeper,
and said again, whole, when the line is. Whoever reads lines passes over these.
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
    """Lines that should stand here are not (or not now) to be had; the text says why."""


@frozen(kw_only=True)
class LogLine:
    """One line that an attempt wrote, or a gap where some should be.

    Attributes:
        time: seconds since the epoch, by its machine's clock, when it was read from the process. Of a gap: where it
            begins (that of the line before it; 0.0 when that is not known).
        stream: ``"out"``, ``"err"``, or ``"sys"`` for what Fray itself says of the attempt.
        text: without its newline.
        number: of the line within its attempt, from 0. Of a gap: the number of the first line that is missing.
        lost: of a gap: how many lines, where that is known.
        until: of a gap: when it ends (the time of the line after it), where that is known.
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
    """Records in a row: lines from number ``first`` to before ``end``, some of which may be missing."""

    first: int
    end: int
    data: Bytes = b""


def head(stream: str, first: int, count: int, time: float, size: int, *, pending: bool = False) -> bytes:
    mark = "~" if pending else "-"
    return f"\x1e{STREAMS[stream]}{mark}{first:012d} {count:08d} {time:017.6f} {size:08d}\n".encode()


def record(stream: str, first: int, time: float, lines: Bytes) -> bytes:
    """One record of whole lines, each with its newline."""
    count = bytes(lines).count(b"\n")
    return head(stream, first, count, time, len(lines)) + lines


def read_head(data: Bytes, at: int) -> Head | None:
    """The head that begins there; None if none does, or it is cut short."""
    if at + HEAD_BYTES > len(data) or data[at] != _MARK:
        return None
    fields = bytes(data[at + 3 : at + HEAD_BYTES]).split()
    try:
        first, count, time, size = fields
        return _NAMES[chr(data[at + 1])], data[at + 2] == _PENDING, int(first), int(count), float(time), int(size)
    except (ValueError, KeyError):
        return None


def records(data: Bytes, at: int = 0) -> Iterator[tuple[Head, int, int]]:
    """Each whole record: its head, where it begins and where it ends. Stops before one that is cut short or damaged."""
    while (found := read_head(data, at)) is not None:
        end = at + HEAD_BYTES + found[5]
        if end > len(data):
            return
        yield found, at, end
        at = end


def line_texts(lines: Bytes) -> list[str]:
    """The lines of a record, without their newlines."""
    found = bytes(lines).decode("utf-8", "replace").split("\n")
    found.pop()  # what follows the last newline is nothing
    return [line.removesuffix("\r") for line in found] if b"\r" in bytes(lines) else found


def unpack(data: Bytes) -> Iterator[tuple[int, str, float, list[str]]]:
    """The records of a chunk: number of the first line, stream, time, texts."""
    for (stream, pending, first, _, time, _), at, end in records(data):
        if not pending:
            yield first, stream, time, line_texts(data[at + HEAD_BYTES : end])


# In an archive -------------------------------------------------------------------------------------------------------

INDEX = "index.json"
"""Beside the objects of an attempt: ``{"attempt", "objects": [{"object", "first", "end", "bytes"}]}``."""


def archive_directory(archive: str, attempt_id: AttemptId) -> str:
    """The directory of an attempt in an archive: one name for its job, whatever that is called, one for the attempt."""
    from urllib.parse import quote  # only who has an archive needs it

    job_id, generation, member = split_attempt(attempt_id)
    return f"{archive.rstrip('/')}/{quote(job_id, safe='')}/{generation}.{member}"
