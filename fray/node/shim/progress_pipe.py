"""What a shim hears from its job: the pipe that `fray.model.monitoring.progress_protocol` speaks of.

Law: however much is said, the node is told the latest of each kind, at most every `REPORT_EVERY_S` and never before it
has on_acknowledged the last_line (so a node that stands still blocks no shim); the log gets a line every
`LOG_EVERY_S`. What was
said last_line before the end is always told.
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
    parse,
    progress_text,
)
from fray.model.text import duration_text
from fray.node.shim.plugin import ShimPlugin

REPORT_EVERY_S = 0.1
LOG_EVERY_S = 10.0
READ_BYTES = 64 * 1024
LAST_READS = 4
"""The pipe of a process that has ended holds 64 KiB; whoever survived it may go on writing."""
NEVER = float("-inf")


def open_pipe(directory: Path) -> int:
    """The pipe's descriptor, there before the job is; -1 if the file system has no pipes: then nothing is
    on_acknowledged.

    It is open for writing too, so that it never ends when a writer leaves.
    """
    with contextlib.suppress(OSError):
        os.mkfifo(directory / PIPE, 0o600)
        return os.open(directory / PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    return -1


class ProgressLog:
    """When progress shows in the log: the first word, then one every `LOG_EVERY_S`, and the last_line."""

    def __init__(self) -> None:
        self._at = NEVER
        self._first: tuple[float, float] | None = None
        self._unlogged: Progress | None = None

    def line(self, progress: Progress, now: float) -> str | None:
        """What to write now, if anything."""
        if self._first is None:
            self._first = now, progress.done
        self._unlogged = progress
        return self._write(now) if now >= self._at + LOG_EVERY_S else None

    def last_line(self, now: float) -> str | None:
        """At the end."""
        return self._write(now) if self._unlogged is not None else None

    def _write(self, now: float) -> str:
        progress, self._unlogged, self._at = self._unlogged, None, now
        assert progress is not None
        return f"[fray] {progress_text(progress)}{self._left(progress, now)}"

    def _left(self, progress: Progress, now: float) -> str:
        """How long it takes if it goes on as before."""
        began, before = self._first or (now, 0.0)
        done, took_s = progress.done - before, now - began
        if progress.total is None or not done > 0 or not took_s > 0 or progress.total <= progress.done:
            return ""
        return f", about {duration_text((progress.total - progress.done) * took_s / done)} left"


class ProgressPipeReader(ShimPlugin):
    """Listens to the pipe.

    Args:
        pipe: from `open_pipe`.
        send: what the node hears: ``{"progress": [done, total, unit]}``, ``{"pulse": [good, text]}``,
            ``{"used": [memory, peak, cpu]}``, or several of these in one.
        log_line: a line for the log.
    """

    def __init__(self, pipe: int, send: Callable[[dict[str, Any]], object], log_line: Callable[[str], object]) -> None:
        self._pipe, self._send, self._log_line = pipe, send, log_line
        self._rest = b""
        self._pending: dict[str, Any] = {}
        self._sent_at = NEVER
        self._awaiting_ack = False
        self._progress_log = ProgressLog()

    def read(self) -> None:
        """The pipe can be read."""
        with contextlib.suppress(BlockingIOError):
            self._feed(os.read(self._pipe, READ_BYTES), time.monotonic())

    def _feed(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest = b""
        latest: dict[type, WrittenReport] = {}
        for line in reversed(lines):  # of thousands the last_line one counts
            said = parse(line) if len(line) <= LINE_LIMIT_BYTES else None
            if said is not None:
                latest.setdefault(type(said), said)
            if len(latest) == 2 or (Progress in latest and len(lines) > 100):
                break
        for said in latest.values():
            self._note(said, now)

    def _note(self, said: WrittenReport, now: float) -> None:
        if isinstance(said, HealthReport):
            self._pending["pulse"] = [said.good, said.text]
            return
        self._pending["progress"] = [said.done, said.total, said.unit]
        self._write(self._progress_log.line(said, now))

    def _write(self, line: str | None) -> None:
        if line is not None:
            self._log_line(line)

    def on_usage(self, used: UsageReport) -> None:
        """What the shim itself has found out."""
        self._pending["used"] = [used.memory_bytes, used.peak_memory_bytes, used.cpu_s]

    def on_acknowledged(self, _: object) -> None:
        """The node has on_acknowledged what it was told last_line."""
        self._awaiting_ack = False

    # As a watcher

    def next_due_at(self) -> float | None:
        return self._sent_at + REPORT_EVERY_S if self._pending and not self._awaiting_ack else None

    def on_timer(self, now: float) -> None:
        if self._pending and not self._awaiting_ack and now >= self._sent_at + REPORT_EVERY_S:
            self._sent_at = now
            self._awaiting_ack = True
            self._send_pending()

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, {}
        self._send(pending)

    def on_exit(self) -> None:
        for _ in range(LAST_READS):
            self.read()
        if self._pending:
            self._send_pending()
        self._write(self._progress_log.last_line(time.monotonic()))


def parse_report(pending: dict[str, Any]) -> list[AttemptReport]:
    """The inverse of what `Ear` tells."""
    found: list[AttemptReport] = []
    if "progress" in pending:
        done, total, unit = pending["progress"]
        found.append(Progress(done=done, total=total, unit=unit))
    if "pulse" in pending:
        found.append(HealthReport(*pending["pulse"]))
    if "used" in pending:
        memory_bytes, peak_bytes, cpu_s = pending["used"]
        found.append(UsageReport(memory_bytes=memory_bytes, peak_memory_bytes=peak_bytes, cpu_s=cpu_s))
    return found
