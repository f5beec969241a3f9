"""The cluster as a driver or a job sees it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, overload

from fray.api.actors.group import ActorGroup
from fray.api.actors.handle import ActorHandle
from fray.api.actors.host import ActorHost
from fray.api.actors.queries import ActorQueries, actor_error_text, no_such_actor
from fray.api.jobs.job import (
    Job,
    error_of,
    job_id_of,
    stacks_of,
)
from fray.api.node_admin import NodeAdmin
from fray.api.on_failure import OnFailure
from fray.api.reservation import Reservation, ReservationApi
from fray.api.scope import Scope, open_scope
from fray.api.usage import UsageQueries
from fray.errors import InvalidRequest, NoSuchJob
from fray.model.environment import Secret
from fray.model.ids import AttemptId, JobId, Namespace, check_name
from fray.model.log_records import LogLine
from fray.model.messages.client import (
    CreateJoinToken,
    Event,
    Events,
    Explain,
    GetEvents,
    Jobs,
    JoinTokenCreated,
    ListGroups,
    ListJobs,
    Terminate,
    Text,
)
from fray.model.requests import JobRequest
from fray.model.reservations import ReservationId
from fray.model.service_key import ServiceKey
from fray.model.specs import JobInfo, JobState
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.runtime import Runtime, current, current_or_none
from fray.runtime.scope.interrupts import defer_sigint_in_fray_code
from fray.runtime.scope.scope import ChildScope

if TYPE_CHECKING:
    from fray.api.jobs.job_group import JobGroup
    from fray.model.job_groups import JobGroupConfig, JobGroupInfo
    from fray.runtime.logs.reader import LogReader


class Cluster(ActorQueries, NodeAdmin, ReservationApi, UsageQueries):
    """A connection to a cluster. Made by `open_cluster`; in a job, `current_cluster()` is the job's own.

    What is launched here without a scope belongs to the connection: it ends with the driver or the job.
    """

    def __init__(self, runtime: Runtime, root: Scope) -> None:
        self._runtime = runtime
        self._root = root

    @property
    def address(self) -> str:
        """Where the controller is."""
        return self._runtime.address

    def open_scope(
        self, name: str = "scope", *, env_vars: Mapping[str, str | Secret] | None = None
    ) -> AbstractAsyncContextManager[Scope]:
        """A nursery whose children are jobs and actors: ``async with cluster.open_scope("run") as scope``.

        Args:
            env_vars: variables of all its children; what a child's own environment says goes before them.
        """
        return open_scope(self._runtime, name, env_vars)

    # Jobs ------------------------------------------------------------------------------------------------------------

    @overload
    async def launch(
        self,
        request: JobRequest,
        *,
        count: None = None,
        name: str | None = None,
        job_id: JobId | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationId | Reservation | None = None,
        on_failure: OnFailure = "absorb",
    ) -> Job: ...
    @overload
    async def launch(
        self,
        request: JobRequest,
        *,
        count: int,
        name: str | None = None,
        adopt_existing: bool = False,
        reservation_id: ReservationId | Reservation | None = None,
        on_failure: OnFailure = "absorb",
    ) -> list[Job]: ...

    async def launch(self, request: JobRequest, *, on_failure: OnFailure = "absorb", **how: Any) -> Job | list[Job]:
        """Launch a job, or ``count`` of them, that belong to this connection. As `Scope.launch`.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameInUse: nothing was launched.
            ConnectionFailed: the conversation with the controller has ended.
        """
        launched: Job | list[Job] = await self._root.launch(request, on_failure=on_failure, **how)
        return launched

    async def launch_group(
        self,
        requests: Sequence[JobRequest],
        group: JobGroupConfig | None = None,
        reservation_id: str | None = None,
        *,
        on_failure: OnFailure = "absorb",
    ) -> JobGroup:
        """Launch jobs that are placed together and belong to this connection. As `Scope.launch_group`."""
        return await self._root.launch_group(requests, group, reservation_id, on_failure=on_failure)

    async def list_groups(self, namespace: Namespace | None = None, *, name: str = "") -> list[JobGroupInfo]:
        """Job groups on record, newest last.

        Args:
            namespace: default the own one, and those that detached groups have made of their names; ``"*"``: all.
            name: only those of this name, or this id.
        """
        from fray.api.jobs.job_group import find_groups

        return await find_groups(self._runtime, ListGroups(namespace=namespace, name=name))

    async def poll(self, job: Job | JobId) -> JobInfo:
        """The job's state now.

        Raises:
            NoSuchJob: the cluster does not know it, or no more.
        """
        return (await self._records([job]))[0].info

    @overload
    async def wait(  # type: ignore[overload-overlap]  # a str is a Sequence[str] to the type checker, not to us
        self, job_ids: Job | JobId, raise_on_failure: bool = False
    ) -> JobInfo: ...
    @overload
    async def wait(self, job_ids: Sequence[Job | JobId], raise_on_failure: bool = False) -> list[JobInfo]: ...

    async def wait(
        self, job_ids: Job | JobId | Sequence[Job | JobId], raise_on_failure: bool = False
    ) -> JobInfo | list[JobInfo]:
        """Wait for the end of one job or of all of a sequence.

        Args:
            raise_on_failure: raise the error of the first job (in the order given) that did not succeed.

        Raises:
            NoSuchJob: one of them is unknown.
        """
        single = isinstance(job_ids, Job | str)
        wanted: Sequence[Job | JobId] = [job_ids] if isinstance(job_ids, Job | str) else job_ids
        records = await self._records(wanted)
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
        """What the job has printed, also after its end: ``async for line in cluster.logs(job)``, each a `LogLine`.

        What is lost or cannot be had now is told as a line of the kind `LogLineKind.GAP`. Several attempts or jobs are
        merged by time. A reader that follows and is left before its end: use ``async with`` or ``aclose()``.

        Args:
            tail: only the last so many lines there are now (at most 100,000). Default: all that are kept.
            since_s: only those of the last so many seconds.
            follow: go on with what it prints, until it has ended. Default: end with what there is now.
            attempt: only of this attempt, by its id or number: 0 is the first, -1 the last so far. Default: of all.
            stream: only ``"out"``, ``"err"``, or ``"sys"`` (what Fray says). Default: all.
            contains: only lines with this in them; looked for on the job's machine.
            tree: also of all jobs below it.

        Raises:
            InvalidRequest: at once, for a stream or an amount that cannot be.
            NoSuchJob, ConnectionFailed: while iterating.
        """
        from fray.runtime.logs.reader import LogQuery, LogReader  # not every process reads logs

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
        return LogReader(self._runtime.link, query)

    async def monitor(
        self,
        job: Job | JobId,
        on_line: Callable[[LogLine], object] | None = None,
        *,
        tail: int | None = None,
        tree: bool = False,
    ) -> JobInfo:
        """Follow what the job writes, from its first line to its end; returns its final state.

        Args:
            on_line: called in the loop with each line. Default: lines are printed, those of a job that prints to this
                terminal already as they come, and no second time.
            tail: begin with the last so many lines.
            tree: also of all jobs below it.

        Raises:
            NoSuchJob, ConnectionFailed.
        """
        from fray.runtime.controller_client.log_lines import print_lines

        job_id, link = job_id_of(job), self._runtime.link
        (record,) = await self._records([job])
        if on_line is not None or tree or not link.logs.is_printed(record.info):
            with link.logs.suppress_printing(job_id) if on_line is None else nullcontext():
                async with self.logs(job_id, follow=True, tail=tail, tree=tree) as lines:
                    async for line in lines:
                        on_line(line) if on_line is not None else print_lines([line])
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
        """Ask for the end of jobs (and actors), and of everything they own; does not wait for it.

        Args:
            name: the living one of this name.
            prefix: all living ones whose names begin so: ``"alice/rl/"``.
            namespace: where names are looked for; default as in `get_job`; ``"*"``: everywhere.
            tree: all that these have launched, at any depth, at once, the detached ones too. Default False: what they
                own ends when they have ended, and detached jobs go on.
            group: all of the living job group of this name (or id).

        Returns:
            Ids of those whose end this call has asked for. Others had ended, or were being ended already: to ask again
            does no harm.

        Raises:
            InvalidRequest: nothing was asked for, or an empty name or prefix.
        """
        wanted: Sequence[Job | JobId] = [job_ids] if isinstance(job_ids, Job | str) else job_ids
        ids = tuple(job_id_of(job) for job in wanted)
        if name == "" or prefix == "" or group == "":
            raise InvalidRequest("terminate(name=), (prefix=) and (group=) need a text; list_jobs() has all ids")
        for record in self._runtime.link.jobs.known(ids):
            record.asked_to_end = True
        message = Terminate(
            jobs=ids,
            reason=reason,
            name=name or "",
            prefix=prefix or "",
            namespace=namespace,
            tree=tree,
            group=group or "",
        )
        return list(await self._runtime.link.jobs.terminate(message))

    async def list_jobs(
        self,
        namespace: Namespace | None = None,
        *,
        prefix: str = "",
        states: Sequence[JobState | str] = (),
        limit: int | None = None,
    ) -> list[JobInfo]:
        """Jobs of the own namespace, newest last.

        Args:
            namespace: of another one; ``"*"``: of all.
            prefix: only those whose names (or ids) start so.
            states: only those in one of these states. Default: in any.
            limit: only so many of the newest. Default: all that the controller remembers.

        Raises:
            InvalidRequest: a state that there is not.
        """
        return await self._list(
            ListJobs(namespace=namespace, prefix=prefix, states=states_of(states), limit=limit or 0)
        )

    async def get_job(self, name: str, namespace: Namespace | None = None) -> Job:
        """The job of this name (or id), whoever launched it: to wait for, read or end. A living one before one that has
        ended, and of those the last.

        Args:
            namespace: default the own one, then those that detached jobs of drivers without a namespace have made of
                their names; ``"*"``: any.

        Raises:
            NoSuchJob: the cluster knows none of this name.
        """
        record = await self._runtime.link.jobs.find_by_name(check_name(name, "a job"), namespace)
        if record is not None:
            return Job(self._runtime, record)
        raise NoSuchJob(
            f"the cluster has no job {actor_error_text(name, namespace or self.namespace)}; list_jobs('*') shows all "
            "namespaces",
            name=name,
        )

    async def follow_jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        """The jobs of these ids, whoever launched them, each followed from here on to its end.

        Raises:
            NoSuchJob: one of them is unknown.
        """
        return [Job(self._runtime, record) for record in await self._records(job_ids)]

    async def _list(self, asked: ListJobs) -> list[JobInfo]:
        reply = await self._runtime.link.request(asked)
        assert isinstance(reply, Jobs)
        return list(reply.jobs)

    async def explain(self, job: Job | JobId) -> str:
        """Why the job is in its state: what it waits for, or what ended it. Raises NoSuchJob."""
        reply = await self._runtime.link.request(Explain(job=job_id_of(job)))
        assert isinstance(reply, Text)
        return reply.text

    async def events(self, job: Job | JobId) -> list[Event]:
        """What happened to the job, in order. Raises NoSuchJob."""
        reply = await self._runtime.link.request(GetEvents(job=job_id_of(job)))
        assert isinstance(reply, Events)
        return list(reply.events)

    async def stacks(self, job: Job | JobId) -> dict[str, str]:
        """Look into the processes of a job, now: the stacks of all threads (and Trio tasks) of each living attempt, by
        attempt id. Where there are none a line in brackets says why; nobody is waited for longer than 20 s.

        Raises:
            NoSuchJob: the cluster does not know it, or no more.
        """
        return await stacks_of(self._runtime, job_id_of(job))

    async def join_token(self, machine: str, *, hosts: int = 1, life_s: float = 3600.0) -> str:
        """A token with which a machine that is yet to come can join the cluster, once, as ``machine``.

        Args:
            hosts: of a TPU slice; each may use it once, told apart by the attribute ``tpu_worker``.
            life_s: how long it can be used, in seconds; default an hour, at most 30 days.

        Raises:
            InvalidRequest: an impossible name, number or time.
            Unauthorized: this is a job.
        """
        reply = await self._runtime.link.request(CreateJoinToken(machine=machine, hosts=hosts, life_s=life_s))
        assert isinstance(reply, JoinTokenCreated)
        return reply.token

    # Actors ----------------------------------------------------------------------------------------------------------

    async def create_actor(self, cls: type, *args: Any, **kwargs: Any) -> ActorHandle:
        """As `Scope.create_actor`, for an actor that belongs to this connection."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.create_actor(cls, *args, **kwargs)

    async def create_actor_group(self, cls: type, *args: Any, **kwargs: Any) -> ActorGroup:
        """As `Scope.create_actor_group`, for actors that belong to this connection."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.create_actor_group(cls, *args, **kwargs)

    async def launch_actors(self, request: JobRequest, count: int | None, *what: Any, **kwargs: Any) -> ActorGroup:
        """As `Scope.launch_actors`, for actors that belong to this connection."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.launch_actors(request, count, *what, **kwargs)

    async def create_host(self, name: str | None = None, **kwargs: Any) -> ActorHost:
        """As `Scope.create_host`, for a host that belongs to this connection."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.create_host(name, **kwargs)

    async def delete_actor(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> None:
        """End an actor, whatever its lifetime and whoever owns it, and wait until it has ended: its name is free then.

        One that has ended already is left alone.

        Raises:
            NoSuchActor: none of this name lives, or the handle's is not known (any more).
            InvalidRequest: an `ActorServer` or another actor's process serves it: end it there.
        """
        info = await self.actor_info(actor, namespace)
        if isinstance(actor, str) and info.ended is not None:
            raise no_such_actor(actor, namespace or self.namespace, info)
        if info.served:
            raise InvalidRequest(
                f"actor {info.name!r} lives in another process, which registered it: unregister it there, or end that"
            )
        await self.terminate(info.actor_id, "its actor was deleted")
        try:
            await self.wait(info.actor_id)
        except NoSuchJob:
            pass  # so long over that it has been forgotten since

    async def _records(self, jobs: Sequence[Job | JobId]) -> list[JobRecord]:
        return await self._runtime.link.jobs.watch([job_id_of(job) for job in jobs])

    def __repr__(self) -> str:
        return f"<Cluster {self.address} namespace={self.namespace!r}>"


def states_of(words: Sequence[JobState | str]) -> tuple[JobState, ...]:
    """Raises InvalidRequest: a state that there is not."""
    try:
        return tuple(map(JobState, words))
    except ValueError:
        known = ", ".join(repr(state.value) for state in JobState)
        raise InvalidRequest(f"states={words!r} must be a list of some of {known}") from None


CLUSTER: ServiceKey[Cluster] = ServiceKey("cluster")


def cluster_of(runtime: Runtime) -> Cluster:
    """The `Cluster` of a runtime, made when first asked for."""

    def make() -> Cluster:
        return Cluster(runtime, Scope(ChildScope(runtime, "root", runtime.nursery)))

    return runtime.services.get_or_make(CLUSTER, make)


def current_cluster() -> Cluster:
    """The cluster of the running code: in a job its own connection, in a driver the one it opened.

    Raises:
        FrayError: neither in a job nor in `open_cluster`.
    """
    return cluster_of(current())


@asynccontextmanager
async def open_cluster(
    spec: str | None = None,
    *,
    namespace: Namespace | None = None,
    token: str | None = None,
    logs: bool = True,
    grace_s: float | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> AsyncIterator[Cluster]:
    """Connect to a cluster, or make one that lives as long as the ``async with``.

    Args:
        spec: ``local`` (threads and tasks of this process), ``machine`` or ``machine?nodes=2&cpu=4`` (real processes on
            this machine), ``fray://host:port`` (a running controller). Default: ``FRAY_CLUSTER_SPEC``, else ``local``;
            inside a job, the job's own cluster.
        namespace: names are unique within it. Default: a new one of its own.
        token: for ``fray://``; default ``FRAY_TOKEN``.
        logs: print what the jobs write to this terminal, each line behind the job's name. Default True.
        grace_s: for ``fray://``: how many seconds this driver may be lost without a goodbye (no network, asleep) before
            all it owns ends, up to a week. Default: as the controller says (``fray-controller --driver-grace-s``, 30).
            For ``local``: how long leaving waits for threads of jobs and actors that have been ended and go on (nobody
            can end a thread); a RuntimeWarning names those left. Default 2.
        env_vars: variables of every job of a cluster that is made here; a running one has ``fray-controller --env``.

    Raises:
        UnknownClusterSpec: the spec names nothing.
        InvalidRequest: no token, or an impossible ``grace_s``.
        Unreachable, Unauthorized, ProtocolMismatch: the controller is not there or refuses us.
        SessionEnded: the driver was lost for longer than its grace: whatever waited in the block got this, and the
            block ends with it.
    """
    from fray.deploy import connect

    runtime = current_or_none()
    if spec is None and runtime is not None and runtime.job_id is not None:
        yield cluster_of(runtime)
        return
    chosen = connect.parse_spec(spec if spec is not None else os.environ.get("FRAY_CLUSTER_SPEC") or "local")
    with defer_sigint_in_fray_code():
        place = connect.open_by_spec(
            chosen, namespace=namespace, token=token, logs=logs, grace_s=grace_s, env_vars=env_vars
        )
        async with place as opened:
            cluster = cluster_of(opened)
            yield cluster
            await cluster._root.wait_jobs_then_end_actors()
