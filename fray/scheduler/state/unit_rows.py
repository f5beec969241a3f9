"""Machines that are asked of providers, as rows: units, what may become of them, and what groups of them remember."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import Factory, define, frozen

from fray.model.backoff import backoff_s
from fray.model.policy.machine_groups import ErrorKind, MachineState
from fray.model.resources import Capacity

MARK_CHARS = 6
"""Of a cluster's id, in the names of its units."""


def cluster_mark(cluster: str) -> str:
    """What the names of a cluster's units have of its id."""
    return cluster[:MARK_CHARS].lower()


def make_unit_name(group: str, mark: str, order: int) -> str:
    """The name of a unit that is yet to be made."""
    return "-".join(word for word in (group, mark, str(order)) if word)


def group_of_unit_name(name: str, mark: str) -> str:
    """Of whose group a cluster with this mark has made this name up; empty: it has not."""
    group, _, rest = name.rpartition(f"-{mark}-")
    return group if rest.isascii() and rest.isdecimal() else ""


class UnitPhase(StrEnum):
    """Where a unit is, as far as the law knows."""

    WANTED = "wanted"
    """Decided and saved, under its name; its provider has not said yes."""
    ASKED = "asked"
    """Its provider has said yes."""
    SEEN = "seen"
    """Its provider lists it; not all of its nodes are here."""
    JOINED = "joined"
    """All of its nodes have been here."""
    DRAINING = "draining"
    """Nothing new is placed on it; it is given back when it is empty."""
    DELETING = "deleting"
    """Its provider is told to end it, until it lists it no more."""
    GONE = "gone"
    """Remembered for a while: a list may be older than it seems."""


class UnitEvent(StrEnum):
    """What can happen to a unit."""

    TAKEN = "taken"
    """The order, by its provider."""
    LISTED = "listed"
    WHOLE = "whole"
    """All its nodes are here."""
    CLOSED = "closed"
    """It shall go as soon as nothing runs on it."""
    DOOMED = "doomed"
    """It shall go now: it is empty, dead, or was never there."""
    ENDED = "ended"
    """It is not there any more, or never was."""
    BACK = "back"
    """It is listed although it was gone."""


_P, _T = UnitPhase, UnitEvent
ON_ITS_WAY = (_P.WANTED, _P.ASKED, _P.SEEN)
UNIT_TABLE: Mapping[tuple[UnitPhase, UnitEvent], UnitPhase] = {
    (_P.WANTED, _T.TAKEN): _P.ASKED,
    (_P.WANTED, _T.LISTED): _P.SEEN,
    (_P.ASKED, _T.LISTED): _P.SEEN,
    **{(phase, _T.WHOLE): _P.JOINED for phase in ON_ITS_WAY},
    **{(phase, _T.CLOSED): _P.DRAINING for phase in (*ON_ITS_WAY, _P.JOINED)},
    **{(phase, _T.DOOMED): _P.DELETING for phase in (*ON_ITS_WAY, _P.JOINED, _P.DRAINING)},
    **{(phase, _T.ENDED): _P.GONE for phase in _P if phase is not _P.GONE},
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
    """When it came into its phase."""
    hosts: int = 1
    price_per_hour: float = 0.0
    requested_at: float = 0.0
    broken_at: float | None = None
    """Since when not all of its nodes are here; None: they are."""
    unlisted_at: float | None = None
    """Since when it is not listed although it was."""
    provider_state: MachineState | None = None
    """As it was listed last; None: it never was."""
    provider_message: str = ""
    """What its provider said of it last."""
    reason: str = ""
    """What it was made for; once it is leaving, why that."""
    delete_failures: int = 0
    """To delete it that have failed."""
    order_not_before: float = 0.0
    """Its order (to make or delete it) is not given before."""
    delete_accepted: bool = False
    """While DELETING: its provider has said yes."""

    @property
    def is_live(self) -> bool:
        return self.phase in LIVE

    @property
    def has_order(self) -> bool:
        """There is something for its provider to do."""
        return self.phase is UnitPhase.WANTED or (self.phase is UnitPhase.DELETING and not self.delete_accepted)


@frozen
class Backoff:
    """Why nothing is asked of a zone for a while."""

    kind: str
    until: float
    streak: int
    """Failures without a success between them."""
    message: str = ""


@define(kw_only=True)
class GroupRow:
    """What is remembered of a group beside its `GroupConfig`."""

    name: str
    min: int | None = None
    """Set at run time, over the policy's."""
    max: int | None = None
    stop_reason: str = ""
    """Why nothing is asked for at all, until the policy is read again."""
    backoffs: dict[str, Backoff] = Factory(dict)
    """By zone."""
    observed_capacity: Capacity | None = None
    """What the last of its nodes offered."""
    observed_declaration: str = ""
    """What was declared of it then: of another shape nothing has been learnt."""


FIRST_S: Mapping[str, float] = {ErrorKind.QUOTA: 60.0, ErrorKind.STOCKOUT: 60.0, ErrorKind.TRANSIENT: 5.0, "boot": 30.0}
MOST_S: Mapping[str, float] = {
    ErrorKind.QUOTA: 3600.0,
    ErrorKind.STOCKOUT: 1800.0,
    ErrorKind.TRANSIENT: 300.0,
    "boot": 1800.0,
}
"""A zone rests so long after its first failure, twice as long after each one more in a row, and never longer."""


def next_backoff(before: Backoff | None, kind: str, message: str, now: float) -> Backoff:
    """The zone's rest after a failure of this kind. Failures while it rests (of orders given before) do not add up."""
    if before is not None and before.until > now:
        return (
            before
            if before.kind == kind
            else Backoff(kind, max(before.until, now + FIRST_S[kind]), before.streak, message)
        )
    streak = before.streak + 1 if before is not None else 1
    return Backoff(kind, now + backoff_s(FIRST_S[kind], MOST_S[kind], streak), streak, message)
