"""What a node gave an attempt beside a process, as its shim is told."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Allocation:
    """What one attempt has; its shim is told."""

    limit_bytes: int = 0
    """Of the memory of its process tree; 0: none."""
    group: str = ""
    """Path of its control group."""
    group_version: int = 0
    cpus: tuple[int, ...] = ()
    """The only ones it may run on; empty: any."""
