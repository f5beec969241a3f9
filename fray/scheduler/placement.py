"""Who gets a machine next: first in, first tried; whole gangs; and nobody starves.

A job that does not fit lets later ones pass. But once it has waited ``starve_s``, later jobs may no longer take
anything of the machines it could use, until it has its place. Jobs that take nothing, and jobs launched by running
ones (which those may be waiting for), are not held back.
"""

from __future__ import annotations

import heapq

from fray.model.ids import NodeName
from fray.scheduler.jobs import start
from fray.scheduler.match import takes, weightless
from fray.scheduler.outbox import Outbox
from fray.scheduler.queue import Shape
from fray.scheduler.rows import Job
from fray.scheduler.starvation import holds_back, starving, starving_heads
from fray.scheduler.state import State


def place_waiting(state: State, out: Outbox) -> None:
    """Place all waiting jobs that can be placed, oldest first; each shape is given up at its first refusal."""
    version = None
    state.pool.now = state.now
    while state.queue and version != state.pool.version:
        version = state.pool.version
        _pass(state, out)
    state.pool.freed.clear()


def _pass(state: State, out: Outbox) -> None:
    hopeful = [shape for shape in state.queue.waiting if _hopeful(state, shape)]
    if not hopeful:
        return
    starved = {state.shape(job): None for job in starving_heads(state)}
    heads = [(state.queue.waiting[shape][0], shape) for shape in dict.fromkeys([*hopeful, *starved])]
    line = [(entry, index, shape) for index, (entry, shape) in enumerate(heads)]
    heapq.heapify(line)
    held: dict[NodeName, None] = {}
    while line:
        (_, job_id), index, shape = heapq.heappop(line)
        job = state.jobs[job_id]
        if _place(state, out, job, shape, held):
            left = state.queue.waiting.get(shape)
            if left:
                heapq.heappush(line, (left[0], index, shape))
        elif shape in starved and len(held) < state.pool.open_machines and starving(state, job):
            held.update(dict.fromkeys(holds_back(state, job)))


def _hopeful(state: State, shape: Shape) -> bool:
    """Something has changed for this shape since it last did not fit."""
    pool = state.pool
    if state.queue.failed.get(shape) != pool.version:
        return True
    return any(takes(pool.machines[name], shape.demand) for name in pool.freed)


def _place(state: State, out: Outbox, job: Job, shape: Shape, held: dict[NodeName, None]) -> bool:
    exempt = shape.child or weightless(shape.demand)
    grants = state.pool.place(shape.demand, shape.members, () if exempt else held, job.places)
    if grants is None:
        state.queue.failed[shape] = state.pool.version
        return False
    if starving(state, job):
        state.pool.version += 1  # what was held back for it may fit now
    state.queue.remove(job.job_id)
    start(state, out, job, grants)
    return True
