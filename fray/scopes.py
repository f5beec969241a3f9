"""Scopes: a nursery whose children live anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, get_args

from attrs import evolve

from fray.actors import ActorHandle, methods_of
from fray.errors import InvalidRequest
from fray.jobs import Job, build_actor_spec, build_spec, error_of
from fray.model.ids import mint
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig, Entrypoint, EnvironmentConfig, JobRequest
from fray.runtime.context import Runtime
from fray.runtime.family import Kind, Supervision
from fray.runtime.scope import ChildScope, open_child_scope, open_service_scope

ACTOR_RESOURCES = ResourceConfig(cpu=0, memory=0)
"""An actor that asks for nothing reserves nothing, and goes where the fewest are."""

OnFailure = Literal["escalate", "absorb"]
Lifetime = Literal["non_detached", "detached"]


class Scope:
    """Owner of jobs and actors. Leaving it waits for its jobs, then ends its actors; an error ends both.

    A child that fails by itself cancels the scope, and its error comes out of the ``async with`` in an
    ExceptionGroup, unless it was launched with ``on_failure="absorb"``.
    """

    def __init__(self, children: ChildScope) -> None:
        self._children = children

    @property
    def name(self) -> str:
        return self._children.name

    @property
    def _runtime(self) -> Runtime:
        return self._children.runtime

    async def launch(self, request: JobRequest, *, on_failure: OnFailure = "escalate") -> Job:
        """Launch a job owned by this scope; returns once the controller has accepted it.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameTaken: nothing was launched.
            ConnectionFailed: the conversation with the controller has ended.
        """
        return (await self.launch_all([request], on_failure=on_failure))[0]

    async def launch_all(self, requests: Sequence[JobRequest], *, on_failure: OnFailure = "escalate") -> list[Job]:
        """Launch several jobs, all or none. Raises as `launch`."""
        built = [build_spec(request, self._runtime) for request in requests]
        specs, payloads = [spec for spec, _ in built], [content for _, content in built if content is not None]
        records = await self._children.launch(
            specs,
            payloads,
            Kind.JOB,
            Supervision(on_failure),
            error_of,
        )
        return [Job(self._runtime, record) for record in records]

    async def wait_jobs_then_end_actors(self) -> None:
        """The orderly exit: what leaving the ``async with`` does when nothing failed."""
        await self._children.wait_jobs_then_end_actors()

    async def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        resources: ResourceConfig | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """One remote call: run ``fn(*args, **kwargs)`` as a job of its own and return its value.

        Its failure is raised here, not by the scope. Cancelling the await ends the job.

        Args:
            resources: default 1 CPU, 2 GB.
            name: of the job; default the function's name and a token.
        """
        label = name or f"{_label(fn)}-{mint(self._runtime.rng, 6)}"
        request = JobRequest(
            name=label,
            resources=resources or ResourceConfig(),
            entrypoint=Entrypoint.from_callable(fn, args, kwargs),
        )
        async with open_service_scope(self._runtime, label) as inner:
            job = await Scope(inner).launch(request, on_failure="absorb")
            await job.wait_ended()
        return await job.wait()

    async def create_actor(
        self,
        cls: type,
        *args: Any,
        name: str | None = None,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        max_restarts: int | None = None,
        actor_config: ActorConfig | None = None,
        on_failure: OnFailure = "escalate",
        get_if_exists: bool = False,
        lifetime: Lifetime = "non_detached",
        **kwargs: Any,
    ) -> ActorHandle:
        """Create ``cls(*args, **kwargs)`` in a process of its own; returns a handle that can be used at once.

        Args:
            name: unique among the living of the namespace; default one is made up. While an earlier holder of the name
                is being ended, the actor waits for that end.
            resources: default none reserved.
            environment: variables for its process.
            max_restarts: how often a failed actor is made anew from its arguments; -1: always. Default: as
                ``actor_config`` says, else 0.
            actor_config: concurrency, restarts, idle time and the like.
            on_failure: as for `launch`.
            get_if_exists: if an actor of this ``name`` lives, return a handle of that one: then nothing is created, the
                class and its arguments are not looked at, and the actor stays whose it is. Of any number of creators
                at the same time, one creates.
            lifetime: ``"detached"``: owned by the cluster, it outlives this scope and this driver until
                `Cluster.delete_actor`. Made by a driver that gave no namespace, it has one of its own, called like
                itself. Default ``"non_detached"``: it ends with this scope.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameTaken: nothing was created.
        """
        _check_lifetime(lifetime, name, get_if_exists)
        config = actor_config or ActorConfig()
        restarts = max_restarts if max_restarts is not None else config.max_restarts or 0
        request = JobRequest(
            name=name or f"{_label(cls)}-{mint(self._runtime.rng, 6)}",
            detached=lifetime == "detached",
            resources=resources or ACTOR_RESOURCES,
            environment=environment,
            max_retries_failure=restarts,
            max_retries_preemption=restarts,
        )
        if request.members() != 1:
            raise InvalidRequest(f"actor {request.name!r}: an actor has one process; replicas must be 1")
        config = evolve(config, max_restarts=restarts)
        spec, content = build_actor_spec(request, self._runtime, cls, args, kwargs, config)
        spec = evolve(spec, get_if_exists=get_if_exists)
        (record,) = await self._children.launch([spec], [content], Kind.ACTOR, Supervision(on_failure), error_of)
        is_new = record.info.job_id == spec.job_id  # else it may be of another class: its own process knows its methods
        return ActorHandle(record.info.job_id, request.name, methods_of(cls) if is_new else None, self._runtime)


def _check_lifetime(lifetime: str, name: str | None, get_if_exists: bool) -> None:
    if lifetime not in get_args(Lifetime):
        raise InvalidRequest(f"lifetime={lifetime!r} must be one of {', '.join(map(repr, get_args(Lifetime)))}")
    if name is None and (get_if_exists or lifetime == "detached"):
        why = "get_if_exists=True" if get_if_exists else 'lifetime="detached"'
        raise InvalidRequest(f"create_actor with {why} needs a name=, or nobody could find the actor again")


def _label(thing: Any) -> str:
    """A job name for a function or class: its own name where that may be one."""
    name = getattr(thing, "__name__", type(thing).__name__)
    return "".join(c if c.isalnum() or c in "_." else "-" for c in name).strip("-._") or "job"


@asynccontextmanager
async def open_scope(runtime: Runtime, name: str) -> AsyncIterator[Scope]:
    async with open_child_scope(runtime, name) as children:
        yield Scope(children)
