"""Plug-in that reads the job's progress pipe (`fray.model.monitoring.progress_protocol`).

Invariants: however much is written, the node is sent the latest of each kind, at most every `REPORT_EVERY_S` and never
before it has acknowledged the last report (so a stopped node leaves one unread); the log gets a line every
`LOG_EVERY_S`. The last report before the end is always sent.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fray.model.monitoring.health import Progress
from fray.model.monitoring.progress_protocol import (
    LINE_LIMIT_BYTES,
    PIPE,
    AttemptReport,
    HealthReport,
    UsageReport,
    WrittenReport,
    format_line,
    parse,
    progress_text,
)
from fray.model.monitoring.served_calls import ServedCalls
from fray.model.text import duration_text
from fray.node.shim.plugin import ShimPlugin

REPORT_EVERY_S = 0.1
LOG_EVERY_S = 10.0
READ_BYTES = 64 * 1024
LAST_READS = 4
"""Reads at the end: the pipe of a process that has ended holds 64 KiB, and a survivor may keep writing."""
NEVER = float("-inf")


def open_pipe(directory: Path) -> int:
    """Create the pipe before the job starts and return its descriptor; -1 if the file system has no pipes.

    It is open for writing too, so that it never reaches its end when a writer closes it.
    """
    # A named pipe and not an inherited descriptor: any process of the job reaches it, in any language and through
    # everything that closes descriptors, and the kernel keeps lines of up to 4096 bytes (PIPE_BUF) whole.
    with contextlib.suppress(OSError):
        os.mkfifo(directory / PIPE, 0o600)
        return os.open(directory / PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    return -1


class ProgressLog:
    """Decides when progress shows in the log: the first report, then one every `LOG_EVERY_S`, and the last."""

    def __init__(self) -> None:
        self._at = NEVER
        self._first: tuple[float, float] | None = None
        self._unlogged: Progress | None = None

    def line(self, progress: Progress, now: float) -> str | None:
        """Return the line to write now, or None."""
        if self._first is None:
            self._first = now, progress.done
        self._unlogged = progress
        return self._write(now) if now >= self._at + LOG_EVERY_S else None

    def last_line(self, now: float) -> str | None:
        """Return the line to write at the end, or None."""
        return self._write(now) if self._unlogged is not None else None

    def _write(self, now: float) -> str:
        progress, self._unlogged, self._at = self._unlogged, None, now
        assert progress is not None
        return f"[fray] {progress_text(progress)}{self._time_left(progress, now)}"

    def _time_left(self, progress: Progress, now: float) -> str:
        """Return the estimated time left, at the average speed so far."""
        began, before = self._first or (now, 0.0)
        done, took_s = progress.done - before, now - began
        if progress.total is None or not done > 0 or not took_s > 0 or progress.total <= progress.done:
            return ""
        return f", about {duration_text((progress.total - progress.done) * took_s / done)} left"


class ProgressPipeReader(ShimPlugin):
    """Reads the pipe and reports to the node.

    Args:
        pipe: descriptor from `open_pipe`.
        send: sends ``{"progress": [done, total, unit]}``, ``{"health": [good, text]}``, ``{"calls": line}``,
            ``{"used": [memory, peak, cpu]}``, or several of these in one, to the node.
        log_line: writes a line to the attempt's log.
    """

    def __init__(self, pipe: int, send: Callable[[dict[str, Any]], object], log_line: Callable[[str], object]) -> None:
        self._pipe, self._send, self._log_line = pipe, send, log_line
        self._rest = b""
        self._pending: dict[str, Any] = {}
        self._sent_at = NEVER
        self._awaiting_ack = False
        self._progress_log = ProgressLog()

    def read(self) -> None:
        """Read the pipe once; it is readable."""
        with contextlib.suppress(BlockingIOError):
            self._feed(os.read(self._pipe, READ_BYTES), time.monotonic())

    def _feed(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A writer that never ends its line must not fill the shim's memory.
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest = b""
        latest: dict[type, WrittenReport] = {}
        for line in reversed(lines):  # the latest of each kind counts
            report = parse(line) if len(line) <= LINE_LIMIT_BYTES else None
            if report is not None:
                latest.setdefault(type(report), report)
            # All kinds are found, or it is a flood of progress, which is not searched back to its beginning for a
            # health line.
            if len(latest) == 3 or (Progress in latest and len(lines) > 100):
                break
        for report in latest.values():
            self._note(report, now)

    def _note(self, report: WrittenReport, now: float) -> None:
        if isinstance(report, HealthReport):
            self._pending["health"] = [report.good, report.text]
            return
        if isinstance(report, ServedCalls):
            self._pending["calls"] = format_line(report).decode()
            return
        self._pending["progress"] = [report.done, report.total, report.unit]
        self._write(self._progress_log.line(report, now))

    def _write(self, line: str | None) -> None:
        if line is not None:
            self._log_line(line)

    def on_usage(self, used: UsageReport) -> None:
        """Add a usage report of the shim itself."""
        self._pending["used"] = [used.memory_bytes, used.peak_memory_bytes, used.cpu_s]

    def on_acknowledged(self, _: object) -> None:
        """Note that the node has processed the last report."""
        self._awaiting_ack = False

    # Plug-in

    def next_due_at(self) -> float | None:
        return self._sent_at + REPORT_EVERY_S if self._pending and not self._awaiting_ack else None

    def on_timer(self, now: float) -> None:
        if self._pending and not self._awaiting_ack and now >= self._sent_at + REPORT_EVERY_S:
            self._sent_at = now
            # No further report before the acknowledgement: else the reports to a node that is stopped (SIGSTOP) would
            # fill the socket and then the shim's memory.
            self._awaiting_ack = True
            self._send_pending()

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, {}
        self._send(pending)

    def on_exit(self) -> None:
        for _ in range(LAST_READS):
            self.read()
        if self._pending:
            # Without waiting for an acknowledgement: the last report is sent in any case.
            self._send_pending()
        self._write(self._progress_log.last_line(time.monotonic()))


def parse_report(pending: dict[str, Any]) -> list[AttemptReport]:
    """Return the reports in a message of `ProgressPipeReader`."""
    found: list[AttemptReport] = []
    if "progress" in pending:
        done, total, unit = pending["progress"]
        found.append(Progress(done=done, total=total, unit=unit))
    if "health" in pending:
        found.append(HealthReport(*pending["health"]))
    if "calls" in pending and (served := parse(pending["calls"].encode())) is not None:
        found.append(served)
    if "used" in pending:
        memory_bytes, peak_bytes, cpu_s = pending["used"]
        found.append(UsageReport(memory_bytes=memory_bytes, peak_memory_bytes=peak_bytes, cpu_s=cpu_s))
    return found
