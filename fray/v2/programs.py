"""Programs as jobs of this process: started, read, ended."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections import deque

log = logging.getLogger("fray.v2")

KEPT_LINES = 10_000
"""Of a program's output, the last ones."""
END_S = 5.0
"""After SIGTERM, before SIGKILL."""


class Program:
    """A child process; what it prints, both streams, goes to the log and is kept."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self._name, self._argv = name, argv
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._killed = threading.Event()

    def run(self) -> None:
        """Run it to its end.

        Raises:
            subprocess.CalledProcessError: it ended with another code than 0.
            OSError: there is no such program.
        """
        with subprocess.Popen(
            self._argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        ) as self._process:
            if self._killed.is_set():
                self._process.terminate()
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._lines.append(line)
                log.info("%s: %s", self._name, line.rstrip("\n"))
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._argv, output=self.output())

    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self._lines)

    def kill(self) -> None:
        """Ask for its end, and soon insist; returns at once."""
        self._killed.set()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        insist = threading.Timer(END_S, process.kill)
        insist.daemon = True
        insist.start()
