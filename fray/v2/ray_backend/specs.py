"""What clients, the registry, jobs and actors tell one another."""

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
    """A job as the registry keeps it.

    Attributes:
        owner: client, job or actor that made it and with which it ends.
        options: of the Ray task that runs it, or of each member of a gang.
        tries: how often Ray may begin it again, in all.
        failures: how many of these may be failures of its own code.
        replicas: members; above 1, or of slices, it is a gang.
        own_process: no other job has had its process, nor will: it has an accelerator.
        directory: on a Ray of one machine, the workspace itself, which it enters.
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
    def gang(self) -> bool:
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
    """Which member of a gang, and the variables that tell it so."""

    index: int
    variables: dict[str, str]


@dataclass(frozen=True)
class ActorOutcome:
    """How a job or an actor stands; with FAILED, why."""

    status: JobStatus
    failure: PickledError | None = None


@dataclass(frozen=True)
class FoundActor:
    """An actor that was found: its Ray handle (None: it has ended) and the methods of its class."""

    host: Any
    methods: frozenset[str] = field(default_factory=frozenset)
