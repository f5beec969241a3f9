"""Plug-in that captures the stacks of a job, without the job's help where that is possible.

A capture runs in a child process of the shim: it may take seconds, during which the shim's loop must not wait. As a
child of an ancestor it uses the job's process numbers, and the job's pid cannot be reused before the shim has reaped
it. For each Python process of the job it runs ``py-spy``, where that is installed and permitted, and else triggers
`faulthandler` by a signal (`fray.runtime.process.stack_dump`); then it asks the job's loop for its tasks, and writes
one file.
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
from fray.model.specs import JobAccount
from fray.node.accounts.switch import become
from fray.node.linux.process_tree import descendants, die_with, set_title
from fray.node.shim.plugin import ShimPlugin
from fray.node.shim.spawn import close_all_but

CAPTURED = "captured"
"""File among the attempt's records that holds the text."""
CAPTURE_S = 8.0
"""Seconds after which a capture process is killed."""
PY_SPY_S = 4.0
PROCESSES_LIMIT = 8
"""Number of Python processes of one job that are captured: the main one and the nearest below it."""
SIGNALLED_S = 1.0
"""Seconds that `faulthandler` may take to begin."""
QUIET_S = 0.05
"""Seconds without output after which `faulthandler` is taken to be done."""
TASKS_S = 0.3
"""Seconds that the job's loop has to answer."""
_NAP_S = 0.01


# In the shim -------------------------------------------------------------------------------------------------------


class ShimContext(Protocol):
    """Part of a shim's loop that a `StackCapturer` needs."""

    def add_reader(self, descriptor: int, handler: Callable[[], None]) -> None: ...

    def remove_reader(self, descriptor: int) -> None: ...


@frozen
class CaptureTarget:
    """Process tree to capture, and the means."""

    pid: int
    control_fd: int
    """Descriptor by which its loop is asked for its tasks."""
    directory: Path
    """Directory of the job, to which its `faulthandler` writes."""
    captured: Path
    """File for the text."""
    py_spy: str = ""
    """Path of py-spy; empty: `faulthandler` only."""
    account: JobAccount | None = None
    """Account of the job; None: that of this process."""


class StackCapturer(ShimPlugin):
    """Runs one capture at a time; ``on_done`` is called when the file is written or has failed."""

    def __init__(self, shim: ShimContext, target: CaptureTarget, on_done: Callable[[], object]) -> None:
        self._shim, self._target, self._on_done = shim, target, on_done
        self._process: tuple[int, int] | None = None
        self._overdue_at = 0.0

    def start(self, py_spy: str) -> None:
        """Start a capture with this py-spy, unless one is running."""
        if self._process is not None:
            return
        shim = os.getpid()
        try:
            # Otherwise the node would read the previous capture after one that failed.
            self._target.captured.unlink(missing_ok=True)
            process = os.fork()
            if process == 0:
                _run_capture(shim, evolve(self._target, py_spy=py_spy))
            descriptor = os.pidfd_open(process)
        except OSError:
            self._on_done()  # the node finds no file
            return
        self._process, self._overdue_at = (process, descriptor), time.monotonic() + CAPTURE_S
        self._shim.add_reader(descriptor, self._on_capture_done)

    def pids(self) -> list[int]:
        """Return the pids of the capture process and what it runs."""
        return [] if self._process is None else [self._process[0], *descendants(self._process[0])]

    def _on_capture_done(self) -> None:
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
            # An unreaped child: its pid cannot belong to another process.
            os.kill(self._process[0], signal.SIGKILL)
            self._overdue_at = now + CAPTURE_S

    def on_exit(self) -> None:
        """Kill a running capture: it is not a process of the job, and must not be counted as swept."""
        if self._process is not None:
            os.kill(self._process[0], signal.SIGKILL)
            self._on_capture_done()


# The capture ----------------------------------------------------------------------------------------------------------


def _run_capture(shim: int, target: CaptureTarget) -> NoReturn:
    try:
        die_with(shim)
        set_title("fray-capture")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # This process must not keep the job's pipes and the node's socket open beyond the shim's end.
        close_all_but((target.control_fd,))
        # A second less than the shim's patience, so that what is known by then is written before the SIGKILL.
        deadline = time.monotonic() + CAPTURE_S - 1
        # Opened first: what is captured is read from files and processes of the account, as the account.
        file = os.open(target.captured, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        if target.account is not None:
            become(target.account)
            die_with(shim)
        text = truncate_middle(capture(target, deadline), STACKS_LIMIT_BYTES).encode("utf-8", "replace")
        with open(file, "wb") as out:
            out.write(text)
    except BaseException:  # noqa: BLE001 - the shim's own code must never continue in the child
        traceback.print_exc()
    finally:
        os._exit(0)


@cache
def find_py_spy() -> str:
    """Return the path of py-spy beside this interpreter or in PATH; empty if it is not installed."""
    # Called by the node and sent to the shim, whose interpreter may be one of an environment without py-spy.
    # Beside the interpreter first: a virtual environment that is not activated is not in PATH.
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy") or ""


def capture(target: CaptureTarget, deadline: float) -> str:
    """Return the stacks of each Python process, then the Trio tasks of the main one."""
    tasks, shown = _tasks(target.control_fd, target.directory), []
    for pid in _python_processes(target.pid):
        # The least that one more process takes; what has been captured so far must still be written.
        if time.monotonic() > deadline - SIGNALLED_S - QUIET_S:
            shown.append(f"[fray] process {pid} was not captured: the others took too long\n")
        else:
            shown.append(_capture_process(pid, target, deadline) or _state(pid))
    return "\n".join(filter(None, (*shown, tasks)))


def _python_processes(pid: int) -> list[int]:
    """Return the main process and the Python processes below it."""
    # The main process always, also if it is not Python: then the kernel functions it waits in are shown.
    below = [one for one in descendants(pid) if _is_python(one)]
    return [pid, *below][:PROCESSES_LIMIT]


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # The executable and not the name, which every process can set (Fray's jobs do).
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return False


def _capture_process(pid: int, target: CaptureTarget, deadline: float) -> str:
    """Return the stacks by whatever works; empty if nothing does."""
    # py-spy first: it shows the stacks of a process that has not installed `faulthandler`. It needs ptrace, which many
    # machines allow to root only.
    found = _by_py_spy(pid, target.py_spy, deadline) if target.py_spy and _is_python(pid) else ""
    return found or _by_signal(pid, target.directory)


def _by_py_spy(pid: int, py_spy: str, deadline: float) -> str:
    """Run py-spy, which stops the process for milliseconds; if py-spy is killed, the kernel resumes the process."""
    # Leaves enough time for the signal, should py-spy hang.
    patience_s = max(0.1, min(PY_SPY_S, deadline - SIGNALLED_S - time.monotonic()))
    command = [py_spy, "dump", "--full-filenames", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience_s, check=False)
        if ran.returncode == 0:
            return ran.stdout.decode("utf-8", "replace")
    return ""


def _by_signal(pid: int, directory: Path) -> str:
    """Return what `faulthandler` writes; empty for a process that has not installed it."""
    # The default action of this signal would end the process.
    if not _catches_signal(pid, STACKS_SIGNAL):
        return ""
    file = directory / STACKS_FILE
    before = _size(file)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
    _wait_quiet(file, before)
    text = _read(file, before)
    return f"Process {pid}:\n{text}" if text else ""


def _wait_quiet(file: Path, size: int) -> None:
    """Wait until the file has grown and has stopped growing."""
    # `faulthandler` does not report that it has finished, so silence has to do.
    quiet_at = give_up_at = time.monotonic() + SIGNALLED_S
    while (now := time.monotonic()) < min(give_up_at, quiet_at):
        time.sleep(_NAP_S)
        grown = _size(file)
        if grown != size:
            size, quiet_at = grown, now + QUIET_S


def _tasks(control_fd: int, directory: Path) -> str:
    """Return the tasks of the job's loop; empty if it has no loop."""
    file = directory / STACKS_FILE
    # The job's runtime creates the file when it starts; a program has none and does not read the control pipe.
    if not file.exists():
        return ""
    if _size(file) > STACKS_LIMIT_BYTES:
        # Safe beside a writer: the job appends (O_APPEND).
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
    return "[fray] its event loop did not answer: no Trio tasks\n"


def _state(pid: int) -> str:
    """Return the threads of a process that cannot be captured, and the kernel function each waits in."""
    lines = [f"Process {pid} is not a Python process that can be captured. Its threads:"]
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
    return "runs or waits in user space"


def _catches_signal(pid: int, number: int) -> bool:
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
