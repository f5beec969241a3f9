"""Description of the current job for its own code, taken from the spec of its attempt."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from attrs import Factory

from fray.errors import FrayError
from fray.model.frozen import frozen
from fray.model.gangs import coordinator_of, group_name, local_ranks, rank_of, role_of
from fray.model.ids import AttemptId, JobId, Namespace
from fray.model.specs import AttemptSpec, GangMember

# A shorter value, such as `1`, occurs in ordinary text, which would become unreadable.
LEAST_CHARS = 8
"""Length below which secrets are not redacted."""


@frozen(kw_only=True)
class CurrentJob:
    """The job of the running code, and which member of its gang this is.

    Attributes:
        id, name, namespace: identity of the job.
        attempt: id of this incarnation of this member.
        node, host: the machine: its name, and how peers reach it.
        rank, world_size: which member, of how many; 0 of 1 for a job that is not a gang.
        local_rank, local_world_size: the same among the members on this machine.
        coordinator: ``host:port`` where the gang meets, at the first member; None for a job that is not a gang.
        ports: numbers of its ports on this machine, by name.
        peers: all members in order of rank, itself included; empty for a job that is not a gang.
        group, role: name of its job group and its role there; empty for a job outside job groups.
        mates: members of that group that have ports, by role, as of the start of this process. A member that has
            restarted since then is elsewhere: `Cluster.get_job` and `Job.wait_port` return its address.
    """

    id: JobId
    name: str
    namespace: Namespace
    attempt: AttemptId
    node: str = ""
    host: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    coordinator: str | None = None
    ports: dict[str, int] = Factory(dict)
    peers: tuple[GangMember, ...] = ()
    group: str = ""
    role: str = ""
    mates: dict[str, tuple[GangMember, ...]] = Factory(dict)

    @property
    def preempted(self) -> bool:
        """Return whether the job is being preempted, or its machine drained: save state and stop.

        True from the notice on (`JobRequest.preemption_notice_s`), at the latest when it is cancelled for that reason.
        """
        return self.attempt in _preempted


_preempted: dict[AttemptId, None] = {}
"""Attempts of this process that have received a preemption notice."""
# In a process of its own the job is that of the process, also for threads that Fray has not started.
_attempt_spec: ContextVar[AttemptSpec | None] = ContextVar("fray_attempt_spec", default=None)
_of_process: AttemptSpec | None = None


def bind_task(attempt_spec: AttemptSpec) -> None:
    """Assign the running task, and all tasks and threads it starts, to this attempt."""
    _attempt_spec.set(attempt_spec)


def bind_process(attempt_spec: AttemptSpec) -> None:
    """Assign all code of this process to this attempt."""
    global _of_process
    _of_process = attempt_spec


def set_preemption_notice(attempt_id: AttemptId | None = None) -> None:
    """Mark an attempt (default: that of this process) as being preempted; from any thread."""
    if attempt_id is None and _of_process is not None:
        attempt_id = _of_process.attempt_id
    if attempt_id is not None:
        _preempted[attempt_id] = None


def clear_preemption_notice(attempt_id: AttemptId) -> None:
    """Drop the notice of an attempt that has ended."""
    _preempted.pop(attempt_id, None)


def make_redactor() -> Callable[[str], str]:
    """Return a function that replaces the values of this attempt's secrets in a text."""
    attempt_spec = _attempt_spec.get() or _of_process
    secrets = attempt_spec.secrets if attempt_spec is not None else {}

    def redacted(text: str) -> str:
        for name, value in secrets.items():
            text = text.replace(value, f"[secret {name}]") if len(value) >= LEAST_CHARS else text
        return text

    return redacted


def contains_secret(data: bytes) -> bool:
    """Return whether ``data`` contains the value of a secret of this attempt."""
    attempt_spec = _attempt_spec.get() or _of_process
    secrets = attempt_spec.secrets.values() if attempt_spec is not None else ()
    return any(len(value) >= LEAST_CHARS and value.encode() in data for value in secrets)


def current_job() -> CurrentJob:
    """Return the job of the running code; from any thread in a job's own process.

    Raises:
        FrayError: the code does not run in a job.
    """
    attempt_spec = _attempt_spec.get() or _of_process
    if attempt_spec is None:
        raise FrayError("no job here: current_job() works in code that a job or an actor runs")
    rank, local = rank_of(attempt_spec), local_ranks(attempt_spec)
    return CurrentJob(
        id=attempt_spec.spec.job_id,
        name=attempt_spec.spec.name,
        namespace=attempt_spec.spec.namespace,
        attempt=attempt_spec.attempt_id,
        node=attempt_spec.node,
        host=attempt_spec.advertise,
        rank=rank,
        world_size=attempt_spec.spec.members,
        local_rank=local.index(rank),
        local_world_size=len(local),
        coordinator=coordinator_of(attempt_spec.members) or None,
        ports=dict(attempt_spec.ports),
        peers=attempt_spec.members,
        group=group_name(attempt_spec.spec),
        role=role_of(attempt_spec.spec).name if attempt_spec.spec.job_group else "",
        mates=dict(attempt_spec.group_members),
    )
