"""Actor that says where it runs. Only what every environment has is imported."""

from __future__ import annotations

import os
import sys
from typing import Any


class Resident:
    """Actor of a node that is replaced."""

    def place(self) -> dict[str, Any]:
        """Return its process, account, CPUs and environment."""
        return {
            "pid": os.getpid(),
            "uid": os.getuid(),
            "cpus": frozenset(os.sched_getaffinity(0)),
            "prefix": sys.prefix,
        }
