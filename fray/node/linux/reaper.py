"""Killing of processes that carry a mark, and a reaper that does it when another process ends.

This module imports little: the reaper is a process of its own, and starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

from fray.node.linux.process_tree import end_all, has_mark


def end_marked(variable: str, mark: str) -> tuple[int, int]:
    """Kill every process with this mark; return how many were killed, and how many are left after 10 s."""
    return end_all(lambda pid: has_mark(pid, variable, mark))


def reap(parent: int, variable: str, mark: str) -> None:
    """Wait for the end of the parent process, then kill every process with this mark: the reaper's whole work."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ends a group of processes must not end the reaper first
    with suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(parent)
        # Else it has ended, and the number may be another process's.
        if os.getppid() == parent:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
    end_marked(variable, mark)
