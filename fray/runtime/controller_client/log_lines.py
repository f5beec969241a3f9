"""Decoder from log records to lines, with gaps where lines are missing; printing of lines to a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

from attrs import define

from fray.model.log_records import (
    Bytes,
    LogLine,
    LogLineKind,
    unpack,
)
from fray.model.messages.client import LogLines, LogSource
from fray.model.text import plural

CUT_OFF = "older lines were dropped by the limit of its machine, or its disk was full"


@define
class LogLineDecoder:
    """Decoder of the log of one attempt, record by record."""

    source: LogSource
    last_time: float = 0.0
    """Time of the previous line."""

    def read(self, data: Bytes, first: int, end: int, stream: str = "", contains: str = "") -> Iterator[LogLine]:
        """Yield lines from ``first`` to before ``end``; missing numbers are gaps, unless the lines are filtered."""
        # With a filter, missing numbers are lines that did not match.
        wants_all = not stream and not contains
        for number, name, time, texts in unpack(data):
            if wants_all and number > first:
                yield self.gap_line(first, number - first, CUT_OFF, until=time)
            if not stream or name == stream:
                for at, text in enumerate(texts, number):
                    if first <= at < end and contains in text:
                        yield self._line(at, name, time, text)
            # Records may overlap the requested range at both ends.
            first = max(first, number + len(texts))
            self.last_time = time
        if wants_all and first < end:
            yield self.gap_line(first, end - first, CUT_OFF)

    def _line(self, number: int, stream: str, time: float, text: str) -> LogLine:
        source = self.source
        return LogLine(
            time=time,
            stream=stream,
            text=text,
            attempt_id=source.attempt_id,
            job_id=source.job_id,
            name=source.name,
            number=number,
        )

    def gap_line(self, number: int, lost: int | None, why: str, until: float | None = None) -> LogLine:
        """Return a line that stands for ``lost`` missing lines (None: unknown how many)."""
        many = "lines" if lost is None else plural(lost, "line")
        return LogLine(
            # A gap has no time of its own; that of the line before keeps it in place when logs are merged.
            time=self.last_time or until or 0.0,
            stream="sys",
            text=f"… {many} missing: {why} …",
            attempt_id=self.source.attempt_id,
            job_id=self.source.job_id,
            name=self.source.name,
            number=number,
            kind=LogLineKind.GAP,
            lost=lost,
            until=until,
        )


def lines_of_notice(message: LogLines, data: Bytes) -> list[LogLine]:
    """Return the lines of a notice, for a terminal."""
    lines = LogLineDecoder(LogSource(attempt_id=message.attempt_id, job_id=message.job_id, name=message.name))
    found = list(lines.read(data, message.first, message.end))
    if message.skipped:
        at = found[0].time if found else 0.0
        why = "too many lines to show here; job.logs() has them"
        found.insert(0, lines.gap_line(message.first - message.skipped, message.skipped, why, until=at))
    return found


def print_lines(lines: Iterable[LogLine]) -> None:
    """Print ``(name) line`` for each, to standard output or standard error as the job did."""
    # One write for a run of lines: prints of several jobs then interleave by line, not within one.
    for stream, run in groupby(lines, lambda line: line.stream):
        text = "".join(f"({line.name}) {line.text}\n" for line in run)
        print(text, end="", file=sys.stdout if stream == "out" else sys.stderr, flush=True)
