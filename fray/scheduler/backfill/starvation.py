"""Who starves, and which machines are kept from later applicants for their sake (see `placement`)."""

from __future__ import annotations

from collections.abc import Mapping

from fray.model.ids import NodeName
from fray.scheduler.queue.applicant import Applicant, PlacementShape
from fray.scheduler.queue.order import order_key
from fray.scheduler.state.tables import Tables

MAX_HELD_FOR = 64
"""So many of the first starving kinds of applicants have machines kept for them at a time; the others move up."""


def is_starving(state: Tables, applicant: Applicant) -> bool:
    """It has waited for ``starve_s``."""
    return state.now - applicant.waiting_since >= state.config.starve_s


def starving_heads(state: Tables) -> list[Applicant]:
    """The first of each shape, if it starves; by turn, at most `KEPT_FOR`. Looks at all that waits."""
    queue = state.queue
    found: dict[PlacementShape, Applicant] = {}
    for want in queue.waiting.values():
        starved = [a for a in map(queue.first, want.lanes.values()) if is_starving(state, a)]
        if starved:
            found[want.shape] = min(starved, key=lambda applicant: order_key(queue, applicant))
    return sorted(found.values(), key=lambda applicant: order_key(queue, applicant))[:MAX_HELD_FOR]


def nodes_to_hold(state: Tables, applicant: Applicant) -> list[NodeName]:
    """Machines later ones may not use for its sake: those it could use, if they could hold all of it when empty."""
    found: dict[NodeName, None] = {}
    pool = state.pool_for(applicant.shape.reservation)
    for part in applicant.shape.request.parts:
        if not pool.could_hold(part):  # hosts that make no slice are not enough, however many
            return []
        for demand in part.choices:
            found |= dict.fromkeys(pool.usable(demand))
    return list(found)


def blocker(state: Tables, applicant: Applicant) -> str | None:
    """The id of the first starving applicant before this one that keeps machines from it, as the last pass had it."""
    queue, reservation = state.queue, applicant.shape.reservation
    if not queue.held_machines or queue.waiting[applicant.shape].is_exempt:
        return None
    mine, pool = order_key(queue, applicant), state.pool_for(reservation)
    usable: list[Mapping[NodeName, int]] = []  # which takes a look at all machines
    for other_id, kept in queue.held_machines.items():
        other = queue.applicants.get(other_id)
        if other is None or other.shape.reservation != reservation or not is_starving(state, other):
            continue
        if not order_key(queue, other) < mine:
            continue
        usable = usable or [pool.usable(demand) for demand in applicant.shape.request.demands]
        if any(name in machines for name in kept.nodes for machines in usable):
            return other_id
    return None
