"""`FrayClient`: the same on a cluster of Fray."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fray.model.service_key import ServiceKey
from fray.v2.interface import ActorContext, HostedActor, _current_client_var
from fray.v2.job import JobAlreadyExists
from fray.v2.types import ActorConfig, JobRequest, ResourceConfig

if TYPE_CHECKING:
    from fray.blocking import Cluster
    from fray.v2.fray.actors import FrayActorHandle
    from fray.v2.fray.groups import FrayActorGroup
    from fray.v2.fray.jobs import FrayJobHandle

log = logging.getLogger("fray.v2")


class FrayClient:
    """Jobs and actors on a cluster of Fray; see `fray.v2.Client`. What it makes ends with it, or with the job whose
    code made it. It pickles to the client of where it arrives.

    Args:
        spec: ``local``, ``machine``, ``machine?nodes=2&cpu=4``, ``fray://host:port``, as `fray.blocking.open_cluster`
            has them. Default: ``FRAY_CLUSTER_SPEC``, else ``local``; inside a job of Fray, the job's own cluster.
        cluster: an open `fray.blocking.Cluster` to use in place of a new one; `shutdown` leaves it open.
        namespace, token, logs, grace_s, env_vars: as for `fray.blocking.open_cluster`.

    Raises:
        ValueError: the spec names nothing, or ``cluster`` and something else was given.
        ConnectionError: the controller is not there, or refuses us.
    """

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
            raise ValueError("FrayClient(cluster=…) uses that cluster as it is: give no spec or option of another")
        opened = cluster or open_cluster(
            spec, namespace=namespace, token=token, logs=logs, grace_s=grace_s, env_vars=env_vars
        )
        self._begin(opened, owns=cluster is None and opened._held is not None)

    def _begin(self, cluster: Cluster | None, owns: bool) -> None:
        self._bound, self._owns = cluster, owns
        """``_bound`` None: it came by pickle, and is bound where it is first used."""
        self._jobs: list[FrayJobHandle] = []
        self._members: list[FrayJobHandle] = []
        """Actors that `shutdown` has to end, as the cluster stays."""
        self._hosted: list[HostedActor] = []
        self._sweep_at = 64
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def cluster(self) -> Cluster:
        """For what this face does not have: `fray.blocking.Cluster`. Raises RuntimeError: the client came by pickle to
        where there is none."""
        if self._bound is None:
            from fray.v2.fray.current_cluster import cluster_here

            self._bound = cluster_here("a FrayClient that came by pickle")
        return self._bound

    # Jobs ------------------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> FrayJobHandle:
        """Submit it; returns when the cluster has accepted it. As `fray.v2.Client.submit`.

        With ``adopt_existing`` a living job of this name is gone on with; that its request is another is logged.

        Raises:
            JobAlreadyExists: ``adopt_existing`` is False, and there is one; the error has its handle.
            ValueError: no entrypoint, or it can never be run on this cluster.
            TypeError: the function or an argument cannot be pickled; the message says what of it.
            RuntimeError: this client was shut down.
        """
        from fray.errors import NameInUse
        from fray.v2.fray import convert
        from fray.v2.fray.jobs import FrayJobHandle, submitted

        self._check_open()
        native = submitted(convert.job_request(request), client_of_fray_job)
        argv = native.entrypoint.argv if native.entrypoint is not None else ()
        try:
            job = self.cluster.launch(native, adopt_existing=adopt_existing)
        except NameInUse as taken:
            handle = FrayJobHandle(taken.details["holder"], argv=argv).bind(self.cluster)
            if not adopt_existing:
                raise JobAlreadyExists(request.name, handle) from taken
            log.warning("submit(%r) goes on with a job that is not the same: %s", request.name, taken)
            return handle
        return self._keep(FrayJobHandle(job.id, job=job, argv=argv))

    def _keep(self, handle: FrayJobHandle) -> FrayJobHandle:
        with self._lock:
            if len(self._jobs) >= self._sweep_at:
                self._jobs = [job for job in self._jobs if not job.is_over]
                self._sweep_at = max(64, 2 * len(self._jobs))
            self._jobs.append(handle)
        return handle

    # Actors ----------------------------------------------------------------------------------------------------------

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 (as callers read the signature)
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> FrayActorHandle:
        """Make it in a process of its own, a job called ``name``; returns when the cluster has accepted it. What its
        constructor raises comes out of the first call.

        Resources that are not written reserve nothing. It is made anew after the loss of its machine (unless
        ``preemptible=False``), and after a failure as often as ``max_restarts`` says (default never).

        Raises:
            JobAlreadyExists: a living job or actor has this name.
            ValueError: it can never be run on this cluster.
            TypeError: the class or an argument cannot be pickled.
            RuntimeError: this client was shut down.
        """
        group = self._create(actor_class, args, kwargs, name, None, resources, actor_config)
        return group._handles[0]

    def create_actor_group(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> FrayActorGroup:
        """``count`` of them, ``{name}-0`` and so on, accepted all or none; 0 is a group without members. As
        `create_actor`."""
        if count == 0:
            return self._none(name)
        return self._create(actor_class, args, kwargs, name, count, resources, actor_config)

    def _none(self, name: str) -> FrayActorGroup:
        from fray.v2.fray.groups import FrayActorGroup

        self._check_open()
        return FrayActorGroup(name, [], [], self.cluster)

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
        from fray.v2.fray.current_actor import taken_by_actor
        from fray.v2.fray.groups import made

        self._check_open()
        request, how = convert.actor_request(name, resources, config), convert.actor_config(config)
        try:
            members = self.cluster.launch_actors(request, count, cls, tuple(args), kwargs, how)
        except NameInUse as taken:
            raise taken_by_actor(taken.details["name"]) from taken
        group = made(self.cluster, members, cls, config)
        if not self._owns:
            with self._lock:
                self._members += group._jobs
        return group

    def host_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> HostedActor:
        """Make it here and now, in this process; its methods run on threads of their own, one call at a time unless
        ``actor_config`` says more. What its constructor raises comes out.

        Raises:
            JobAlreadyExists: an actor that is a job of its own has this name.
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
        """Take no more jobs, wait for those that run (or end them: ``wait=False``), end the actors, and leave the
        cluster; one that was made by ``spec`` ends. May be repeated. In a process that was forked it ends nothing: all
        belongs to the parent."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        for job in self._jobs:
            with suppress(RuntimeError):  # the conversation has ended, and the job with it
                _end_or_wait(job, wait)
        for hosted in self._hosted:  # last: jobs may call them
            hosted.shutdown()
        if self._owns:
            self.cluster.close()
        for job in self._members:
            job.terminate()

    @property
    def is_closed(self) -> bool:
        """`shutdown` was called, or the conversation with the cluster has ended."""
        held = None if self._bound is None else self._bound._held
        return self._closed or (held is not None and held.over)

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
    elif not job.is_over:
        job.terminate()


# Which client --------------------------------------------------------------------------------------------------------

_shared: dict[tuple[int, str], FrayClient] = {}
"""By process and spec."""
_sharing = threading.RLock()


def shared_fray_client(spec: str) -> FrayClient:
    """The client of this process for a spec of `fray.blocking.open_cluster`, made when first asked for; it ends with
    the interpreter. Inside a job of Fray it is the job's own, whatever the spec. Raises as `FrayClient`."""
    if (own := client_of_fray_job()) is not None:
        return own
    with _sharing:
        client = _shared.get((os.getpid(), spec))
        if client is None or client.is_closed:
            client = _shared[os.getpid(), spec] = FrayClient(spec)
        return client


V2_CLIENT: ServiceKey[FrayClient] = ServiceKey("v2 client")


def client_of_fray_job() -> FrayClient | None:
    """The client of the Fray job whose code is running; None: it is none."""
    if "fray.runtime.runtime" not in sys.modules:
        return None  # a job's process has it
    from fray.blocking.bridge.background_loop import job_runtime
    from fray.blocking.open import cluster_of

    runtime = job_runtime()
    if runtime is None or runtime.job_id is None:
        return None
    client = runtime.services.get(V2_CLIENT)
    if client is None or client.is_closed:
        client = runtime.services[V2_CLIENT] = FrayClient(cluster=cluster_of(runtime))
    return client


def client_here() -> FrayClient:
    """Where a pickled client arrives: the current one, if it is one of Fray; else one that is bound at its first use,
    as what comes with a job arrives before the job has its place in the cluster."""
    current = _current_client_var.get()
    if isinstance(current, FrayClient):
        return current
    client = FrayClient.__new__(FrayClient)
    client._begin(None, owns=False)
    return client


def running_actor() -> ActorContext | None:
    """The actor whose code is running, when that is one of Fray's; None: it is none."""
    if "fray.runtime.actors.lifecycle" not in sys.modules:
        return None
    from fray.v2.fray.current_actor import context_of_actor

    return context_of_actor()


def _after_fork() -> None:
    global _sharing
    _sharing = threading.RLock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)
