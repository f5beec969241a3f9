"""What a client may ask about machines that can be had, and what an operator may change of them."""

from __future__ import annotations

from fray.model.frozen import frozen


@frozen(kw_only=True)
class ListMachines:
    """Reply: `Machines`."""

    group: str = ""
    """Of this group alone; empty: all."""


@frozen(kw_only=True)
class ZoneBackoff:
    """A zone of which nothing is asked for a while."""

    zone: str
    kind: str
    """``quota``, ``stockout``, ``transient`` or ``boot``."""
    remaining_s: float
    failures: int
    """In a row."""
    message: str = ""


@frozen(kw_only=True)
class GroupInfo:
    """A group of machines: what is wanted, and what has come of it so far. All counts are of units."""

    name: str
    provider: str
    kind: str
    """One unit, in a few words."""
    min: int = 0
    buffer: int = 0
    max: int = 0
    wanted: int = 0
    """Decided, whatever has come of it; those that are leaving left out."""
    asked: int = 0
    """Of these, ordered from the provider, which said yes."""
    seen: int = 0
    """Of these, listed by the provider."""
    joined: int = 0
    """Of these, all nodes are here."""
    leaving: int = 0
    cost_per_hour: float = 0.0
    """Of all that may be there, those that are leaving among them."""
    stopped: str = ""
    """Why nothing is asked for at all."""
    trouble: str = ""
    """Why its provider does not say what it has."""
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
    """Since it was decided."""
    hosts: int = 1
    nodes: tuple[str, ...] = ()
    """That are here."""
    attempts: int = 0
    """That run on it."""
    state: str = ""
    """As its provider listed it last; empty: it never did."""
    price_per_hour: float = 0.0
    reason: str = ""
    """What it was made for; if it is leaving, why that."""
    provider_message: str = ""
    """What its provider said of it last."""


@frozen(kw_only=True)
class Machines:
    groups: tuple[GroupInfo, ...] = ()
    machines: tuple[MachineInfo, ...] = ()
    cost_per_hour: float = 0.0
    spend_limit_per_hour: float | None = None


@frozen(kw_only=True)
class ScaleGroup:
    """Set what a group has at least and at most, over its policy; not for jobs. Reply: `Done`.

    None: as in the policy. Errors: InvalidRequest, Unauthorized.
    """

    group: str
    min: int | None = None
    max: int | None = None
