"""Resources that a node has given one attempt."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Allocation:
    """Resources of one attempt, sent to its shim."""

    limit_bytes: int = 0
    """Memory limit of its process tree; 0: none."""
    group: str = ""
    """Path of its control group."""
    group_version: int = 0
    cpus: tuple[int, ...] = ()
    """CPUs it may run on; empty: any."""
