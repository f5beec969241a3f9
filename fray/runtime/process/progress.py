"""Reports of a running job to its node: `progress`, outcomes of its health method, and the calls of its actors.

Contract: a caller of `progress` never waits, and the latest report always arrives. In an inner loop a call costs a
comparison and an assignment: a report is sent at most every `REPORT_EVERY_S`, by the caller or, if there is no further
call, by a thread.

Two reporters: `PipeReporter` in processes (every process of a job finds the pipe in its environment), and
`InProcessReporter` where jobs are tasks and threads of one loop (``local``, simulation).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import trio

from fray.model.monitoring.health import Progress
from fray.model.monitoring.progress_protocol import (
    VARIABLE,
    HealthReport,
    WrittenReport,
    check_progress,
    check_unit,
    format_line,
)
from fray.model.monitoring.served_calls import ServedCalls
from fray.model.service_key import ServiceKey
from fray.runtime.runtime import Runtime, current_or_none

REPORT_EVERY_S = 0.2

_INFINITE = float("inf")
_Numbers: TypeAlias = tuple[float, float | None, str]


class ProgressReporter(Protocol):
    """Reporter of one job."""

    def progress(self, done: float, total: float | None, unit: str) -> None:
        """Report progress. Any thread."""

    def report_health(self, report: HealthReport) -> None:
        """Report an outcome of the health method. Loop only."""

    def report_calls(self, report: ServedCalls) -> None:
        """Report the calls of the process's actors. Loop only."""


def progress(done: float, total: float | None = None, unit: str = "") -> None:
    """Report the progress of this job. Cheap enough for inner loops, from any thread or task; the last report arrives.

    It is shown in ``job.info.progress``, on the command line and from time to time in the log; and it is the heartbeat
    that ``JobRequest(stall_s=…)`` checks. Outside a job (in a driver or a notebook) the call does nothing.

    Args:
        done: amount done, in any unit.
        total: total amount; None: unknown.
        unit: a word of at most 40 characters.

    Raises:
        InvalidRequest: ``done`` or ``total`` is not a finite number of at least 0, or the unit is longer.
    """
    try:
        # The cheap test first: inner loops call this millions of times, and the full check makes messages.
        if not (0 <= done < _INFINITE and (total is None or 0 <= total < _INFINITE)):
            check_progress(done, total, unit)
    except (TypeError, ValueError):
        check_progress(done, total, unit)
    reporter = current_reporter()
    if reporter is None:
        check_unit(unit)
    else:
        reporter.progress(float(done), None if total is None else float(total), unit)


def current_reporter() -> ProgressReporter | None:
    """Return the reporter of the job whose code is running; None in a driver."""
    runtime = current_or_none()
    # A plain thread or a subprocess of the job has no runtime; the pipe in its environment is enough.
    if runtime is None:
        return _of_process if _is_searched else _find_pipe()
    return reporter_of(runtime)


def reporter_of(runtime: Runtime) -> ProgressReporter | None:
    """Return the reporter of the job with this runtime."""
    reporter = runtime.services.find(IN_PROCESS_REPORTER)
    if reporter is not None:
        return reporter
    return _of_process if _is_searched else _find_pipe()


class PipeReporter:
    """Reporter that writes to the pipe at ``path``, opened with the first report; one per process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1
        self._latest: _Numbers = (0.0, None, "")
        self._unit = ""
        self._scheduled = False
        """Flag: the thread is going to send the latest progress, so it suffices to change it."""
        self._sent_at = -_INFINITE
        self._reset_threads()

    def _reset_threads(self) -> None:
        """Reset locks and thread, initially and in a forked child, where those of the parent do not work."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._scheduled = False

    def progress(self, done: float, total: float | None, unit: str) -> None:
        # By identity: a literal in a loop is one object, so its length is checked once.
        if unit is not self._unit:
            check_unit(unit)
            self._unit = unit
        self._latest = (done, total, unit)
        # Read without the lock: a late thread sends the latest numbers, which were just stored.
        if not self._scheduled:
            self._send_or_schedule()

    def report_health(self, report: HealthReport) -> None:
        self._send(report)

    def report_calls(self, report: ServedCalls) -> None:
        self._send(report)

    def _send_or_schedule(self) -> None:
        with self._lock:
            if self._scheduled:
                return
            if time.monotonic() - self._sent_at >= REPORT_EVERY_S:
                self._send_latest()
                return
            self._scheduled = True
            if self._thread is None:
                # Only with the second report within a period: most programs report seldom and need no thread.
                self._thread = threading.Thread(target=self._send_scheduled, name="fray-progress", daemon=True)
                self._thread.start()
                _flush_at_exit(self.flush)
            self._wake.set()

    def _send_scheduled(self) -> None:
        """Send scheduled reports when they are due. Runs on the thread."""
        while True:
            self._wake.wait()
            time.sleep(max(0.0, self._sent_at + REPORT_EVERY_S - time.monotonic()))
            self.flush()

    def flush(self) -> None:
        """Send a scheduled report now."""
        with self._lock:
            if self._scheduled:
                self._wake.clear()
                self._scheduled = False  # before the latest is read, so that a later one is scheduled again
                self._send_latest()

    def _send_latest(self) -> None:
        done, total, unit = self._latest
        self._sent_at = time.monotonic()
        self._send(Progress(done=done, total=total, unit=unit))

    def _send(self, report: WrittenReport) -> None:
        """Write one report; it is dropped if the pipe is full or closed."""
        with contextlib.suppress(OSError):
            if self._file < 0:
                # A full pipe drops a report instead of blocking the training loop; the next one brings newer numbers.
                # Lines are below PIPE_BUF, so those of several processes never mix.
                self._file = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._file, format_line(report))


class InProcessReporter:
    """Reporter that calls the node in the same loop, with the last progress of each step of the loop."""

    def __init__(self, token: trio.lowlevel.TrioToken, on_report: Callable[[WrittenReport], object]) -> None:
        self._on_report = on_report
        self._token = token
        self._latest: _Numbers = (0.0, None, "")
        self._scheduled = False

    def progress(self, done: float, total: float | None, unit: str) -> None:
        check_unit(unit)
        self._latest = (done, total, unit)
        if self._scheduled:
            return
        if trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._token:
            self._send_latest()
            return
        self._scheduled = True
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._send_latest)

    def report_health(self, report: HealthReport) -> None:
        self._on_report(report)

    def report_calls(self, report: ServedCalls) -> None:
        self._on_report(report)

    def _send_latest(self) -> None:
        self._scheduled = False
        done, total, unit = self._latest
        self._on_report(Progress(done=done, total=total, unit=unit))


IN_PROCESS_REPORTER: ServiceKey[InProcessReporter] = ServiceKey("progress reporter")
"""Reporter of a job that shares its process with others; a job without one has a process of its own."""


def _flush_at_exit(flush: Callable[[], None]) -> None:
    """Flush at the end of `multiprocessing` processes, which do not run `atexit` handlers."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, flush, exitpriority=0)


_of_process: PipeReporter | None = None
_is_searched = False


def _find_pipe() -> ProgressReporter | None:
    """Return the reporter for the pipe in this process's environment, which every process of a job has."""
    global _of_process, _is_searched
    path = os.environ.get(VARIABLE)
    if path:
        reporter = _of_process = PipeReporter(path)
        atexit.register(reporter.flush)
        os.register_at_fork(after_in_child=reporter._reset_threads)
    _is_searched = True
    return _of_process
