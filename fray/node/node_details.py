"""What a node tells people of itself beside what the law decides by: in a few short lines, the latest replaces all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fray.node.config import LogRules, PidNamespaceMode

if TYPE_CHECKING:
    from fray.node.resources.allocator import ResourceAllocator

_UNITS = ("B", "KB", "MB", "GB", "TB")


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
        f"kept for {days(rules.age_s)} after an attempt's end, at most {amount(rules.attempt_bytes)} of each and "
        f"{amount(rules.total_bytes)} of all{where}"
    )


def zygotes(others: dict[str, int]) -> str:
    """``others``: interpreters of environments that have a zygote, with the attempts that use each."""
    described = [f"{Path(path).parents[2].name[:12]} ({users} attempts)" for path, users in sorted(others.items())]
    return ", ".join(["its own", *described])


def python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}, {sys.executable}"


def amount(count: float) -> str:
    """``1.5GB``: powers of 1024."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.1f}".removesuffix(".0") + unit


def days(seconds: float) -> str:
    """``7 days``, ``90 s``."""
    return f"{seconds / 86_400:g} days" if seconds >= 86_400 else f"{seconds:g} s"
