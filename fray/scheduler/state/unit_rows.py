"""Rows of machines requested from providers: units with their life cycle, and what is remembered of machine groups."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import Factory, define, frozen

from fray.model.backoff import backoff_s
from fray.model.policy.machine_groups import ErrorKind, MachineState
from fray.model.resources import Capacity

MARK_CHARS = 6
"""Characters of a cluster's id in the names of its units."""


def cluster_mark(cluster: str) -> str:
    """Return the part of a cluster's id that is in the names of its units."""
    return cluster[:MARK_CHARS].lower()


def make_unit_name(group: str, mark: str, order: int) -> str:
    """Return the name of a unit that is to be created."""
    return "-".join(word for word in (group, mark, str(order)) if word)


def group_of_unit_name(name: str, mark: str) -> str:
    """Return the group for which a cluster with this mark made the name; empty for a name it did not make."""
    group, _, rest = name.rpartition(f"-{mark}-")
    # Exactly the form that `make_unit_name` gives: machines with other names are never deleted by this cluster.
    return group if rest.isascii() and rest.isdecimal() else ""


class UnitPhase(StrEnum):
    """Phase of a unit, as far as the scheduler can see."""

    WANTED = "wanted"
    """Decided and saved under its name; not confirmed by its provider."""
    ASKED = "asked"
    """Confirmed by its provider."""
    SEEN = "seen"
    """Listed by its provider; not all of its nodes have joined."""
    JOINED = "joined"
    """Joined with all of its nodes."""
    DRAINING = "draining"
    """Closed for new attempts; deleted when it is empty."""
    DELETING = "deleting"
    """Deletion requested from its provider, until the provider no longer lists it."""
    GONE = "gone"
    """Remembered for a while, since a list of a provider may be outdated."""


class UnitEvent(StrEnum):
    """Event in the life of a unit."""

    TAKEN = "taken"
    """Order accepted by its provider."""
    LISTED = "listed"
    WHOLE = "whole"
    """All its nodes have joined."""
    CLOSED = "closed"
    """Deletion decided, for when nothing runs on it any more."""
    DOOMED = "doomed"
    """Deletion decided, at once: the unit is empty, dead, or was never created."""
    ENDED = "ended"
    """No longer there, or never created."""
    BACK = "back"
    """Listed although it was gone."""


_P, _T = UnitPhase, UnitEvent
ON_ITS_WAY = (_P.WANTED, _P.ASKED, _P.SEEN)
UNIT_TABLE: Mapping[tuple[UnitPhase, UnitEvent], UnitPhase] = {
    (_P.WANTED, _T.TAKEN): _P.ASKED,
    (_P.WANTED, _T.LISTED): _P.SEEN,
    (_P.ASKED, _T.LISTED): _P.SEEN,
    **{(phase, _T.WHOLE): _P.JOINED for phase in ON_ITS_WAY},
    **{(phase, _T.CLOSED): _P.DRAINING for phase in (*ON_ITS_WAY, _P.JOINED)},
    **{(phase, _T.DOOMED): _P.DELETING for phase in (*ON_ITS_WAY, _P.JOINED, _P.DRAINING)},
    # Not of ASKED: a unit that was accepted and is not listed may exist, so it is deleted under its name.
    **{(phase, _T.ENDED): _P.GONE for phase in _P if phase not in (_P.GONE, _P.ASKED)},
    # A machine that was given up and is listed again costs money: it is deleted, never used.
    (_P.GONE, _T.BACK): _P.DELETING,
}

LIVE = (*ON_ITS_WAY, _P.JOINED)
LEAVING = (_P.DRAINING, _P.DELETING)


@define(kw_only=True)
class CloudUnit:
    """One machine, or one slice with all its hosts."""

    name: str
    group: str
    provider: str
    order: int
    zone: str = ""
    phase: UnitPhase = UnitPhase.WANTED
    since: float = 0.0
    """Time at which it entered its phase."""
    hosts: int = 1
    price_per_hour: float = 0.0
    requested_at: float = 0.0
    broken_at: float | None = None
    """Time since which a node is missing; None while all are here."""
    unlisted_at: float | None = None
    """Time since which its provider no longer lists it."""
    provider_state: MachineState | None = None
    """State in the provider's last list; None before the first."""
    provider_message: str = ""
    """Last message of its provider about it."""
    reason: str = ""
    """Reason of its creation; once it is leaving, reason of that."""
    delete_failures: int = 0
    """Number of failed attempts to delete it."""
    order_not_before: float = 0.0
    """Earliest time of its next order (to create or to delete it)."""
    delete_accepted: bool = False
    """True if its provider has accepted the deletion, while DELETING."""

    @property
    def is_live(self) -> bool:
        return self.phase in LIVE

    @property
    def has_order(self) -> bool:
        """Return whether its provider has to create or delete it."""
        return self.phase is UnitPhase.WANTED or (self.phase is UnitPhase.DELETING and not self.delete_accepted)


@frozen
class Backoff:
    """Pause of requests to a zone after failures."""

    kind: str
    until: float
    streak: int
    """Failures without a success between them."""
    message: str = ""


@define(kw_only=True)
class GroupRow:
    """State of a machine group beside its `GroupConfig`."""

    name: str
    min: int | None = None
    """Minimum set at run time, instead of the policy's."""
    max: int | None = None
    stop_reason: str = ""
    """Reason why nothing is requested at all, until the policy is read again."""
    backoffs: dict[str, Backoff] = Factory(dict)
    """Pauses by zone."""
    observed_capacity: Capacity | None = None
    """Capacity of the last of its nodes that joined."""
    observed_declaration: str = ""
    """Declaration of the group at that time: the observed capacity holds for this declaration only."""


FIRST_S: Mapping[str, float] = {ErrorKind.QUOTA: 60.0, ErrorKind.STOCKOUT: 60.0, ErrorKind.TRANSIENT: 5.0, "boot": 30.0}
MOST_S: Mapping[str, float] = {
    ErrorKind.QUOTA: 3600.0,
    ErrorKind.STOCKOUT: 1800.0,
    ErrorKind.TRANSIENT: 300.0,
    "boot": 1800.0,
}
"""Seconds for which a zone rests after its first failure; doubled after each further one, up to the maximum."""


def next_backoff(before: Backoff | None, kind: str, message: str, now: float) -> Backoff:
    """Return the zone's pause after a failure. Failures during a pause (of earlier orders) do not extend it."""
    # Several orders were in calls when the first failed: their failures are the same event.
    if before is not None and before.until > now:
        return (
            before
            if before.kind == kind
            else Backoff(kind, max(before.until, now + FIRST_S[kind]), before.streak, message)
        )
    streak = before.streak + 1 if before is not None else 1
    return Backoff(kind, now + backoff_s(FIRST_S[kind], MOST_S[kind], streak), streak, message)
