"""Who gets a machine next: first in, first tried; whole gangs; and nobody starves.

A job that does not fit lets later ones pass. But once it has waited ``starve_s``, later jobs may no longer take
anything of the machines it could use, until it has its place. Jobs that take nothing, and jobs launched by running
ones (which those may be waiting for), are not held back.
"""

from __future__ import annotations

import heapq

from fray.model.ids import NodeName
from fray.scheduler.jobs import start
from fray.scheduler.match import weightless
from fray.scheduler.outbox import Outbox
from fray.scheduler.queue import Shape
from fray.scheduler.rows import Job
from fray.scheduler.starvation import holds_back, starving
from fray.scheduler.state import State


def place_waiting(state: State, out: Outbox) -> None:
    """Place all waiting jobs that can be placed, oldest first; each shape is given up at its first refusal."""
    heads = [(entries[0], index, shape) for index, (shape, entries) in enumerate(state.queue.waiting.items())]
    heapq.heapify(heads)
    held: dict[NodeName, None] = {}
    while heads:
        (_, job_id), index, shape = heapq.heappop(heads)
        job = state.jobs[job_id]
        if _place(state, out, job, shape, held):
            left = state.queue.waiting.get(shape)
            if left:
                heapq.heappush(heads, (left[0], index, shape))
        elif starving(state, job):
            held.update(dict.fromkeys(holds_back(state, job)))


def _place(state: State, out: Outbox, job: Job, shape: Shape, held: dict[NodeName, None]) -> bool:
    if state.queue.failed.get(shape) == state.pool.version:
        return False  # nothing has become free since it last did not fit
    exempt = shape.child or weightless(shape.demand)
    grants = state.pool.place(shape.demand, shape.members, () if exempt else held)
    if grants is None:
        state.queue.failed[shape] = state.pool.version
        return False
    state.queue.remove(job.job_id)
    start(state, out, job, grants)
    return True
