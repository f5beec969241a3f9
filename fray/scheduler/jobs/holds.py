"""Jobs that may not be placed yet, whatever the machines have free.

The law. A job waits for the time of its back-off; for every earlier job that still has its name (those were being ended
when it was accepted, or it would have been refused); and for siblings that are being ended to begin anew with it. As
long as none of a job group is placed its members then wait for each other; the last one puts the group into the queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.ids import JobId, attempt_id
from fray.model.job_groups import Restart
from fray.model.specs import SupervisionStrategy
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.transitions import change_phase
from fray.scheduler.lifecycle import AttemptPhase, JobEvent, JobPhase
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import Tables


def release_held_jobs(state: State, out: EffectBuffer) -> None:
    """After every step: into the queue with those that wait for nothing any more, in the order of acceptance."""
    while state.backoffs and state.backoffs[0][0] <= state.now:
        job = state.jobs[state.backoffs[0][2]]
        state.unindex_hold(job)
        job.held_until = None
        state.index_hold(job)
    if not state.held_jobs:
        return
    gathering: dict[str, None] = {}
    for job in sorted((state.jobs[job_id] for job_id in state.held_jobs), key=lambda job: job.order):
        if next(blocking_jobs(state, job), None) is None:
            state.unindex_hold(job)
            if is_placed_with_group(state, job):
                state.gather(job)
                gathering[job.spec.job_group] = None
            else:
                _let_go(state, out, job)
    for group_id in gathering:
        _gathered(state, group_id)


def _let_go(state: State, out: EffectBuffer, job: JobRow) -> None:
    change_phase(state, out, job, JobEvent.RELEASED)
    job.queued_at = state.now
    state.enqueue(job)


def _gathered(state: State, group_id: str) -> None:
    """The last of them may have been missing: only then the group begins to wait for machines."""
    if state.group_members[group_id].is_complete:
        state.job_groups[group_id].queued_at = state.now
        state.touch("job_group", group_id)
        state.enqueue_group_if_complete(group_id)


# What a job waits for -------------------------------------------------------------------------------------------------


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
