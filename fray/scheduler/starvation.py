"""Who starves, and which machines are kept from later applicants for their sake (see `placement`)."""

from __future__ import annotations

from fray.model.ids import NodeName
from fray.scheduler.queue import Applicant
from fray.scheduler.tables import Tables

KEPT_FOR = 64
"""So many of the first starving kinds of applicants have machines kept for them at a time; the others move up."""


def starving(state: Tables, applicant: Applicant) -> bool:
    """It has waited for ``starve_s``."""
    return state.now - applicant.since >= state.rules.starve_s


def starving_heads(state: Tables) -> list[Applicant]:
    """The first of each shape, if it starves; in order, at most `KEPT_FOR`."""
    if not state.queue:
        return []
    heads = map(state.queue.head, state.queue.waiting)
    return sorted((head for head in heads if starving(state, head)), key=lambda head: head.entry)[:KEPT_FOR]


def holds_back(state: Tables, applicant: Applicant) -> list[NodeName]:
    """Machines later ones may not use for its sake: those it could use, if they could hold all of it when empty."""
    found: dict[NodeName, None] = {}
    pool = state.pool_for(applicant.shape.reservation)
    for part in applicant.shape.ask.parts:
        usable: dict[NodeName, int] = {}
        for demand in part.choices:
            usable |= pool.usable(demand)
        if sum(usable.values()) < part.members:
            return []
        found |= dict.fromkeys(usable)
    return list(found)


def blocker(state: Tables, applicant: Applicant) -> str | None:
    """The id of the first starving applicant before this one that keeps machines from it."""
    if applicant.shape.child or applicant.shape.ask.weightless:
        return None
    reservation = applicant.shape.reservation
    pool = state.pool_for(reservation)
    mine = {name for demand in applicant.shape.ask.demands for name in pool.usable(demand)}
    for other in state.queue.cached((state.now, pool.changes), lambda: starving_heads(state)):
        if other.shape.reservation != reservation:
            continue
        if other.entry < applicant.entry and any(node in mine for node in holds_back(state, other)):
            return other.id
    return None
