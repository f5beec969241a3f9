"""Jobs whose time is over.

The law. The time of a job counts from the moment its machines are its own, anew with each generation: to make its
environment ready is part of it, since others wait for those machines all the same. When ``time_limit_s`` of it have
passed the job is ended by its ladder and has failed, as ``time_limit``; it is not retried. One that succeeds while it
is being ended has succeeded.
"""

from __future__ import annotations

from fray.model.specs import Cause, Outcome
from fray.scheduler.effect_buffer import Outbox
from fray.scheduler.jobs.transitions import cut, reconsider
from fray.scheduler.state.state import State


def end_overdue(state: State, out: Outbox) -> None:
    """After every step: those whose time is over, in the order in which it was."""
    while state.limits and state.limits[0][0] <= state.now:
        job = state.jobs[state.limits[0][2]]
        text = f"it ran for its time limit of {job.spec.time_limit_s:g} s"
        out.happened(job.job_id, "time limit", text)
        cut(state, out, job, Outcome(cause=Cause.TIME_LIMIT, message=text), Cause.TIME_LIMIT)
        reconsider(state, out, job)
