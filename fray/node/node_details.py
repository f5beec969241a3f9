"""What a node tells people of itself beside what the law decides by: in a few short lines, the latest replaces all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fray.model.text import byte_size_text, duration_text
from fray.node.config import LogRules, PidNamespaceMode

if TYPE_CHECKING:
    from fray.node.resources.allocator import ResourceAllocator


def isolation(mode: PidNamespaceMode, error: str) -> str:
    """Which way of holding a job's processes together is in force, and why not the other."""
    if mode is PidNamespaceMode.OFF:
        return "subreaper: no PID namespaces, as --pid-namespace off says"
    if error:
        return f"subreaper: this machine gives no PID namespaces ({error})"
    if mode is PidNamespaceMode.ON:
        return "a PID namespace for every job"
    return "a PID namespace for programs; subreaper for Python jobs (--pid-namespace on: for all)"


def memory_limit(allocator: ResourceAllocator) -> str:
    """How jobs are held to the memory they asked for."""
    if not allocator.enforce:
        return "off: jobs may take more than they asked for, as --memory-limit off says"
    if allocator.groups is None:
        return "by looking at what processes have: no control groups (not allowed here, or --memory-limit watch)"
    return f"by control groups of version {allocator.groups.version}, below {allocator.groups.base}"


def logs(rules: LogRules) -> str:
    """What is kept of what attempts print."""
    where = f"; copied to {rules.archive}" if rules.archive else ""
    return (
        f"kept for {duration_text(rules.age_s)} after an attempt's end, at most "
        f"{byte_size_text(rules.attempt_bytes)} of each and {byte_size_text(rules.total_bytes)} of all{where}"
    )


def zygotes(others: dict[str, int]) -> str:
    """``others``: interpreters of environments that have a zygote, with the attempts that use each."""
    described = [f"{Path(path).parents[2].name[:12]} ({users} attempts)" for path, users in sorted(others.items())]
    return ", ".join(["its own", *described])


def python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}, {sys.executable}"
