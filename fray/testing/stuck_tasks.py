"""Stacks of waiting tasks, for a scenario that does not end: the innermost lines of every task of one machine."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from fray.testing.sim_cluster import current_machine

DEPTH = 6
"""Number of lines shown of each task, outermost first."""


def where(machine: str) -> list[str]:
    """Return one line per task of the machine: its name and the last lines of its stack."""
    return [_line(task) for task in _tasks() if task.context.get(current_machine, "") == machine]


def _tasks() -> Iterator[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    waiting = [root] if root is not None else []
    while waiting:
        task = waiting.pop()
        yield task
        waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]


def _line(task: trio.lowlevel.Task) -> str:
    frames = [
        f"{frame.f_code.co_filename.rpartition('/fray/')[2]}:{line} {frame.f_code.co_name}"
        for frame, line in task.iter_await_frames()
        if "/trio/" not in frame.f_code.co_filename and "contextlib" not in frame.f_code.co_filename
    ]
    return f"{task.name}: {' < '.join(reversed(frames[-DEPTH:]))}"
