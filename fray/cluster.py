"""The cluster as a driver or a job sees it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, overload

import trio

from fray.actors import ActorHandle
from fray.errors import DeadlineExceeded
from fray.jobs import Job, error_of, job_id_of
from fray.model.ids import JobId, Namespace
from fray.model.messages.client import (
    Event,
    Events,
    Explain,
    Jobs,
    ListJobs,
    ListNodes,
    NodeInfo,
    Nodes,
    Story,
    Terminate,
    Text,
)
from fray.model.specs import JobInfo, JobRequest, JobState
from fray.runtime.context import Runtime, current, current_or_none
from fray.runtime.interrupts import deferred_in_our_code
from fray.runtime.links import JobRecord
from fray.runtime.scope import ChildScope
from fray.scopes import OnFailure, Scope, open_scope


class Cluster:
    """A connection to a cluster. Made by `open_cluster`; in a job, `current_cluster()` is the job's own.

    What is launched here without a scope belongs to the connection: it ends with the driver or the job.
    """

    def __init__(self, runtime: Runtime, root: Scope) -> None:
        self._runtime = runtime
        self._root = root

    @property
    def namespace(self) -> Namespace:
        """Names of jobs and actors are unique among the living of a namespace; child jobs inherit it."""
        return self._runtime.namespace

    @property
    def address(self) -> str:
        """Where the controller is."""
        return self._runtime.address

    def open_scope(self, name: str = "scope") -> AbstractAsyncContextManager[Scope]:
        """A nursery whose children are jobs and actors: ``async with cluster.open_scope("run") as scope``."""
        return open_scope(self._runtime, name)

    # Jobs ------------------------------------------------------------------------------------------------------------

    async def launch(self, request: JobRequest, *, on_failure: OnFailure = "absorb") -> Job:
        """Launch a job that belongs to this connection; returns once the controller has accepted it.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge, NeverSchedulable, NameTaken: nothing was launched.
            ConnectionFailed: the conversation with the controller has ended.
        """
        return await self._root.launch(request, on_failure=on_failure)

    async def create_actor(self, cls: type, *args: Any, **kwargs: Any) -> ActorHandle:
        """As `Scope.create_actor`, for an actor that belongs to this connection."""
        kwargs.setdefault("on_failure", "absorb")
        return await self._root.create_actor(cls, *args, **kwargs)

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

    async def monitor(self, job: Job | JobId) -> JobInfo:
        """Print what the job writes, as it writes it, until it ends; returns its final state."""
        job_id = job_id_of(job)
        (record,) = await self._records([job])
        self._runtime.link.follow_logs(job_id)
        try:
            await record.ended.wait()
        finally:
            self._runtime.link.follow_logs(job_id, on=False)
        return record.info

    async def terminate(self, job_ids: Job | JobId | Sequence[Job | JobId], reason: str = "terminated") -> None:
        """Ask for the end of jobs and of everything below them. Jobs that have ended are left alone."""
        wanted: Sequence[Job | JobId] = [job_ids] if isinstance(job_ids, Job | str) else job_ids
        ids = tuple(job_id_of(job) for job in wanted)
        for record in self._runtime.link.known(ids):
            record.asked_to_end = True
        await self._runtime.link.request(Terminate(jobs=ids, reason=reason))

    async def list_jobs(self, namespace: Namespace | None = None) -> list[JobInfo]:
        """Jobs of the own namespace (``"*"``: of all), newest last."""
        reply = await self._runtime.link.request(ListJobs(namespace=namespace))
        assert isinstance(reply, Jobs)
        return list(reply.jobs)

    async def explain(self, job: Job | JobId) -> str:
        """Why the job is in its state: what it waits for, or what ended it. Raises NoSuchJob."""
        reply = await self._runtime.link.request(Explain(job=job_id_of(job)))
        assert isinstance(reply, Text)
        return reply.text

    async def story(self, job: Job | JobId) -> list[Event]:
        """What happened to the job, in order. Raises NoSuchJob."""
        reply = await self._runtime.link.request(Story(job=job_id_of(job)))
        assert isinstance(reply, Events)
        return list(reply.events)

    async def nodes(self) -> list[NodeInfo]:
        """The machines of the cluster."""
        reply = await self._runtime.link.request(ListNodes())
        assert isinstance(reply, Nodes)
        return list(reply.nodes)

    async def wait_for_nodes(self, count: int, timeout: float = 60.0) -> list[NodeInfo]:
        """Wait until ``count`` machines are there.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds.
        """
        with trio.move_on_after(timeout):
            while len(alive := [node for node in await self.nodes() if node.alive]) < count:  # noqa: ASYNC110
                await trio.sleep(0.1)  # machines have no subscription yet
            return alive
        raise DeadlineExceeded(f"the cluster has fewer than {count} nodes after {timeout:g} s")

    async def _records(self, jobs: Sequence[Job | JobId]) -> list[JobRecord]:
        return await self._runtime.link.watch_jobs([job_id_of(job) for job in jobs])

    def __repr__(self) -> str:
        return f"<Cluster {self.address} namespace={self.namespace!r}>"


def cluster_of(runtime: Runtime) -> Cluster:
    """The `Cluster` of a runtime, made when first asked for."""
    cluster = runtime.extras.get("cluster")
    if cluster is None:
        root = Scope(ChildScope(runtime, "root", runtime.nursery))
        cluster = runtime.extras["cluster"] = Cluster(runtime, root)
    assert isinstance(cluster, Cluster)
    return cluster


def current_cluster() -> Cluster:
    """The cluster of the running code: in a job its own connection, in a driver the one it opened.

    Raises:
        FrayError: neither in a job nor in `open_cluster`.
    """
    return cluster_of(current())


@asynccontextmanager
async def open_cluster(
    spec: str | None = None, *, namespace: Namespace | None = None, token: str | None = None, logs: bool = True
) -> AsyncIterator[Cluster]:
    """Connect to a cluster, or make one that lives as long as the ``async with``.

    Args:
        spec: ``local`` (threads and tasks of this process), ``machine`` or ``machine?nodes=2&cpu=4`` (real processes on
            this machine), ``fray://host:port`` (a running controller). Default: ``FRAY_CLUSTER_SPEC``, else ``local``;
            inside a job, the job's own cluster.
        namespace: names are unique within it. Default: a new one of its own.
        token: for ``fray://``; default ``FRAY_TOKEN``.
        logs: print what the jobs write to this terminal, each line behind the job's name. Default True.

    Raises:
        UnknownClusterSpec: the spec names nothing.
        Unreachable, Unauthorized, ProtocolMismatch: the controller is not there or refuses us.
    """
    from fray import connect

    runtime = current_or_none()
    if spec is None and runtime is not None and runtime.job_id is not None:
        yield cluster_of(runtime)
        return
    chosen = connect.parse_spec(spec if spec is not None else os.environ.get("FRAY_CLUSTER_SPEC") or "local")
    with deferred_in_our_code():
        async with connect.open_by_spec(chosen, namespace=namespace, token=token, logs=logs) as opened:
            cluster = cluster_of(opened)
            yield cluster
            await cluster._root.wait_jobs_then_end_actors()
