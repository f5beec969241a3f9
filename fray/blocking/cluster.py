"""Cluster and scopes for sync code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

import fray.api.cluster as native
from fray.api.launch_options import RunOptions
from fray.api.scope import Scope as NativeScope
from fray.blocking.actors import ActorHandle, actor_handle
from fray.blocking.bridge import background_loop
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import BlockingContext, Portal
from fray.blocking.jobs import Job, job_list, wait_stopped
from fray.blocking.launching import LaunchMixin
from fray.blocking.logs import LogStream
from fray.blocking.metadata import Metadata
from fray.blocking.reservations import ReservationMixin
from fray.errors import FrayError, NotPicklable
from fray.missing_names import CLUSTER_LINES, SCOPE_LINES, blocking_lines
from fray.model.actors import ActorInfo, ActorStatus
from fray.model.environment import Secret
from fray.model.ids import JobId, Namespace
from fray.model.log_records import LogLine
from fray.model.resources import ResourceConfig
from fray.model.specs import JobInfo
from fray.tracebacks import short_tracebacks

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
ASYNC_LINE = "in async code write `async with fray.open_cluster(...) as cluster:`"


@short_tracebacks
class Scope(LaunchMixin):
    """Owner of jobs and actors: ``with cluster.open_scope("run") as scope``. As `fray.Scope`.

    When a child fails by itself, waits in the body of the ``with`` raise `ScopeCancelled`, and the block raises the
    child's error in an ExceptionGroup.
    """

    _meant = blocking_lines(SCOPE_LINES)
    _native: NativeScope

    def __init__(self, portal: Portal, manager: Any) -> None:
        self._portal = portal
        self._context: BlockingContext[NativeScope] = BlockingContext(portal, manager)

    def __enter__(self) -> Scope:
        self._native = self._context.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.leave(error)

    @property
    def name(self) -> str:
        return self._native.name

    launch_all = make_blocking(NativeScope.launch_all, job_list)

    if TYPE_CHECKING:  # `make_blocking` loses overloads

        @overload
        def run(self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
        @overload
        def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
        @overload
        def run(
            self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], /, *args: *Ts, **options: Unpack[RunOptions]
        ) -> T: ...
        @overload
        def run(self, fn: Callable[[*Ts], T], /, *args: *Ts, **options: Unpack[RunOptions]) -> T: ...
        @overload
        def run(  # type: ignore[overload-cannot-match]
            self, fn: Callable[..., Coroutine[Any, Any, T]], /, *, name: str | None, **kwargs: Any
        ) -> T: ...
        @overload
        def run(self, fn: Callable[..., T], /, *, name: str | None, **kwargs: Any) -> T: ...  # type: ignore[overload-cannot-match]
        @overload
        def run(  # type: ignore[overload-cannot-match]
            self, fn: Callable[..., Coroutine[Any, Any, T]], /, *, resources: ResourceConfig | None, **kwargs: Any
        ) -> T: ...
        @overload
        def run(  # type: ignore[overload-cannot-match]
            self, fn: Callable[..., T], /, *, resources: ResourceConfig | None, **kwargs: Any
        ) -> T: ...

        def run(self, /, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]

    else:
        run = make_blocking(NativeScope.run)

    supervise = make_blocking(
        NativeScope.supervise, lambda portal, handles: [ActorHandle(handle) for handle in handles]
    )

    if not TYPE_CHECKING:  # with it, type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if name == "_native":
                raise FrayError("this scope was not entered: write `with cluster.open_scope(...) as scope:`")
            return super().__getattr__(name)

        def __aenter__(self) -> NoReturn:
            raise TypeError("this is a scope of fray.blocking: write `with cluster.open_scope(...) as scope:`")

        async def __aexit__(self, *error: object) -> None:
            """Exist because Python looks for it before it calls `__aenter__`."""

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            "a scope belongs to its process: pass handles of its jobs and actors, or open another scope in the job: "
            "fray.blocking.current_cluster().open_scope()"
        )

    def __repr__(self) -> str:
        return repr(self._native) if "_native" in vars(self) else "<Scope, not entered>"

    def _repr_html_(self) -> str:
        return self._native._repr_html_() if "_native" in vars(self) else f"<div>{escape(repr(self))}</div>"


@short_tracebacks
class Cluster(LaunchMixin, ReservationMixin):
    """Connection to a cluster, usable on any thread. Made by `open_cluster`; in a job, `current_cluster()` is the job's
    own.

    What is launched here without a scope belongs to the connection: it ends with the driver or the job.
    """

    _meant = blocking_lines(CLUSTER_LINES)
    _native: native.Cluster

    def __init__(
        self, portal: Portal, cluster: native.Cluster, context: BlockingContext[native.Cluster] | None = None
    ) -> None:
        self._portal, self._native, self._context = portal, cluster, context

    @property
    def _runtime(self) -> Any:
        return self._native._runtime

    @property
    def namespace(self) -> Namespace:
        """Namespace of this connection: names of jobs and actors are unique among its living; child jobs inherit it."""
        return self._native.namespace

    @property
    def address(self) -> str:
        """Address of the controller."""
        return self._native.address

    @property
    def metadata(self) -> Metadata:
        """Registered actors by name."""
        return Metadata(self._portal, self._native)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    if not TYPE_CHECKING:  # type checkers find this mistake themselves

        def __aenter__(self) -> NoReturn:
            raise TypeError(f"this is a cluster of fray.blocking: {ASYNC_LINE}")

        async def __aexit__(self, *error: object) -> None:
            """Exist because Python looks for it before it calls `__aenter__`."""

    def close(self) -> None:
        """Wait for the jobs, end the actors, and disconnect. Does nothing in a job: its own cluster is closed
        with it.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._context is not None:
            background_loop.forget(self._runtime)
            self._context.leave(error)

    # Jobs ------------------------------------------------------------------------------------------------------------

    def open_scope(self, name: str = "scope", *, env_vars: Mapping[str, str | Secret] | None = None) -> Scope:
        """Return a scope, a nursery of jobs and actors: ``with cluster.open_scope("run") as scope``.

        ``env_vars``: variables of all its children.
        """
        return Scope(self._portal, self._native.open_scope(name, env_vars=env_vars))

    list_groups = make_blocking(native.Cluster.list_groups)

    def poll(self, job_id: Job | JobId) -> JobInfo:
        """Return the present state of the job. Raises NoSuchJob."""
        return self._portal.call(self._native.poll, job_id)

    @overload
    def wait(  # type: ignore[overload-overlap]  # a str is a Sequence[str] to the type checker, not to us
        self, job_ids: Job | JobId, raise_on_failure: bool = False
    ) -> JobInfo: ...
    @overload
    def wait(self, job_ids: Sequence[Job | JobId], raise_on_failure: bool = False) -> list[JobInfo]: ...

    def wait(
        self, job_ids: Job | JobId | Sequence[Job | JobId], raise_on_failure: bool = False
    ) -> JobInfo | list[JobInfo]:
        """Wait for the end of one job, or of all jobs of a sequence; return their final states.

        Args:
            raise_on_failure: raise the error of the first job (in the order given) that did not succeed.

        Raises:
            NoSuchJob: the cluster does not know one of them.
        """
        wait: Any = self._native.wait
        infos: JobInfo | list[JobInfo] = self._portal.call(wait, job_ids, raise_on_failure)
        return infos

    def logs(self, job: Job | JobId, **which: Any) -> LogStream:
        """Return a reader of the job's output, also after its end: ``for line in cluster.logs(job)``. As
        `fray.Cluster.logs`.
        """
        return LogStream(self._portal, self._portal.run(lambda: self._native.logs(job, **which)))

    def monitor(
        self,
        job_id: Job | JobId,
        on_line: Callable[[LogLine], object] | None = None,
        *,
        tail: int | None = None,
        tree: bool = False,
    ) -> JobInfo:
        """Follow the output of a job until it ends; return its final state. As `fray.Cluster.monitor`.

        Args:
            on_line: called on this thread with each line. Default: the lines are printed.
        """
        if on_line is None:
            return self._portal.call(lambda: self._native.monitor(job_id, tail=tail, tree=tree))
        with self.logs(job_id, follow=True, tail=tail, tree=tree) as lines:
            for line in lines:
                on_line(line)
        info: JobInfo = self._portal.call(lambda: self._native.wait(job_id))
        return info

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
        """Request the end of jobs, and of all they own; return the ids whose end was requested. As
        `fray.Cluster.terminate`.

        In a `local` cluster the jobs are STOPPED when it returns; see `Job.terminate`.
        """
        filters: dict[str, Any] = {"name": name, "prefix": prefix, "namespace": namespace, "tree": tree}
        requested = self._portal.call(lambda: self._native.terminate(job_id, reason, **filters))
        wait_stopped(self._portal, lambda: self._native.wait(requested))
        return requested

    requeue = make_blocking(native.Cluster.requeue)
    list_jobs = make_blocking(native.Cluster.list_jobs)
    job_changes = make_blocking(native.Cluster.job_changes)
    get_job = make_blocking(native.Cluster.get_job, Job)
    follow_jobs = make_blocking(native.Cluster.follow_jobs, job_list)
    explain = make_blocking(native.Cluster.explain)
    stacks = make_blocking(native.Cluster.stacks)
    events = make_blocking(native.Cluster.events)
    requested = make_blocking(native.Cluster.requested)
    find_events = make_blocking(native.Cluster.find_events)
    attempts = make_blocking(native.Cluster.attempts)
    gone_nodes = make_blocking(native.Cluster.gone_nodes)
    history = make_blocking(native.Cluster.history)
    cost = make_blocking(native.Cluster.cost)
    daily_use = make_blocking(native.Cluster.daily_use)
    reservation_history = make_blocking(native.Cluster.reservation_history)
    capacity = make_blocking(native.Cluster.capacity)
    capacity_history = make_blocking(native.Cluster.capacity_history)
    node_changes = make_blocking(native.Cluster.node_changes)
    nodes = make_blocking(native.Cluster.nodes)
    queue = make_blocking(native.Cluster.queue)
    usage = make_blocking(native.Cluster.usage)
    counts = make_blocking(native.Cluster.counts)
    join_token = make_blocking(native.Cluster.join_token)
    wait_for_nodes = make_blocking(native.Cluster.wait_for_nodes)
    list_machines = make_blocking(native.Cluster.list_machines)
    scale_group = make_blocking(native.Cluster.scale_group)
    cordon = make_blocking(native.Cluster.cordon)
    uncordon = make_blocking(native.Cluster.uncordon)
    drain = make_blocking(native.Cluster.drain)
    what_if = make_blocking(native.Cluster.what_if)
    add_user = make_blocking(native.Cluster.add_user)
    remove_user = make_blocking(native.Cluster.remove_user)
    list_users = make_blocking(native.Cluster.list_users)
    list_keys = make_blocking(native.Cluster.list_keys)
    revoke_keys = make_blocking(native.Cluster.revoke_keys)
    launch_users = make_blocking(native.Cluster.launch_users)
    share_namespace = make_blocking(native.Cluster.share_namespace)
    list_namespaces = make_blocking(native.Cluster.list_namespaces)
    audit_records = make_blocking(native.Cluster.audit_records)

    # Actors ----------------------------------------------------------------------------------------------------------

    get_actor = make_blocking(native.Cluster.get_actor, actor_handle)
    list_actors = make_blocking(native.Cluster.list_actors)

    def actor_info(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> ActorInfo:
        """Return the controller's record of an actor. As `fray.Cluster.actor_info`."""
        return self._portal.call(self._native.actor_info, _native_actor(actor), namespace)

    def actor_status(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> ActorStatus:
        """Return the `ActorStatus` of an actor. As `fray.Cluster.actor_status`."""
        return self._portal.call(self._native.actor_status, _native_actor(actor), namespace)

    def delete_actor(self, actor: ActorHandle | str, namespace: Namespace | None = None) -> None:
        """End an actor and wait until it has ended. As `fray.Cluster.delete_actor`."""
        self._portal.call(self._native.delete_actor, _native_actor(actor), namespace)

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            "a cluster belongs to its process: do not pass it, call fray.blocking.current_cluster() in the job or actor"
        )

    def __repr__(self) -> str:
        return repr(self._native)

    def _repr_html_(self) -> str:
        return self._native._repr_html_()


def _native_actor(actor: ActorHandle | str) -> Any:
    return actor._native if isinstance(actor, ActorHandle) else actor
