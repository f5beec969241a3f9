"""Programs run as jobs of `LocalClient`: child processes that end with this process at the latest.

Each program has its own session and process group, so that its descendants end with it unless they leave the group.
SIGKILL of this process leaves it running: PDEATHSIG would need code between fork and exec in a process full of threads.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from contextvars import Context
from time import monotonic

from fray.threads import call_in_thread

log = logging.getLogger("fray.v2")

MAX_LINES = 10_000
"""Last lines of a program's output that are stored."""
END_S, END_AT_EXIT_S = 5.0, 1.0
"""Seconds between SIGTERM and SIGKILL: usually, and when the interpreter exits."""
READ_S = 1.0
"""Seconds to read the rest of a program's output after its end, while another process may hold the pipe open."""

_running: set[Program] = set()


class Program:
    """Child process; both of its output streams go to the log and are stored."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self._name, self._argv = name, argv
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()
        self._group: int | None = None
        """Process group, from the start of the program until its end has been seen."""
        self._killed = False
        self.ended = threading.Event()

    def run(self) -> None:
        """Run the program to its end.

        Raises:
            subprocess.CalledProcessError: the exit code is not 0.
            OSError: there is no such program.
        """
        _running.add(self)
        try:
            code = self._run()
        finally:
            _running.discard(self)
            self.ended.set()
        if code:
            raise subprocess.CalledProcessError(code, self._argv, output=self.output())

    def _run(self) -> int:
        process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with self._lock:
            self._group = process.pid
        # `kill` was called before the process existed.
        if self._killed:
            self.kill()
        reading = call_in_thread(Context(), f"{self._name}-output", self._read, process)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped: the group still has its id
        # Descendants in the group end with the program, as on a cluster.
        self.send(signal.SIGKILL)
        with self._lock:
            self._group = None
        code = process.wait()
        try:
            reading.exception(READ_S)
        except TimeoutError:
            log.warning("%s has ended, but a process that it started still holds its output open", self._name)
        return code

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(line)
                log.info("%s: %s", self._name, line.rstrip("\n"))

    def output(self) -> str:
        """Return the output so far."""
        return "".join(tuple(self._lines))

    def kill(self) -> None:
        """Send SIGTERM, and SIGKILL after `END_S`; return at once."""
        self._killed = True
        if self.send(signal.SIGTERM):
            timer = threading.Timer(END_S, self.send, (signal.SIGKILL,))
            timer.daemon = True
            timer.start()

    def send(self, number: int) -> bool:
        """Send a signal to the program and what it started; return False if it has not started, or has ended."""
        # Together with the check: a group id that was released could be that of another program.
        with self._lock:
            if self._group is None:
                return False
            os.killpg(self._group, number)
            return True


def _end_all() -> None:
    programs = list(_running)
    # Without `kill` and its timer: from Python 3.12 on, no thread can be started at exit.
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = monotonic() + END_AT_EXIT_S
        for program in programs:
            program.send(number)
        for program in programs:
            program.ended.wait(max(0.0, until - monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_running.clear)  # they belong to the parent
