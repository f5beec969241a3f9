"""Supervised groups of actors, and what the owner of a failed child decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

from attrs import evolve, frozen

from fray.api.actors.handle import ActorHandle
from fray.api.jobs.job import Job, build_actor_spec
from fray.errors import InvalidRequest
from fray.model.environment import EnvironmentConfig
from fray.model.ids import mint, mint_name
from fray.model.requests import JobRequest
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig, JobSpec, SupervisedGroup, SupervisionStrategy
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.runtime import Runtime
from fray.runtime.scope.children import OnChildFailure

ACTOR_RESOURCES = ResourceConfig(cpu=0, memory=0)
"""An actor that asks for nothing reserves nothing, and goes where the fewest are."""

Verdict = Literal["escalate", "absorb"]
FailureHook: TypeAlias = Callable[[Any, BaseException], Verdict]
"""Told the `Job` or `ActorHandle` that failed for good, and its error; runs in the scope's task, and must not wait."""
OnFailure: TypeAlias = Verdict | FailureHook


@frozen
class ChildSpec:
    """One member of a supervised group; made by `child`."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str | None
    resources: ResourceConfig | None
    environment: EnvironmentConfig | None
    actor_config: ActorConfig | None


def child(
    cls: type,
    *args: Any,
    name: str | None = None,
    resources: ResourceConfig | None = None,
    environment: EnvironmentConfig | None = None,
    actor_config: ActorConfig | None = None,
    **kwargs: Any,
) -> ChildSpec:
    """``cls(*args, **kwargs)`` as a member of a group for `Scope.supervise`; the arguments are those of `create_actor`.

    ``actor_config`` says nothing of restarts and back-off: they are the group's.
    """
    return ChildSpec(cls, args, kwargs, name, resources, environment, actor_config)


def label_of(thing: Any) -> str:
    """A job name for a function or class: its own name where that may be one."""
    name = getattr(thing, "__name__", type(thing).__name__)
    return "".join(c if c.isalnum() or c in "_." else "-" for c in name).strip("-._") or "job"


def build_group(
    runtime: Runtime, children: Sequence[ChildSpec], strategy: str, policy: ActorConfig
) -> list[tuple[JobSpec, bytes]]:
    """The jobs of a group, each with its closed payload.

    Raises:
        InvalidRequest: no children, something that is no `child`, an unknown strategy, or restarts asked for twice.
        NotPicklable, MessageTooLarge: a child cannot travel.
    """
    if strategy not in list(SupervisionStrategy):
        raise InvalidRequest(
            f"strategy={strategy!r} must be one of {', '.join(repr(s.value) for s in SupervisionStrategy)}"
        )
    if not children:
        raise InvalidRequest("supervise needs at least one fray.child(...)")
    group_id = f"group-{mint(runtime.rng)}"
    built = []
    for index, member in enumerate(children):
        spec, content = _build(runtime, member, policy)
        siblings = SupervisedGroup(group_id=group_id, strategy=SupervisionStrategy(strategy), index=index)
        built.append((evolve(spec, siblings=siblings), content))
    return built


def _build(runtime: Runtime, member: ChildSpec, policy: ActorConfig) -> tuple[JobSpec, bytes]:
    if not isinstance(member, ChildSpec):
        raise InvalidRequest(f"supervise takes a list of fray.child(Class, ...), not {member!r}")
    own = member.actor_config or ActorConfig()
    if own.max_restarts is not None or own.restart_period_s is not None or own.backoff_s:
        raise InvalidRequest(
            f"child {member.cls.__name__}: restarts are counted for the whole group: give max_restarts, period_s and "
            "backoff_s to supervise(), not to the child"
        )
    config = evolve(
        own,
        max_restarts=policy.max_restarts,
        restart_period_s=policy.restart_period_s,
        backoff_s=policy.backoff_s,
        backoff_max_s=policy.backoff_max_s,
    )
    restarts = policy.max_restarts or 0
    name = member.name or mint_name(label_of(member.cls), runtime.rng)
    request = actor_request(name, member.resources, member.environment, restarts)
    return build_actor_spec(request, runtime, member.cls, member.args, member.kwargs, config)


def actor_request(
    name: str,
    resources: ResourceConfig | None,
    environment: EnvironmentConfig | None,
    restarts: int,
    *,
    detached: bool = False,
) -> JobRequest:
    """Of the job that hosts one actor, or each of several.

    Raises:
        InvalidRequest: it would have more than one process.
    """
    request = JobRequest(
        name=name,
        resources=resources or ACTOR_RESOURCES,
        environment=environment,
        max_retries_failure=restarts,
        max_retries_preemption=restarts,
        detached=detached,
    )
    if request.members() != 1:
        raise InvalidRequest(f"actor {name!r}: an actor has one process; say count=, not replicas, for more of them")
    return request


# What the owner decides ----------------------------------------------------------------------------------------------


def failure_policy(
    on_failure: OnFailure, thing_of: Callable[[JobRecord], Job | ActorHandle]
) -> OnChildFailure | Callable[[JobRecord, BaseException], OnChildFailure]:
    """What is decided when a child has failed for good.

    Raises:
        InvalidRequest: ``on_failure`` is neither a word nor callable.
    """
    if isinstance(on_failure, str) and on_failure in get_args(Verdict):
        return OnChildFailure(on_failure)
    if not callable(on_failure):
        raise InvalidRequest(f'on_failure={on_failure!r} must be "escalate", "absorb" or a function(child, error)')
    return lambda record, error: _asked(on_failure, thing_of(record), error)


def _asked(hook: FailureHook, thing: Job | ActorHandle, error: BaseException) -> OnChildFailure:
    verdict = hook(thing, error)
    if verdict not in get_args(Verdict):
        raise InvalidRequest(
            f'the on_failure hook answered {verdict!r} for {thing!r}: return "escalate" or "absorb" (a plain function, '
            "not an async one)"
        ) from error
    return OnChildFailure(verdict)
