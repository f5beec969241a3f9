"""Holds: jobs that may not be placed yet, however much capacity is free.

Invariants: A job waits until its back-off expires; for every earlier job that still has its name (those were being
ended when it was accepted, or it would have been refused); and for siblings that are being ended to restart with it. As
long as no member of a job group is placed, its members then wait for each other; the last one puts the group into the
queue.
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
    """Enqueue, after every step, the held jobs that wait for nothing else any more, in the order of acceptance."""
    while state.backoffs and state.backoffs[0][0] <= state.now:
        job = state.jobs[state.backoffs[0][2]]
        state.unindex_hold(job)
        # Its back-off has ended; below it may turn out to wait for others.
        job.held_until = None
        state.index_hold(job)
    if not state.held_jobs:
        return
    # Groups are queued after the loop: members that are released in one step must not be placed without each other.
    gathering: dict[str, None] = {}
    # What each waits for is derived from the rows each time, so no end of a wait can be missed or undone twice.
    for job in sorted((state.jobs[job_id] for job_id in state.held_jobs), key=lambda job: job.order):
        if next(blocking_jobs(state, job), None) is None:
            state.unindex_hold(job)
            if is_placed_with_group(state, job):
                state.gather(job)
                gathering[job.spec.job_group] = None
            else:
                _enqueue(state, out, job)
    for group_id in gathering:
        _enqueue_group(state, group_id)


def _enqueue(state: State, out: EffectBuffer, job: JobRow) -> None:
    change_phase(state, out, job, JobEvent.RELEASED)
    # The time in HELD does not count as waiting for machines: it would make a retried job starve at once.
    job.queued_at = state.now
    state.enqueue(job)


def _enqueue_group(state: State, group_id: str) -> None:
    """Enqueue the group if that was its last missing member: only then it begins to wait for machines."""
    if state.group_members[group_id].is_complete:
        state.job_groups[group_id].queued_at = state.now
        state.touch("job_group", group_id)
        state.enqueue_group_if_complete(group_id)


# What a job waits for -------------------------------------------------------------------------------------------------


def blocking_jobs(state: Tables, job: JobRow) -> Iterator[JobId]:
    """Yield all jobs for whose end a held job waits."""
    yield from jobs_holding_name(state, job)
    yield from ending_siblings(state, job)
    yield from ending_group_members(state, job)


def jobs_holding_name(state: Tables, job: JobRow) -> Iterator[JobId]:
    """Yield earlier jobs that still have the job's name."""
    for job_id in state.jobs_by_name.get((job.spec.namespace, job.spec.name), ()):
        # By acceptance: of two waiting jobs of one name the earlier goes first, and a retried one keeps its place.
        if state.jobs[job_id].order < job.order:
            yield job_id


def ending_siblings(state: Tables, job: JobRow) -> Iterator[JobId]:
    """Yield siblings that are being ended to restart together with the job."""
    if job.spec.siblings is None or job.spec.siblings.strategy is SupervisionStrategy.ONE_FOR_ONE:
        return
    for mate in state.siblings_of(job):
        # One that is being stopped for good does not restart with the job, so there is nothing to wait for.
        if mate.phase is JobPhase.CLOSING and mate.stop_cause is None:
            yield mate.job_id


def ending_group_members(state: Tables, job: JobRow) -> Iterator[JobId]:
    """Yield members of its job group that are being ended to restart together with the job."""
    if not job.spec.job_group or state.job_groups[job.spec.job_group].config.restart is Restart.MEMBER:
        return
    for job_id in state.group_members[job.spec.job_group].phases.get(JobPhase.CLOSING, ()):
        if state.jobs[job_id].stop_cause is None:
            yield job_id


def is_placed_with_group(state: Tables, job: JobRow) -> bool:
    """Return whether the job is placed with its job group and not by itself: no member has machines, or all restart
    together."""
    if not job.spec.job_group:
        return False
    group, members = state.job_groups[job.spec.job_group], state.group_members[job.spec.job_group]
    return group.config.restart is Restart.GROUP or not members.is_placed


def is_waiting_for_stage(state: Tables, job: JobRow) -> bool:
    """Return whether a member of a job group has machines but waits for its stage."""
    first = state.attempts.get(attempt_id(job.job_id, job.generation, 0))
    return first is not None and first.phase is AttemptPhase.RESERVED
