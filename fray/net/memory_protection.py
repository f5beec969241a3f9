"""Protection of a daemon's memory from other processes of its account."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def forbid_inspection() -> None:
    """Make this process not dumpable: processes of the same account cannot attach to it, or read its memory, its
    environment and its descriptors. Root still can. It also makes no core dump.

    The programs that it executes can be inspected again, which captures of stacks of jobs need.
    """
    # Jobs run under the account of the node, and often of the controller, both of which know the cluster's token. An
    # error is of a system without prctl, and nothing depends on it.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def allow_inspection() -> None:
    """Undo `forbid_inspection`, which a fork inherits."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def hides_processes(mounts: str = "/proc/self/mountinfo") -> bool:
    """Return whether ``/proc`` hides the processes that may not be inspected (its option ``hidepid``)."""
    try:
        with open(mounts) as file:
            options = [line.rpartition(" ")[2].strip() for line in file if line.split()[4] == "/proc"]
    except OSError:
        return True
    hidden = [word for word in options[-1].split(",") if word.startswith("hidepid=")] if options else []
    return any(word not in ("hidepid=0", "hidepid=off") for word in hidden)
