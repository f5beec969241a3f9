"""`FrayIrisClient`: `fray.v2` on a cluster of Iris, by its client library, where that is installed.

Translation: ``preemptible=False`` becomes the constraint ``preemptible == false``; CPUs, memory, disk and device become
Iris's `ResourceSpec`; each actor is a separate job with a port named ``actor``, which registers an endpoint named after
the job and the actor; a handle pickles to that name, and finds the actor by the context of the job in which it is used.

Iris passes on no exceptions of jobs, only texts: `JobHandle.wait` raises `JobFailed` with Iris's text.
"""

from __future__ import annotations

import threading
from typing import Any

from fray.missing_names import V2_CLIENT_LINES, ExplainsMissing
from fray.tracebacks import short_tracebacks
from fray.v2.interface import HostedActor
from fray.v2.iris.actors import (
    PORT,
    IrisActorGroup,
    IrisActorHandle,
    endpoint_of,
    host_actor_job,
    methods_of,
    serve,
)
from fray.v2.iris.convert import (
    band_of,
    convert_constraints,
    convert_container_profile,
    convert_entrypoint,
    convert_environment,
    convert_resources,
    image_of,
    iris_client,
    iris_context,
    limit_of,
    max_failures_of,
    policy_of,
    remember_driver,
    resolve_coscheduling,
    wrap_multiprocess,
    wrap_nsys,
)
from fray.v2.iris.jobs import HostingJob, IrisJobHandle
from fray.v2.job import JobAlreadyExists, JobStatus
from fray.v2.types import ActorConfig, EnvironmentConfig, JobRequest, ResourceConfig, check_request

_shared: dict[str, FrayIrisClient] = {}


def shared_iris_client(spec: str) -> FrayIrisClient:
    """Return the client of this process for ``iris://host:port``; make it if there is none or it was shut down.

    Raises:
        RuntimeError: Iris is not installed.
    """
    client = _shared.get(spec)
    # One for each address: each would hold a connection and threads of Iris.
    if client is None or client._closed:
        client = _shared[spec] = FrayIrisClient(spec.removeprefix("iris://"))
    return client


def client_of_iris_job() -> FrayIrisClient | None:
    """Return the client of the Iris job whose code is running; None outside of Iris jobs."""
    context = iris_context()
    return None if context is None else FrayIrisClient.from_iris_client(context.client)


@short_tracebacks
class FrayIrisClient(ExplainsMissing):
    """Jobs and actors on Iris; see `fray.v2.Client`.

    Args:
        controller_address: ``host:port`` or URL of Iris's controller.
        workspace: directory that Iris uploads with jobs.
        bundle_id: an uploaded workspace to use, in its place.

    Raises:
        RuntimeError: Iris is not installed.
    """

    _meant = V2_CLIENT_LINES
    _job_class = IrisJobHandle

    def __init__(self, controller_address: str, workspace: Any = None, bundle_id: str | None = None) -> None:
        url = controller_address if "://" in controller_address else f"http://{controller_address}"
        self._initialize(iris_client().IrisClient.remote(url, workspace=workspace, bundle_id=bundle_id))

    @classmethod
    def from_iris_client(cls, iris_client: Any) -> FrayIrisClient:
        """Return a client that uses an existing client of Iris."""
        made = cls.__new__(cls)
        made._initialize(iris_client)
        return made

    def _initialize(self, client: Any) -> None:
        self._iris = client
        remember_driver(client)
        self._jobs: list[IrisJobHandle] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> IrisJobHandle:
        """Submit a job. See `fray.v2.Client.submit`."""
        check_request(request)
        self._check_open()
        exists = iris_client().JobAlreadyExists
        assert request.replicas is not None
        entrypoint = convert_entrypoint(request.entrypoint, f"job {request.name!r}")
        resources = convert_resources(request.resources)
        if request.processes_per_task > 1:
            entrypoint = wrap_multiprocess(entrypoint, resources, request.processes_per_task)
        try:
            job = self._iris.submit(
                entrypoint=wrap_nsys(entrypoint),
                name=request.name,
                resources=resources,
                environment=convert_environment(request.environment, request.resources.device),
                constraints=convert_constraints(request.resources) or None,
                coscheduling=resolve_coscheduling(request.resources, request.replicas),
                replicas=request.replicas,
                max_retries_failure=request.max_retries_failure,
                max_retries_preemption=request.max_retries_preemption,
                max_task_failures=max_failures_of(request),
                existing_job_policy=policy_of(adopt_existing),
                task_image=image_of(request.environment, request.resources),
                container_profile=convert_container_profile(request.resources),
                priority_band=band_of(request.priority),
                timeout=limit_of(request),
            )
        except exists:
            raise JobAlreadyExists(request.name) from None
        return self._track(self._job_class(job))

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 (as callers read the signature)
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        environment: EnvironmentConfig | None = None,
        **kwargs: Any,
    ) -> IrisActorHandle:
        """Submit a job named ``name`` that hosts the actor; the first use of the handle waits until it is there."""
        handle, _ = self._submit_host(actor_class, args, kwargs, name, name, 0, resources, actor_config, environment)
        return handle

    def create_actor_group(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        environment: EnvironmentConfig | None = None,
        **kwargs: Any,
    ) -> IrisActorGroup:
        """Submit jobs ``{name}-0``, ``{name}-1``, … that host one member each; return without waiting for them."""
        made = [
            self._submit_host(
                actor_class, args, kwargs, f"{name}-{index}", name, index, resources, actor_config, environment
            )
            for index in range(count)
        ]
        return IrisActorGroup([handle for handle, _ in made], [job for _, job in made])

    def _submit_host(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        group: str,
        index: int,
        resources: ResourceConfig,
        config: ActorConfig,
        environment: EnvironmentConfig | None,
    ) -> tuple[IrisActorHandle, IrisJobHandle]:
        from iris.cluster.types import Entrypoint

        self._check_open()
        concurrency = config.max_concurrency
        # Marin's actors are restarted as often as their calls would be repeated.
        restarts = config.max_restarts if config.max_restarts is not None else config.max_task_retries or 0
        job = self._iris.submit(
            entrypoint=Entrypoint.from_callable(host_actor_job, cls, args, kwargs, name, group, index, concurrency),
            name=name,
            resources=convert_resources(resources),
            environment=convert_environment(environment, resources.device),
            ports=[PORT],
            constraints=convert_constraints(resources) or None,
            # Iris restarts a job, not an actor; the job of an actor is the actor's process.
            max_retries_failure=restarts,
            max_task_failures=restarts,
            task_image=image_of(environment, resources),
            container_profile=convert_container_profile(resources),
            priority_band=band_of(config.priority),
        )
        hosting = HostingJob(job, self._iris)
        self._track(hosting)
        return IrisActorHandle(endpoint_of(job.job_id, name), methods=methods_of(cls), job=hosting), hosting

    def host_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> HostedActor:
        """Serve the actor from this process, which must be a job of Iris: callers find it by that job's context.

        Raises:
            RuntimeError: this process is not a job of Iris.
        """
        context = iris_context()
        if context is None:
            raise RuntimeError(
                "host_actor must be called in a job of Iris: callers find the actor by that job's context"
            )
        # Port 0: any free one, as this job has reserved none for the actor.
        stop, about = serve(actor_class, args, kwargs, name, name, 0, 0, actor_config.max_concurrency)
        return HostedActor(about.handle, stop)

    def shutdown(self, wait: bool = True) -> None:
        """End the actors that this client made, and wait for its jobs; with ``wait=False``, end them too."""
        with self._lock:
            self._closed, jobs, self._jobs = True, self._jobs, []
        for job in jobs:
            # A job that hosts an actor never ends by itself.
            if isinstance(job, HostingJob) or not wait:
                if not JobStatus.finished(job.status()):
                    job.terminate()
            else:
                job.wait(raise_on_failure=False)

    def _track(self, job: IrisJobHandle) -> IrisJobHandle:
        with self._lock:
            self._jobs.append(job)
        return job

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this FrayIrisClient was shut down: make another")
