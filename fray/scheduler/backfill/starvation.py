"""Starvation: applicants that have waited too long, and the machines held for them (see `placement`)."""

from __future__ import annotations

from collections.abc import Mapping

from fray.model.ids import NodeName
from fray.scheduler.queue.applicant import Applicant, PlacementShape
from fray.scheduler.queue.order import order_key
from fray.scheduler.state.tables import Tables

MAX_HELD_FOR = 64
"""Maximum number of starving shapes for which machines are held at a time; the others follow."""


def is_starving(state: Tables, applicant: Applicant) -> bool:
    """Return whether the applicant has waited for ``starve_s``."""
    return state.now - applicant.waiting_since >= state.config.starve_s


def starving_heads(state: Tables) -> list[Applicant]:
    """Return the first starving applicant of each shape, in order, at most `MAX_HELD_FOR`. Examines all that waits."""
    queue = state.queue
    found: dict[PlacementShape, Applicant] = {}
    for want in queue.waiting.values():
        starved = [a for a in map(queue.first, want.lanes.values()) if is_starving(state, a)]
        if starved:
            found[want.shape] = min(starved, key=lambda applicant: order_key(queue, applicant))
    return sorted(found.values(), key=lambda applicant: order_key(queue, applicant))[:MAX_HELD_FOR]


def nodes_to_hold(state: Tables, applicant: Applicant) -> dict[NodeName, None]:
    """Return the machines the applicant could use; none if they could not hold all of it even if they were empty."""
    found: dict[NodeName, None] = {}
    pool = state.pool_for(applicant.shape.reservation)
    for part in applicant.shape.request.parts:
        if not pool.could_hold(part):  # any number of hosts that make no slice is not enough
            return {}
        for demand in part.choices:
            # All of them, and not as many as it needs: no end is known, and it could wait for a job on a chosen one
            # that never ends.
            found |= dict.fromkeys(pool.usable(demand))
    return found


def blocker(state: Tables, applicant: Applicant) -> str | None:
    """Return the first starving applicant for which the last pass held machines that this one could use."""
    queue, reservation = state.queue, applicant.shape.reservation
    # Exempt shapes are never held back for starving applicants.
    if not queue.held_machines or queue.waiting[applicant.shape].is_exempt:
        return None
    own_key, pool = order_key(queue, applicant), state.pool_for(reservation)
    usable: list[Mapping[NodeName, int]] = []  # computed late: it examines all machines
    for other_id, held in queue.held_machines.items():
        other = queue.applicants.get(other_id)
        if other is None or other.shape.reservation != reservation or not is_starving(state, other):
            continue
        if not order_key(queue, other) < own_key:
            continue
        usable = usable or [pool.usable(demand) for demand in applicant.shape.request.demands]
        if any(name in machines for name in held.nodes for machines in usable):
            return other_id
    return None
