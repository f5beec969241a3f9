"""Views of the state for clients: jobs, endpoints under a name, actors, job groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from attrs import evolve

from fray.errors import NoSuchJob
from fray.model.actors import ActorInfo, ActorStatus
from fray.model.gangs import role_of
from fray.model.ids import INTERNAL_PREFIX, ActorId, JobId, Namespace
from fray.model.job_groups import JobGroupInfo, MemberInfo
from fray.model.messages.client import Names
from fray.model.specs import RESULT_GONE, AttemptInfo, EndReason, EntryKind, JobInfo, JobSpec, JobState, Outcome
from fray.scheduler.explain.diagnosis import group_reasons, job_reason_text, job_reasons
from fray.scheduler.jobs.queries import is_group_in_namespace
from fray.scheduler.lifecycle import FINAL_STATE, Budget, JobPhase
from fray.scheduler.reasons import Reason, ReasonKind, reasons_text
from fray.scheduler.state.rows import (
    ActorRegistration,
    ActorTombstone,
    AttemptRow,
    JobGroupRow,
    JobRow,
    error_message,
    job_state,
)
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import Tables, name_key

_NOTHING_YET = Outcome(cause=EndReason.SUCCEEDED)
"""Outcome whose (empty) codes and values a job shows before it has one."""
SHOWN = (
    *("name", "namespace", "user", "entry", "demand", "alternatives", "members", "gang", "ports", "pin_cpus"),
    *("max_retries_failure", "max_retries_preemption", "max_retries_machine_loss", "max_retries_out_of_memory"),
    *("exit_codes", "backoff_s", "backoff_max_s", "memory_limit_bytes", "time_limit_s", "wait_limit_s", "notice_s"),
    *("termination", "stall_s", "on_stall", "detached", "owned_by_job", "group", "index", "siblings"),
    *("reservation_id", "job_group", "role"),
)
"""Fields of a `JobSpec` that are shown to clients: none has code, arguments, variables, secrets or addresses."""
ENDED_ACTORS = 1_000
"""Ended actors in a list: those that ended last."""


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
    spec, outcome = job.spec, job.outcome or _NOTHING_YET
    reasons = job_reasons(state, job) if explained else []
    retries = {cause.value: count for cause, count in job.retries.items()}
    if job.requeues:
        retries[Budget.REQUEUE.value] = job.requeues
    return JobInfo(
        job_id=job_id,
        name=spec.name,
        # Phases of the scheduler are finer than what users see (`lifecycle.LIVING_STATE`).
        state=job_state(job),
        error_message=error_message(job.outcome) or (RESULT_GONE if job.value_forgotten else None),
        start_time=job.started_at,
        end_time=job.ended_at,
        namespace=spec.namespace,
        owner=job.owner,
        cause=job.outcome.cause if job.outcome else None,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        value=outcome.value,
        stored=outcome.stored,
        reason=reasons_text(reasons) if reasons else "",
        reason_kind=reasons[0].kind.code if reasons else "",
        attempts=tuple(map(_attempt_info, state.attempt_records(job))),
        ended_by=job.ended_by,
        launch_time=job.launched_at,
        parent=job.parent,
        user=spec.user,
        retries=retries,
        first_member=job.first_member if spec.members > 1 else None,
        job_group=spec.job_group,
        role=role_of(spec).name if spec.job_group else "",
        absorbed=job.is_absorbed,
    )


def requested_spec(state: State, job_id: JobId) -> JobSpec:
    """Return what a job requests of the cluster: `SHOWN` of its spec, and its band.

    Raises:
        NoSuchJob: unknown, or only its summary is on record.
    """
    job = state.jobs.get(job_id)
    if job is None:
        raise NoSuchJob(f"the request of job {job_id!r} is not on record", job_id=job_id)
    spec = job.spec
    actor = evolve(spec.actor, checkpoint_storage=None, health=None) if spec.actor is not None else None
    shown = {name: getattr(spec, name) for name in SHOWN}
    return JobSpec(job_id=job_id, band=job.band, actor=actor, **shown)


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
    only: Sequence[JobId] = (),
    name: str = "",
    prefix: str = "",
    states: Sequence[JobState] = (),
    limit: int = 0,
    is_visible: Callable[[JobRow], bool] = lambda job: True,
) -> tuple[JobInfo, ...]:
    """Return jobs on record, newest last: of one namespace, of some ids (in their order), of one name, of names or ids
    with a prefix, in some states; of those that are visible."""
    found = [
        job.job_id
        for job in ((state.jobs[job_id] for job_id in only if job_id in state.jobs) if only else state.jobs.values())
        if namespace in (None, job.spec.namespace)
        and (not name or job.spec.name == name)
        and job.job_id.startswith(prefix)  # an id is the name, and more
        and (not states or job_state(job) in states)
        and is_visible(job)
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
    registration = state.registrations.get(actor_id)
    if registration is None:
        # Silence is reported as an end that may be revoked: callers fail with `MachineLost` meanwhile, and reach the
        # actor again through the same handle.
        silent = _silent_member(state, actor_id)
        ended = _silence_outcome(state, silent) if silent else _end_of_actor(state, actor_id)
        return Names(key=key, endpoints=(), ended=ended, may_return=silent is not None)
    if state.is_hidden(registration):
        silence = _silence_outcome(state, state.attempts[registration.endpoint.incarnation])
        return Names(key=key, endpoints=(), ended=silence, may_return=True)
    return Names(key=key, endpoints=(registration.endpoint,))


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
    # Any other unknown id was forgotten or never existed: callers must not wait for it.
    return Outcome(cause=EndReason.FAILURE, message="no such actor")


def _silence_outcome(state: State, attempt: AttemptRow) -> Outcome:
    silent_s = state.now - state.nodes[attempt.node].silent_since
    return Outcome(
        cause=EndReason.MACHINE_LOST,
        message=f"its machine {attempt.node} has been silent for {silent_s:.0f} s",
    )


# Actors ---------------------------------------------------------------------------------------------------------------


def list_actors(
    state: State, namespace: Namespace | None = None, prefix: str = "", *, ended: bool = False
) -> tuple[ActorInfo, ...]:
    """Return every living actor (of one namespace) whose name starts with ``prefix``, oldest first; with ``ended``
    before them the last `ENDED_ACTORS` that have ended and are on record."""
    found = [(job.order, hosted_actor_info(state, job)) for job in _living_actor_jobs(state)]
    found += [(registration.order, served_actor_info(state, registration)) for registration in _served_actors(state)]

    def is_chosen(info: ActorInfo) -> bool:
        is_named = info.name.startswith(prefix) and not info.name.startswith(INTERNAL_PREFIX)
        return is_named and namespace in (None, info.namespace)

    living = tuple(info for _, info in sorted(found, key=lambda pair: pair[0]) if is_chosen(info))
    if not ended:
        return living
    past = [info for info in _ended_actors(state) if is_chosen(info)]
    past.sort(key=lambda info: info.ended or 0.0)
    return (*past[-ENDED_ACTORS:], *living)


def _ended_actors(state: State) -> Iterator[ActorInfo]:
    jobs = (state.jobs[job_id] for job_id in state.finished_jobs)
    yield from (hosted_actor_info(state, job) for job in jobs if _is_actor(job))
    yield from map(_ended_actor_info, state.actor_tombstones.values())


def find_by_id(state: State, actor_id: ActorId) -> tuple[ActorInfo, ...]:
    """Return the actor, living or ended; empty when it is not on record (any more)."""
    job = state.jobs.get(actor_id)
    if job is not None:
        return (hosted_actor_info(state, job),) if _is_actor(job) else ()
    registration, tombstone = state.registrations.get(actor_id), state.actor_tombstones.get(actor_id)
    if registration is not None:
        return (served_actor_info(state, registration),)
    return (_ended_actor_info(tombstone),) if tombstone is not None else ()


def find_by_name(state: State, namespace: Namespace, name: str) -> tuple[ActorInfo, ...]:
    """Return the living actors of this name, those with a job of their own first; else the last that ended."""
    jobs = (state.jobs[job_id] for job_id in state.jobs_by_name.get((namespace, name), ()))
    registrations = (
        state.registrations[actor_id] for actor_id in state.registrations_by_key.get(name_key(namespace, name), ())
    )
    living = [hosted_actor_info(state, job) for job in jobs if _is_actor(job)]
    living += [
        served_actor_info(state, registration)
        for registration in registrations
        if registration.endpoint.actor_id not in state.jobs
    ]
    return tuple(living) or tuple(_last_ended(state, namespace, name))


def _living_actor_jobs(state: State) -> Iterator[JobRow]:
    return (job for job in state.jobs.values() if _is_actor(job) and not job.ended)


def _served_actors(state: State) -> Iterator[ActorRegistration]:
    return (registration for actor_id, registration in state.registrations.items() if actor_id not in state.jobs)


def _last_ended(state: State, namespace: Namespace, name: str) -> Iterator[ActorInfo]:
    # There is no index of the names of ended actors: the newest first, as only the last one counts.
    for job_id in reversed(state.finished_jobs):
        job = state.jobs[job_id]
        if _is_actor(job) and (job.spec.namespace, job.spec.name) == (namespace, name):
            yield hosted_actor_info(state, job)
            return


def _is_actor(job: JobRow) -> bool:
    return job.spec.entry is EntryKind.ACTOR


def hosted_actor_info(state: State, job: JobRow) -> ActorInfo:
    members = state.members(job)
    member = members[0] if members else None
    return ActorInfo(
        actor_id=job.job_id,
        name=job.spec.name,
        namespace=job.spec.namespace,
        status=actor_status(state, job),
        node=member.node if member else "",
        pid=member.pid if member else None,
        restarts=job.generation,
        reason=_actor_reason(state, job),
        started=job.started_at,
        ended=job.ended_at,
        detached=not job.owner,
        incarnation=member.attempt_id if member else "",
        parent=job.parent,
    )


def actor_status(state: State, job: JobRow) -> ActorStatus:
    if job.outcome is not None:
        return ActorStatus.FAILED if job_state(job) is JobState.FAILED else ActorStatus.ENDED
    # Its end is decided: it will not be READY again.
    if job.stop_cause is not None:
        return ActorStatus.ENDED
    if job.phase is JobPhase.CLOSING:
        return ActorStatus.RESTARTING
    registration = state.registrations.get(job.job_id)
    if registration is not None and not state.is_hidden(registration):
        return ActorStatus.READY
    # Silent, or between two incarnations: it was there before. Only the first incarnation is CREATING.
    return ActorStatus.RESTARTING if registration is not None or job.generation else ActorStatus.CREATING


def _actor_reason(state: State, job: JobRow) -> str:
    if job.ended:
        return error_message(job.outcome) or ""
    text = job_reason_text(state, job)
    if not text and job.phase is JobPhase.RUNNING and job.job_id not in state.registrations:
        return str(Reason(ReasonKind.CONSTRUCTING))
    return text


def served_actor_info(state: State, registration: ActorRegistration) -> ActorInfo:
    endpoint, attempt = registration.endpoint, state.attempts.get(registration.endpoint.incarnation)
    silent = state.is_hidden(registration)
    return ActorInfo(
        actor_id=endpoint.actor_id,
        name=endpoint.name,
        namespace=endpoint.namespace,
        status=ActorStatus.RESTARTING if silent else ActorStatus.READY,
        node=attempt.node if attempt else "",
        pid=attempt.pid if attempt else None,
        reason=str(Reason(ReasonKind.MACHINE_SILENT, attempt.node)) if silent and attempt else "",
        started=attempt.started_at if attempt else None,
        incarnation=endpoint.incarnation,
        parent=attempt.job_id if attempt else "",
        served=True,
    )


def _ended_actor_info(tombstone: ActorTombstone) -> ActorInfo:
    return ActorInfo(
        actor_id=tombstone.actor_id,
        name=tombstone.name,
        namespace=tombstone.namespace,
        status=ActorStatus.ENDED,
        reason=tombstone.outcome.message,
        ended=tombstone.ended_at,
        served=True,
    )


# Job groups -----------------------------------------------------------------------------------------------------------


def group_info(state: Tables, group: JobGroupRow) -> JobGroupInfo:
    """Return a group's record."""
    jobs = [state.jobs[job_id] for job_id in state.group_members[group.group_id].jobs]
    return JobGroupInfo(
        group_id=group.group_id,
        name=group.config.name,
        namespace=group.namespace,
        state=group_state(state, group).value,
        error_message=_group_error(group),
        decided_by=group.decided_by,
        place=(group.place or "") if state.group_members[group.group_id].is_placed else "",
        same=group.config.same,
        launch_time=group.launched_at,
        start_time=group.placed_at,
        end_time=group.ended_at,
        reason=reasons_text(group_reasons(state, group)),
        members=tuple(map(_member_info, jobs)),
    )


def _group_error(group: JobGroupRow) -> str | None:
    outcome = group.outcome
    return outcome.message if outcome is not None and outcome.cause is not EndReason.SUCCEEDED else None


def _member_info(job: JobRow) -> MemberInfo:
    role = role_of(job.spec)
    return MemberInfo(
        job_id=job.job_id,
        name=job.spec.name,
        role=role.name,
        stage=role.stage,
        auxiliary=role.auxiliary,
        state=job_state(job).value,
        absorbed=job.is_absorbed,
    )


def group_state(state: Tables, group: JobGroupRow) -> JobState:
    if group.ended_at is not None and group.outcome is not None:
        return FINAL_STATE[group.outcome.cause]
    return JobState.RUNNING if state.group_members[group.group_id].is_placed else JobState.PENDING


def list_groups(state: Tables, own: Namespace, asked: Namespace | None, name: str = "") -> tuple[JobGroupInfo, ...]:
    """Return groups on record, newest last: of a namespace, and of a name or id."""
    return tuple(
        group_info(state, group)
        for group in state.job_groups.values()
        if (not name or name in (group.config.name, group.group_id))
        and (name == group.group_id or is_group_in_namespace(group, own, asked))
    )
