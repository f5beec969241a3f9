"""Queries of jobs: by name, prefix and tree; names of sessions; and differences between two requests.

A name means a job of the client's namespace. Where no namespace is given it also means a root: a detached job that was
launched by a driver without a namespace, so that its namespace was derived from its name (`fray.api.jobs.job`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from attrs import evolve

from fray.model.environment import EnvironmentSpec
from fray.model.ids import JobId, Namespace, SessionId
from fray.model.messages.client import Role
from fray.model.specs import EntryKind, JobSpec
from fray.scheduler.effects import TerminateRequested
from fray.scheduler.state.rows import JobGroupRow, JobRow
from fray.scheduler.state.state import State

ALL_NAMESPACES = "*"


def is_root(spec: JobSpec) -> bool:
    """Return whether the job's namespace was derived from its name, or from that of its job group."""
    whole = spec.detached and bool(spec.namespace)
    return whole and (spec.name.startswith(spec.namespace) or spec.job_group.startswith(spec.namespace))


def _is_in_namespace(spec: JobSpec, own: Namespace, asked: Namespace | None) -> bool:
    if asked is None:
        return spec.namespace == own or is_root(spec)
    return asked in (ALL_NAMESPACES, spec.namespace)


def find_job(
    state: State,
    own: Namespace,
    name: str,
    asked: Namespace | None = None,
    is_visible: Callable[[JobRow], bool] = lambda job: True,
) -> JobId | None:
    """Return, of the visible jobs, the living one of this name (of the own namespace first), else the one that ended
    last, else the one with this id."""
    found = [job for job in living_jobs(state, own, asked, name) if job.spec.name == name and is_visible(job)]
    if found:
        # One that is being ended comes last: its successor has the same name already.
        return min(found, key=lambda job: (job.spec.namespace != own, job.stop_cause is not None, job.order)).job_id
    for job_id in reversed(state.finished_jobs):
        spec = state.jobs[job_id].spec
        if spec.name == name and _is_in_namespace(spec, own, asked) and is_visible(state.jobs[job_id]):
            return job_id
    return name if name in state.jobs and is_visible(state.jobs[name]) else None


def living_jobs(state: State, own: Namespace, asked: Namespace | None, prefix: str) -> Iterator[JobRow]:
    """Yield living jobs whose names begin with ``prefix``, oldest name first."""
    for (_, name), holders in state.jobs_by_name.items():
        if name.startswith(prefix):
            jobs = [state.jobs[job_id] for job_id in holders]
            yield from (job for job in jobs if _is_in_namespace(job.spec, own, asked))


def matching_jobs(state: State, event: TerminateRequested) -> Iterator[JobId]:
    """Yield the jobs that a request to end jobs means by its name and its prefix."""
    session = state.sessions.get(event.session)
    own = session.namespace if session is not None else ""
    if event.name:
        yield from (j.job_id for j in living_jobs(state, own, event.namespace, event.name) if j.spec.name == event.name)
    if event.prefix:
        yield from (job.job_id for job in living_jobs(state, own, event.namespace, event.prefix))


def descendants(state: State, roots: Iterable[JobId]) -> Iterator[JobId]:
    """Yield all jobs that these have launched, at any depth and of any owner, also below jobs that have ended."""
    below: dict[JobId, list[JobId]] = {}
    for job in state.jobs.values():
        # By the launching job, which stays on record after its end; the index of children has living jobs only.
        if job.parent:
            below.setdefault(job.parent, []).append(job.job_id)
    # A stack and no recursion: detached chains may be of any depth.
    waiting = list(roots)
    while waiting:
        for job_id in below.pop(waiting.pop(), ()):
            yield job_id
            waiting.append(job_id)


def session_text(state: State, session: SessionId) -> str:
    """Return a session as text: its driver or job, and the user; of a tool, the user who runs it."""
    known = state.sessions.get(session)
    if known is None:
        return f"session {session}"
    if known.attempt_id is not None:
        return f"job {state.attempts[known.attempt_id].job_id}" if known.attempt_id in state.attempts else session
    if known.role is Role.TOOL:
        return known.user or "a tool"
    return f"driver {session}" + (f" of {known.user}" if known.user else "")


# The same request -----------------------------------------------------------------------------------------------------

_COMPARED = {
    "name": "name",
    "namespace": "namespace",
    "entry": "entrypoint",
    "argv": "entrypoint",
    "demand": "resources",
    "members": "replicas",
    "env_vars": "environment.env_vars",
    "secrets": "environment.env_vars",
    **{name: name for name in ("max_retries_failure", "max_retries_preemption", "max_retries_machine_loss")},
    **{name: name for name in ("max_retries_out_of_memory", "exit_codes", "backoff_s", "backoff_max_s", "detached")},
    "owned_by_job": "lifetime",
    **{name: name for name in ("termination", "ports", "health", "stall_s", "on_stall", "result_storage")},
    **{name: name for name in ("time_limit_s", "wait_limit_s")},
    "actor": "actor_config",
    "reservation_id": "reservation_id",
    "job_group": "its job group",
    "role": "role",
}
"""Fields of a spec that make it a different request, and their names for its author. Origin, user and id are not
compared; nor is the code, only the callable and its arguments."""


def _without_code(environment: EnvironmentSpec) -> EnvironmentSpec:
    """Return the environment as requested, without the present files of the workspace and the client's interpreter."""
    return evolve(environment, bundle=None, python="")


def differing_fields(first: JobSpec, second: JobSpec) -> list[str]:
    """Return the fields in which two requests differ, in their authors' terms; empty: they are the same."""
    differing = [name for field, name in _COMPARED.items() if getattr(first, field) != getattr(second, field)]
    if _without_code(first.environment) != _without_code(second.environment):
        differing.append("environment")
    # By what was asked for: pickles of the same call differ from process to process.
    if first.signature and second.signature:
        if first.signature != second.signature:
            differing.append("entrypoint or its arguments")
    elif first.payload != second.payload:
        differing.append("entrypoint or its arguments")
    return list(dict.fromkeys(differing))


def living_actor(state: State, namespace: Namespace, name: str) -> JobId | None:
    """Return the actor of this name, if one lives that is not being ended."""
    for job_id in state.jobs_by_name.get((namespace, name), ()):
        job = state.jobs[job_id]
        if job.spec.entry is EntryKind.ACTOR and job.stop_cause is None:
            return job_id
    return None


def is_group_in_namespace(group: JobGroupRow, own: Namespace, asked: Namespace | None) -> bool:
    """Return whether the group is of the namespace, or its namespace was derived from its name (see `is_root`)."""
    if asked is None:
        return group.namespace == own or (bool(group.namespace) and group.config.name.startswith(group.namespace))
    return asked in (ALL_NAMESPACES, group.namespace)
