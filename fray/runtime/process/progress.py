"""What a job says of itself while it runs: `progress`, and the answers of its health method.

Law: whoever calls never waits, and the latest word always arrives. In the inner loop a call costs a comparison and an
assignment: at most `TELL_EVERY_S` apart something is really said, by the caller or, if nobody calls again, by a thread.

Two kinds of voices: `PipeReporter` of processes (any process of a job finds the pipe in its environment),
`InProcessReporter`
where jobs are tasks and threads of one loop (``local``, simulation).
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
from fray.runtime.runtime import Runtime, current_or_none

TELL_EVERY_S = 0.2

_INFINITE = float("inf")
_Numbers: TypeAlias = tuple[float, float | None, str]


class ProgressReporter(Protocol):
    """Of one job."""

    def progress(self, done: float, total: float | None, unit: str) -> None:
        """From any thread."""

    def report_health(self, pulse: HealthReport) -> None:
        """In the loop."""


def progress(done: float, total: float | None = None, unit: str = "") -> None:
    """Say how far this job is. Cheap enough for inner loops, from any thread or task; the last word always arrives.

    It shows in ``job.info.progress``, on the command line and now and then in the log; and it is the beat that
    ``JobRequest(stall_s=…)`` waits for. Where no job runs (a driver, a notebook) nothing happens.

    Args:
        done: how much, in any unit.
        total: of how much; None: nobody knows.
        unit: a word of at most 40 characters.

    Raises:
        InvalidRequest: a number below 0, NaN or infinite, or no number; a longer unit.
    """
    try:
        if not (0 <= done < _INFINITE and (total is None or 0 <= total < _INFINITE)):
            check_progress(done, total, unit)
    except (TypeError, ValueError):
        check_progress(done, total, unit)
    voice = current_reporter()
    if voice is None:
        check_unit(unit)
    else:
        voice.progress(float(done), None if total is None else float(total), unit)


def current_reporter() -> ProgressReporter | None:
    """That of the job whose code is running; None in a driver."""
    runtime = current_or_none()
    if runtime is not None and runtime.progress is not None:
        voice: ProgressReporter = runtime.progress
        return voice
    return _of_process if _looked else _look()


def reporter_of(runtime: Runtime) -> ProgressReporter | None:
    """That of the job whose runtime this is."""
    if runtime.progress is not None:
        voice: ProgressReporter = runtime.progress
        return voice
    return _of_process if _looked else _look()


class PipeReporter:
    """Speaks into the pipe at ``path``; one per process. Opened when there is first something to say."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1
        self._latest: _Numbers = (0.0, None, "")
        self._unit = ""
        self._owed = False
        """Somebody is going to say the latest: there is nothing to do but to change it."""
        self._said_at = -_INFINITE
        self._forget_threads()

    def _forget_threads(self) -> None:
        """At first, and in a forked child, where threads and held locks are the parent's."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._owed = False

    def progress(self, done: float, total: float | None, unit: str) -> None:
        if unit is not self._unit:
            check_unit(unit)
            self._unit = unit
        self._latest = (done, total, unit)
        if not self._owed:
            self._say_or_owe()

    def report_health(self, pulse: HealthReport) -> None:
        self._send(pulse)

    def _say_or_owe(self) -> None:
        with self._lock:
            if self._owed:
                return
            if time.monotonic() - self._said_at >= TELL_EVERY_S:
                self._say()
                return
            self._owed = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._pay, name="fray-progress", daemon=True)
                self._thread.start()
                _before_leaving(self.flush)
            self._wake.set()

    def _pay(self) -> None:
        """On the thread: whatever is owed is said when it is time."""
        while True:
            self._wake.wait()
            time.sleep(max(0.0, self._said_at + TELL_EVERY_S - time.monotonic()))
            self.flush()

    def flush(self) -> None:
        """Say now what is owed."""
        with self._lock:
            if self._owed:
                self._wake.clear()
                self._owed = False  # before the latest is read: a later one is owed anew
                self._say()

    def _say(self) -> None:
        done, total, unit = self._latest
        self._said_at = time.monotonic()
        self._send(Progress(done=done, total=total, unit=unit))

    def _send(self, said: WrittenReport) -> None:
        """A pipe that is full or gone costs a word, nothing else."""
        with contextlib.suppress(OSError):
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._file, format_line(said))


class InProcessReporter:
    """Speaks to the node in the same loop; of many words said in one step of the loop it hears the last."""

    def __init__(self, hear: Callable[[WrittenReport], object]) -> None:
        self._hear = hear
        self._token = trio.lowlevel.current_trio_token()
        self._latest: _Numbers = (0.0, None, "")
        self._owed = False

    def progress(self, done: float, total: float | None, unit: str) -> None:
        check_unit(unit)
        self._latest = (done, total, unit)
        if self._owed:
            return
        if trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._token:
            self._say()
            return
        self._owed = True
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._say)

    def report_health(self, pulse: HealthReport) -> None:
        self._hear(pulse)

    def _say(self) -> None:
        self._owed = False
        done, total, unit = self._latest
        self._hear(Progress(done=done, total=total, unit=unit))


def _before_leaving(flush: Callable[[], None]) -> None:
    """Processes of `multiprocessing` leave by a door of their own, past `atexit`."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, flush, exitpriority=0)


_of_process: PipeReporter | None = None
_looked = False


def _look() -> ProgressReporter | None:
    """The pipe stands in the environment of every process of a job."""
    global _of_process, _looked
    path = os.environ.get(VARIABLE)
    if path:
        voice = _of_process = PipeReporter(path)
        atexit.register(voice.flush)
        os.register_at_fork(after_in_child=voice._forget_threads)
    _looked = True
    return _of_process
