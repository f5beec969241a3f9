"""Cluster: the connection of a driver or a job to its cluster."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from attrs import evolve

from fray.api.actors.group import ActorGroup
from fray.api.actors.handle import ActorHandle
from fray.api.actors.host import ActorHost
from fray.api.actors.queries import ActorQueries, actor_error_text, no_such_actor
from fray.api.async_block import AsyncBlock
from fray.api.history import HistoryQueries
from fray.api.job_html import jobs_html
from fray.api.jobs.job import (
    Job,
    error_of,
    job_id_of,
    stacks_of,
)
from fray.api.jobs.job_spec import ReservationRef
from fray.api.node_admin import NodeAdmin
from fray.api.on_failure import OnFailure
from fray.api.people_admin import PeopleAdmin
from fray.api.reservation import ReservationApi
from fray.api.scope import Scope, open_scope
from fray.api.usage import UsageQueries
from fray.errors import InvalidRequest, NoSuchJob, NotPicklable
from fray.missing_names import CLUSTER_LINES, ExplainsMissing
from fray.model.environment import Secret
from fray.model.ids import AttemptId, JobId, Namespace, check_name, split_attempt
from fray.model.log_records import LogLine
from fray.model.messages.client import (
    CreateJoinToken,
    Event,
    Events,
    Explain,
    GetEvents,
    GetJobSpec,
    Jobs,
    JoinTokenCreated,
    ListGroups,
    ListJobs,
    RequestedJob,
    Requeue,
    RequeueResult,
    Terminate,
    Text,
)
from fray.model.requests import JobRequest
from fray.model.service_key import ServiceKey
from fray.model.specs import JobInfo, JobSpec, JobState
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.runtime import Runtime, current
from fray.runtime.scope.scope import ChildScope
from fray.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from fray.api.jobs.job_group import JobGroup
    from fray.model.job_groups import JobGroupConfig, JobGroupInfo
    from fray.runtime.logs.reader import LogReader

T = TypeVar("T")


@short_tracebacks
class Cluster(ExplainsMissing, ActorQueries, NodeAdmin, PeopleAdmin, ReservationApi, UsageQueries, HistoryQueries):
    """Connection to a cluster. Made by `open_cluster`; in a job, `current_cluster()` is the job's own.

    What is launched here without a scope belongs to the connection: it ends with the driver or the job.
    """

    _meant = CLUSTER_LINES

    def __init__(self, runtime: Runtime, root: Scope) -> None:
        self._runtime = runtime
        self._root = root

    @property
    def address(self) -> str:
        """Address of the controller."""
        return self._runtime.address

    def open_scope(
        self, name: str = "scope", *, env_vars: Mapping[str, str | Secret] | None = None
    ) -> AsyncBlock[Scope]:
        """Return a scope, a nursery of jobs and actors: ``async with cluster.open_scope("run") as scope``.

        Args:
            env_vars: variables of all its children; a child's own environment overrides them.
        """
        return open_scope(self._runtime, name, env_vars)

    # Jobs ------------------------------------------------------------------------------------------------------------

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
        on_failure: OnFailure = "absorb",
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
        on_failure: OnFailure = "absorb",
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
        on_failure: OnFailure = "absorb",
    ) -> list[Job[T]]: ...

    async def launch(
        self, request: JobRequest, *extra: Any, on_failure: OnFailure = "absorb", **how: Any
    ) -> Job | list[Job]:
        """Launch a job, or ``count`` of them, owned by this connection. As `Scope.launch`.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was launched.
            ConnectionFailed: the connection to the controller has ended.
        """
        # Of the connection itself: what it owns ends with the connection. Failures do not cancel the caller's block by
        # default, as there is no scope that it has opened.
        launched: Job | list[Job] = await self._root.launch(request, *extra, on_failure=on_failure, **how)
        return launched

    async def launch_group(
        self,
        requests: Sequence[JobRequest],
        group: JobGroupConfig | None = None,
        reservation_id: str | None = None,
        *,
        on_failure: OnFailure = "absorb",
    ) -> JobGroup:
        """Launch jobs that are placed together, owned by this connection. As `Scope.launch_group`."""
        return await self._root.launch_group(requests, group, reservation_id, on_failure=on_failure)

    async def list_groups(self, namespace: Namespace | None = None, *, name: str = "") -> list[JobGroupInfo]:
        """Return job groups, newest last.

        Args:
            namespace: default the own one, and those of detached groups that have a namespace of their own name;
                ``"*"``: all.
            name: only those with this name or id.
        """
        from fray.api.jobs.job_group import find_groups

        return await find_groups(self._runtime, ListGroups(namespace=namespace, name=name))

    async def poll(self, job: Job | JobId) -> JobInfo:
        """Return the present state of the job.

        Raises:
            NoSuchJob: the cluster does not know it, or has forgotten it.
        """
        (record,) = await self._runtime.client.jobs.watch([job_id_of(job)], read_reasons=True)
        return record.info

    @overload
    async def wait(  # type: ignore[overload-overlap]  # a str is a Sequence[str] to the type checker, not to us
        self, job_ids: Job | JobId, raise_on_failure: bool = False
    ) -> JobInfo: ...
    @overload
    async def wait(self, job_ids: Sequence[Job | JobId], raise_on_failure: bool = False) -> list[JobInfo]: ...

    async def wait(
        self, job_ids: Job | JobId | Sequence[Job | JobId], raise_on_failure: bool = False
    ) -> JobInfo | list[JobInfo]:
        """Wait for the end of one job, or of all jobs of a sequence; return their final states.

        Args:
            raise_on_failure: raise the error of the first job (in the order given) that did not succeed.

        Raises:
            NoSuchJob: the cluster does not know one of them.
        """
        # A job id is a str and so a sequence as well.
        single = isinstance(job_ids, Job | str)
        wanted: Sequence[Job | JobId] = [job_ids] if isinstance(job_ids, Job | str) else job_ids
        records = await self._records(wanted)
        # In the order given, so that `raise_on_failure` is deterministic.
        for record in records:
            await record.ended.wait()
            if record.lost is not None:
                raise record.lost
            if raise_on_failure and record.info.state is not JobState.SUCCEEDED:
                raise error_of(record)
        infos = [record.info for record in records]
        return infos[0] if single else infos

    def logs(
        self,
        job: Job | JobId,
        *,
        tail: int | None = None,
        since_s: float | None = None,
        follow: bool = False,
        attempt: AttemptId | int | None = None,
        stream: str = "",
        contains: str = "",
        tree: bool = False,
    ) -> LogReader:
        """Return a reader of the job's output, also after its end: ``async for line in cluster.logs(job)``, each a
        `LogLine`.

        Missing output is reported by a line of the kind `LogLineKind.GAP`. Several attempts or jobs are merged by time.
        Use ``async with`` or ``aclose()`` to leave a reader that follows before its end.

        Args:
            tail: only the last N lines at present (at most 100,000). Default: all that are stored.
            since_s: only lines of the last N seconds.
            follow: continue with new output until the job has ended. Default: end after the present output.
            attempt: only this attempt, by its id or number: 0 is the first, -1 the latest. Default: all.
            stream: only ``"out"``, ``"err"``, or ``"sys"`` (messages of Fray). Default: all.
            contains: only lines that contain this; filtered on the job's machine.
            tree: also output of all jobs below it.

        Raises:
            InvalidRequest: at once, for an invalid stream or amount.
            NoSuchJob, ConnectionFailed: while iterating.
        """
        from fray.runtime.logs.reader import LogQuery, LogReader  # imported here: most processes read no logs

        query = LogQuery(
            job_id=job_id_of(job),
            tail=tail,
            since_s=since_s,
            follow=follow,
            attempt=attempt,
            stream=stream,
            contains=contains,
            tree=tree,
        )
        return LogReader(self._runtime.client, query)

    async def monitor(
        self,
        job: Job | JobId,
        on_line: Callable[[LogLine], object] | None = None,
        *,
        tail: int | None = None,
        tree: bool = False,
    ) -> JobInfo:
        """Follow the output of a job, from its first line to its end; return its final state.

        Args:
            on_line: called in the loop with each line. Default: print the lines; not again those of a job whose output
                is printed to this terminal anyway.
            tail: start with the last N lines.
            tree: also output of all jobs below it.

        Raises:
            NoSuchJob, ConnectionFailed.
        """
        from fray.runtime.controller_client.log_lines import print_lines

        job_id, client = job_id_of(job), self._runtime.client
        (record,) = await self._records([job])
        if on_line is not None or tree or not client.logs.is_printed(record.info):
            # This call prints the lines; the driver's own printing would show each of them twice.
            with client.logs.suppress_printing(job_id) if on_line is None else nullcontext():
                async with self.logs(job_id, follow=True, tail=tail, tree=tree) as lines:
                    async for line in lines:
                        on_line(line) if on_line is not None else print_lines([line])
        # The log may end a moment before the job's outcome arrives.
        await record.ended.wait()
        if record.lost is not None:
            raise record.lost
        return record.info

    async def terminate(
        self,
        job_ids: Job | JobId | Sequence[Job | JobId] = (),
        reason: str = "terminated",
        *,
        name: str | None = None,
        prefix: str | None = None,
        namespace: Namespace | None = None,
        tree: bool = False,
        group: str | None = None,
    ) -> list[JobId]:
        """Request the end of jobs (and actors), and of everything they own; does not wait for it.

        Args:
            name: the living job of this name.
            prefix: all living jobs whose names start with it: ``"alice/rl/"``.
            namespace: of these names; default as in `get_job`; ``"*"``: all.
            tree: also all jobs below them, at any depth, at once, including detached ones. Default False: what they own
                ends after them, and detached jobs continue.
            group: all jobs of the living job group of this name (or id).

        Returns:
            Ids of the jobs whose end this call has requested. The others had ended or were ending already; to request
            the end again is harmless.

        Raises:
            InvalidRequest: no job was named, or an empty name or prefix was given.
        """
        wanted: Sequence[Job | JobId] = [job_ids] if isinstance(job_ids, Job | str) else job_ids
        ids = tuple(job_id_of(job) for job in wanted)
        if name == "" or prefix == "" or group == "":
            raise InvalidRequest("terminate(name=), (prefix=) and (group=) must not be empty; list_jobs() has all ids")
        # Marked before the request: the jobs may end before its answer, and their end is not an error of a scope.
        for record in self._runtime.client.jobs.known(ids):
            record.end_requested = True
        message = Terminate(
            jobs=ids,
            reason=reason,
            name=name or "",
            prefix=prefix or "",
            namespace=namespace,
            tree=tree,
            group=group or "",
        )
        return list(await self._runtime.client.jobs.terminate(message))

    async def requeue(self, job_ids: Job | JobId | Sequence[Job | JobId], reason: str = "on request") -> RequeueResult:
        """End the attempts of running jobs, which then wait for machines again, at their place in the queue.

        As a preemption, with its notice and termination steps, but it costs none of their retries. What they own ends
        with the attempt. Does not wait for that. Jobs whose author allows no restart after a preemption are refused.

        Returns:
            ``jobs``: ids of those that wait again; ``refused``: id of each other one, and why.

        Raises:
            NoSuchJob: the cluster does not know one of them, or has forgotten it.
            InvalidRequest: no job was named.
            Unauthorized: one of them is another user's, and the role does not suffice.
        """
        wanted: Sequence[Job | JobId] = [job_ids] if isinstance(job_ids, Job | str) else job_ids
        records = await self._runtime.client.jobs.watch([job_id_of(job) for job in wanted])
        infos = [record.info for record in records]
        # The attempt that is seen now: however often the request arrives, no later one ends by it.
        seen = {info.job_id: split_attempt(info.attempts[-1].attempt_id)[1] for info in infos if info.attempts}
        unplaced = {info.job_id: f"it is {info.state.value}" for info in infos if not info.attempts}
        if wanted and not seen:
            return RequeueResult(refused=unplaced)
        reply = await self._runtime.client.request(Requeue(generations=seen, reason=reason))
        assert isinstance(reply, RequeueResult)
        return evolve(reply, refused={**unplaced, **reply.refused})

    async def list_jobs(
        self,
        namespace: Namespace | None = None,
        *,
        prefix: str = "",
        states: Sequence[JobState | str] = (),
        limit: int | None = None,
    ) -> list[JobInfo]:
        """Return jobs of the own namespace, newest last.

        Args:
            namespace: of another one; ``"*"``: of all.
            prefix: only those whose names (or ids) start with it.
            states: only those in one of these states. Default: any.
            limit: only the N newest. Default: all that the controller remembers.

        Raises:
            InvalidRequest: an unknown state.
        """
        return await self._list(
            ListJobs(namespace=namespace, prefix=prefix, states=states_of(states), limit=limit or 0)
        )

    async def job_changes(
        self,
        since: int = 0,
        *,
        limit: int = 500,
        jobs: Sequence[JobId] = (),
        namespace: Namespace | None = None,
        wait_s: float = 0.0,
    ) -> Jobs:
        """Return jobs that have changed after an earlier answer, to keep a list of all jobs up to date at the cost of
        its changes; or the present state of some.

        Args:
            since: ``change`` of the earlier answer; 0: all jobs.
            limit: at most so many jobs; there is more if ``has_more`` of the answer is set.
            jobs: in place of changes, the state of those of these that the cluster knows: progress, and the reasons of
                jobs that wait, change without being changes.
            namespace: as for `list_jobs`.
            wait_s: seconds to wait for a change, at most 10, if there is none yet.
        """
        if jobs:
            query = ListJobs(namespace=namespace, jobs=tuple(jobs))
        else:
            query = ListJobs(namespace=namespace, limit=limit, changed_since=since, wait_s=wait_s)
        reply = await self._runtime.client.request(query)
        assert isinstance(reply, Jobs)
        return reply

    async def get_job(self, name: str, namespace: Namespace | None = None) -> Job:
        """Return the job of this name (or id), whichever client launched it: to wait for it, read its output or end it.
        A living job comes before ended ones, and of those the last.

        Args:
            namespace: default the own one, then those of detached jobs that have a namespace of their own name;
                ``"*"``: any.

        Raises:
            NoSuchJob: the cluster has no job of this name.
        """
        record = await self._runtime.client.jobs.find_by_name(check_name(name, "a job"), namespace)
        if record is not None:
            return Job(self._runtime, record)
        raise NoSuchJob(
            f"no job {actor_error_text(name, namespace or self.namespace)}; list_jobs('*') shows all namespaces",
            name=name,
        )

    async def follow_jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        """Return the jobs of these ids, whichever clients launched them, each followed from now on to its end.

        Raises:
            NoSuchJob: the cluster does not know one of them.
        """
        return [Job(self._runtime, record) for record in await self._records(job_ids)]

    async def _list(self, query: ListJobs) -> list[JobInfo]:
        reply = await self._runtime.client.request(query)
        assert isinstance(reply, Jobs)
        return list(reply.jobs)

    async def explain(self, job: Job | JobId) -> str:
        """Return why the job is in its state: what it waits for, or what ended it. Raises NoSuchJob."""
        reply = await self._runtime.client.request(Explain(job=job_id_of(job)))
        assert isinstance(reply, Text)
        return reply.text

    async def events(self, job: Job | JobId) -> list[Event]:
        """Return the events of the job, in order. Raises NoSuchJob."""
        reply = await self._runtime.client.request(GetEvents(job=job_id_of(job)))
        assert isinstance(reply, Events)
        return list(reply.events)

    async def requested(self, job: Job | JobId) -> JobSpec:
        """Return what the job requests of the cluster, without its code, arguments, variables and secrets.

        Raises:
            NoSuchJob: the cluster does not know it, or has only a summary left.
            Unsupported: the controller is of an earlier release.
        """
        reply = await self._runtime.client.request(GetJobSpec(job=job_id_of(job)))
        assert isinstance(reply, RequestedJob)
        return reply.spec

    async def stacks(self, job: Job | JobId) -> dict[str, str]:
        """Return the present stacks of all threads (and Trio tasks) of each living attempt of a job, by attempt id.
        Where there are none, a line in brackets says why; no process is waited for longer than 20 s.

        Raises:
            NoSuchJob: the cluster does not know it, or has forgotten it.
        """
        return await stacks_of(self._runtime, job_id_of(job))

    async def join_token(self, machine: str, *, hosts: int = 1, life_s: float = 3600.0) -> str:
        """Return a token with which a future machine can join the cluster, once, as ``machine``.

        Args:
            hosts: of a TPU slice; each may use the token once, identified by the attribute ``tpu_worker``.
            life_s: seconds until the token expires; default an hour, at most 30 days.

        Raises:
            InvalidRequest: an impossible name, number or time.
            Unauthorized: this is a job.
        """
        reply = await self._runtime.client.request(CreateJoinToken(machine=machine, hosts=hosts, life_s=life_s))
        assert isinstance(reply, JoinTokenCreated)
        return reply.token

    # Actors ----------------------------------------------------------------------------------------------------------

    async def create_actor(self, cls: type, *args: Any, **kwargs: Any) -> ActorHandle:
        """Create an actor owned by this connection. As `Scope.create_actor`."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.create_actor(cls, *args, **kwargs)

    async def create_actor_group(self, cls: type, *args: Any, **kwargs: Any) -> ActorGroup:
        """Create actors owned by this connection. As `Scope.create_actor_group`."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.create_actor_group(cls, *args, **kwargs)

    async def launch_actors(self, request: JobRequest, count: int | None, *what: Any, **kwargs: Any) -> ActorGroup:
        """Create actors owned by this connection. As `Scope.launch_actors`."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.launch_actors(request, count, *what, **kwargs)

    async def create_host(self, name: str | None = None, **kwargs: Any) -> ActorHost:
        """Launch a host of light actors owned by this connection. As `Scope.create_host`."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.create_host(name, **kwargs)

    async def delete_actor(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> None:
        """End an actor, whatever its lifetime and owner, and wait until it has ended: its name is free then.

        Does nothing to an actor that has ended already.

        Raises:
            NoSuchActor: no living actor has this name, or the handle's actor is unknown or forgotten.
            InvalidRequest: an `ActorServer` or another actor's process serves it: end it there.
        """
        info = await self.actor_info(actor, namespace)
        # By name an ended actor is no longer meant; by handle the call is simply done already.
        if isinstance(actor, str) and info.ended is not None:
            raise no_such_actor(actor, namespace or self.namespace, info)
        if info.served:
            raise InvalidRequest(
                f"actor {info.name!r} is served by another process: unregister it there, or end that process"
            )
        await self.terminate(info.actor_id, "its actor was deleted")
        try:
            # The name is free only after the end, and callers often use it again at once.
            await self.wait(info.actor_id)
        except NoSuchJob:
            pass  # it ended so long ago that the cluster has forgotten it

    async def _records(self, jobs: Sequence[Job | JobId]) -> list[JobRecord]:
        return await self._runtime.client.jobs.watch([job_id_of(job) for job in jobs])

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            "a cluster belongs to its process: do not pass it, call fray.current_cluster() in the job or actor"
        )

    def __repr__(self) -> str:
        return f"<Cluster {self.address} namespace={self.namespace!r}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the address, and the jobs and actors that this process follows."""
        return jobs_html(f"Cluster {self.address}", self._runtime.client.jobs.infos())


def states_of(values: Sequence[JobState | str]) -> tuple[JobState, ...]:
    """Return the states with these values. Raises InvalidRequest for an unknown state."""
    try:
        return tuple(map(JobState, values))
    except ValueError:
        known = ", ".join(repr(state.value) for state in JobState)
        raise InvalidRequest(f"invalid states={values!r}; expected a list of {known}") from None


CLUSTER: ServiceKey[Cluster] = ServiceKey("cluster")


def cluster_of(runtime: Runtime) -> Cluster:
    """Return the `Cluster` of a runtime, which is made on first use."""

    def make() -> Cluster:
        # On the runtime's own nursery: the root scope ends with the connection.
        return Cluster(runtime, Scope(ChildScope(runtime, "root", runtime.nursery)))

    return runtime.services.get_or_make(CLUSTER, make)


def current_cluster() -> Cluster:
    """Return the cluster of the running code: of its job, or the cluster that the driver has opened.

    Raises:
        FrayError: neither in a job nor in `open_cluster`.
    """
    return cluster_of(current())
