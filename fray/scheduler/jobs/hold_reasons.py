"""Which other jobs a HELD one waits for (see `holding`)."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.ids import JobId, attempt_id
from fray.model.job_groups import Restart
from fray.model.specs import SupervisionStrategy
from fray.scheduler.lifecycle import AttemptPhase, JobPhase
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.tables import Tables


def blocking_jobs(state: Tables, job: JobRow) -> Iterator[JobId]:
    """All of them."""
    yield from jobs_holding_name(state, job)
    yield from ending_siblings(state, job)
    yield from ending_group_members(state, job)


def jobs_holding_name(state: Tables, job: JobRow) -> Iterator[JobId]:
    """Earlier jobs that still have its name."""
    if job.spec.exclusive_name:
        for job_id in state.jobs_by_name.get((job.spec.namespace, job.spec.name), ()):
            if state.jobs[job_id].order < job.order:
                yield job_id


def ending_siblings(state: Tables, job: JobRow) -> Iterator[JobId]:
    """Siblings that are being ended to begin anew together with it."""
    if job.spec.siblings is None or job.spec.siblings.strategy is SupervisionStrategy.ONE_FOR_ONE:
        return
    for mate in state.siblings_of(job):
        if mate.phase is JobPhase.CLOSING and mate.stop_cause is None:
            yield mate.job_id


def ending_group_members(state: Tables, job: JobRow) -> Iterator[JobId]:
    """Members of its job group that are being ended to begin anew together with it."""
    if not job.spec.job_group or state.job_groups[job.spec.job_group].config.restart is Restart.MEMBER:
        return
    for job_id in state.group_members[job.spec.job_group].phases.get(JobPhase.CLOSING, ()):
        if state.jobs[job_id].stop_cause is None:
            yield job_id


def is_placed_with_group(state: Tables, job: JobRow) -> bool:
    """It is placed with its job group, and not by itself: none of it has machines, or all begin anew together."""
    if not job.spec.job_group:
        return False
    group, muster = state.job_groups[job.spec.job_group], state.group_members[job.spec.job_group]
    return group.config.restart is Restart.GROUP or not muster.is_placed


def is_waiting_for_stage(state: Tables, job: JobRow) -> bool:
    """A member of a job group that has machines, and has not begun for its stage."""
    first = state.attempts.get(attempt_id(job.job_id, job.generation, 0))
    return first is not None and first.phase is AttemptPhase.RESERVED
