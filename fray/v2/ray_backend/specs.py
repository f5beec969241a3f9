"""Values that clients, the registry, jobs and actors send one another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fray.v2.job import JobStatus
from fray.v2.ray_backend.errors import PickledError


@dataclass(frozen=True)
class SliceRequest:
    """TPU slices of one type: ``head`` is the resource that only the first VM of such a slice has."""

    head: str
    slices: int
    vms: int
    chips: int


@dataclass(frozen=True)
class RayJobSpec:
    """Job as the registry stores it.

    Attributes:
        owner: id of the client, job or actor that made the job and with which it ends.
        options: options of the Ray task that runs the job, or of each member of a gang.
        tries: number of restarts by Ray, in all.
        failures: number of these restarts that may follow failures of the job's own code.
        replicas: members; a job of more than one, or of TPU slices, is a gang.
        own_process: whether the job runs in a process of its own, as jobs with an accelerator do.
        directory: on a Ray of one machine, the workspace itself, which the job enters.
    """

    job_id: str
    name: str
    owner: str
    options: dict[str, Any]
    tries: int
    failures: int
    replicas: int = 1
    slices: SliceRequest | None = None
    own_process: bool = False
    directory: str | None = None

    @property
    def is_gang(self) -> bool:
        return self.replicas > 1 or self.slices is not None


@dataclass(frozen=True)
class ActorSpec:
    """Actor as the registry stores it.

    Attributes:
        job_id: id of its job.
        methods: names of the public methods of its class.
        handle: handle that the actor's own code gets as `ActorContext.handle`. It comes with the specification because
            handles lie above the modules that run actors.
    """

    job_id: str
    name: str
    owner: str
    group: str
    index: int
    methods: frozenset[str]
    options: dict[str, Any]
    hosted: bool = False
    handle: Any = None


@dataclass(frozen=True)
class Member:
    """Member of a gang: its index, and its environment variables."""

    index: int
    variables: dict[str, str]


@dataclass(frozen=True)
class ActorOutcome:
    """Status of a job or an actor; with FAILED, the error."""

    status: JobStatus
    failure: PickledError | None = None


@dataclass(frozen=True)
class FoundActor:
    """Actor as found by name: its Ray handle (None if it has ended) and the methods of its class."""

    host: Any
    methods: frozenset[str] = field(default_factory=frozenset)
