"""What reservations hold beyond their minimum is lent to them: whoever waits for machines may have it back.

The law. Whoever would fit if some of that were free, gets it: of the latest bands and lowest priorities first, idle
units before those in use, and never of an earlier band than its own. Bands that may preempt
(`fray.model.policy.policy.Preemption`) may take all of a preemptible reservation of a later band, as often within the
period
as the place of a job; it waits for its minimum again then. How units are given back is in `giving_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

from attrs import frozen

from fray.model.ids import NodeName
from fray.model.reservations import ReservationId
from fray.scheduler.backfill.starvation import blocker
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.pool.machine import held_empty
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.pool.requests import Placement, PlacementRequest, shares_of
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

FIRST_UNITS = 32
"""So many units are looked at before all of them are."""
APPLICANTS_LIMIT = 16
"""For so many of those that were refused in a step room is looked for."""

NodeFilter: TypeAlias = Callable[[NodeName], bool]
"""Whether the fleet's machine of this name could hold a member, if it were empty."""


@frozen(eq=False)
class SurplusUnit:
    """A unit that its reservation would have to give back."""

    reservation: ReservationRow
    unit: ReservedUnit
    idle: bool
    leaving: bool = False

    def move_share(self, pool: MachinePool, sign: int) -> None:
        """Out of the fleet's pool, or into it again."""
        demand = self.reservation.demand_of(self.unit)
        for host in self.unit.hosts:
            (pool.release if sign > 0 else pool.take)(host.node, demand, host.devices)

    def is_free_in(self, pool: MachinePool) -> bool:
        """Its share is free in the fleet's pool."""
        demand = self.reservation.demand_of(self.unit)
        per_node: dict[NodeName, int] = {}
        for host in self.unit.hosts:
            per_node[host.node] = per_node.get(host.node, 0) + 1
            if per_node[host.node] > 1 or not is_share_free(pool.machines[host.node], demand, host):
                return False
        return True


def reclaim_for_refused(state: State, out: EffectBuffer) -> bool:
    """For those that were just refused; True: something is free now, so that they may be tried again."""
    refused = list(state.queue.refused)
    state.queue.refused.clear()
    if not state.reservations_on or not refused:
        return False
    waiting = [s for s in refused if not (s.reservation or s.is_growth) and s in state.queue.waiting]
    heads = sorted((state.queue.head(shape) for shape in waiting), key=lambda head: head.entry)
    wanting = [head for head in heads if not head.shape.request.is_weightless]
    freed = [_reclaim_for(state, out, applicant) for applicant in wanting[:APPLICANTS_LIMIT]]
    return any(freed)


def _reclaim_for(state: State, out: EffectBuffer, applicant: Applicant) -> bool:
    if blocker(state, applicant) is not None:
        return False  # it would not get what is given back
    wanted = choose_units(state, applicant)
    if wanted is None:
        return applicant.id not in state.claims and revoke_for(state, out, applicant)
    notices_s = [lent.reservation.spec.notice_s for lent in wanted if not lent.idle]
    pause_s = max(REGROW_S, 2 * max(notices_s, default=0.0))
    why = f"{applicant.id} needs it"
    freed = [request_release(state, out, lent.reservation, lent.unit, why, pause_s) for lent in wanted]
    return any(freed)


def revoke_for(state: State, out: EffectBuffer, applicant: Applicant) -> bool:
    """Take whole reservations of later bands for its sake, as the policy's rule of preemption allows; False: none, or
    all of them would not help."""
    rule = state.policy.preemption
    if not rule.enabled or applicant.band not in rule.bands or not _may_ask(applicant):
        return False
    found: list[ReservationRow] = []
    for reservation in _reclaim_order(state, applicant):
        for chosen in ([reservation], [*found, reservation]):
            needed = _without(state, applicant, chosen)
            if needed:
                names = dict.fromkeys(lent.reservation.id for lent in needed)
                _claim(state, applicant, needed, tuple(names))
                why = f"{applicant.id} of band {applicant.band.value} needs it"
                for one in names:
                    revoke_reservation(state, out, state.reservations[one], why)
                return True
        found.append(reservation)
    return False


def _claim(state: State, applicant: Applicant, needed: list[SurplusUnit], names: tuple[ReservationId, ...]) -> None:
    """What they leave is kept for it: else they would hold their minimum there again before the last unit is free."""
    pool, ask, freed = state.pool, applicant.shape.request, dict(state.pool.freed)
    units = [*_leaving(state, _useful(state, applicant)), *needed]
    for lent in units:
        lent.move_share(pool, +1)
    placed = pool.place(ask)
    assert placed is not None, "it was tried a moment ago"
    _undo(pool, ask, placed)
    for lent in units:
        lent.move_share(pool, -1)
    pool.freed.clear()
    pool.freed.update(freed)
    shares = shares_of(ask, placed)
    claimed = [ClaimedShare(node=node, demand=d, members=n) for node, demands in shares.items() for d, n in demands]
    state.put_claim(CapacityClaim(applicant=applicant.id, shares=tuple(claimed), victims=names, made_at=state.now))


def _reclaim_order(state: State, applicant: Applicant) -> list[ReservationRow]:
    """The latest band, the lowest priority and the youngest first; not those it has happened to often enough."""
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
    """Units of these without which it would fit; empty: it would not."""
    useful = _useful(state, applicant)
    units = [SurplusUnit(row, unit, is_idle(state, row, unit)) for row in chosen for unit in row.staying_units]
    freed = dict(state.pool.freed)
    try:
        return _tried(state, applicant, [list(_leaving(state, useful)), units]) or []
    finally:
        state.pool.freed.clear()
        state.pool.freed.update(freed)


def surplus_suffices(state: State, applicant: Applicant) -> bool:
    """What is lent, or on its way back, is enough for it: nobody else has to give anything."""
    return (
        bool(state.with_surplus or state.releasing)
        and _may_ask(applicant)
        and choose_units(state, applicant) is not None
    )


def reclaimable_units(state: Tables, applicant: Applicant) -> list[SurplusUnit]:
    """All that may be asked back for its sake, none beyond what each reservation has to spare."""
    if not state.with_surplus or not _may_ask(applicant):
        return []
    return _allowed(list(_spare(state, _useful(state, applicant), applicant)))


def _may_ask(applicant: Applicant) -> bool:
    shape = applicant.shape
    return not (shape.reservation or shape.is_growth or shape.request.is_weightless)


def choose_units(state: State, applicant: Applicant) -> list[SurplusUnit] | None:
    """Lent units without which it would fit, none too many; empty: it only has to wait for those that are on their way
    back; None: all that is lent does not help."""
    usable = _useful(state, applicant)
    leaving = list(_leaving(state, usable))
    freed = dict(state.pool.freed)
    try:
        for stages in _plans(state, applicant, usable):
            found = _tried(state, applicant, [leaving, *stages])
            if found is not None:
                return found
        return None
    finally:
        state.pool.freed.clear()
        state.pool.freed.update(freed)


def _plans(state: State, applicant: Applicant, usable: NodeFilter) -> Iterator[list[list[SurplusUnit]]]:
    """In which order to free what is lent: idle units that are soon found; then the cheapest of all, wherever they are;
    if that does not help, since no reservation gives more than it has to spare, what there is on each machine."""
    soon = list(islice(_spare(state, usable, applicant), FIRST_UNITS))
    yield [[lent for lent in _allowed(soon) if lent.idle]]
    units = soon if len(soon) < FIRST_UNITS else list(_spare(state, usable, applicant))
    cheapest = _allowed(units)
    yield [[lent for lent in cheapest if lent.idle], [lent for lent in cheapest if not lent.idle]]
    if len(cheapest) == len(units):
        return  # that was all there is
    at: dict[NodeName, list[SurplusUnit]] = {}
    for lent in units:
        for node in lent.unit.nodes:
            at.setdefault(node, []).append(lent)
    machines = sorted((_allowed(found) for found in at.values()), key=lambda found: sum(not one.idle for one in found))
    if applicant.shape.request.members == 1:
        yield from ([found] for found in machines)
    else:
        yield [_allowed(list(dict.fromkeys(lent for found in machines for lent in found)))]


def _allowed(units: list[SurplusUnit]) -> list[SurplusUnit]:
    """As many of each reservation as it has to spare, the first ones."""
    left: dict[ReservationId, int] = {}
    found = []
    for lent in units:
        name = lent.reservation.id
        if name not in left:
            left[name] = lent.reservation.surplus_units
        left[name] -= 1
        if left[name] >= 0:
            found.append(lent)
    return found


def _tried(state: State, applicant: Applicant, stages: list[list[SurplusUnit]]) -> list[SurplusUnit] | None:
    """Free one stage after the other until it fits; then see which of them it really takes. None: it does not fit."""
    pool, ask = state.pool, applicant.shape.request
    out_there: list[SurplusUnit] = []
    placed = None
    for chunk in _chunks(stages):
        for lent in chunk:
            lent.move_share(pool, +1)
        out_there += chunk
        placed = pool.place(ask)
        if placed is not None:
            break
    if placed is None:
        for lent in out_there:
            lent.move_share(pool, -1)
        return None
    missing = _taken_back(pool, out_there)
    _undo(pool, ask, placed)
    needed = []
    for lent in missing:  # what is spared by another way to place it
        lent.move_share(pool, -1)
        placed = pool.place(ask)
        if placed is not None:
            _undo(pool, ask, placed)
        else:
            needed.append(lent)
            lent.move_share(pool, +1)
    for lent in needed:
        lent.move_share(pool, -1)
    return [lent for lent in needed if not lent.leaving]


def _undo(pool: MachinePool, ask: PlacementRequest, placed: Sequence[Placement]) -> None:
    """It was only tried."""
    for part, got in zip(ask.parts, placed, strict=True):
        for grant in got.grants:
            pool.release(grant.node, part.choices[got.choice], grant.devices, grant.ports)


def _chunks(stages: list[list[SurplusUnit]]) -> Iterator[list[SurplusUnit]]:
    """All that is on its way back at once; then the cheapest alone, and twice as many each time."""
    leaving, *others = stages
    if leaving:
        yield leaving
    for stage in others:
        at, size = 0, 1
        while at < len(stage):
            yield stage[at : at + size]
            at, size = at + size, size * 2


def _taken_back(pool: MachinePool, out_there: list[SurplusUnit]) -> list[SurplusUnit]:
    """Into the pool's books again, the dearest first; those for which there is no room now."""
    missing = []
    for lent in reversed(out_there):
        if lent.is_free_in(pool):
            lent.move_share(pool, -1)
        else:
            missing.append(lent)
    return missing


def _useful(state: Tables, applicant: Applicant) -> NodeFilter:
    """Asked for machines on which something is lent, which may be few."""
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
    """Units that are on their way back."""
    for reservation_id in state.releasing:
        reservation = state.reservations[reservation_id]
        for unit in reservation.units:
            if (unit.leaving or reservation.is_closed) and _helps(unit, usable):
                yield SurplusUnit(reservation, unit, False, True)


def _spare(state: Tables, usable: NodeFilter, applicant: Applicant) -> Iterator[SurplusUnit]:
    """Units of those that may be asked for some; lender by lender, the cheapest first, and of each the last it got."""
    lenders = [state.reservations[reservation_id] for reservation_id in state.with_surplus]
    later = [one for one in lenders if one.band.rank >= applicant.band.rank]
    for reservation in sorted(later, key=lambda one: (-one.band.rank, one.spec.priority, -one.order)):
        for unit in reversed(reservation.units):
            if not unit.leaving and _helps(unit, usable):
                yield SurplusUnit(reservation, unit, is_idle(state, reservation, unit))
