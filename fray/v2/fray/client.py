"""`FrayClient`: jobs and actors of `fray.v2` on a cluster of Fray.

`fray.blocking` and what uses it are imported when they are first used: `import fray.v2` takes 80 ms without the runtime
of the cluster, and 500 ms with it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fray.missing_names import V2_CLIENT_LINES, ExplainsMissing
from fray.model.service_key import ServiceKey
from fray.tracebacks import short_tracebacks
from fray.v2.interface import ActorContext, HostedActor, _current_client_var, take_environment
from fray.v2.job import JobAlreadyExists
from fray.v2.types import ActorConfig, JobRequest, ResourceConfig, check_request

if TYPE_CHECKING:
    from fray.blocking import Cluster
    from fray.v2.fray.actors import FrayActorHandle
    from fray.v2.fray.groups import FrayActorGroup
    from fray.v2.fray.jobs import FrayJobHandle

log = logging.getLogger("fray.v2")

T = TypeVar("T")


@short_tracebacks
class FrayClient(ExplainsMissing):
    """Jobs and actors on a cluster of Fray; see `fray.v2.Client`. What it makes ends with it, or with the job whose
    code made it. A pickled client becomes the client of the process where it arrives.

    Args:
        spec: ``local``, ``machine``, ``machine?nodes=2&cpu=4``, ``fray://host:port``, as for
            `fray.blocking.open_cluster`. Default: ``FRAY_CLUSTER_SPEC``, else ``local``; inside a job of Fray, the
            job's own cluster.
        cluster: an open `fray.blocking.Cluster` to use in place of a new one; `shutdown` leaves it open.
        namespace, token, logs, grace_s, env_vars: as for `fray.blocking.open_cluster`.

    Raises:
        ValueError: the spec is invalid, or ``cluster`` was given together with another option.
        ConnectionError: the controller cannot be reached, or refuses the connection.
    """

    _meant = V2_CLIENT_LINES

    def __init__(
        self,
        spec: str | None = None,
        *,
        cluster: Cluster | None = None,
        namespace: str | None = None,
        token: str | None = None,
        logs: bool = True,
        grace_s: float | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        from fray.blocking import open_cluster

        if cluster is not None and (spec, namespace, token, grace_s, env_vars) != (None,) * 5:
            raise ValueError("FrayClient(cluster=…) uses that cluster as it is: pass no spec or option of another")
        opened = cluster or open_cluster(
            spec, namespace=namespace, token=token, logs=logs, grace_s=grace_s, env_vars=env_vars
        )
        # Inside a job `open_cluster` returns the job's own cluster, which is not this client's to close.
        self._initialize(opened, owns=cluster is None and opened._context is not None)

    def _initialize(self, cluster: Cluster | None, owns: bool) -> None:
        self._bound, self._owns = cluster, owns
        """``_bound`` is None after unpickling: the client finds its cluster at the first use."""
        self._jobs: list[FrayJobHandle] = []
        self._members: list[FrayJobHandle] = []
        """Actors that `shutdown` ends itself, because the cluster stays open."""
        self._hosted: list[HostedActor] = []
        self._sweep_at = 64
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def cluster(self) -> Cluster:
        """Cluster, for operations that `fray.v2` does not offer. Raises RuntimeError: the client was unpickled where
        there is no cluster."""
        if self._bound is None:
            from fray.v2.fray.current_cluster import cluster_here

            self._bound = cluster_here("an unpickled FrayClient")
        return self._bound

    # Jobs ------------------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> FrayJobHandle:
        """Submit a job; return when the cluster has accepted it. See `fray.v2.Client.submit`.

        With ``adopt_existing``, a living job of this name is returned; a warning is logged if its request differs.

        Raises:
            JobAlreadyExists: ``adopt_existing`` is False and such a job exists; the error has its handle.
            ValueError: there is no entrypoint, or the job can never run on this cluster.
            TypeError: the function or an argument cannot be pickled; the message says which part.
            RuntimeError: this client was shut down.
        """
        from fray.errors import NameInUse
        from fray.v2.fray import convert
        from fray.v2.fray.jobs import FrayJobHandle, with_client

        check_request(request)
        self._check_open()
        # So that code in the job finds a client of the same cluster by `current_client`.
        native = with_client(convert.job_request(request), client_of_fray_job)
        argv = native.entrypoint.argv if native.entrypoint is not None else ()
        try:
            job = self.cluster.launch(native, adopt_existing=adopt_existing)
        except NameInUse as taken:
            # The cluster refuses a name in use with the holder's id, so no second look-up is needed.
            handle = FrayJobHandle(taken.details["holder"], argv=argv).bind(self.cluster)
            if not adopt_existing:
                raise JobAlreadyExists(request.name, handle) from taken
            log.warning("submit(%r) returns a living job with a different request: %s", request.name, taken)
            return handle
        return self._track(FrayJobHandle(job.id, job=job, argv=argv))

    def _track(self, handle: FrayJobHandle) -> FrayJobHandle:
        with self._lock:
            # Ended jobs are dropped when the list has doubled: a driver may submit a million, and each sweep looks at
            # all.
            if len(self._jobs) >= self._sweep_at:
                self._jobs = [job for job in self._jobs if not job.has_ended]
                self._sweep_at = max(64, 2 * len(self._jobs))
            self._jobs.append(handle)
        return handle

    # Actors ----------------------------------------------------------------------------------------------------------

    def create_actor(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 (as callers read the signature)
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> FrayActorHandle[T]:
        """Make an actor in its own process, a job named ``name``; return when the cluster has accepted it. The first
        call raises what the constructor raises.

        Resources that are not given reserve nothing. The actor restarts after the loss of its machine (unless
        ``preemptible=False``), and after a failure up to ``max_restarts`` times (default: ``max_task_retries``).

        Raises:
            JobAlreadyExists: a living job or actor has this name.
            ValueError: the actor can never run on this cluster.
            TypeError: the class or an argument cannot be pickled.
            RuntimeError: this client was shut down.
        """
        group = self._create(actor_class, args, kwargs, name, None, resources, actor_config)
        return group._handles[0]

    def create_actor_group(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> FrayActorGroup[T]:
        """Make ``count`` actors, ``{name}-0`` and so on, accepted all or none. See `create_actor`."""
        if count == 0:
            from fray.v2.fray.groups import FrayActorGroup

            self._check_open()
            return FrayActorGroup(name, [], [], self.cluster)
        return self._create(actor_class, args, kwargs, name, count, resources, actor_config)

    def _create(
        self,
        cls: type,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        name: str,
        count: int | None,
        resources: ResourceConfig,
        config: ActorConfig,
    ) -> FrayActorGroup:
        from fray.errors import NameInUse
        from fray.v2.fray import convert
        from fray.v2.fray.current_actor import name_in_use_error
        from fray.v2.fray.groups import group_of

        self._check_open()
        environment = take_environment(cls, kwargs)
        request = convert.actor_request(name, resources, config, environment)
        how = convert.actor_config(config)
        try:
            members = self.cluster.launch_actors(request, count, cls, tuple(args), kwargs, how)
        except NameInUse as taken:
            raise name_in_use_error(taken.details["name"]) from taken
        group = group_of(self.cluster, members, cls, config)
        # A cluster that is closed ends them anyway.
        if not self._owns:
            with self._lock:
                self._members += group._jobs
        return group

    def host_actor(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> HostedActor[T]:
        """Make an actor in this process; its methods run on its own threads, one call at a time unless ``actor_config``
        allows more. Raises what the constructor raises.

        Raises:
            JobAlreadyExists: an actor with a process of its own has this name.
            RuntimeError: this client was shut down.
        """
        from fray.v2.fray.current_actor import host

        self._check_open()
        hosted = host(self.cluster, actor_class, args, kwargs, name, actor_config)
        with self._lock:
            self._hosted.append(hosted)
        return hosted

    # The end ---------------------------------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """Accept no more jobs, wait for the running ones (with ``wait=False``, end them), end the actors, and leave the
        cluster, which ends if ``spec`` made it. May be repeated. No effect in a forked process: everything belongs to
        the parent."""
        with self._lock:
            # The jobs and the connection belong to the parent.
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        for job in self._jobs:
            with suppress(RuntimeError):  # the connection has ended, and the job with it
                _end_or_wait(job, wait)
        for hosted in self._hosted:  # last: jobs may call them
            hosted.shutdown()
        if self._owns:
            self.cluster.close()
        for job in self._members:
            job.terminate()

    @property
    def is_closed(self) -> bool:
        """True once `shutdown` was called or the connection to the cluster has ended."""
        held = None if self._bound is None else self._bound._context
        return self._closed or (held is not None and held.has_ended)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this FrayClient was shut down: make another")

    def __enter__(self) -> FrayClient:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.shutdown(wait=kind is None)

    def __reduce__(self) -> tuple[Any, ...]:
        return client_here, ()

    def __repr__(self) -> str:
        return f"<FrayClient {self._bound!r}{', shut down' if self._closed else ''}>"


def _end_or_wait(job: FrayJobHandle, wait: bool) -> None:
    if wait:
        job.wait(raise_on_failure=False)
    elif not job.has_ended:
        job.terminate()


# Current client ------------------------------------------------------------------------------------------------------

_shared: dict[tuple[int, str], FrayClient] = {}
"""Clients by process id and spec."""
_sharing = threading.RLock()


def shared_fray_client(spec: str) -> FrayClient:
    """Return the client of this process for a spec of `fray.blocking.open_cluster`, made at the first call; it ends
    with the interpreter. Inside a job of Fray, return the job's own client, whatever the spec. Raises as
    `FrayClient`."""
    if (own := client_of_fray_job()) is not None:
        return own
    with _sharing:
        client = _shared.get((os.getpid(), spec))
        if client is None or client.is_closed:
            # By process id: a child made by fork must not use the parent's connection.
            client = _shared[os.getpid(), spec] = FrayClient(spec)
        return client


V2_CLIENT: ServiceKey[FrayClient] = ServiceKey("v2 client")


def client_of_fray_job() -> FrayClient | None:
    """Return the client of the Fray job whose code is running; None outside of jobs."""
    if "fray.runtime.runtime" not in sys.modules:
        return None  # the process of a job has imported it
    from fray.blocking.bridge.background_loop import job_runtime
    from fray.blocking.open import cluster_of

    runtime = job_runtime()
    if runtime is None or runtime.job_id is None:
        return None
    client = runtime.services.get(V2_CLIENT)
    if client is None or client.is_closed:
        # Made once for each runtime, so that all code of a job shares it.
        client = runtime.services[V2_CLIENT] = FrayClient(cluster=cluster_of(runtime))
    return client


def client_here() -> FrayClient:
    """Return what a pickled client becomes where it arrives: the current client if it is a `FrayClient`, else one that
    finds its cluster at the first use, because a job's arguments arrive before the job is connected."""
    current = _current_client_var.get()
    if isinstance(current, FrayClient):
        return current
    client = FrayClient.__new__(FrayClient)
    client._initialize(None, owns=False)
    return client


def running_actor() -> ActorContext | None:
    """Return the actor of a Fray cluster whose code is running; None if there is none."""
    if "fray.runtime.actors.lifecycle" not in sys.modules:
        return None
    from fray.v2.fray.current_actor import context_of_actor

    return context_of_actor()


def _after_fork() -> None:
    global _sharing
    _sharing = threading.RLock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)
