"""Who gets a machine next: first in, first tried; whole gangs; and nobody starves.

A job that does not fit lets later ones pass. But once it has waited ``starve_s``, later jobs may no longer take
anything of the machines it could use, until it has its place. Jobs that take nothing, and jobs launched by running
ones (which those may be waiting for), are not held back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from fray.model.ids import NodeName
from fray.scheduler import job_groups, reservations
from fray.scheduler.asks import Placed
from fray.scheduler.jobs import start
from fray.scheduler.match import Pool, takes
from fray.scheduler.outbox import Outbox
from fray.scheduler.queue import Applicant, Kind, Shape
from fray.scheduler.starvation import holds_back, starving, starving_heads
from fray.scheduler.state import State


def _start_job(state: State, out: Outbox, applicant: Applicant, placed: Sequence[Placed]) -> None:
    start(state, out, state.jobs[applicant.id], placed[0])


def _start_group(state: State, out: Outbox, applicant: Applicant, placed: Sequence[Placed]) -> None:
    job_groups.start_all(state, out, state.job_groups[applicant.id], placed)


Starter: TypeAlias = Callable[[State, Outbox, Applicant, Sequence[Placed]], None]
STARTERS: Mapping[Kind, Starter] = {
    Kind.JOB: _start_job,
    Kind.GROUP: _start_group,
    Kind.RESERVATION: reservations.granted,
    Kind.GROWTH: reservations.granted,
}
"""Who makes something of the places an applicant was given; it is out of the queue already."""


def place_waiting(state: State, out: Outbox) -> None:
    """Place all that waits and can be placed, in order; each shape is given up at its first refusal."""
    version = None
    state.pool.now = state.now
    while state.queue and version != state.pool.version:
        version = state.pool.version
        _pass(state, out)
    state.pool.freed.clear()
    for reservation_id in state.stirred:
        state.reserved[reservation_id].freed.clear()
    state.stirred.clear()


def _pass(state: State, out: Outbox) -> None:
    hopeful = [shape for shape in state.queue.waiting if _hopeful(state, shape)]
    if not hopeful:
        return
    starved = {applicant.shape: None for applicant in starving_heads(state)}
    heads = [(state.queue.waiting[shape][0], shape) for shape in dict.fromkeys([*hopeful, *starved])]
    line = [(entry, index, shape) for index, (entry, shape) in enumerate(heads)]
    heapq.heapify(line)
    held: dict[str, dict[NodeName, None]] = {}
    while line:
        entry, index, shape = heapq.heappop(line)
        applicant = state.queue.applicants[entry[2]]
        mine, pool = held.setdefault(shape.reservation, {}), state.pool_for(shape.reservation)
        if _place(state, out, applicant, mine):
            left = state.queue.waiting.get(shape)
            if left:
                heapq.heappush(line, (left[0], index, shape))
        elif shape in starved and len(mine) < pool.open_machines and starving(state, applicant):
            mine.update(dict.fromkeys(holds_back(state, applicant)))


def _hopeful(state: State, shape: Shape) -> bool:
    """Something has changed for this shape since it last did not fit."""
    pool = state.pool_for(shape.reservation)
    if state.queue.failed.get(shape) != pool.version:
        return True
    lent = state.lending and not shape.reservation
    return any(_takes_any(pool, name, shape) or (lent and name in state.units_on) for name in pool.freed)


def _takes_any(pool: Pool, name: NodeName, shape: Shape) -> bool:
    return any(takes(pool.machines[name], demand) for demand in shape.ask.demands)


def _place(state: State, out: Outbox, applicant: Applicant, held: dict[NodeName, None]) -> bool:
    shape, pool = applicant.shape, state.pool_for(applicant.shape.reservation)
    exempt = shape.child or shape.ask.weightless
    placed = pool.place(shape.ask, () if exempt else held, state.places_of(applicant))
    if placed is None:
        state.queue.failed[shape] = pool.version
        state.queue.refused[shape] = None
        return False
    if starving(state, applicant):
        pool.version += 1  # what was held back for it may fit now
        state.pool.version += pool is not state.pool
    state.queue.remove(applicant.id)
    STARTERS[applicant.kind](state, out, applicant, placed)
    return True
