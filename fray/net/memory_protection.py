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
