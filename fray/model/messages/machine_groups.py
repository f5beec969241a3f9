"""Messages about machine groups and their machines (autoscaling)."""

from __future__ import annotations

from fray.model.frozen import frozen


@frozen(kw_only=True)
class ListMachines:
    """List machine groups and machines. Reply: `Machines`."""

    group: str = ""
    """Only this group; empty: all."""


@frozen(kw_only=True)
class ZoneBackoff:
    """Back-off of a zone: no machines are requested there for a while."""

    zone: str
    kind: str
    """``quota``, ``stockout``, ``transient`` or ``boot``."""
    remaining_s: float
    failures: int
    """Number of failures in a row."""
    message: str = ""


@frozen(kw_only=True)
class GroupInfo:
    """State of a machine group: desired and existing units. All counts are of units."""

    name: str
    provider: str
    kind: str
    """Short description of one unit."""
    min: int = 0
    buffer: int = 0
    max: int = 0
    wanted: int = 0
    """Desired units, in any phase except leaving."""
    asked: int = 0
    """Desired units that the provider has accepted."""
    seen: int = 0
    """Desired units that the provider lists."""
    joined: int = 0
    """Desired units whose nodes have all joined."""
    leaving: int = 0
    cost_per_hour: float = 0.0
    """Cost of all units that may exist, including those that are leaving."""
    stopped: str = ""
    """Reason for requesting nothing at all; empty: none."""
    trouble: str = ""
    """Error of the provider's last listing; empty: none."""
    backoffs: tuple[ZoneBackoff, ...] = ()


@frozen(kw_only=True)
class MachineInfo:
    """A unit: one machine, or one slice with all its hosts."""

    name: str
    group: str
    zone: str
    phase: str
    """``wanted``, ``asked``, ``seen``, ``joined``, ``draining`` or ``deleting``."""
    age_s: float
    """Seconds since it was requested by the autoscaler."""
    hosts: int = 1
    nodes: tuple[str, ...] = ()
    """Nodes that have joined."""
    attempts: int = 0
    """Number of attempts that run on it."""
    state: str = ""
    """State as last listed by its provider; empty: never listed."""
    price_per_hour: float = 0.0
    reason: str = ""
    """Reason for its creation; if it is leaving, for that."""
    provider_message: str = ""
    """Last message of its provider about it."""


@frozen(kw_only=True)
class Machines:
    groups: tuple[GroupInfo, ...] = ()
    machines: tuple[MachineInfo, ...] = ()
    cost_per_hour: float = 0.0
    spend_limit_per_hour: float | None = None


@frozen(kw_only=True)
class ScaleGroup:
    """Override the minimum and maximum of a group; not for jobs. Reply: `Done`.

    None: as in the policy. Errors: InvalidRequest, Unauthorized.
    """

    group: str
    min: int | None = None
    max: int | None = None
