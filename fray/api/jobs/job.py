"""Jobs: from a `JobRequest` to what travels, and the `Job` that waits for what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from fray.errors import FrayError, InvalidRequest, JobFailed, JobStopped
from fray.model import job_text
from fray.model.environment import UNSENT, EnvironmentSpec, plain_variables, secret_names
from fray.model.gangs import port_names
from fray.model.ids import ANONYMOUS_PREFIX, AttemptId, JobId, Namespace, mint_job_id
from fray.model.messages.client import GetStacks, Stacks, Terminate
from fray.model.requests import Entrypoint, JobRequest
from fray.model.specs import ActorConfig, EndReason, EntryKind, JobInfo, JobSpec, JobState
from fray.runtime.actors.checkpoints import AT_END_S, check_class
from fray.runtime.actors.lifecycle import CLEANUP
from fray.runtime.actors.methods import check_concurrency, check_health, check_kill_after
from fray.runtime.controller_client import large_results
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.process.attempt import check_blob
from fray.runtime.process.current_job import CurrentJob as CurrentJob
from fray.runtime.process.current_job import current_job as current_job
from fray.runtime.runtime import Runtime, current
from fray.runtime.serialization import errors, pickling

if TYPE_CHECKING:
    from fray.runtime.logs.reader import LogReader

CLEANUP_MARGIN_S = 1.0
"""How long an actor with a cleanup hook has, beyond the hook's own time, before it gets SIGTERM."""


def build_spec(request: JobRequest, runtime: Runtime) -> tuple[JobSpec, bytes | None]:
    """What travels of a request: the spec and the closed payload. Everything wrong with it is said here.

    Raises:
        InvalidRequest: no entrypoint, or an impossible amount of something.
        NotPicklable: the callable or an argument cannot travel.
        MessageTooLarge: they have more than 8 MiB together.
    """
    if not isinstance(request, JobRequest):
        raise InvalidRequest(f"launch needs a JobRequest, not {request!r}; scope.run(fn, *args) takes a plain callable")
    entry = request.entrypoint
    if entry is None or (entry.callable is None and not entry.argv):
        raise InvalidRequest(f"job {request.name!r} has no entrypoint: use Entrypoint.from_callable or from_binary")
    if request.health is not None and request.health.actor is not None:
        raise InvalidRequest(
            f"job {request.name!r} is no actor: its health is asked for by HealthCheck(path='/healthz'); for an actor "
            f"write create_actor(..., actor_config=ActorConfig(health=HealthCheck(actor={request.health.actor!r})))"
        )
    content = None
    if entry.callable is not None:
        content = _closed((entry.callable, entry.args, entry.kwargs), f"the entrypoint of job {request.name!r}")
    spec = _spec(request, runtime, EntryKind.BINARY if content is None else EntryKind.CALLABLE, content)
    return evolve(
        spec, argv=entry.argv, signature=_signature(entry), namespace=_namespace_of(request, runtime)
    ), content


def build_forecast_spec(request: JobRequest, runtime: Runtime) -> JobSpec:
    """What of a request decides where and when it runs; nothing of it travels that would have to be sent first."""
    plain_request = evolve(request, environment=evolve(request.environment, workspace=None, env_vars={}))
    entry = request.entrypoint
    argv = entry.argv if entry is not None and entry.argv else ("unsaid",)
    return evolve(_spec(plain_request, runtime, EntryKind.BINARY, None), argv=argv)


def _namespace_of(request: JobRequest, runtime: Runtime) -> Namespace:
    """A detached job or actor of a driver without a namespace is a root of its own, and has that of its name."""
    is_root = request.detached and (not runtime.namespace or runtime.namespace.startswith(ANONYMOUS_PREFIX))
    return request.name if is_root else runtime.namespace


def _signature(entry: Entrypoint) -> str:
    """The callable's place and a hash of its arguments; empty for programs, whose ``argv`` says it all."""
    fn = entry.callable
    if fn is None:
        return ""
    place = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    return f"{place}#{pickling.blob_name(pickling.dumps_to_compare((entry.args, entry.kwargs)))[:16]}"


def build_actor_spec(
    request: JobRequest,
    runtime: Runtime,
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: ActorConfig | None = None,
) -> tuple[JobSpec, bytes]:
    """The job that hosts one actor. ``request`` gives name, resources and retries."""
    if not isinstance(cls, type):
        raise InvalidRequest(f"create_actor needs a class, not {cls!r}")
    config = config or ActorConfig()
    check_concurrency(cls, config.max_concurrency, config.concurrency_groups)
    check_kill_after(cls, config.kill_after_s)
    check_health(cls, config.health)
    content = _closed((cls, args, kwargs), f"actor {request.name!r}")
    spec = _spec(request, runtime, EntryKind.ACTOR, content)
    ladder = spec.termination
    last_words_s = config.cleanup_s if hasattr(cls, CLEANUP) else 0.0
    last_words_s += AT_END_S if check_class(cls, config) else 0.0
    if last_words_s:
        ladder = evolve(ladder, cancel_s=max(ladder.cancel_s, last_words_s + CLEANUP_MARGIN_S))
    return evolve(
        spec,
        actor=config,
        namespace=_namespace_of(request, runtime),
        termination=ladder,
        health=config.health,
        wait_limit_s=config.wait_limit_s,
    ), content


def _closed(work: object, what: str) -> bytes:
    content = pickling.dumps(work, what)
    check_blob(len(content), what, "write the data to storage and pass its path")
    return content


def _spec(request: JobRequest, runtime: Runtime, entry: EntryKind, content: bytes | None) -> JobSpec:
    variables = request.environment.env_vars
    demand, members = request.resources.demand(), request.members()
    spec = JobSpec(
        job_id=mint_job_id(request.name, runtime.rng),
        name=request.name,
        namespace=runtime.namespace,
        user=runtime.user,
        entry=entry,
        payload=None if content is None else pickling.blob_name(content),
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
    choices = (evolve(one, ports=ports, containers=containers) for one in (demand, *spec.alternatives))
    return evolve(spec, demand=next(choices), alternatives=tuple(choices))


def _environment_of(request: JobRequest, entry: EntryKind, runtime: Runtime) -> EnvironmentSpec:
    """What is pickled here is opened by the same version of Python; a program has none.

    Extras are of the project around: that of the workspace this code runs in, else of the directory it stands in.
    """
    config = request.environment
    if config.extras and config.workspace is None and not runtime.bundle and os.path.exists("pyproject.toml"):
        config = evolve(config, workspace=os.getcwd())
    return EnvironmentSpec(
        extras=config.extras,
        pip_packages=config.pip_packages,
        bundle=_unsent(config.workspace),
        docker_image=config.docker_image,
        python="" if entry is EntryKind.BINARY else f"{sys.version_info.major}.{sys.version_info.minor}",
    )


def _unsent(workspace: str | None) -> str | None:
    """The directory, until it has become a bundle on the way out (`fray.runtime.workspaces.upload`)."""
    return None if workspace is None else UNSENT + os.path.realpath(os.path.expanduser(workspace))


def error_of(record: JobRecord) -> BaseException:
    """The error a job's end is: the user's own exception with its remote traceback, or `JobFailed`/`JobStopped`."""
    if record.lost is not None:
        return record.lost
    info = record.info
    if record.value is not None and info.cause is EndReason.FAILURE:
        error = errors.load_error(record.value)
        error.add_note(f"raised in job {info.job_id}{job_text.machines_text(info)}")
        if len(info.attempts) > 1:
            error.add_note(info.error_message or "")
        return error
    cls = JobStopped if info.state is JobState.STOPPED else JobFailed
    return cls(
        f"job {info.job_id} {job_text.end_text(info)}",
        job_id=info.job_id,
        name=info.name,
        cause=info.cause,
        exit_code=info.exit_code,
        signal=info.signal,
        nodes=job_text.last_machines(info),
        attempts=job_text.run_count(info),
        ended_by=info.ended_by,
    )


class Job:
    """One job of the cluster, seen from here. ``await job`` is ``await job.wait()``. Picklable: it means the same job
    wherever it arrives in the cluster."""

    def __init__(self, runtime: Runtime, record: JobRecord) -> None:
        self._place: Runtime | None = runtime
        self._known: JobRecord | None = record
        self._names = record.info.job_id, record.info.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived_job, self._names

    @property
    def _runtime(self) -> Runtime:
        """A job that came by pickle belongs to the cluster of the code that uses it."""
        if self._place is None:
            self._place = current()
        return self._place

    @property
    def _record(self) -> JobRecord:
        if self._known is None:
            link = self._runtime.link
            self._known, is_new = link.jobs.get_or_add(*self._names)
            if is_new:
                self._runtime.token.run_sync_soon(self._runtime.nursery.start_soon, link.jobs.find, self._known)
        return self._known

    @property
    def id(self) -> JobId:
        return self._names[0]

    @property
    def name(self) -> str:
        return self._names[1]

    @property
    def info(self) -> JobInfo:
        """The latest state known here."""
        return self._record.info

    async def wait(self) -> Any:
        """What the callable returned (None for a program).

        Raises:
            BaseException: the callable's own exception, with the remote traceback as its cause.
            JobFailed: it ended for another reason: killed, exit code, lost machine; JobStopped: somebody ended it.
            FrayError: its value is in ``result_storage`` and cannot be read here.
            ConnectionFailed: the conversation with the controller has ended.
        """
        await self.wait_ended()
        if self._record.info.stored is not None:
            await large_results.fetch(self._record)
        return self.result()

    def done(self) -> bool:
        """Whether it has ended, as far as is known here."""
        return self._record.ended.is_set()

    def exception(self) -> BaseException | None:
        """What `wait` raises, of a job that is `done`; None when it raises nothing."""
        try:
            self.result()
        except BaseException as error:  # noqa: BLE001 - it is the answer
            return error
        return None

    def add_done_callback(self, callback: Callable[[Job], object]) -> None:
        """Call ``callback(job)`` in the loop when it has ended; at once if it has. In the loop only."""
        if self.done():
            callback(self)
        else:
            self._record.callbacks.append(_Callback(self, callback))

    def remove_done_callback(self, callback: Callable[[Job], object]) -> None:
        """Do not call it after all."""
        told = _Callback(self, callback)
        if told in self._record.callbacks:
            self._record.callbacks.remove(told)

    def result(self) -> Any:
        """What `wait` returns or raises, of a job that is `done`; for any thread.

        One that is in ``result_storage`` is read here and now, unless the job was awaited before.

        Raises:
            FrayError: it has not ended: await it; or it ended so long ago that its result is no longer kept.
        """
        if not self.done():
            raise FrayError(f"{self!r} has not ended: await it")
        if self._record.lost is not None or self.info.state is not JobState.SUCCEEDED:
            raise error_of(self._record)
        if self._record.value is None and self.info.error_message is not None:
            raise FrayError(f"job {self.id}: {self.info.error_message}")
        value = large_results.read_now(self._record)
        return None if value is None else pickling.loads(value)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.wait().__await__()

    async def wait_ended(self) -> JobInfo:
        """Wait for the end, whatever it is; raises only when the conversation with the controller has ended."""
        await self._record.ended.wait()
        if self._record.lost is not None:
            raise self._record.lost
        return self._record.info

    async def wait_running(self) -> JobInfo:
        """Wait until every process of the job runs, or the job has ended."""
        record = self._record
        while record.info.state is JobState.PENDING and not record.ended.is_set():
            await record.changed.wait()
        if record.lost is not None:
            raise record.lost
        return record.info

    async def wait_port(self, name: str, member: int = 0) -> str:
        """``host:port`` of a port of the job, as soon as all its members run; they may not listen there yet.

        Args:
            name: one of `JobRequest.ports`, or ``"coordinator"`` of a gang.
            member: whose, by rank.

        Raises:
            InvalidRequest: it has no such port, or no such member.
            BaseException: it has ended: what `wait` raises (`JobFailed` also for one that has succeeded).
        """
        info = await self.wait_running()
        if self.done():
            self.result()
            raise JobFailed(f"job {self.id} has ended: nobody is at its port {name!r} any more", job_id=self.id)
        attempt = info.members[member] if 0 <= member < len(info.members) else None
        if attempt is None or name not in attempt.ports:
            if attempt is None:
                raise InvalidRequest(f"job {self.id} has no member {member}: write 0 to {len(info.members) - 1}")
            ports = ", ".join(info.ports) or "none"
            raise InvalidRequest(
                f"job {self.id} has no port {name!r} (its ports: {ports}): ask for it by JobRequest(ports=[{name!r}]), "
                f"or `fray run --port {name}`"
            )
        return attempt.addresses[name]

    async def terminate(self, reason: str = "terminated by its owner") -> None:
        """Ask for its end and that of everything below it; returns when the controller has noted it."""
        self._record.asked_to_end = True
        await self._runtime.link.request(Terminate(jobs=(self.id,), reason=reason))

    async def stacks(self) -> dict[str, str]:
        """Look into its processes: see `Cluster.stacks`."""
        return await stacks_of(self._runtime, self.id)

    def logs(
        self,
        *,
        tail: int | None = None,
        since_s: float | None = None,
        follow: bool = False,
        attempt: AttemptId | int | None = None,
        stream: str = "",
        contains: str = "",
        tree: bool = False,
    ) -> LogReader:
        """What it has printed, each line a `LogLine`: ``async for line in job.logs()``. As `Cluster.logs`."""
        from fray.runtime.logs.reader import LogQuery, LogReader  # not every process reads logs

        query = LogQuery(
            job_id=self.id,
            tail=tail,
            since_s=since_s,
            follow=follow,
            attempt=attempt,
            stream=stream,
            contains=contains,
            tree=tree,
        )
        return LogReader(self._runtime.link, query)

    def __repr__(self) -> str:
        """What is known here of its state, and why: ``<Job train-k3x9 pending: waits for 8 h100>``."""
        return f"<Job {self.id} {job_text.summary_text(self._known.info) if self._known else 'elsewhere'}>"


async def stacks_of(runtime: Runtime, job_id: JobId) -> dict[str, str]:
    """See `Cluster.stacks`."""
    reply = await runtime.link.request(GetStacks(job=job_id))
    assert isinstance(reply, Stacks)
    return dict(reply.stacks)


@frozen
class _Callback:
    job: Job
    callback: Callable[[Job], object]

    def __call__(self) -> None:
        self.callback(self.job)


def _arrived_job(job_id: JobId, name: str) -> Job:
    job = Job.__new__(Job)
    job._place, job._known, job._names = None, None, (job_id, name)
    return job


def job_id_of(job: Job | JobId) -> JobId:
    """The id of a `Job`, or the id itself.

    Raises:
        InvalidRequest: neither.
    """
    if isinstance(job, Job):
        return job.id
    if isinstance(job, str):
        return job
    raise InvalidRequest(f"{job!r} is neither a Job nor a job id")
