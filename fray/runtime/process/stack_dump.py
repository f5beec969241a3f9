"""Stack dumps of this process, requested from outside.

Threads: a signal makes `faulthandler` write the stacks of all of them to the file ``stacks`` in the attempt's
directory. Its handler is C and needs neither the loop nor the lock of the interpreter, so it works while the main
thread is stuck in foreign code. Trio tasks: their tree, written by the loop itself when the shim requests it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import trio

from fray.model.monitoring.progress_protocol import STACKS_FILE, STACKS_SIGNAL, TASKS_END

TASKS_LIMIT = 200
"""Maximum number of tasks shown."""
FRAMES_LIMIT = 12
"""Number of innermost frames shown of one task."""
OURS = (str(Path(__file__).parent.parent) + os.sep, str(Path(trio.__file__).parent) + os.sep)
"""Directories of Fray and Trio, whose frames are left out: they are the same in every job."""

_file = -1


def enable_stack_dumps(directory: str) -> None:
    """Enable stack dumps on `STACKS_SIGNAL`. Never fails: with a full file system there are no dumps."""
    global _file
    # Opened at the start: a process that hangs or is out of descriptors could not open it later.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        _file = os.open(f"{directory}/{STACKS_FILE}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=_file, all_threads=True)


def write_tasks(text: str) -> None:
    """Write the answer to the shim's request for tasks."""
    with contextlib.suppress(OSError):
        os.write(_file, f"{text}{TASKS_END}\n".encode("utf-8", "replace"))


def tasks_text() -> str:
    """Return the tree of Trio's tasks without those that run only Fray's own code. Loop only."""
    root = trio.lowlevel.current_root_task()
    lines = list(_task_lines(root, 0)) if root is not None else []
    if len(lines) > TASKS_LIMIT * 4:
        lines = [*lines[: TASKS_LIMIT * 4], f"… {len(lines) - TASKS_LIMIT * 4} more lines"]
    return "Trio tasks:\n" + "".join(f"{line}\n" for line in lines) if lines else ""


def _task_lines(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    """Yield the lines of this task and its descendants."""
    # Only the user's frames help; those of Fray and Trio would fill the limit.
    frames = [(frame, line) for frame, line in task.iter_await_frames() if not _is_ours(frame)]
    if frames:
        yield f"{'  ' * depth}task {task.name}"
        for frame, line in frames[-FRAMES_LIMIT:]:
            yield f"{'  ' * depth}    {frame.f_code.co_name} ({frame.f_code.co_filename}:{line})"
        depth += 1
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _task_lines(child, depth)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def threads_text() -> str:
    """Return the stacks of all threads of this process, for ``local`` clusters, which have no shim."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = ""
    # `faulthandler` writes to files only, and here the text is wanted.
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_list(traceback.extract_stack(frame)))
        text += f"Thread {names.get(ident, '?')} ({ident}):\n{stack}\n"
    return text
