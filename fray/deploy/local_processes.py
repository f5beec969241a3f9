"""Processes that the jobs of a ``local`` cluster start: each ends, with all below it, with its job.

Jobs of ``local`` are threads and tasks of the driver, so no shim is above their processes. Instead, what code of a job
executes gets a variable that names its attempt; the variable is inherited, also by daemons and new sessions, and at the
end of the attempt every process that has it is killed. If the driver is killed (-9), a reaper does it: a process that
waits for the driver's end. It is started with the first process of a job, so that a cluster whose jobs start none pays
nothing.

Invariant: the reaper is started before the first marked process, so that a killed driver never leaves one behind.

A context variable says whose code runs: it is there in the tasks and threads that Fray, Trio and AnyIO start for a job,
but not in a `threading.Thread` that the job starts by itself. Marked is what is executed (`subprocess`,
``multiprocessing`` with ``spawn``), not what is only forked.
"""

from __future__ import annotations

import _posixsubprocess
import contextvars
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trio

import fray.errors
from fray.model.ids import AttemptId
from fray.node.job_process.inherited_environ import STATE_MARK
from fray.node.linux.reaper import end_marked

_ENV = 5
"""Position of the environment among the arguments of ``fork_exec``."""
_NAME = "fork_exec"
_REAPER = "import sys; sys.path.insert(0, {path!r}); from fray.node.linux.reaper import reap; reap({arguments})"


class JobProcesses:
    """Processes of the jobs of one cluster.

    Args:
        mark: name of the cluster, unique on this machine.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._reaper: subprocess.Popen[bytes] | None = None
        self._starters: set[AttemptId] = set()

    @contextmanager
    def started_by(self, attempt_id: AttemptId) -> Iterator[None]:
        """Mark what the code in this block, and the tasks and threads it starts, executes."""
        _watch_executions()
        token = _current.set((self, attempt_id))
        try:
            yield
        finally:
            _current.reset(token)

    def marks(self, attempt_id: AttemptId) -> list[str]:
        """Return the marks of a process that the attempt is about to start."""
        if self._reaper is None:
            # In an empty context: the reaper does not belong to the job.
            contextvars.Context().run(self._start_reaper)
        self._starters.add(attempt_id)
        return [self._mark, _attempt_mark(self._mark, attempt_id)]

    def _start_reaper(self) -> None:
        arguments = f"{os.getpid()}, {STATE_MARK!r}, {self._mark!r}"
        code = _REAPER.format(path=os.path.dirname(os.path.dirname(fray.errors.__file__)), arguments=arguments)
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the driver
        )

    async def end(self, attempt_id: AttemptId) -> None:
        """Kill what the attempt has started and what is below that; returns at once if it has started nothing."""
        if attempt_id in self._starters:
            self._starters.discard(attempt_id)
            mark = _attempt_mark(self._mark, attempt_id)
            with trio.CancelScope(shield=True):  # bounded by the limit of `end_marked`
                await trio.to_thread.run_sync(end_marked, STATE_MARK, mark)

    def close(self) -> None:
        """Kill what is left of all attempts, then the reaper."""
        if self._reaper is not None:
            end_marked(STATE_MARK, self._mark)
            self._reaper.kill()
            self._reaper.wait()


_current: contextvars.ContextVar[tuple[JobProcesses, AttemptId] | None] = contextvars.ContextVar(
    "fray_job_processes", default=None
)
"""Attempt whose code runs, and the processes it belongs to."""


def _attempt_mark(mark: str, attempt_id: AttemptId) -> str:
    return f"{mark}/{attempt_id.replace(':', '.')}"  # marks are joined by colons


def _watch_executions() -> None:
    """Let the two places that `subprocess` and ``multiprocessing`` execute through add the marks; idempotent."""
    original: Callable[..., int] = getattr(_posixsubprocess, _NAME)
    if hasattr(original, "adds_marks"):
        return

    def fork_exec(*args: Any) -> int:
        found = _current.get()
        if found is not None:
            processes, attempt_id = found
            args = (*args[:_ENV], with_marks(args[_ENV], processes.marks(attempt_id)), *args[_ENV + 1 :])
        return original(*args)

    fork_exec.adds_marks = True  # type: ignore[attr-defined]
    setattr(_posixsubprocess, _NAME, fork_exec)
    setattr(subprocess, "_" + _NAME, fork_exec)


def with_marks(environ: Sequence[bytes] | None, marks: Sequence[str]) -> list[bytes]:
    """Return an environment (None: this process's) as ``KEY=value`` with these marks added to those that it has."""
    variables = [b"%s=%s" % item for item in os.environb.items()] if environ is None else environ
    prefix = os.fsencode(STATE_MARK) + b"="
    known = [entry.removeprefix(prefix) for entry in variables if entry.startswith(prefix)]
    joined = b":".join([*filter(None, known), *map(os.fsencode, marks)])
    return [*(entry for entry in variables if not entry.startswith(prefix)), prefix + joined]
