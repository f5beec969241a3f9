"""Who starves, and which machines are kept from later jobs for their sake (see `placement`)."""

from __future__ import annotations

from fray.model.ids import JobId, NodeName
from fray.scheduler.match import weightless
from fray.scheduler.rows import Job
from fray.scheduler.tables import Tables

KEPT_FOR = 64
"""So many of the oldest starving kinds of jobs have machines kept for them at a time; the others move up."""


def starving(state: Tables, job: Job) -> bool:
    """It has waited for ``starve_s``."""
    return state.now - job.queued_at >= state.rules.starve_s


def starving_heads(state: Tables) -> list[Job]:
    """The oldest job of each shape, if it starves; oldest first, at most `KEPT_FOR`."""
    if not state.queue:
        return []
    heads = (state.jobs[entries[0][1]] for entries in state.queue.waiting.values())
    return sorted((job for job in heads if starving(state, job)), key=lambda job: job.order)[:KEPT_FOR]


def holds_back(state: Tables, job: Job) -> list[NodeName]:
    """Machines later jobs may not use for its sake: those it could use, if they could hold all of it when empty."""
    usable = state.pool.usable(job.spec.demand)
    return list(usable) if sum(usable.values()) >= job.spec.members else []


def blocker(state: Tables, job: Job) -> JobId | None:
    """The oldest starving job before this one that keeps machines from it."""
    shape = state.shape(job)
    if shape.child or weightless(shape.demand):
        return None
    mine = state.pool.usable(shape.demand)
    for other in state.queue.cached((state.now, state.pool.changes), lambda: starving_heads(state)):
        if other.order < job.order and any(node in mine for node in holds_back(state, other)):
            return other.job_id
    return None
