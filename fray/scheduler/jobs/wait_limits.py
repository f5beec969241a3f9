"""Limits on waiting.

The law. A job with ``wait_limit_s`` that has waited so long for machines, counted anew whenever it comes into the
queue, ends as failed, cause unschedulable, with the reason why it waited at that moment. Back-offs are no such wait. A
member of a job group waits with its group; what its end means to the others, the group's rules say.
"""

from __future__ import annotations

from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.explain.explain import reason
from fray.scheduler.jobs.transitions import fail_unschedulable
from fray.scheduler.state.rows import JobPhase
from fray.scheduler.state.state import State


def on_timer_wait(state: State, out: EffectBuffer, job_id: str) -> None:
    """It has waited as long as it may."""
    job = state.jobs.get(job_id)
    if job is None or not (job.phase is JobPhase.QUEUED or job.is_gathered):
        return
    fail_unschedulable(
        state, out, job, f"it waited {job.spec.wait_limit_s:g} s for machines, its limit: {reason(state, job)}"
    )
