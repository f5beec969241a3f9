"""Jobs whose time is over.

The law. The time of a job counts from the moment its machines are its own, anew with each generation: to make its
environment ready is part of it, since others wait for those machines all the same. When ``time_limit_s`` of it have
passed the job is ended by its ladder and has failed, as ``time_limit``; it is not retried. One that succeeds while it
is being ended has succeeded.
"""

from __future__ import annotations

from fray.model.specs import EndReason, Outcome
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.transitions import end_generation, retry_or_commit
from fray.scheduler.state.state import State


def end_overdue(state: State, out: EffectBuffer) -> None:
    """After every step: those whose time is over, in the order in which it was."""
    while state.time_limits and state.time_limits[0][0] <= state.now:
        job = state.jobs[state.time_limits[0][2]]
        text = f"it ran for its time limit of {job.spec.time_limit_s:g} s"
        out.log_event(job.job_id, "time limit", text)
        end_generation(state, out, job, Outcome(cause=EndReason.TIME_LIMIT, message=text), EndReason.TIME_LIMIT)
        retry_or_commit(state, out, job)
