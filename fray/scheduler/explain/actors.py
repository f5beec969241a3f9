"""Actors as people see them: jobs that host one, and those that servers in other processes have registered.

Only looks; `ActorStatus` says what each word means.
"""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.actors import ActorInfo, ActorStatus
from fray.model.ids import INTERNAL_PREFIX, ActorId, Namespace
from fray.model.specs import EntryKind, JobState
from fray.scheduler.explain.explain import reason
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.state.rows import ActorRegistration, ActorTombstone, JobRow, error_message, job_state
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import name_key


def list_actors(state: State, namespace: Namespace | None = None, prefix: str = "") -> tuple[ActorInfo, ...]:
    """Every living actor (of one namespace) whose name starts with ``prefix``, oldest first."""
    found = [(job.order, hosted_actor_info(state, job)) for job in _living(state)]
    found += [(binding.order, served_actor_info(state, binding)) for binding in _served(state)]
    infos = (info for _, info in sorted(found, key=lambda pair: pair[0]))
    return tuple(
        info
        for info in infos
        if info.name.startswith(prefix)
        and namespace in (None, info.namespace)
        and not info.name.startswith(INTERNAL_PREFIX)
    )


def find_by_id(state: State, actor_id: ActorId) -> tuple[ActorInfo, ...]:
    """The actor, living or ended; empty when nobody knows it (any more)."""
    job = state.jobs.get(actor_id)
    if job is not None:
        return (hosted_actor_info(state, job),) if _hosts_one(job) else ()
    binding, grave = state.registrations.get(actor_id), state.actor_tombstones.get(actor_id)
    if binding is not None:
        return (served_actor_info(state, binding),)
    return (_of_grave(grave),) if grave is not None else ()


def find_by_name(state: State, namespace: Namespace, name: str) -> tuple[ActorInfo, ...]:
    """Living ones of this name, those the cluster made first; else the last that ended."""
    jobs = (state.jobs[job_id] for job_id in state.jobs_by_name.get((namespace, name), ()))
    bindings = (
        state.registrations[actor_id] for actor_id in state.registrations_by_key.get(name_key(namespace, name), ())
    )
    living = [hosted_actor_info(state, job) for job in jobs if _hosts_one(job)]
    living += [served_actor_info(state, binding) for binding in bindings if binding.endpoint.actor_id not in state.jobs]
    return tuple(living) or tuple(_last_ended(state, namespace, name))


def _living(state: State) -> Iterator[JobRow]:
    return (job for job in state.jobs.values() if _hosts_one(job) and not job.ended)


def _served(state: State) -> Iterator[ActorRegistration]:
    return (binding for actor_id, binding in state.registrations.items() if actor_id not in state.jobs)


def _last_ended(state: State, namespace: Namespace, name: str) -> Iterator[ActorInfo]:
    for job_id in reversed(state.finished_jobs):
        job = state.jobs[job_id]
        if _hosts_one(job) and (job.spec.namespace, job.spec.name) == (namespace, name):
            yield hosted_actor_info(state, job)
            return


def _hosts_one(job: JobRow) -> bool:
    return job.spec.entry is EntryKind.ACTOR


# One actor ------------------------------------------------------------------------------------------------------------


def hosted_actor_info(state: State, job: JobRow) -> ActorInfo:
    members = state.members(job)
    there = members[0] if members else None
    return ActorInfo(
        actor_id=job.job_id,
        name=job.spec.name,
        namespace=job.spec.namespace,
        status=actor_status(state, job),
        node=there.node if there else "",
        pid=there.pid if there else None,
        restarts=job.generation,
        reason=_why(state, job),
        started=job.started_at,
        ended=job.ended_at,
        detached=not job.owner,
    )


def actor_status(state: State, job: JobRow) -> ActorStatus:
    if job.outcome is not None:
        return ActorStatus.FAILED if job_state(job) is JobState.FAILED else ActorStatus.ENDED
    if job.stop_cause is not None:
        return ActorStatus.ENDED
    if job.phase is JobPhase.CLOSING:
        return ActorStatus.RESTARTING
    binding = state.registrations.get(job.job_id)
    if binding is not None and not state.is_hidden(binding):
        return ActorStatus.READY
    return ActorStatus.RESTARTING if binding is not None or job.generation else ActorStatus.CREATING


def _why(state: State, job: JobRow) -> str:
    if job.ended:
        return error_message(job.outcome) or ""
    text = reason(state, job)
    if not text and job.phase is JobPhase.RUNNING and job.job_id not in state.registrations:
        return "its constructor has not returned yet"
    return text


def served_actor_info(state: State, binding: ActorRegistration) -> ActorInfo:
    endpoint, attempt = binding.endpoint, state.attempts.get(binding.endpoint.incarnation)
    silent = state.is_hidden(binding)
    return ActorInfo(
        actor_id=endpoint.actor_id,
        name=endpoint.name,
        namespace=endpoint.namespace,
        status=ActorStatus.RESTARTING if silent else ActorStatus.READY,
        node=attempt.node if attempt else "",
        pid=attempt.pid if attempt else None,
        reason=f"its machine {attempt.node} is silent" if silent and attempt else "",
        started=attempt.started_at if attempt else None,
        served=True,
    )


def _of_grave(grave: ActorTombstone) -> ActorInfo:
    return ActorInfo(
        actor_id=grave.actor_id,
        name=grave.name,
        namespace=grave.namespace,
        status=ActorStatus.ENDED,
        reason=grave.outcome.message,
        ended=grave.ended_at,
        served=True,
    )
