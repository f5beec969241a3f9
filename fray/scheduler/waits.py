"""Which other jobs a HELD one waits for (see `holding`)."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.ids import JobId
from fray.model.specs import Strategy
from fray.scheduler.rows import Job, JobPhase
from fray.scheduler.tables import Tables


def waits_for(state: Tables, job: Job) -> Iterator[JobId]:
    """All of them."""
    yield from holders(state, job)
    yield from ending_siblings(state, job)


def holders(state: Tables, job: Job) -> Iterator[JobId]:
    """Earlier jobs that still have its name."""
    if job.spec.exclusive_name:
        for job_id in state.named.get((job.spec.namespace, job.spec.name), ()):
            if state.jobs[job_id].order < job.order:
                yield job_id


def ending_siblings(state: Tables, job: Job) -> Iterator[JobId]:
    """Siblings that are being ended to begin anew together with it."""
    if job.spec.siblings is None or job.spec.siblings.strategy is Strategy.ONE_FOR_ONE:
        return
    for mate in state.group_of(job):
        if mate.phase is JobPhase.CLOSING and mate.stop_cause is None:
            yield mate.job_id
