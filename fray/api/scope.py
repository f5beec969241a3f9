"""Scope of jobs and actors: a nursery whose children run anywhere in the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

from attrs import evolve

from fray.api.actors.group import ActorGroup
from fray.api.actors.handle import ActorHandle, methods_of
from fray.api.actors.host import ActorHost
from fray.api.async_block import async_block
from fray.api.job_html import jobs_html
from fray.api.jobs.job import Job, error_of
from fray.api.jobs.job_spec import (
    ChildSpec,
    Lifetime,
    ReservationRef,
    Specs,
    actor_request,
    build_actor,
    build_actor_group,
    build_each,
    build_job_group,
    build_jobs,
    build_supervised_group,
    check_count,
    check_function,
    check_request,
    default_name,
)
from fray.api.launch_options import ActorOptions, GroupOptions, RunOptions
from fray.api.on_failure import OnFailure, failure_policy
from fray.errors import NameInUse, NotPicklable
from fray.missing_names import SCOPE_LINES, ExplainsMissing
from fray.model.environment import EnvironmentConfig, Secret
from fray.model.ids import ActorId, JobId, mint_name
from fray.model.monitoring.health import HealthCheck
from fray.model.requests import Entrypoint, JobRequest
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig
from fray.model.text import plural
from fray.runtime.actors.light import LightActorHost
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.runtime import Runtime
from fray.runtime.scope.children import ChildKind, OnChildFailure
from fray.runtime.scope.scope import ChildScope, open_child_scope, open_service_scope
from fray.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from fray.api.jobs.job_group import JobGroup
    from fray.model.job_groups import JobGroupConfig, JobGroupSpec


P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
First = TypeVar("First")


@short_tracebacks
class Scope(ExplainsMissing):
    """Owner of jobs and actors. Leaving it waits for its jobs, then ends its actors; an error ends both.

    A child that fails by itself cancels the scope, and its error leaves the ``async with`` in an ExceptionGroup, unless
    the child was launched with ``on_failure="absorb"``.
    """

    _meant = SCOPE_LINES

    def __init__(self, children: ChildScope) -> None:
        self._children = children

    @property
    def name(self) -> str:
        return self._children.name

    @property
    def _runtime(self) -> Runtime:
        return self._children.runtime

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            "a scope belongs to its process: pass handles of its jobs and actors, or open another scope in the job: "
            "fray.current_cluster().open_scope()"
        )

    def __repr__(self) -> str:
        return f"<Scope {self.name!r}: {plural(len(self._children.living_infos()), 'child', 'children')}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the living jobs and actors."""
        return jobs_html(f"Scope {self.name}", self._children.living_infos())

    @overload
    async def launch(
        self,
        request: JobRequest[Coroutine[Any, Any, T]],
        *,
        count: None = None,
        name: str | None = None,
        job_id: JobId | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = "escalate",
    ) -> Job[T]: ...
    @overload
    async def launch(
        self,
        request: JobRequest[T],
        *,
        count: None = None,
        name: str | None = None,
        job_id: JobId | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = "escalate",
    ) -> Job[T]: ...
    @overload
    async def launch(
        self,
        request: JobRequest[T],
        *,
        count: int,
        name: str | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = "escalate",
    ) -> list[Job[T]]: ...

    async def launch(
        self,
        request: JobRequest,
        *extra: Any,  # refused with the line that was meant; type checkers see the overloads
        count: int | None = None,
        name: str | None = None,
        job_id: JobId | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationRef | None = None,
        on_failure: OnFailure = "escalate",
    ) -> Job | list[Job]:
        """Launch a job owned by this scope, or ``count`` of them; returns once the controller has accepted all.

        Args:
            count: 1 to 10,000 jobs of this request, all or none; returns a list of them, in order. Each job has its
                number in ``FRAY_JOB_INDEX``. Default None: one job, not a list.
            name: replaces that of the request; ``{user}`` is the user of the driver, and with ``count`` ``{index}``
                (``{index:03d}``: with zeros) is the number of the job, from 0. Default with ``count``: the request's
                name and ``/{index}``.
            job_id: a chosen id: the name, a dash, and letters or digits. Launching the same request again under it,
                from anywhere, returns the same job, even after its end, as long as the cluster remembers it.
            adopt_existing: return a living job of this name instead, if its request is the same; its owner does not
                change. Of concurrent launches, one launches.
            reservation_id: reservation (or its id) whose machines the job runs on, and no others; it waits for free
                machines there, and ends with the reservation. Default: machines that are not reserved.
            on_failure: effect of its failure, after all retries: ``"escalate"`` (default): it fails the scope;
                ``"absorb"``: only waits for the job raise it; or a function ``hook(child, error)``, which gets the
                `Job` (or `ActorHandle`) and returns one of the two. The hook runs in the scope's task and must not
                wait; what it raises fails the scope.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable: nothing was launched. InvalidRequest also
                if ``job_id`` belongs to a different request.
            NoSuchReservation: nothing was launched: the reservation is unknown, or has ended.
            NameInUse: nothing was launched; with ``adopt_existing`` the message names the differences from the living
                job's request.
            ConnectionFailed: the connection to the controller has ended.
        """
        check_request(request, extra)
        built = build_jobs(
            self._runtime,
            request,
            count=count,
            name=name,
            job_id=job_id,
            adopt_existing=adopt_existing,
            reservation_id=reservation_id,
        )
        # Only these may return a job of another owner, which this scope must not end or watch.
        jobs = await self._launch_jobs(built, on_failure, may_exist=adopt_existing or job_id is not None)
        return jobs if count is not None else jobs[0]

    async def launch_all(
        self, requests: Sequence[JobRequest[T]], *, on_failure: OnFailure = "escalate"
    ) -> list[Job[T]]:
        """Launch several jobs, all or none. Raises as `launch`."""
        return await self._launch_jobs(build_each(self._runtime, requests), on_failure)

    async def launch_group(
        self,
        requests: Sequence[JobRequest],
        group: JobGroupConfig | None = None,
        reservation_id: str | None = None,
        *,
        on_failure: OnFailure = "escalate",
    ) -> JobGroup:
        """Launch jobs that are placed together and near each other, all or none; returns once the controller has
        accepted all of them.

        Args:
            requests: one per job; each may set its `JobRequest.role`.
            group: name, locality, and the effect of one job's end on the others. Default: ``JobGroupConfig()``.
            reservation_id: place all of them on the machines of this reservation.
            on_failure: as for `launch`, called once, for the member that failed the group.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NameInUse, NeverSchedulable: nothing was launched.
            ConnectionFailed: the connection to the controller has ended.
        """
        from fray.api.jobs.job_group import JobGroup  # imported here: few programs use job groups

        # Built before anything is sent: pickling errors and invalid requests launch nothing.
        spec, specs, payloads = build_job_group(self._runtime, requests, group, reservation_id)
        return JobGroup(self._runtime, spec, await self._launch_jobs((specs, payloads), on_failure, group=spec))

    async def _launch_jobs(
        self, built: Specs, on_failure: OnFailure, may_exist: bool = False, group: JobGroupSpec | None = None
    ) -> list[Job]:
        decide = OnChildFailure.ESCALATE if on_failure == "escalate" else failure_policy(on_failure, self._job)
        records = await self._children.launch(*built, ChildKind.JOB, decide, error_of, may_exist, group)
        return [self._job(record) for record in records]

    async def _launch_actors(self, built: Specs, on_failure: OnFailure) -> list[JobRecord]:
        decide = failure_policy(on_failure, self._actor)
        return await self._children.launch(*built, ChildKind.ACTOR, decide, error_of)

    def _job(self, record: JobRecord) -> Job:
        return Job(self._runtime, record)

    def _actor(self, record: JobRecord, methods: tuple[str, ...] | None = None) -> ActorHandle:
        return ActorHandle(record.info.job_id, record.info.name, methods, self._runtime)

    async def wait_jobs_then_end_actors(self) -> None:
        """Wait for all jobs, then end all actors: the exit of an ``async with`` in which nothing failed."""
        await self._children.wait_jobs_then_end_actors()

    @overload
    async def run(self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(
        self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], /, *args: *Ts, **options: Unpack[RunOptions]
    ) -> T: ...
    @overload
    async def run(self, fn: Callable[[*Ts], T], /, *args: *Ts, **options: Unpack[RunOptions]) -> T: ...
    @overload
    async def run(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., Coroutine[Any, Any, T]], /, *, name: str | None, **kwargs: Any
    ) -> T: ...
    @overload
    async def run(self, fn: Callable[..., T], /, *, name: str | None, **kwargs: Any) -> T: ...  # type: ignore[overload-cannot-match]
    @overload
    async def run(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., Coroutine[Any, Any, T]], /, *, resources: ResourceConfig | None, **kwargs: Any
    ) -> T: ...
    @overload
    async def run(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., T], /, *, resources: ResourceConfig | None, **kwargs: Any
    ) -> T: ...

    async def run(  # type: ignore[misc]
        self,
        /,
        fn: Callable[..., Any],
        *args: Any,
        resources: ResourceConfig | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` as a job of its own and return its result.

        A failure is raised here and does not fail the scope. Cancelling the await ends the job.

        Args:
            resources: default 1 CPU, 2 GB.
            name: of the job; default the function's name and a random suffix.

        Raises:
            InvalidRequest: ``fn`` is not a function; nothing was launched.
        """
        check_function(fn)
        # A random suffix: concurrent runs of one function must not collide on a name.
        label = name or mint_name(default_name(fn), self._runtime.rng)
        request = JobRequest(
            name=label,
            resources=resources or ResourceConfig(),
            entrypoint=Entrypoint.from_callable(fn, args, kwargs),
        )
        # A scope of its own: cancelling this await ends the job and waits for that, and its failure is raised here
        # only.
        async with open_service_scope(self._runtime, label) as inner:
            inner.variables = self._children.variables
            # Raised by `job.wait` below, once, instead of by the scope as well.
            job = await Scope(inner).launch(request, on_failure="absorb")
            # Inside the scope, so that a cancellation here ends the job. The result is read after the scope has been
            # left.
            await job.wait_ended()
        return await job.wait()

    @overload
    async def create_actor(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[T]: ...
    @overload
    async def create_actor(
        self, cls: Callable[[*Ts], T], /, *args: *Ts, **options: Unpack[ActorOptions]
    ) -> ActorHandle[T]: ...
    @overload
    async def create_actor(self, cls: Callable[..., T], /, *, name: str | None, **kwargs: Any) -> ActorHandle[T]: ...  # type: ignore[overload-cannot-match]
    @overload
    async def create_actor(  # type: ignore[overload-cannot-match]
        self, cls: Callable[..., T], /, *, resources: ResourceConfig | None, **kwargs: Any
    ) -> ActorHandle[T]: ...
    @overload
    async def create_actor(  # type: ignore[overload-cannot-match]
        self, cls: Callable[..., T], /, *, actor_config: ActorConfig | None, **kwargs: Any
    ) -> ActorHandle[T]: ...
    @overload
    async def create_actor(  # type: ignore[overload-cannot-match]
        self, cls: Callable[..., T], /, *, max_restarts: int | None, **kwargs: Any
    ) -> ActorHandle[T]: ...
    @overload
    async def create_actor(
        self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, name: str | None, **kwargs: Any
    ) -> ActorHandle[T]: ...

    async def create_actor(  # type: ignore[misc]
        self,
        /,
        cls: Any,
        *args: Any,
        name: str | None = None,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        max_restarts: int | None = None,
        actor_config: ActorConfig | None = None,
        on_failure: OnFailure = "escalate",
        get_if_exists: bool = False,
        lifetime: Lifetime = "non_detached",
        reservation_id: ReservationRef | None = None,
        **kwargs: Any,
    ) -> ActorHandle:
        """Create ``cls(*args, **kwargs)`` in a process of its own; return a handle that can be used at once.

        Args:
            name: unique among the living of the namespace; default: a generated name. While an earlier actor of the
                name is being ended, the new one waits for that.
            resources: default none reserved.
            environment: packages, files, image and variables of its process.
            max_restarts: number of times a failed actor is restarted from its arguments; -1: no limit. Default: that of
                ``actor_config``, else 0.
            actor_config: concurrency, restarts, idle time and the like.
            on_failure: as for `launch`.
            get_if_exists: if an actor of this ``name`` lives, return a handle of it: nothing is created, class and
                arguments are ignored, and its owner does not change. Of concurrent creators, one creates. With
                ``lifetime="job"`` only an actor that this job owns is returned; another one is a `NameInUse`.
            lifetime: default ``"non_detached"``: it ends with this scope. ``"job"``, in a process of a job: owned by
                that job as a whole, it outlives this scope and stays while the job restarts, whose next attempt finds
                it with ``get_if_exists``; it ends with the job. ``"detached"``: owned by the cluster, it outlives this
                scope and this driver until `Cluster.delete_actor`; if the driver has no namespace, the actor gets one
                of its own name. Both need a ``name``.
            reservation_id: reservation whose machines it runs on, as for `launch`.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was created.
        """
        built = build_actor(
            self._runtime,
            cls,
            args,
            kwargs,
            name=name,
            resources=resources,
            environment=environment,
            max_restarts=max_restarts,
            config=actor_config,
            get_if_exists=get_if_exists,
            lifetime=lifetime,
            reservation_id=reservation_id,
        )
        (spec,), _ = built
        try:
            (record,) = await self._launch_actors(built, on_failure)
        # Light actors are not known to the controller as jobs, so a name of one is refused, and answered here with its
        # handle.
        except NameInUse as error:
            holder = _light_holder(error) if get_if_exists and not spec.owned_by_job else None
            if holder is None:
                raise
            return ActorHandle(holder, spec.name, None, self._runtime)
        is_new = record.info.job_id == spec.job_id  # an existing one may be of another class, with other methods
        return self._actor(record, methods_of(cls) if is_new else None)

    async def supervise(
        self,
        children: Sequence[ChildSpec[T]],
        *,
        strategy: Literal["one_for_one", "one_for_all", "rest_for_one"] = "one_for_one",
        max_restarts: int = 3,
        period_s: float | None = 60.0,
        backoff_s: float = 0.0,
        backoff_max_s: float = 30.0,
        on_failure: OnFailure = "escalate",
    ) -> list[ActorHandle[T]]:
        """Create a group of actors that fail and restart together; return their handles in order.

        When one of them fails (or its machine is lost), the strategy decides which of the others are ended too, at no
        cost to their restarts. All of these restart from their arguments in the order of ``children``, once the last of
        them has ended.

        Args:
            children: each a `fray.child(Class, *args, name=...)`; all are created, or none.
            strategy: ``"one_for_one"``: only the failed one restarts; ``"one_for_all"``: all; ``"rest_for_one"``: the
                failed one and those after it.
            max_restarts: failures that the group survives within ``period_s``; -1: no limit. One more ends the whole
                group, with that error.
            period_s: None: the whole life of the group.
            backoff_s: wait before the first restart; doubled with each further one up to ``backoff_max_s``.
            on_failure: as for `launch`, called once for the group, for the member that failed last.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was created.
        """
        # One policy for all: a supervised group has a single budget of restarts.
        policy = ActorConfig(
            max_restarts=max_restarts, restart_period_s=period_s, backoff_s=backoff_s, backoff_max_s=backoff_max_s
        )
        records = await self._launch_actors(
            build_supervised_group(self._runtime, children, strategy, policy), on_failure
        )
        return [self._actor(record, methods_of(each.cls)) for record, each in zip(records, children, strict=True)]

    @overload
    async def create_actor_group(
        self, cls: Callable[[*Ts], T], /, *args: *Ts, count: int, **options: Unpack[GroupOptions]
    ) -> ActorGroup[T]: ...
    @overload
    async def create_actor_group(self, cls: Callable[..., T], /, *, count: int, **kwargs: Any) -> ActorGroup[T]: ...
    @overload
    async def create_actor_group(
        self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, count: int, **kwargs: Any
    ) -> ActorGroup[T]: ...

    async def create_actor_group(  # type: ignore[misc]
        self,
        /,
        cls: Any,
        *args: Any,
        count: int,
        name: str | None = None,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        actor_config: ActorConfig | None = None,
        on_failure: OnFailure = "escalate",
        light: bool = False,
        reservation_id: ReservationRef | None = None,
        **kwargs: Any,
    ) -> ActorGroup:
        """Create the same actor ``count`` times, all or none; returns at once, and the members become ready one by one.

        Each is a job of its own named ``{name}-{index}``; its `current_actor` has ``group`` and ``index``.

        Args:
            count: 1 to 10,000.
            light: all in one process, a host made for them (see `create_host`, also for restarts of the process:
                ``max_restarts`` of ``actor_config`` applies to it, too); ``resources`` are then those of the process.
            name: of the group, prefix of the names of its members; default: a generated name.
            resources: of each member; default none reserved.
            environment: packages, files, image and variables of their processes.
            actor_config: concurrency, restarts, idle time and the like, of each member.
            on_failure: as for `launch`, of each member.
            reservation_id: reservation whose machines they run on, as for `launch`; not for light actors.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was created.
        """
        config = actor_config or ActorConfig()
        # None would mean the budgets of the request; here an actor is not restarted by default.
        config = evolve(config, max_restarts=config.max_restarts or 0)
        if light:
            check_count(name or cls.__name__, count)
            host = await self.create_host(
                None if name is None else f"{name}-host",
                resources=resources,
                environment=environment,
                max_restarts=config.max_restarts or 0,
                on_failure=on_failure,
            )
            return await host.create_actors(cls, *args, count=count, name=name, actor_config=config, **kwargs)
        label = name or mint_name(default_name(cls), self._runtime.rng)
        request = actor_request(label, resources, environment, config.max_restarts or 0)
        return await self.launch_actors(
            request, count, cls, args, kwargs, config, on_failure=on_failure, reservation_id=reservation_id
        )

    async def launch_actors(
        self,
        request: JobRequest,
        count: int | None,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: ActorConfig,
        *,
        on_failure: OnFailure = "escalate",
        reservation_id: ReservationRef | None = None,
    ) -> ActorGroup:
        """Create a group of actors whose jobs a request describes: `create_actor_group` for layers above. ``request``
        has the members' resources, environment, priority and, where ``config`` does not set restarts, retries; its
        entrypoint is ignored.

        ``count``: None: one actor with the name of the request, returned as a group of one. Raises as
        `create_actor_group`.
        """
        built = build_actor_group(self._runtime, request, count, cls, args, kwargs, config, reservation_id)
        await self._launch_actors(built, on_failure)
        methods = methods_of(cls)
        handles = [ActorHandle(spec.job_id, spec.name, methods, self._runtime) for spec in built[0]]
        return ActorGroup(request.name, handles, self._runtime)

    async def create_host(
        self,
        name: str | None = None,
        *,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        max_restarts: int = 0,
        health: HealthCheck | None = None,
        on_failure: OnFailure = "escalate",
    ) -> ActorHost:
        """Launch a process for light actors; returns at once: actors can be created in it and called immediately.

        Args:
            name: of the host; default: a generated name.
            resources: of the process, for all its actors; default none reserved.
            environment: packages, files, image and variables of the process.
            max_restarts: number of times a host whose process has died is restarted, with all its living actors (their
                state starts over); -1: no limit. Default 0.
            health: ``HealthCheck(actor="ping")``: the process fails when its loop does not answer. Default None.
            on_failure: as for `launch`, of the host and of each actor in it that fails for good.

        Raises:
            InvalidRequest, NeverSchedulable, NameInUse: nothing was launched.
        """
        built = build_actor(
            self._runtime,
            LightActorHost,
            name=name or mint_name("host", self._runtime.rng),
            resources=resources,
            environment=environment,
            max_restarts=max_restarts,
            config=ActorConfig(health=health),
        )
        (record,) = await self._launch_actors(built, on_failure)
        host = ActorHost(self._runtime, record, self._actor(record, methods_of(LightActorHost)), on_failure)
        # In the scope's nursery: the host's actors are restarted as long as the scope lives, and their failures end it.
        self._children.start_soon(host.keep)
        return host


def _light_holder(error: NameInUse) -> ActorId | None:
    """Return the light actor that has the name; None if a job has it: then the controller has decided already."""
    # Only a registration has an incarnation; a holder that is a job was already considered by the controller.
    return error.details["holder"] if "incarnation" in error.details else None


@async_block("async with cluster.open_scope(...) as scope")
@asynccontextmanager
async def open_scope(
    runtime: Runtime, name: str, env_vars: Mapping[str, str | Secret] | None = None
) -> AsyncIterator[Scope]:
    # Checked before the scope is opened: an invalid variable then starts nothing.
    variables = EnvironmentConfig.create(env_vars=env_vars).env_vars
    async with open_child_scope(runtime, name) as children:
        children.variables = variables
        yield Scope(children)
