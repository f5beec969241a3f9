"""Requeue: a person ends the attempts of running jobs, which then wait for machines again.

It is a preemption that no budget pays for. Invariant: a request names the generation that it means, so that a repeated
one has no second effect: that generation was ended by the first.
"""

from __future__ import annotations

from fray.model.ids import JobId
from fray.model.messages.client import RequeueResult
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import RequeueRequested
from fray.scheduler.jobs.queries import session_text
from fray.scheduler.jobs.retries import may_requeue
from fray.scheduler.jobs.transitions import preempt_job
from fray.scheduler.state.rows import JobRow, job_state
from fray.scheduler.state.state import State


def on_requeue_requested(state: State, event: RequeueRequested, out: EffectBuffer) -> None:
    """Requeue jobs; the reply is immediate, and says why the others are not."""
    by = f"{event.reason} (by {session_text(state, event.session)})"
    done: list[JobId] = []
    refused: dict[JobId, str] = {}
    for job_id, generation in event.generations.items():
        if why := _requeue(state, out, state.jobs.get(job_id), generation, by):
            refused[job_id] = why
        else:
            done.append(job_id)
    out.reply(event.session, event.ref, RequeueResult(jobs=tuple(done), refused=refused))


def _requeue(state: State, out: EffectBuffer, job: JobRow | None, generation: int, by: str) -> str:
    """Requeue a job; return why it is not, or an empty text."""
    if job is None:
        return "it is not on record"
    if job.requeued == generation:
        return ""
    if not job.is_active:
        ending = "is ending already" if job_state(job).value == "running" else f"is {job_state(job).value}"
        return f"it {ending}, and only what runs can be requeued"
    if job.generation != generation:
        return f"attempt {generation} has ended, and attempt {job.generation} runs"
    if not may_requeue(job):
        return "its author allows no restart after a preemption (max_retries_preemption=0, max_restarts=0)"
    # Before its end, which may be decided at once: then the budget is asked for.
    job.requeued, job.requeued_by = generation, by
    preempt_job(state, out, job, by, what="requeued")
    return ""
