"""Jobs that may not be placed yet, whatever the machines have free.

The law. A job waits for the time of its back-off; for every earlier job that still has its name (those were being ended
when it was accepted, or it would have been refused); and for siblings that are being ended to begin anew with it. As
long as none of a job group is placed its members then wait for each other; the last one puts the group into the queue.
"""

from __future__ import annotations

from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.hold_reasons import blocking_jobs, is_placed_with_group
from fray.scheduler.jobs.transitions import change_phase
from fray.scheduler.lifecycle import JobEvent
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State


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
