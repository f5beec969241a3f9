"""Views of the state for clients: job records, lists of jobs, and the endpoints registered under a name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fray.errors import NoSuchJob
from fray.model.gangs import role_of
from fray.model.ids import INTERNAL_PREFIX, ActorId, JobId, Namespace
from fray.model.messages.client import Names
from fray.model.specs import RESULT_GONE, AttemptInfo, EndReason, JobInfo, JobState, Outcome
from fray.scheduler.explain.explain import reason
from fray.scheduler.lifecycle import FINAL_STATE
from fray.scheduler.state.rows import AttemptRow, error_message, job_state
from fray.scheduler.state.state import State

_NOTHING_YET = Outcome(cause=EndReason.SUCCEEDED)
"""Outcome whose (empty) codes and values a job shows before it has one."""


# Jobs -----------------------------------------------------------------------------------------------------------------


def job_info(state: State, job_id: JobId, *, explained: bool = True) -> JobInfo:
    """Return a job's record.

    Args:
        explained: with the reason why it waits; that takes a look at the machines.

    Raises:
        NoSuchJob.
    """
    job = state.jobs.get(job_id)
    if job is None:
        return _tombstone_info(state, job_id)
    outcome = job.outcome or _NOTHING_YET
    return JobInfo(
        job_id=job_id,
        name=job.spec.name,
        state=job_state(job),
        error_message=error_message(job.outcome) or (RESULT_GONE if job.value_forgotten else None),
        start_time=job.started_at,
        end_time=job.ended_at,
        namespace=job.spec.namespace,
        owner=job.owner,
        cause=job.outcome.cause if job.outcome else None,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        value=outcome.value,
        stored=outcome.stored,
        reason=reason(state, job) if explained else "",
        attempts=tuple(map(_attempt_info, state.attempt_records(job))),
        ended_by=job.ended_by,
        launch_time=job.launched_at,
        parent=job.parent,
        user=job.spec.user,
        retries={cause.value: count for cause, count in job.retries.items()},
        first_member=job.first_member if job.spec.members > 1 else None,
        job_group=job.spec.job_group,
        role=role_of(job.spec).name if job.spec.job_group else "",
        absorbed=job.is_absorbed,
    )


def _tombstone_info(state: State, job_id: JobId) -> JobInfo:
    past = state.job_tombstones.get(job_id)
    if past is None:
        raise NoSuchJob(f"no job {job_id!r} on record (it may have ended long ago)", job_id=job_id)
    message = error_message(Outcome(cause=past.cause, message=past.message))
    return JobInfo(
        job_id=job_id,
        name=past.name,
        state=FINAL_STATE[past.cause],
        error_message=message or (RESULT_GONE if past.had_value else None),
        end_time=past.ended_at,
        namespace=past.namespace,
        cause=past.cause,
        exit_code=past.exit_code,
    )


def list_jobs(
    state: State,
    namespace: Namespace | None = None,
    *,
    name: str = "",
    prefix: str = "",
    states: Sequence[JobState] = (),
    limit: int = 0,
) -> tuple[JobInfo, ...]:
    """Return jobs on record, newest last: of one namespace, of one name, of names or ids with a prefix, in some
    states."""
    found = [
        job.job_id
        for job in state.jobs.values()
        if namespace in (None, job.spec.namespace)
        and (not name or job.spec.name == name)
        and job.job_id.startswith(prefix)  # an id is the name, and more
        and (not states or job_state(job) in states)
    ]
    return tuple(map(partial(job_info, state), found[-limit:]))


def _attempt_info(attempt: AttemptRow) -> AttemptInfo:
    outcome = attempt.outcome
    if outcome is None:
        return AttemptInfo(
            attempt_id=attempt.attempt_id,
            node=attempt.node,
            pid=attempt.pid,
            start_time=attempt.started_at,
            ports=attempt.ports,
            host=attempt.host,
            place_time=attempt.placed_at,
        )
    return AttemptInfo(
        attempt_id=attempt.attempt_id,
        node=attempt.node,
        cause=outcome.cause,
        message=outcome.message,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        pid=attempt.pid,
        start_time=attempt.started_at,
        end_time=attempt.ended_at,
        ports=attempt.ports,
        host=attempt.host,
        peak_memory_bytes=outcome.peak_memory_bytes,
        cpu_s=outcome.cpu_s,
        swept=outcome.swept,
        captured=outcome.captured,
        place_time=attempt.placed_at,
        duration_s=outcome.duration_s,
    )


# Names ----------------------------------------------------------------------------------------------------------------


def names_under(state: State, key: str) -> Names:
    """Return all living actors under a key (see `Watch.key`), oldest first; those of silent machines are left out."""
    kind, _, rest = key.partition(":")
    if kind == "actor":
        return _names_of_actor(state, key, rest)
    found = sorted(
        (state.registrations[actor] for actor in state.registrations_by_key.get(key, ())), key=lambda b: b.order
    )
    return Names(key=key, endpoints=tuple(b.endpoint for b in found if not state.is_hidden(b)))


def _names_of_actor(state: State, key: str, actor_id: ActorId) -> Names:
    binding = state.registrations.get(actor_id)
    if binding is None:
        silent = _silent_member(state, actor_id)
        ended = _silence_outcome(state, silent) if silent else _end_of_actor(state, actor_id)
        return Names(key=key, endpoints=(), ended=ended, may_return=silent is not None)
    if state.is_hidden(binding):
        silence = _silence_outcome(state, state.attempts[binding.endpoint.incarnation])
        return Names(key=key, endpoints=(), ended=silence, may_return=True)
    return Names(key=key, endpoints=(binding.endpoint,))


def _silent_member(state: State, actor_id: ActorId) -> AttemptRow | None:
    """Return the attempt of a living actor whose machine is silent."""
    job = state.jobs.get(actor_id)
    return next(filter(state.is_suspect, state.members(job)), None) if job is not None and not job.ended else None


def _end_of_actor(state: State, actor_id: ActorId) -> Outcome | None:
    """Return the outcome of an actor that has no registration; None: it is still starting."""
    job = state.jobs.get(actor_id)
    if job is not None:
        return job.outcome
    if actor_id in state.actor_tombstones:
        return state.actor_tombstones[actor_id].outcome
    if actor_id.startswith(INTERNAL_PREFIX):
        return None  # exports that are about to be registered; those who wait for them have a time limit
    return Outcome(cause=EndReason.FAILURE, message="no such actor")


def _silence_outcome(state: State, attempt: AttemptRow) -> Outcome:
    silent_s = state.now - state.nodes[attempt.node].silent_since
    return Outcome(
        cause=EndReason.MACHINE_LOST,
        message=f"its machine {attempt.node} has been silent for {silent_s:.0f} s",
    )
