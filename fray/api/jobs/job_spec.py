"""Job specs: what a launch sends of requests, actor classes and groups, together with the pickled payloads.

Everything that is wrong with a request is raised here, before anything is sent. Each builder returns the specs of one
launch, which the controller accepts all or none, and the distinct payloads they name by their hashes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    get_args,
    overload,
)

from attrs import evolve, frozen

from fray.errors import InvalidRequest
from fray.model.environment import UNSENT, EnvironmentConfig, EnvironmentSpec, plain_variables, secret_names
from fray.model.gangs import port_names
from fray.model.ids import ANONYMOUS_PREFIX, JobId, Namespace, check_name, mint, mint_job_id, mint_name
from fray.model.job_groups import JobGroupConfig, JobGroupSpec
from fray.model.messages.client import Role
from fray.model.messages.large_values import check_size
from fray.model.policy.name_templates import common_part, expand
from fray.model.requests import Entrypoint, JobRequest
from fray.model.reservations import ReservationId
from fray.model.resources import ResourceConfig, short_repr
from fray.model.specs import (
    BLOB_LIMIT_BYTES,
    NEEDS_A_JOB,
    ActorConfig,
    EntryKind,
    JobSpec,
    SupervisedGroup,
    SupervisionStrategy,
)
from fray.runtime.actors.checkpoints import AT_END_S, check_class
from fray.runtime.actors.lifecycle import CLEANUP
from fray.runtime.actors.methods import check_concurrency, check_health, check_kill_after
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling
from fray.runtime.serialization.values import Value, value_id, value_of
from fray.type_variables import A_co

ACTOR_RESOURCES = ResourceConfig(cpu=0, memory=0)
"""Resources of an actor without ``resources=``: it reserves nothing, and is placed where the fewest actors are."""
CLEANUP_MARGIN_S = 1.0
"""Seconds between the end of an actor's cleanup hook, at its time limit, and SIGTERM."""
GROUP_LIMIT = 10_000
"""Maximum number of members of an actor group, and of actors in one host."""


P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
First = TypeVar("First")

Specs: TypeAlias = tuple[list[JobSpec], list[Value]]
"""Specs of one launch, and their payloads."""
Lifetime = Literal["non_detached", "job", "detached"]


class ReservationHandle(Protocol):
    """`Reservation` of the async or of the blocking API."""

    @property
    def id(self) -> ReservationId: ...


ReservationRef: TypeAlias = ReservationId | ReservationHandle
"""Reservation as an argument: its id, or a handle."""


# Jobs ----------------------------------------------------------------------------------------------------------------


def build_jobs(
    runtime: Runtime,
    request: JobRequest,
    *,
    count: int | None = None,
    name: str | None = None,
    job_id: JobId | None = None,
    adopt_existing: bool = False,
    reservation_id: ReservationRef | None = None,
) -> Specs:
    """Build one job, or ``count`` jobs of one request. The arguments are those of `Scope.launch`.

    Raises:
        InvalidRequest: no entrypoint, or an impossible name, count, id or amount.
        NotPicklable: the callable or an argument cannot be pickled.
        MessageTooLarge: they have more than 4 GiB together.
    """
    spec, content = build_spec(request, runtime)
    spec = _in_reservation(spec, reservation_id)
    specs = [spec] if count is None and name is None else _named(spec, runtime, count, name)
    if job_id is not None:
        if count is not None:
            raise InvalidRequest("job_id= is for one job: with count= each has its own, find them by their names")
        specs = [evolve(specs[0], job_id=_checked_job_id(job_id, specs[0].name))]
    if adopt_existing:
        specs = [evolve(spec, adopt_existing=True) for spec in specs]
    return specs, [] if content is None else [content]


def build_each(runtime: Runtime, requests: Sequence[JobRequest]) -> Specs:
    """Build one job of each request. Raises as `build_jobs`."""
    built = [build_spec(request, runtime) for request in requests]
    return [spec for spec, _ in built], [content for _, content in built if content is not None]


def build_job_group(
    runtime: Runtime,
    requests: Sequence[JobRequest],
    group: JobGroupConfig | None,
    reservation_id: ReservationRef | None = None,
) -> tuple[JobGroupSpec, list[JobSpec], list[Value]]:
    """Build a job group: its own spec, its jobs, and their payloads. ``group``: default ``JobGroupConfig()``.

    Raises:
        InvalidRequest, NotPicklable, MessageTooLarge: as `build_jobs`; or no jobs, or ``group`` of another type.
    """
    config = JobGroupConfig() if group is None else group
    if not isinstance(config, JobGroupConfig):
        raise InvalidRequest(f"launch_group(group={group!r}) needs a JobGroupConfig")
    requests = list(requests)
    if not requests:
        raise InvalidRequest("launch_group needs at least one JobRequest")
    config = evolve(config, name=config.name or mint_name("group", runtime.rng))
    group_spec = JobGroupSpec(group_id=mint_job_id(config.name, runtime.rng), config=config)
    specs, payloads = build_each(runtime, requests)
    members = []
    for spec in specs:
        namespace = config.namespace
        if namespace is None:
            namespace = config.name if _is_namespace_root(spec.detached, runtime) else spec.namespace
        spec = evolve(spec, namespace=namespace, job_group=group_spec.group_id)
        members.append(_in_reservation(spec, reservation_id or None))
    return group_spec, members, payloads


def build_spec(request: JobRequest, runtime: Runtime) -> tuple[JobSpec, Value | None]:
    """Build one job; its payload is None for a program. Raises as `build_jobs`."""
    check_request(request)
    entry = request.entrypoint
    if entry is None or (entry.callable is None and not entry.argv):
        raise InvalidRequest(f"job {request.name!r} has no entrypoint: use Entrypoint.from_callable or from_binary")
    if request.health is not None and request.health.actor is not None:
        raise InvalidRequest(
            f"job {request.name!r}: HealthCheck(actor=...) is for actors; write HealthCheck(path='/healthz') for a "
            f"job, or create_actor(..., actor_config=ActorConfig(health=HealthCheck(actor={request.health.actor!r})))"
        )
    content = None
    if entry.callable is not None:
        content = dump_payload(entry.callable, entry.args, entry.kwargs, f"job {request.name!r}")
    spec = _base_spec(request, runtime, EntryKind.BINARY if content is None else EntryKind.CALLABLE, content)
    spec = evolve(spec, argv=entry.argv, signature=_signature(entry), namespace=_namespace_of(request, runtime))
    return spec, content


def check_request(request: object, extra: Sequence[Any] = ()) -> None:
    """Check the positional arguments of `Scope.launch`: one `JobRequest`, and nothing else in ``extra``.

    Raises:
        InvalidRequest: anything else; the message has the line that was meant.
    """
    args = ", ".join(map(short_repr, extra))
    if isinstance(request, JobRequest):
        if extra:
            raise InvalidRequest(f"launch takes one JobRequest, and got {args} too: launch_all takes a list")
        return
    line = "launch(JobRequest('a-name', entrypoint=...))"
    if isinstance(request, type):
        line = f"create_actor({', '.join(filter(None, (request.__name__, args)))}) for an actor"
    elif callable(request):
        name = default_name(request)
        call = f"Entrypoint.from_callable({name}, args=({args}{',' * (len(extra) == 1)}))" if extra else name
        line = f"scope.run({', '.join(filter(None, (name, args)))}), or launch(JobRequest({name!r}, entrypoint={call}))"
    raise InvalidRequest(f"launch needs a JobRequest, not {short_repr(request)}: write {line}")


def check_function(fn: object) -> None:
    """Check the first argument of `Scope.run`.

    Raises:
        InvalidRequest: it cannot be called; the message has the line that was meant.
    """
    if isinstance(fn, JobRequest):
        raise InvalidRequest("run needs a function, not a JobRequest: write launch(request), and wait() for its result")
    if not callable(fn):
        raise InvalidRequest(f"run needs a function, not {short_repr(fn)}: write run(function, arguments...)")


def build_forecast_spec(request: JobRequest, runtime: Runtime) -> JobSpec:
    """Build a job for `Cluster.what_if`: all that decides where and when it runs, and nothing that must be uploaded."""
    plain_request = evolve(request, environment=evolve(request.environment, workspace=None, env_vars={}))
    entry = request.entrypoint
    argv = entry.argv if entry is not None and entry.argv else ("unsaid",)
    return evolve(_base_spec(plain_request, runtime, EntryKind.BINARY, None), argv=argv)


# Actors --------------------------------------------------------------------------------------------------------------


def build_actor(
    runtime: Runtime,
    cls: type,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    resources: ResourceConfig | None = None,
    environment: EnvironmentConfig | None = None,
    max_restarts: int | None = None,
    config: ActorConfig | None = None,
    get_if_exists: bool = False,
    lifetime: Lifetime = "non_detached",
    reservation_id: ReservationRef | None = None,
) -> Specs:
    """Build the job of one actor. The arguments are those of `Scope.create_actor`.

    Raises:
        InvalidRequest: not a class, an impossible name, amount or limit, or no name where one is required.
        NotPicklable, MessageTooLarge: class and arguments cannot be sent.
    """
    _check_lifetime(runtime, lifetime, name, get_if_exists)
    config = config or ActorConfig()
    restarts = max_restarts if max_restarts is not None else config.max_restarts or 0
    name = name or mint_name(default_name(cls), runtime.rng)
    request = actor_request(name, resources, environment, restarts, detached=lifetime == "detached")
    config = evolve(config, max_restarts=restarts)
    spec, content = build_actor_spec(request, runtime, cls, args, kwargs or {}, config)
    spec = evolve(spec, get_if_exists=get_if_exists, owned_by_job=lifetime == "job")
    return [_in_reservation(spec, reservation_id)], [content]


def build_actor_group(
    runtime: Runtime,
    request: JobRequest,
    count: int | None,
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: ActorConfig,
    reservation_id: ReservationRef | None = None,
) -> Specs:
    """Build the jobs of an actor group; all share one payload. ``request`` has the group's name.

    Args:
        count: of the members, named ``{name}-{index}``. None: one actor, with the name of the request and in no group.

    Raises:
        InvalidRequest: an impossible count or name.
        NotPicklable, MessageTooLarge: class and arguments cannot be sent.
    """
    if count is not None:
        check_count(request.name, count)
    first, content = build_actor_spec(request, runtime, cls, args, kwargs, config)
    first = _in_reservation(first, reservation_id)
    if count is None:
        return [first], [content]
    members = []
    for index in range(count):
        name = check_name(f"{request.name}-{index}", "a member of a group")
        job_id = mint_job_id(name, runtime.rng)
        members.append(evolve(first, job_id=job_id, name=name, group=request.name, index=index))
    return members, [content]


def check_count(name: str, count: int) -> None:
    """Raise InvalidRequest unless a group may have ``count`` members."""
    if not isinstance(count, int) or not 1 <= count <= GROUP_LIMIT:
        raise InvalidRequest(f"group {name!r}: count={count!r} must be a whole number from 1 to {GROUP_LIMIT:,}")


@frozen
class ChildSpec(Generic[A_co]):
    """Member of a supervised group; made by `child`."""

    cls: type[A_co]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str | None
    resources: ResourceConfig | None
    environment: EnvironmentConfig | None
    actor_config: ActorConfig | None


# For type checkers, as `Scope.create_actor`: a parameter specification and options do not go together.
@overload
def child(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> ChildSpec[T]: ...
@overload
def child(
    cls: Callable[[*Ts], T],
    *args: *Ts,
    name: str | None = None,
    resources: ResourceConfig | None = None,
    environment: EnvironmentConfig | None = None,
    actor_config: ActorConfig | None = None,
) -> ChildSpec[T]: ...
@overload
def child(cls: Callable[..., T], *, name: str | None, **kwargs: Any) -> ChildSpec[T]: ...  # type: ignore[overload-cannot-match]
@overload
def child(
    cls: Callable[Concatenate[First, ...], T], arg: First, /, *, name: str | None, **kwargs: Any
) -> ChildSpec[T]: ...


def child(  # type: ignore[misc]
    cls: Any,
    *args: Any,
    name: str | None = None,
    resources: ResourceConfig | None = None,
    environment: EnvironmentConfig | None = None,
    actor_config: ActorConfig | None = None,
    **kwargs: Any,
) -> ChildSpec:
    """Return ``cls(*args, **kwargs)`` as a member of a group for `Scope.supervise`.

    The arguments are those of `Scope.create_actor`; restarts and back-off are the group's and must not be set in
    ``actor_config``.
    """
    return ChildSpec(cls, args, kwargs, name, resources, environment, actor_config)


def build_supervised_group(
    runtime: Runtime, children: Sequence[ChildSpec], strategy: str, policy: ActorConfig
) -> Specs:
    """Build the jobs of a supervised group, each with a payload of its own. ``policy`` has the group's restarts.

    Raises:
        InvalidRequest: no children, a child that `child` did not make or that has restarts of its own, or an unknown
            strategy.
        NotPicklable, MessageTooLarge: a child cannot be sent.
    """
    if strategy not in list(SupervisionStrategy):
        raise InvalidRequest(
            f"strategy={strategy!r} must be one of {', '.join(repr(s.value) for s in SupervisionStrategy)}"
        )
    if not children:
        raise InvalidRequest("supervise needs at least one fray.child(...)")
    group_id = f"group-{mint(runtime.rng)}"
    specs, payloads = [], []
    for index, member in enumerate(children):
        spec, content = _build_child(runtime, member, policy)
        siblings = SupervisedGroup(group_id=group_id, strategy=SupervisionStrategy(strategy), index=index)
        specs.append(evolve(spec, siblings=siblings))
        payloads.append(content)
    return specs, payloads


def _build_child(runtime: Runtime, member: ChildSpec, policy: ActorConfig) -> tuple[JobSpec, Value]:
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
    name = member.name or mint_name(default_name(member.cls), runtime.rng)
    request = actor_request(name, member.resources, member.environment, policy.max_restarts or 0)
    return build_actor_spec(request, runtime, member.cls, member.args, member.kwargs, config)


def actor_request(
    name: str,
    resources: ResourceConfig | None,
    environment: EnvironmentConfig | None,
    restarts: int,
    *,
    detached: bool = False,
) -> JobRequest:
    """Return the request of a job that hosts one actor.

    Raises:
        InvalidRequest: its resources mean more than one process.
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


def build_actor_spec(
    request: JobRequest,
    runtime: Runtime,
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: ActorConfig | None = None,
) -> tuple[JobSpec, Value]:
    """Build the job of one actor. ``request`` gives name, resources and retries; its entrypoint is ignored."""
    if not isinstance(cls, type):
        raise InvalidRequest(f"create_actor needs a class, not {cls!r}")
    config = config or ActorConfig()
    check_concurrency(cls, config.max_concurrency, config.concurrency_groups)
    check_kill_after(cls, config.kill_after_s)
    check_health(cls, config.health)
    content = dump_payload(cls, args, kwargs, f"actor {request.name!r}")
    spec = _base_spec(request, runtime, EntryKind.ACTOR, content)
    # The cleanup hook and the last checkpoint run between cancellation and SIGTERM: leave time for both.
    termination = spec.termination
    at_end_s = config.cleanup_s if hasattr(cls, CLEANUP) else 0.0
    at_end_s += AT_END_S if check_class(cls, config) else 0.0
    if at_end_s:
        termination = evolve(termination, cancel_s=max(termination.cancel_s, at_end_s + CLEANUP_MARGIN_S))
    return evolve(
        spec,
        actor=config,
        namespace=_namespace_of(request, runtime),
        termination=termination,
        health=config.health,
        wait_limit_s=config.wait_limit_s,
        # Of a request from `fray.v2` it may be set already.
        notice_s=config.preemption_notice_s or spec.notice_s,
    ), content


def default_name(fn_or_cls: Any) -> str:
    """Return a job name for a function or class: its own name, without characters that job names must not have."""
    name = getattr(fn_or_cls, "__name__", type(fn_or_cls).__name__)
    return "".join(c if c.isalnum() or c in "_." else "-" for c in name).strip("-._") or "job"


def dump_payload(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> Value:
    """Pickle a callable or class with its arguments; ``what`` names the job or actor in errors.

    Raises:
        NotPicklable: a part cannot be pickled.
        MessageTooLarge: it has more than 4 GiB.
    """
    content = value_of(pickling.pack_work(fn, args, kwargs, what))
    if len(content) > BLOB_LIMIT_BYTES:
        check_size(len(content), f"{what}: the code with its arguments")
    return content


# Parts of a spec -----------------------------------------------------------------------------------------------------


def _base_spec(request: JobRequest, runtime: Runtime, entry: EntryKind, content: Value | None) -> JobSpec:
    variables = request.environment.env_vars
    demand = request.resources.demand()
    members = request.resources.members(request.replicas, f"job {request.name!r}")
    spec = JobSpec(
        job_id=mint_job_id(request.name, runtime.rng),
        name=request.name,
        namespace=runtime.namespace,
        user=request.on_behalf_of or runtime.user,
        entry=entry,
        payload=None if content is None else value_id(content),
        demand=demand,
        alternatives=request.resources.alternatives(),
        members=members,
        gang=request.replicas is not None or any(device.kind == "tpu" for device in request.resources.devices),
        env_vars=plain_variables(variables),
        secrets=secret_names(variables),
        sys_path=tuple(path or os.getcwd() for path in sys.path),
        cwd=os.getcwd(),
        environment=_environment_of(request, entry, runtime),
        max_retries_failure=request.max_retries_failure,
        max_retries_preemption=request.max_retries_preemption,
        detached=request.detached,
        termination=request.termination,
        ports=request.ports,
        health=request.health,
        stall_s=request.stall_s,
        on_stall=request.on_stall,
        max_retries_machine_loss=request.max_retries_machine_loss,
        max_retries_out_of_memory=request.max_retries_out_of_memory,
        exit_codes=request.exit_codes,
        backoff_s=request.backoff_s,
        backoff_max_s=request.backoff_max_s,
        result_storage=request.result_storage or "",
        memory_limit_bytes=request.resources.memory_limit_bytes(),
        pin_cpus=request.resources.pin_cpus,
        band=request.priority,
        time_limit_s=request.time_limit_s,
        wait_limit_s=request.wait_limit_s,
        notice_s=request.preemption_notice_s,
        role=request.role,
    )
    ports, containers = len(port_names(spec)), spec.environment.docker_image is not None
    choices = (evolve(each, ports=ports, containers=containers) for each in (demand, *spec.alternatives))
    return evolve(spec, demand=next(choices), alternatives=tuple(choices))


def _environment_of(request: JobRequest, entry: EntryKind, runtime: Runtime) -> EnvironmentSpec:
    """Return the environment of the job's processes.

    A pickle is loaded by the Python version that made it; a program needs none. Extras are those of the project around
    this code: of the workspace it was launched with, else of the working directory.
    """
    config = request.environment
    if config.extras and config.workspace is None and not runtime.bundle and os.path.exists("pyproject.toml"):
        config = evolve(config, workspace=os.getcwd())
    workspace = None
    if config.workspace is not None:  # replaced by the bundle's id when `fray.runtime.workspaces.upload` has sent it
        workspace = UNSENT + os.path.realpath(os.path.expanduser(config.workspace))
    return EnvironmentSpec(
        extras=config.extras,
        pip_packages=config.pip_packages,
        bundle=workspace,
        docker_image=config.docker_image,
        python="" if entry is EntryKind.BINARY else f"{sys.version_info.major}.{sys.version_info.minor}",
    )


def _namespace_of(request: JobRequest, runtime: Runtime) -> Namespace:
    return request.name if _is_namespace_root(request.detached, runtime) else runtime.namespace


def _is_namespace_root(detached: bool, runtime: Runtime) -> bool:
    """Return whether what is launched gets a namespace of its own name.

    Detached things outlive the driver, and the namespace of a driver that gave none would be known to no other driver.
    """
    return detached and (not runtime.namespace or runtime.namespace.startswith(ANONYMOUS_PREFIX))


def _signature(entry: Entrypoint) -> str:
    """Return the callable's qualified name and a hash of its arguments; empty for programs, compared by ``argv``."""
    # For `adopt_existing` and `job_id`: requests are compared by what they name, not by code or pickles, because
    # pickles of the same class differ from process to process.
    fn = entry.callable
    if fn is None:
        return ""
    qualified_name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    return f"{qualified_name}#{pickling.digest_to_compare((entry.args, entry.kwargs))[:16]}"


def _named(spec: JobSpec, runtime: Runtime, count: int | None, name: str | None) -> list[JobSpec]:
    pattern = name if name is not None else f"{spec.name}/{{index}}"
    if not isinstance(pattern, str):
        raise InvalidRequest(f"name={name!r} must be a text such as '{{user}}/rollout/{{index}}'")
    names = expand(pattern, count, runtime.user)
    namespace = spec.namespace
    if spec.detached and namespace == spec.name:  # a root: jobs that are launched together share a namespace
        namespace = names[0] if count is None else common_part(pattern, runtime.user)
    return [
        evolve(spec, job_id=mint_job_id(each, runtime.rng), name=each, namespace=namespace, index=index)
        for index, each in enumerate(names)
    ]


def _checked_job_id(job_id: JobId, name: str) -> JobId:
    token = job_id.removeprefix(f"{name}-") if isinstance(job_id, str) else ""
    if token == job_id or not (token.isascii() and token.isalnum() and len(token) <= 40):
        raise InvalidRequest(
            f"job_id={job_id!r} must be the job's name, a dash, and 1 to 40 letters or digits: {name + '-run1'!r}"
        )
    return job_id


def _check_lifetime(runtime: Runtime, lifetime: str, name: str | None, get_if_exists: bool) -> None:
    if lifetime not in get_args(Lifetime):
        raise InvalidRequest(f"lifetime={lifetime!r} must be one of {', '.join(map(repr, get_args(Lifetime)))}")
    if lifetime == "job" and runtime.role is not Role.JOB:
        raise InvalidRequest(f"create_actor: {NEEDS_A_JOB}")
    if name is None and (get_if_exists or lifetime != "non_detached"):
        why = "get_if_exists=True" if get_if_exists else f'lifetime="{lifetime}"'
        raise InvalidRequest(f"name= is required for create_actor with {why}: the actor is found by its name")


def _in_reservation(spec: JobSpec, reservation: ReservationRef | None) -> JobSpec:
    return spec if reservation is None else evolve(spec, reservation_id=reservation_id_of(reservation))


def reservation_id_of(reservation: ReservationRef) -> ReservationId:
    """Return the id of a `Reservation` (of the async or the blocking API), or the id itself.

    Raises:
        InvalidRequest: neither.
    """
    found = reservation if isinstance(reservation, str) else getattr(reservation, "id", None)
    if not isinstance(found, str) or not found:
        raise InvalidRequest(f"reservation_id={reservation!r} is neither a reservation nor the id of one")
    return found
