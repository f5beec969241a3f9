"""Who starves, and which machines are kept from later jobs for their sake (see `placement`)."""

from __future__ import annotations

from fray.model.ids import JobId, NodeName
from fray.scheduler.match import weightless
from fray.scheduler.rows import Job
from fray.scheduler.tables import Tables


def starving(state: Tables, job: Job) -> bool:
    """It has waited for ``starve_s``."""
    return state.now - job.queued_at >= state.rules.starve_s


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
    heads = sorted(entries[0] for entries in state.queue.waiting.values())
    for order, job_id in heads:
        other = state.jobs[job_id]
        if order < job.order and starving(state, other) and any(node in mine for node in holds_back(state, other)):
            return job_id
    return None
