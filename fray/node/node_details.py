"""Details of a node for people: a few short lines of text.

They are text and not fields because no decision depends on them. The controller keeps them in memory, at most 20 of
1,000 characters, also while the node is silent; which devices are in use or withheld is part of the scheduler's state.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fray.model.text import byte_size_text, duration_text
from fray.node.config import LogRules, PidNamespaceMode

if TYPE_CHECKING:
    from fray.node.resources.allocator import ResourceAllocator


def isolation(mode: PidNamespaceMode, error: str) -> str:
    """Return the isolation mode in force, and why not the other."""
    if mode is PidNamespaceMode.OFF:
        return "subreaper: PID namespaces are disabled (--pid-namespace off)"
    if error:
        return f"subreaper: PID namespaces are not available ({error})"
    if mode is PidNamespaceMode.ON:
        return "a PID namespace for every job"
    return "a PID namespace for programs; subreaper for Python jobs (--pid-namespace on: a namespace for all)"


def memory_limit(allocator: ResourceAllocator) -> str:
    """Return how jobs are held to the memory they asked for."""
    if not allocator.enforce:
        return "off: jobs may use more than they requested (--memory-limit off)"
    if allocator.groups is None:
        return "by sampling: no control groups (not permitted here, or --memory-limit watch)"
    return f"by control groups version {allocator.groups.version}, below {allocator.groups.base}"


def logs(rules: LogRules) -> str:
    """Return the retention of what attempts print."""
    where = f"; copied to {rules.archive}" if rules.archive else ""
    return (
        f"kept for {duration_text(rules.age_s)} after an attempt's end, at most "
        f"{byte_size_text(rules.attempt_bytes)} of each and {byte_size_text(rules.total_bytes)} of all{where}"
    )


def zygotes(others: dict[str, int]) -> str:
    """Return the zygotes that run. ``others``: attempts by interpreter of another environment."""
    described = [f"{Path(path).parents[2].name[:12]} ({users} attempts)" for path, users in sorted(others.items())]
    return ", ".join(["its own", *described])


def python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}, {sys.executable}"
