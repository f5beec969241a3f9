"""Looking into a job from its shim: the stacks of all threads, without the job's help where that is possible.

A capture is a process of its own below the shim, the process: it may take seconds, and the shim's loop does not. For
each Python process of the job it asks ``py-spy``, where that is installed and allowed to look, and else
`faulthandler` by a signal (`fray.runtime.process.stack_dump`); then the job's loop for its tasks. It writes one file
and is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn, Protocol

from attrs import evolve, frozen

from fray.model.monitoring.attempt_metrics import STACKS_LIMIT_BYTES, truncate_middle
from fray.model.monitoring.progress_protocol import STACKS_FILE, STACKS_SIGNAL, TASKS_END
from fray.node.linux.process_tree import descendants, die_with, set_title
from fray.node.shim.plugin import ShimPlugin
from fray.node.shim.spawn import close_all_but

CAPTURED = "captured"
"""The file in the attempt's directory that holds the text."""
CAPTURE_S = 8.0
"""A process that takes longer is killed."""
PY_SPY_S = 4.0
PROCESSES_LIMIT = 8
"""Python processes of one job that are looked into: the main one and those next to it."""
SIGNALLED_S = 1.0
"""How long `faulthandler` may take to begin."""
QUIET_S = 0.05
"""It is done when it has written nothing for so long."""
TASKS_S = 0.3
"""How long the job's loop has to answer."""
_NAP_S = 0.01


# In the shim -------------------------------------------------------------------------------------------------------


class ShimContext(Protocol):
    """The part of a shim's loop that a `Scribe` needs."""

    def add_reader(self, descriptor: int, handler: Callable[[], None]) -> None: ...

    def remove_reader(self, descriptor: int) -> None: ...


@frozen
class CaptureTarget:
    """Who is looked into, and with what."""

    pid: int
    control_fd: int
    """Where its loop is asked for its tasks."""
    directory: Path
    py_spy: str = ""
    """The program; empty: `faulthandler` has to do."""


class StackCapturer(ShimPlugin):
    """One process at a time; ``on_done`` is called when its file is there (or it has failed to write one)."""

    def __init__(self, shim: ShimContext, target: CaptureTarget, on_done: Callable[[], object]) -> None:
        self._shim, self._target, self._on_done = shim, target, on_done
        self._process: tuple[int, int] | None = None
        self._overdue_at = 0.0

    def start(self, py_spy: str) -> None:
        """The node wants a capture, and says where py-spy is; one that is under way serves."""
        if self._process is not None:
            return
        shim = os.getpid()
        try:
            (self._target.directory / CAPTURED).unlink(missing_ok=True)
            process = os.fork()
            if process == 0:
                _run_capture(shim, evolve(self._target, py_spy=py_spy))
            descriptor = os.pidfd_open(process)
        except OSError:
            self._on_done()  # that there is no file says it all
            return
        self._process, self._overdue_at = (process, descriptor), time.monotonic() + CAPTURE_S
        self._shim.add_reader(descriptor, self._done)

    def pids(self) -> list[int]:
        """Of the process and what it runs."""
        return [] if self._process is None else [self._process[0], *descendants(self._process[0])]

    def _done(self) -> None:
        assert self._process is not None
        (process, descriptor), self._process = self._process, None
        self._shim.remove_reader(descriptor)
        os.close(descriptor)
        os.waitpid(process, 0)
        self._on_done()

    def next_due_at(self) -> float | None:
        return self._overdue_at if self._process is not None else None

    def on_timer(self, now: float) -> None:
        if self._process is not None and now >= self._overdue_at:
            os.kill(self._process[0], signal.SIGKILL)
            self._overdue_at = now + CAPTURE_S

    def on_exit(self) -> None:
        """It is no process of the job, and is not counted as swept."""
        if self._process is not None:
            os.kill(self._process[0], signal.SIGKILL)
            self._done()


# The process ----------------------------------------------------------------------------------------------------------


def _run_capture(shim: int, target: CaptureTarget) -> NoReturn:
    try:
        die_with(shim)
        set_title("fray-capture")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all_but((target.control_fd,))
        text = capture(target, time.monotonic() + CAPTURE_S - 1)
        part = target.directory / f"{CAPTURED}.part"
        part.write_text(truncate_middle(text, STACKS_LIMIT_BYTES), "utf-8", "replace")
        part.rename(target.directory / CAPTURED)
    except BaseException:  # noqa: BLE001 - the shim's own code must never go on in the child
        traceback.print_exc()
    finally:
        os._exit(0)


@cache
def find_py_spy() -> str:
    """The program, if it is installed beside this interpreter or in the path; empty if it is not. The node asks: its
    jobs may have environments of their own."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy") or ""


def capture(target: CaptureTarget, deadline: float) -> str:
    """The text: each Python process, then the Trio tasks of the main one."""
    tasks, shown = _tasks(target.control_fd, target.directory), []
    for pid in _processes(target.pid):
        if time.monotonic() > deadline - SIGNALLED_S - QUIET_S:
            shown.append(f"[fray] process {pid} was not looked into: the others took too long\n")
        else:
            shown.append(_look(pid, target, deadline) or _state(pid))
    return "\n".join(filter(None, (*shown, tasks)))


def _processes(pid: int) -> list[int]:
    """The main process, and what below it is Python too."""
    below = [one for one in descendants(pid) if _is_python(one)]
    return [pid, *below][:PROCESSES_LIMIT]


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return False


def _look(pid: int, target: CaptureTarget, deadline: float) -> str:
    """By whatever works; empty if nothing does."""
    found = _by_py_spy(pid, target.py_spy, deadline) if target.py_spy and _is_python(pid) else ""
    return found or _by_signal(pid, target.directory)


def _by_py_spy(pid: int, py_spy: str, deadline: float) -> str:
    """It stops the process for some milliseconds; if it is killed, the kernel lets the process go on."""
    patience_s = max(0.1, min(PY_SPY_S, deadline - SIGNALLED_S - time.monotonic()))
    command = [py_spy, "dump", "--full-filenames", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience_s, check=False)
        if ran.returncode == 0:
            return ran.stdout.decode("utf-8", "replace")
    return ""


def _by_signal(pid: int, directory: Path) -> str:
    """What `faulthandler` writes when it is told to; empty for a process that has not armed it."""
    if not _catches(pid, STACKS_SIGNAL):
        return ""
    file = directory / STACKS_FILE
    before = _size(file)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
    _wait_quiet(file, before)
    text = _read(file, before)
    return f"Process {pid}:\n{text}" if text else ""


def _wait_quiet(file: Path, size: int) -> None:
    """Wait until it has grown and grows no more."""
    quiet_at = give_up_at = time.monotonic() + SIGNALLED_S
    while (now := time.monotonic()) < min(give_up_at, quiet_at):
        time.sleep(_NAP_S)
        grown = _size(file)
        if grown != size:
            size, quiet_at = grown, now + QUIET_S


def _tasks(control_fd: int, directory: Path) -> str:
    """The job's own answer; empty if it has no loop."""
    file = directory / STACKS_FILE
    if not file.exists():
        return ""
    if _size(file) > STACKS_LIMIT_BYTES:
        os.truncate(file, 0)
    before = _size(file)
    try:
        os.write(control_fd, b"t")
    except OSError:
        return ""
    give_up_at = time.monotonic() + TASKS_S
    while time.monotonic() < give_up_at:
        text, end, _ = _read(file, before).partition(TASKS_END)
        if end:
            return text
        time.sleep(_NAP_S)
    return "[fray] its loop did not answer: no Trio tasks\n"


def _state(pid: int) -> str:
    """What the kernel says of a process that nobody can look into: each thread, and what it waits in."""
    lines = [f"Process {pid} is no Python that can be looked into. Its threads:"]
    with contextlib.suppress(OSError):
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:64]:
            root = Path(f"/proc/{pid}/task/{task}")
            state = (root / "stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"    {task} {(root / 'comm').read_text().strip()}: state {state}, {_wait_channel(root)}")
    return "\n".join(lines) + "\n"


def _wait_channel(task: Path) -> str:
    with contextlib.suppress(OSError):
        found = (task / "wchan").read_text().strip()
        if found not in ("", "0"):
            return f"waits in {found}"
    return "on its own"


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(file: Path, start: int) -> str:
    with contextlib.suppress(OSError), open(file, "rb") as reader:
        reader.seek(start)
        return reader.read(STACKS_LIMIT_BYTES).decode("utf-8", "replace")
    return ""
