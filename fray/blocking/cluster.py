"""The cluster, its scopes and its jobs, for sync code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, overload

import fray.api.cluster as native
from fray.api.jobs.job_spec import ChildSpec
from fray.api.on_failure import OnFailure
from fray.api.scope import Scope as NativeScope
from fray.blocking.actors import ActorHandle
from fray.blocking.bridge import background_loop
from fray.blocking.bridge.portal import BlockingContext, Portal
from fray.blocking.job_groups import JobGroup
from fray.blocking.jobs import Job, plain_all, wait_stopped
from fray.blocking.jobs import native_job as plain
from fray.blocking.launching import LaunchMixin
from fray.blocking.logs import LogStream
from fray.blocking.metadata import Metadata
from fray.blocking.reservations import Reserving
from fray.model.actors import ActorInfo, ActorStatus
from fray.model.environment import Secret
from fray.model.ids import JobId, Namespace
from fray.model.job_groups import JobGroupConfig, JobGroupInfo
from fray.model.log_records import LogLine
from fray.model.messages.client import Event, NodeInfo
from fray.model.messages.machine_groups import Machines
from fray.model.messages.maintenance import Forecast, NodesMarked
from fray.model.messages.usage import QueueInfo, UsageInfo
from fray.model.requests import JobRequest
from fray.model.specs import JobInfo


class Scope(LaunchMixin):
    """Owner of jobs and actors: ``with cluster.open_scope("run") as scope``. As `fray.Scope`.

    When a child fails by itself, what the body of the ``with`` waits for ends as `ScopeCancelled`, and the block raises
    the child's error in an ExceptionGroup.
    """

    _native: NativeScope

    def __init__(self, portal: Portal, manager: Any) -> None:
        self._portal = portal
        self._held: BlockingContext[NativeScope] = BlockingContext(portal, manager)

    def __enter__(self) -> Scope:
        self._native = self._held.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.leave(error)

    @property
    def name(self) -> str:
        return self._native.name

    def launch_all(self, requests: Sequence[JobRequest], *, on_failure: OnFailure = "escalate") -> list[Job]:
        """Launch several jobs, all or none. As `fray.Scope.launch_all`."""
        jobs = self._portal.call(lambda: self._native.launch_all(requests, on_failure=on_failure))
        return [Job(self._portal, job) for job in jobs]

    def launch_group(
        self,
        requests: Sequence[JobRequest],
        group: JobGroupConfig | None = None,
        reservation_id: str | None = None,
        *,
        on_failure: OnFailure = "escalate",
    ) -> JobGroup:
        """Launch jobs that are placed together, all or none. As `fray.Scope.launch_group`."""
        made = self._portal.call(
            lambda: self._native.launch_group(requests, group, reservation_id, on_failure=on_failure)
        )
        return JobGroup(self._portal, made)

    def run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """One remote call as a job of its own; returns its value. As `fray.Scope.run`. Ctrl-C ends the job."""
        return self._portal.call(lambda: self._native.run(fn, *args, **kwargs))

    def supervise(self, children: Sequence[ChildSpec], **policy: Any) -> list[ActorHandle]:
        """Create actors that fail and restart together, as `fray.Scope.supervise`: ``fray.child(Class, ...)`` each."""
        return [ActorHandle(handle) for handle in self._portal.call(lambda: self._native.supervise(children, **policy))]

    def __repr__(self) -> str:
        return repr(self._native) if hasattr(self, "_native") else "<Scope, not entered>"


class Cluster(LaunchMixin, Reserving):
    """A connection to a cluster, for any thread. Made by `open_cluster`; in a job, `current_cluster()` is its own.

    What is launched here without a scope belongs to the connection: it ends with the driver or the job.
    """

    _native: native.Cluster

    def __init__(
        self, portal: Portal, cluster: native.Cluster, held: BlockingContext[native.Cluster] | None = None
    ) -> None:
        self._portal, self._native, self._held = portal, cluster, held

    @property
    def _runtime(self) -> Any:
        return self._native._runtime

    @property
    def namespace(self) -> Namespace:
        """Names of jobs and actors are unique among the living of a namespace; child jobs inherit it."""
        return self._native.namespace

    @property
    def address(self) -> str:
        """Where the controller is."""
        return self._native.address

    @property
    def metadata(self) -> Metadata:
        """Which actors are registered under which names."""
        return Metadata(self._portal, self._native)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def close(self) -> None:
        """Wait for its jobs, end its actors, and leave it. A job's own cluster is not closed by its code."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._held is not None:
            background_loop.forget(self._runtime)
            self._held.leave(error)

    # Jobs ------------------------------------------------------------------------------------------------------------

    def open_scope(self, name: str = "scope", *, env_vars: Mapping[str, str | Secret] | None = None) -> Scope:
        """A nursery whose children are jobs and actors: ``with cluster.open_scope("run") as scope``.

        ``env_vars``: variables of all its children.
        """
        return Scope(self._portal, self._native.open_scope(name, env_vars=env_vars))

    def launch_group(
        self,
        requests: Sequence[JobRequest],
        group: JobGroupConfig | None = None,
        reservation_id: str | None = None,
        *,
        on_failure: OnFailure = "absorb",
    ) -> JobGroup:
        """Launch jobs that are placed together, all or none. As `fray.Cluster.launch_group`."""
        made = self._portal.call(
            lambda: self._native.launch_group(requests, group, reservation_id, on_failure=on_failure)
        )
        return JobGroup(self._portal, made)

    def list_groups(self, namespace: Namespace | None = None, *, name: str = "") -> list[JobGroupInfo]:
        """Job groups on record, newest last. As `fray.Cluster.list_groups`."""
        return self._portal.call(lambda: self._native.list_groups(namespace, name=name))

    def poll(self, job_id: Job | JobId) -> JobInfo:
        """The job's state now. Raises NoSuchJob."""
        return self._portal.call(self._native.poll, plain(job_id))

    @overload
    def wait(  # type: ignore[overload-overlap]  # a str is a Sequence[str] to the type checker, not to us
        self, job_ids: Job | JobId, raise_on_failure: bool = False
    ) -> JobInfo: ...
    @overload
    def wait(self, job_ids: Sequence[Job | JobId], raise_on_failure: bool = False) -> list[JobInfo]: ...

    def wait(
        self, job_ids: Job | JobId | Sequence[Job | JobId], raise_on_failure: bool = False
    ) -> JobInfo | list[JobInfo]:
        """Wait for the end of one job or of all of a sequence.

        Args:
            raise_on_failure: raise the error of the first job (in the order given) that did not succeed.

        Raises:
            NoSuchJob: one of them is unknown.
        """
        wait: Any = self._native.wait
        infos: JobInfo | list[JobInfo] = self._portal.call(wait, plain_all(job_ids), raise_on_failure)
        return infos

    def logs(self, job: Job | JobId, **which: Any) -> LogStream:
        """What the job has printed, also after its end: ``for line in cluster.logs(job)``. As `fray.Cluster.logs`."""
        return LogStream(self._portal, self._portal.run(lambda: self._native.logs(plain(job), **which)))

    def monitor(
        self,
        job_id: Job | JobId,
        on_line: Callable[[LogLine], object] | None = None,
        *,
        tail: int | None = None,
        tree: bool = False,
    ) -> JobInfo:
        """Follow what the job writes until it ends; returns its final state. As `fray.Cluster.monitor`.

        Args:
            on_line: called on this thread with each line. Default: they are printed.
        """
        native_job = plain(job_id)
        if on_line is None:
            return self._portal.call(lambda: self._native.monitor(native_job, tail=tail, tree=tree))
        with self.logs(job_id, follow=True, tail=tail, tree=tree) as lines:
            for line in lines:
                on_line(line)
        return self._portal.call(lambda: self._native.wait(native_job))

    def terminate(
        self,
        job_id: Job | JobId | Sequence[Job | JobId] = (),
        reason: str = "terminated",
        *,
        name: str | None = None,
        prefix: str | None = None,
        namespace: Namespace | None = None,
        tree: bool = False,
    ) -> list[JobId]:
        """Ask for the end of a job, or several, and of all they own; which ones it has asked for. As
        `fray.Cluster.terminate`. In a `local` cluster they have STOPPED when it returns; see `Job.terminate`.
        """
        names: dict[str, Any] = {"name": name, "prefix": prefix, "namespace": namespace, "tree": tree}
        asked = self._portal.call(lambda: self._native.terminate(plain_all(job_id), reason, **names))
        wait_stopped(self._portal, lambda: self._native.wait(asked))
        return asked

    def list_jobs(self, namespace: Namespace | None = None, **which: Any) -> list[JobInfo]:
        """Jobs of the own namespace (``"*"``: of all), newest last. As `fray.Cluster.list_jobs`."""
        return self._portal.call(lambda: self._native.list_jobs(namespace, **which))

    def get_job(self, name: str, namespace: Namespace | None = None) -> Job:
        """The job of this name (or id), whoever launched it. As `fray.Cluster.get_job`."""
        return Job(self._portal, self._portal.call(self._native.get_job, name, namespace))

    def follow_jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        """The jobs of these ids, each followed from here on. As `fray.Cluster.follow_jobs`."""
        return [Job(self._portal, job) for job in self._portal.call(self._native.follow_jobs, job_ids)]

    def explain(self, job: Job | JobId) -> str:
        """Why the job is in its state: what it waits for, or what ended it. Raises NoSuchJob."""
        return self._portal.call(self._native.explain, plain(job))

    def stacks(self, job: Job | JobId) -> dict[str, str]:
        """As `fray.Cluster.stacks`."""
        return self._portal.call(self._native.stacks, plain(job))

    def events(self, job: Job | JobId) -> list[Event]:
        """What happened to the job, in order. Raises NoSuchJob."""
        return self._portal.call(self._native.events, plain(job))

    def nodes(self) -> list[NodeInfo]:
        """The machines of the cluster."""
        return self._portal.call(self._native.nodes)

    def queue(self, *, limit: int = 100, user: str | None = None) -> QueueInfo:
        """What waits for machines, in the order in which it is tried; see `fray.Cluster.queue`."""
        return self._portal.call(lambda: self._native.queue(limit=limit, user=user))

    def usage(self, *, samples: bool = False) -> UsageInfo:
        """Who has and had how much of the cluster; see `fray.Cluster.usage`."""
        return self._portal.call(lambda: self._native.usage(samples=samples))

    def join_token(self, machine: str, *, hosts: int = 1, life_s: float = 3600.0) -> str:
        """A token with which a machine that is yet to come can join the cluster; see `fray.Cluster.join_token`."""
        return self._portal.call(lambda: self._native.join_token(machine, hosts=hosts, life_s=life_s))

    def wait_for_nodes(self, count: int, timeout: float = 60.0) -> list[NodeInfo]:
        """Wait until ``count`` machines are there. Raises DeadlineExceeded (a TimeoutError)."""
        return self._portal.call(self._native.wait_for_nodes, count, timeout)

    def list_machines(self, group: str = "") -> Machines:
        """Machines that can be had. As `fray.Cluster.list_machines`."""
        return self._portal.call(self._native.list_machines, group)

    def scale_group(self, group: str, *, min: int | None = None, max: int | None = None) -> None:
        """As `fray.Cluster.scale_group`."""
        self._portal.call(lambda: self._native.scale_group(group, min=min, max=max))

    def cordon(self, *nodes: str, reason: str = "") -> NodesMarked:
        """Place nothing new on these machines. As `fray.Cluster.cordon`."""
        return self._portal.call(lambda: self._native.cordon(*nodes, reason=reason))

    def uncordon(self, *nodes: str) -> NodesMarked:
        """Use these machines again. As `fray.Cluster.uncordon`."""
        return self._portal.call(self._native.uncordon, *nodes)

    def drain(self, *nodes: str, **how: Any) -> NodesMarked:
        """Cordon these machines, and end what runs there, to begin elsewhere. As `fray.Cluster.drain`."""
        return self._portal.call(lambda: self._native.drain(*nodes, **how))

    def what_if(self, request: JobRequest) -> Forecast:
        """What would become of this request now. As `fray.Cluster.what_if`."""
        return self._portal.call(self._native.what_if, request)

    # Actors ----------------------------------------------------------------------------------------------------------

    def get_actor(self, name: str, namespace: Namespace | None = None) -> ActorHandle:
        """The living actor of this name. As `fray.Cluster.get_actor`."""
        return ActorHandle(self._portal.call(self._native.get_actor, name, namespace))

    def list_actors(self, prefix: str = "", namespace: Namespace | None = None) -> list[ActorInfo]:
        """As `fray.Cluster.list_actors`."""
        return self._portal.call(self._native.list_actors, prefix, namespace)

    def actor_info(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> ActorInfo:
        """As `fray.Cluster.actor_info`."""
        return self._portal.call(self._native.actor_info, _plain_actor(actor), namespace)

    def actor_status(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> ActorStatus:
        """As `fray.Cluster.actor_status`."""
        return self._portal.call(self._native.actor_status, _plain_actor(actor), namespace)

    def delete_actor(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> None:
        """As `fray.Cluster.delete_actor`."""
        self._portal.call(self._native.delete_actor, _plain_actor(actor), namespace)

    def __repr__(self) -> str:
        return repr(self._native)


def _plain_actor(actor: ActorHandle | str) -> Any:
    return actor._native if isinstance(actor, ActorHandle) else actor
