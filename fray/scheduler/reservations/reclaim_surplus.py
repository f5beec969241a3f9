"""Reclaiming of surplus: units that reservations hold beyond their minimum, for applicants that need their machines.

An applicant that would fit if some of the surplus were free gets it: from the latest bands and lowest priorities first,
idle units before those in use, and never from an earlier band than its own. Bands that may preempt
(`fray.model.policy.policy.Preemption`) may seize a whole preemptible reservation of a later band, as often within the
period as they may preempt a job; the reservation then waits for its minimum again. `release_units` releases the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeAlias

from attrs import frozen

from fray.model.ids import NodeName
from fray.model.reservations import ReservationId
from fray.scheduler.backfill.start_plan import is_ending
from fray.scheduler.backfill.starvation import blocker
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.pool.machine import held_empty
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.pool.requests import shares_of
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.reservations.release_units import (
    REGROW_S,
    is_idle,
    is_share_free,
    request_release,
    revoke_reservation,
)
from fray.scheduler.state.reservation_rows import ReservationRow, ReservedUnit
from fray.scheduler.state.rows import CapacityClaim, ClaimedShare
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

FIRST_UNITS = 32
"""Number of units that are considered at first; all of them if that does not suffice."""
APPLICANTS_LIMIT = 16
"""Maximum number of refused shapes in a step for which units are sought."""

NodeFilter: TypeAlias = Callable[[NodeName], bool]
"""Function that returns whether the cluster's machine of this name could hold a member if it were empty."""


@frozen(eq=False)
class SurplusUnit:
    """Unit that its reservation would have to release."""

    reservation: ReservationRow
    unit: ReservedUnit
    idle: bool
    leaving: bool = False

    def move_share(self, trial: HypotheticalPool, sign: int) -> None:
        """Add its share to the cluster's pool, or take it out again."""
        demand = self.reservation.demand_of(self.unit)
        for host in self.unit.hosts:
            (trial.free if sign > 0 else trial.take)(host.node, demand, host.devices)

    def is_free_in(self, pool: MachinePool) -> bool:
        """Return whether its share is free in the cluster's pool."""
        demand = self.reservation.demand_of(self.unit)
        per_node: dict[NodeName, int] = {}
        for host in self.unit.hosts:
            per_node[host.node] = per_node.get(host.node, 0) + 1
            # Two hosts of one unit on the same machine are not examined together: they count as missing.
            if per_node[host.node] > 1 or not is_share_free(pool.machines[host.node], demand, host):
                return False
        return True


def reclaim_for_refused(state: State, out: EffectBuffer) -> bool:
    """Reclaim units for shapes that were just refused; return whether anything is free now."""
    refused = list(state.queue.refused)
    state.queue.refused.clear()
    if not state.reservations_on or not refused:
        return False
    # Growth is optional, and would only move surplus from one reservation to another.
    waiting = [s for s in refused if not (s.reservation or s.is_growth) and s in state.queue.waiting]
    heads = sorted((state.queue.head(shape) for shape in waiting), key=lambda head: head.entry)
    wanting = [head for head in heads if not head.shape.request.is_weightless]
    # Each search places and undoes, so only the first in order are served. The others follow when they are refused
    # again.
    freed = [_reclaim_for(state, out, applicant) for applicant in wanting[:APPLICANTS_LIMIT]]
    return any(freed)


def _reclaim_for(state: State, out: EffectBuffer, applicant: Applicant) -> bool:
    if blocker(state, applicant) is not None:
        return False  # others before it would get what is released
    wanted = choose_units(state, applicant)
    if wanted is None:
        return applicant.id not in state.claims and revoke_for(state, out, applicant)
    notices_s = [surplus.reservation.spec.notice_s for surplus in wanted if not surplus.idle]
    # Twice the notice without growth: a job that comes and goes costs a restart of those inside at most once in that
    # time.
    pause_s = max(REGROW_S, 2 * max(notices_s, default=0.0))
    why = f"{applicant.id} needs it"
    freed = [request_release(state, out, surplus.reservation, surplus.unit, why, pause_s) for surplus in wanted]
    return any(freed)


def revoke_for(state: State, out: EffectBuffer, applicant: Applicant) -> bool:
    """Seize whole reservations of later bands for an applicant, as the preemption rules allow.

    Return whether any was seized; none is if all together would not help.
    """
    rule = state.policy.preemption
    if not rule.enabled or applicant.band not in rule.bands or not _may_reclaim(applicant):
        return False
    found: list[ReservationRow] = []
    for reservation in _reclaim_order(state, applicant):
        # Alone first, then with those before it in order: no more reservations are seized than necessary.
        for chosen in ([reservation], [*found, reservation]):
            needed = _without(state, applicant, chosen)
            if needed:
                names = dict.fromkeys(surplus.reservation.id for surplus in needed)
                _claim(state, applicant, needed, tuple(names))
                why = f"{applicant.id} of band {applicant.band.value} needs it"
                for one in names:
                    revoke_reservation(state, out, state.reservations[one], why)
                return True
        found.append(reservation)
    return False


def _claim(state: State, applicant: Applicant, needed: list[SurplusUnit], names: tuple[ReservationId, ...]) -> None:
    """Claim what they release: they would hold their minimum there again before the last unit is free."""
    request = applicant.shape.request
    with HypotheticalPool(state) as trial:
        _apply_pending(state, trial, applicant)
        for surplus in needed:
            surplus.move_share(trial, +1)
        placed = trial.place(request)
    # The request has just been placed by `_without` on the same units.
    assert placed is not None, "it fitted a moment ago"
    shares = shares_of(request, placed)
    claimed = [ClaimedShare(node=node, demand=d, members=n) for node, demands in shares.items() for d, n in demands]
    state.put_claim(CapacityClaim(applicant=applicant.id, shares=tuple(claimed), victims=names, made_at=state.now))


def _reclaim_order(state: State, applicant: Applicant) -> list[ReservationRow]:
    """Return reservations in order: latest band, lowest priority, youngest; without those seized too often already."""
    rule = state.policy.preemption
    rows = [state.reservations[name] for name in state.reservation_pools]
    found = [
        row
        for row in rows
        if row.staying_units
        and not row.is_closed
        and row.spec.preemptible
        and row.band.rank > applicant.band.rank
        and len([at for at in row.revoked_at if at > state.now - rule.period_s]) < rule.limit
    ]
    return sorted(found, key=lambda row: (-row.band.rank, row.spec.priority, -row.order))


def _without(state: State, applicant: Applicant, chosen: list[ReservationRow]) -> list[SurplusUnit]:
    """Return the units of these without which it would fit; empty if it would not."""
    units = [SurplusUnit(row, unit, is_idle(state, row, unit)) for row in chosen for unit in row.staying_units]
    with HypotheticalPool(state) as trial:
        _apply_pending(state, trial, applicant)
        return _try_stages(trial, applicant, [[], units]) or []


def _apply_pending(state: State, trial: HypotheticalPool, applicant: Applicant) -> None:
    """Free what is being released, and what is ending where others have claims, and take what they have claimed."""
    for surplus in _leaving(state, _useful(state, applicant)):
        surplus.move_share(trial, +1)
    nodes = dict.fromkeys(share.node for claim in state.claims.values() for share in claim.shares)
    there = (state.jobs[state.attempts[each].job_id] for node in nodes for each in state.on_node[node])
    trial.end([job for job in there if is_ending(state, job)])
    trial.take_claims(but=applicant.id)


def surplus_suffices(state: State, applicant: Applicant) -> bool:
    """Return whether the surplus, and what is being released, is enough for the applicant."""
    return (
        bool(state.with_surplus or state.releasing)
        and _may_reclaim(applicant)
        and choose_units(state, applicant) is not None
    )


def reclaimable_units(state: Tables, applicant: Applicant) -> list[SurplusUnit]:
    """Return all units that may be reclaimed for the applicant, no more of each reservation than its surplus."""
    if not state.with_surplus or not _may_reclaim(applicant):
        return []
    return _allowed(list(_spare(state, _useful(state, applicant), applicant)))


def _may_reclaim(applicant: Applicant) -> bool:
    shape = applicant.shape
    return not (shape.reservation or shape.is_growth or shape.request.is_weightless)


def choose_units(state: State, applicant: Applicant) -> list[SurplusUnit] | None:
    """Return surplus units without which the applicant would fit, none too many.

    Empty if it only has to wait for units that are being released; None if all surplus does not help.
    """
    usable = _useful(state, applicant)
    leaving = list(_leaving(state, usable))
    with HypotheticalPool(state) as trial:
        for stages in _plans(state, applicant, usable):
            found = _try_stages(trial, applicant, [leaving, *stages])
            trial.undo_to(0)
            if found is not None:
                return found
    return None


def _plans(state: State, applicant: Applicant, usable: NodeFilter) -> Iterator[list[list[SurplusUnit]]]:
    """Yield orders in which to free surplus: idle units that are found soon; then the cheapest of all; and if that does
    not help, since no reservation releases more than its surplus, the units of each machine."""
    # Nearly always enough: with 600 surplus units this takes 0.5 ms, and 30 ms if all of them are examined.
    soon = list(islice(_spare(state, usable, applicant), FIRST_UNITS))
    yield [[surplus for surplus in _allowed(soon) if surplus.idle]]
    units = soon if len(soon) < FIRST_UNITS else list(_spare(state, usable, applicant))
    cheapest = _allowed(units)
    yield [[surplus for surplus in cheapest if surplus.idle], [surplus for surplus in cheapest if not surplus.idle]]
    if len(cheapest) == len(units):
        return  # these were all units
    at: dict[NodeName, list[SurplusUnit]] = {}
    for surplus in units:
        for node in surplus.unit.nodes:
            at.setdefault(node, []).append(surplus)
    machines = sorted((_allowed(found) for found in at.values()), key=lambda found: sum(not one.idle for one in found))
    # A single member fits on one machine or not at all, so each machine is an alternative of its own.
    if applicant.shape.request.members == 1:
        yield from ([found] for found in machines)
    else:
        yield [_allowed(list(dict.fromkeys(surplus for found in machines for surplus in found)))]


def _allowed(units: list[SurplusUnit]) -> list[SurplusUnit]:
    """Return as many units of each reservation as it has surplus, the first ones."""
    left: dict[ReservationId, int] = {}
    found = []
    for surplus in units:
        name = surplus.reservation.id
        if name not in left:
            left[name] = surplus.reservation.surplus_units
        left[name] -= 1
        if left[name] >= 0:
            found.append(surplus)
    return found


def _try_stages(
    trial: HypotheticalPool, applicant: Applicant, stages: list[list[SurplusUnit]]
) -> list[SurplusUnit] | None:
    """Free one stage after the other until it fits, and return the units it really takes; None if it does not fit."""
    request = applicant.shape.request
    out_there: list[SurplusUnit] = []
    for chunk in _chunks(stages):
        for surplus in chunk:
            surplus.move_share(trial, +1)
        out_there += chunk
        mark = trial.mark
        if trial.place(request) is not None:
            break
    else:
        return None
    missing = _taken_back(trial, out_there)
    trial.undo_to(mark)
    for surplus in out_there:
        if surplus not in missing:
            surplus.move_share(trial, -1)
    needed = []
    # The placement found is only one of several: a unit without which the request fits as well is spared.
    for surplus in missing:
        mark = trial.mark
        surplus.move_share(trial, -1)
        if not trial.fits(request):
            trial.undo_to(mark)
            needed.append(surplus)
    return [surplus for surplus in needed if not surplus.leaving]


def _chunks(stages: list[list[SurplusUnit]]) -> Iterator[list[SurplusUnit]]:
    """Yield all units that are being released; then the cheapest alone, and twice as many each time."""
    leaving, *others = stages
    if leaving:
        yield leaving
    for stage in others:
        at, size = 0, 1
        while at < len(stage):
            yield stage[at : at + size]
            # Doubled, so that the number of placements grows with the logarithm of the number of units.
            at, size = at + size, size * 2


def _taken_back(trial: HypotheticalPool, out_there: list[SurplusUnit]) -> dict[SurplusUnit, None]:
    """Take units back into the pool, the dearest first; return those for which there is no room now."""
    missing: dict[SurplusUnit, None] = {}
    for surplus in reversed(out_there):
        if surplus.is_free_in(trial.pool):
            surplus.move_share(trial, -1)
        else:
            missing[surplus] = None
    return missing


def _useful(state: Tables, applicant: Applicant) -> NodeFilter:
    """Return a filter of machines, for those on which there is surplus, which may be few."""
    demands, machines, known = applicant.shape.request.demands, state.pool.machines, dict[NodeName, bool]()

    def is_usable(name: NodeName) -> bool:
        if name not in known:
            machine = machines.get(name)
            there = machine is not None and machine.is_open
            known[name] = there and any(held_empty(demand, machines[name]) for demand in demands)
        return known[name]

    return is_usable


def _helps(unit: ReservedUnit, usable: NodeFilter) -> bool:
    return any(usable(host.node) for host in unit.hosts)


def _leaving(state: State, usable: NodeFilter) -> Iterator[SurplusUnit]:
    """Yield units that are being released."""
    for reservation_id in state.releasing:
        reservation = state.reservations[reservation_id]
        for unit in reservation.leaving_units:
            if _helps(unit, usable):
                yield SurplusUnit(reservation, unit, False, True)


def _spare(state: Tables, usable: NodeFilter, applicant: Applicant) -> Iterator[SurplusUnit]:
    """Yield surplus units by reservation, the cheapest reservation first, and of each the latest unit first."""
    lenders = [state.reservations[reservation_id] for reservation_id in state.with_surplus]
    later = [one for one in lenders if one.band.rank >= applicant.band.rank]
    for reservation in sorted(later, key=lambda one: (-one.band.rank, one.spec.priority, -one.order)):
        for unit in reversed(reservation.units):
            if not unit.leaving and _helps(unit, usable):
                yield SurplusUnit(reservation, unit, is_idle(state, reservation, unit))
