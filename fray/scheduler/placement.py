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
from fray.scheduler import job_groups, preemption, reservations
from fray.scheduler.asks import Placed
from fray.scheduler.backfill import Keeps
from fray.scheduler.jobs import start
from fray.scheduler.match import Pool, takes
from fray.scheduler.outbox import Outbox
from fray.scheduler.queue import Applicant, Kind, Shape
from fray.scheduler.starvation import starving, starving_heads
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
    preemption.settle(state)
    state.pool.now = state.now
    while state.queue and version != state.pool.version:
        version = state.pool.version
        _pass(state, out)
    state.pool.freed.clear()
    for reservation_id in state.stirred:
        state.reserved[reservation_id].freed.clear()
    state.stirred.clear()


def _pass(state: State, out: Outbox) -> None:
    hopeful = {shape: None for shape in state.queue.waiting if _hopeful(state, shape)}
    if not hopeful:
        return
    keeps = Keeps(state)
    starved = {applicant.shape: None for applicant in starving_heads(state)}
    shapes = dict.fromkeys([*hopeful, *starved, *keeps.waiting_shapes()])
    heads = [(state.queue.waiting[shape][0], shape) for shape in shapes]
    line = [(entry, index, shape) for index, (entry, shape) in enumerate(heads)]
    heapq.heapify(line)
    while line:
        entry, index, shape = heapq.heappop(line)
        applicant = state.queue.applicants[entry[2]]
        if shape in hopeful and _place(state, out, applicant, keeps):
            left = state.queue.waiting.get(shape)
            if left:
                heapq.heappush(line, (left[0], index, shape))
        else:
            plan = keeps.refused(applicant)
            if preemption.seek(state, out, applicant, keeps, plan):
                keeps.claimed(applicant)
    keeps.end()


def _hopeful(state: State, shape: Shape) -> bool:
    """Something has changed for this shape since it last did not fit."""
    pool = state.pool_for(shape.reservation)
    if state.queue.failed.get(shape) != pool.version:
        return True
    lent = state.lending and not shape.reservation
    return any(_takes_any(pool, name, shape) or (lent and name in state.units_on) for name in pool.freed)


def _takes_any(pool: Pool, name: NodeName, shape: Shape) -> bool:
    return any(takes(pool.machines[name], demand) for demand in shape.ask.demands)


def _place(state: State, out: Outbox, applicant: Applicant, keeps: Keeps) -> bool:
    shape, pool = applicant.shape, state.pool_for(applicant.shape.reservation)
    placed = keeps.place(applicant, state.places_of(applicant))
    if placed is None:
        state.queue.failed[shape] = pool.version
        state.queue.refused[shape] = None
        return False
    if starving(state, applicant):
        pool.version += 1  # what was held back for it may fit now
        state.pool.version += pool is not state.pool
    keeps.placed(applicant)
    if applicant.id in state.claims:
        state.drop_claim(applicant.id)
    state.queue.remove(applicant.id)
    STARTERS[applicant.kind](state, out, applicant, placed)
    return True
