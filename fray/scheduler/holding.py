"""Jobs that may not be placed yet, whatever the machines have free.

The law. A job waits for the time of its back-off; for every earlier job that still has its name (those were being ended
when it was accepted, or it would have been refused); and for siblings that are being ended to begin anew with it.
"""

from __future__ import annotations

from fray.scheduler.jobs import turn
from fray.scheduler.lifecycle import JobTurn
from fray.scheduler.outbox import Outbox
from fray.scheduler.state import State
from fray.scheduler.waits import waits_for


def release(state: State, out: Outbox) -> None:
    """After every step: into the queue with those that wait for nothing any more, in the order of acceptance."""
    while state.alarms and state.alarms[0][0] <= state.now:
        job = state.jobs[state.alarms[0][2]]
        state.unhold(job)
        job.held_until = None
        state.hold(job)
    if not state.held:
        return
    for job in sorted((state.jobs[job_id] for job_id in state.held), key=lambda job: job.order):
        if next(waits_for(state, job), None) is None:
            state.unhold(job)
            turn(state, out, job, JobTurn.RELEASED)
            job.queued_at = state.now
            state.enqueue(job)
            state.pool_for(
                job.spec.reservation_id
            ).version += 1  # now the first of its shape, it may starve less than the one that was
