"""Selection of the page of a log that a reader asks for. Pure apart from loading segments.

Segments may be files or memory. A page says which range of lines was examined, so that the reader knows what is
missing, also where lines were filtered out (another stream, another word).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from fray.model.log_records import (
    HEAD_BYTES,
    Bytes,
    Head,
    head,
    records,
)
from fray.model.messages.node import LogPage, ReadLog

Segment: TypeAlias = tuple[int, Callable[[], bytes]]
"""Number of a segment's first line, and a function that loads it (OSError: it was removed)."""

LOOK_LIMIT_BYTES = 8 * 1024 * 1024
"""Bytes examined for one page at most, even if nothing of it matches."""
PAGE_LIMIT_BYTES = 1024 * 1024


def read_page(segments: Sequence[Segment], ask: ReadLog, now: float) -> tuple[LogPage, bytes]:
    """Return the page and its records. ``now``: seconds since the epoch, by the clock of the records."""
    start = first_line(segments, ask, now) if ask.first is None else ask.first
    parts: list[Bytes] = []
    kept_from = segments[0][0] if segments else start
    # Older lines were removed by retention; the page shows that by starting later than the request.
    at, size, looked = max(start, kept_from), 0, 0
    # The node's own limits apply to every request, whatever it asks for.
    limit = min(ask.limit_bytes, PAGE_LIMIT_BYTES)
    for found, lines in _records_from(segments, at):
        # Checked between records, so that a page ends with a whole one, and its `next` is where the next page begins.
        if size >= limit or looked >= LOOK_LIMIT_BYTES:
            return _make_page(ask, start, kept_from, at, parts, caught_up=False)
        looked += len(lines)
        for part in _matching_records(found, lines, ask):
            parts.append(part)
            size += len(part)
        at = found[2] + found[3]
    return _make_page(ask, start, kept_from, at, parts, caught_up=True)


def _make_page(
    ask: ReadLog, start: int, kept_from: int, at: int, parts: Sequence[Bytes], *, caught_up: bool
) -> tuple[LogPage, bytes]:
    first = max(start, min(kept_from, at))
    return LogPage(attempt_id=ask.attempt_id, start=start, first=first, next=at, caught_up=caught_up), b"".join(parts)


def first_line(segments: Sequence[Segment], ask: ReadLog, now: float) -> int:
    """Return the line to begin with: of the last n matching lines, of the last seconds, or of the whole log."""
    starts = [0]
    if ask.tail is not None:
        starts.append(_tail_start(segments, ask, ask.tail))
    if ask.since_s is not None:
        starts.append(_since_start(segments, now - ask.since_s))
    return max(starts)


def _tail_start(segments: Sequence[Segment], ask: ReadLog, count: int) -> int:
    end = first = None
    # From the end: the last lines of a log of 256 MiB are in its last segment, usually.
    for found, lines in _records_backwards(segments):
        end = found[2] + found[3] if end is None else end
        if count <= 0:
            break
        numbers = [number for part in _matching_records(found, lines, ask) for number in _line_numbers(part)]
        if len(numbers) >= count:
            return numbers[len(numbers) - count]
        count -= len(numbers)
        first = found[2]
    return (end if count <= 0 else first) or 0


def _line_numbers(part: Bytes) -> Iterator[int]:
    for (_, _, first, count, _, _), _, _ in records(part):
        yield from range(first, first + count)


def _since_start(segments: Sequence[Segment], time: float) -> int:
    first = 0
    for found, _ in _records_backwards(segments):
        if found[4] < time:
            return max(first, found[2] + found[3])
        first = found[2]
    return first


def _records_from(segments: Sequence[Segment], line: int) -> Iterator[tuple[Head, bytes]]:
    """Yield every record of whole lines from that line on; the first may begin before it."""
    later = [index for index, (first, _) in enumerate(segments) if first <= line]
    for _, load in segments[later[-1] if later else 0 :]:
        for found, lines in _records_of(load):
            if found[2] + found[3] > line:
                yield found, lines


def _records_backwards(segments: Sequence[Segment]) -> Iterator[tuple[Head, bytes]]:
    for _, load in reversed(segments):
        # A segment is bounded (4 MiB), so a list of its records is affordable.
        yield from reversed(list(_records_of(load)))


def _records_of(load: Callable[[], bytes]) -> Iterator[tuple[Head, bytes]]:
    try:
        data = load()
    except OSError:
        return  # removed meanwhile; the line numbers show it
    for found, at, end in records(data):
        if not found[1]:
            yield found, data[at + HEAD_BYTES : end]


def _matching_records(found: Head, lines: bytes, ask: ReadLog) -> Iterator[bytes]:
    """Yield the record, or records of its matching lines."""
    stream, _, first, count, time, size = found
    if ask.stream and stream != ask.stream:
        return
    word = ask.contains.encode("utf-8", "replace")  # what came from invalid UTF-8 is stored like this
    if not word:
        yield head(stream, first, count, time, size) + lines
    elif word in lines:
        # Only here: most records contain no match and need not be split into lines.
        for number, line in enumerate(lines[:-1].split(b"\n"), first):
            if word in line:
                yield head(stream, number, 1, time, len(line) + 1) + line + b"\n"
