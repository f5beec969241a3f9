"""Translation between values of `fray.v2` and those of Iris's client library."""

from __future__ import annotations

import weakref
from typing import Any

from fray.v2.job import JobStatus, refuse_async
from fray.v2.types import ANY_REGION, EnvironmentConfig, GpuConfig, JobRequest, ResourceConfig, TpuConfig

STATES = {
    "PENDING": JobStatus.PENDING,
    "BUILDING": JobStatus.PENDING,
    "RUNNING": JobStatus.RUNNING,
    "SUCCEEDED": JobStatus.SUCCEEDED,
    "KILLED": JobStatus.STOPPED,
}
"""Statuses by the names of Iris's states; all other states are failures."""


def iris_client() -> Any:
    """Return Iris's module of its client.

    Raises:
        RuntimeError: Iris is not installed.
    """
    try:
        import iris.client.client
    except ImportError as error:
        raise RuntimeError(
            "Iris is not installed here (no module iris.client.client): install marin-iris, or choose another "
            "cluster with FRAY_CLIENT_SPEC"
        ) from error
    return iris.client.client


def iris_context() -> Any:
    """Return the context of the Iris job that this process is; None if it is not a job of Iris."""
    try:
        from iris.client.client import get_iris_ctx
    except ImportError:
        return None
    return get_iris_ctx()


_drivers: list[weakref.ref[Any]] = []
"""Clients of Iris that this process has made, the last one first."""


def remember_driver(client: Any) -> None:
    """Use a client of Iris for handles that were unpickled in this process, where it is not a job of Iris."""
    _drivers[:] = [weakref.ref(client), *(found for found in _drivers if found() is not None)]


def iris_connection() -> Any:
    """Return the `IrisClient` of the job that this process is, or the one that it has made.

    Raises:
        RuntimeError: it is not a job of Iris and has no client.
    """
    context = iris_context()
    client = context.client if context is not None else next((one for found in _drivers if (one := found())), None)
    if client is None:
        raise RuntimeError("this process is not a job of Iris and has no FrayIrisClient: make one first")
    return client


def entrypoint_of(request: JobRequest) -> Any:
    """Return Iris's entrypoint. Raises ValueError: the request has none, or an async function."""
    from iris.cluster.types import Entrypoint

    entry = request.entrypoint
    if entry is not None and (call := entry.callable_entrypoint) is not None:
        refuse_async(call.callable, f"job {request.name!r}")
        return Entrypoint.from_callable(call.callable, *call.args, **call.kwargs)
    if entry is not None and (program := entry.binary_entrypoint) is not None:
        return Entrypoint.from_command(program.command, *program.args)
    raise ValueError(f"job {request.name!r} has no entrypoint: Entrypoint.from_callable or from_binary makes one")


def resources_of(resources: ResourceConfig) -> Any:
    """Return the `ResourceSpec` of one replica."""
    from iris.cluster.types import ResourceSpec, gpu_device, tpu_device

    device = None
    if isinstance(resources.device, TpuConfig):
        device = tpu_device(resources.device.variant)
    elif isinstance(resources.device, GpuConfig):
        device = gpu_device(resources.device.variant, resources.device.count)
    return ResourceSpec(cpu=resources.cpu, memory=resources.ram, disk=resources.disk, device=device)


def coscheduling_of(resources: ResourceConfig, replicas: int) -> Any:
    """Return the rule that the replicas of a job start together on one slice; None where each may start alone."""
    from iris.cluster.types import CoschedulingConfig

    device = resources.device
    if replicas > 1 and isinstance(device, TpuConfig) and device.vm_count() > 1:
        return CoschedulingConfig(group_by="tpu-name")
    return None


def constraints_of(resources: ResourceConfig) -> list[Any]:
    """Return the constraints on the machines where a job may run."""
    from iris.cluster import constraints as iris

    found = [] if resources.preemptible else [iris.preemptible_constraint(False)]
    regions = list(resources.regions or ())
    if ANY_REGION in regions:
        if len(regions) > 1:
            raise ValueError(f"regions={regions}: ANY_REGION stands for every region, and alone")
        found.append(iris.any_region_constraint())
    elif regions:
        found.append(iris.region_constraint(regions))
    if resources.zone:
        found.append(iris.zone_constraint(resources.zone))
    if cluster := getattr(resources, "target_cluster", None):
        found.append(iris.Constraint.create(key=iris.CLUSTER_CONSTRAINT_KEY, op=iris.ConstraintOp.EQ, value=cluster))
    if resources.device_alternatives and isinstance(resources.device, TpuConfig | GpuConfig):
        found.append(iris.device_variant_constraint([resources.device.variant, *resources.device_alternatives]))
    return found


def profile_of(resources: ResourceConfig) -> int:
    """Return the number of the container profile. Raises ValueError: Iris has none of this name."""
    from iris.rpc import job_pb2

    name = getattr(resources, "container_profile", None)
    if name is None:
        return int(job_pb2.CONTAINER_PROFILE_UNSPECIFIED)
    return int(job_pb2.ContainerProfile.Value(name))


def band_of(priority: int) -> int:
    """Return the number of the priority band: above 0 production, below 0 batch, at 0 that of the submitting job."""
    from iris.rpc import job_pb2

    if priority == 0:
        return int(job_pb2.PRIORITY_BAND_INHERIT)
    return int(job_pb2.PRIORITY_BAND_PRODUCTION if priority > 0 else job_pb2.PRIORITY_BAND_BATCH)


def image_of(environment: EnvironmentConfig | None, resources: ResourceConfig) -> str | None:
    """Return the image that a job asks for; None: that of the cluster."""
    return resources.image if environment is None or environment.docker_image is None else environment.docker_image


def policy_of(adopt_existing: bool) -> int:
    """Return what Iris does with a living job of the same name: keep it, or refuse the new one."""
    from iris.rpc import job_pb2

    return int(job_pb2.EXISTING_JOB_POLICY_KEEP if adopt_existing else job_pb2.EXISTING_JOB_POLICY_UNSPECIFIED)


def max_failures_of(request: JobRequest) -> int:
    """Return the failures of all replicas together that the job may have: Iris ends it with the first beyond them."""
    return request.max_task_failures or request.max_retries_failure * (request.replicas or 1)


def limit_of(request: JobRequest) -> Any:
    """Return the time limit of a request as Iris's duration; None: no limit."""
    from rigging.timing import Duration

    timeout: Any = getattr(request, "timeout", None)
    seconds = timeout.to_seconds() if hasattr(timeout, "to_seconds") else timeout
    return None if seconds is None else Duration.from_seconds(float(seconds))


def environment_of(environment: EnvironmentConfig | None) -> Any:
    """Return an `EnvironmentSpec`; the workspace belongs to Iris's client, and the image to the job."""
    from iris.cluster.types import EnvironmentSpec

    if environment is None:
        return None
    newer = {name: getattr(environment, name, None) for name in ("secrets", "secret_behavior", "sync_packages")}
    # None builds the script of Iris, and an empty list stands for no script.
    scripts = getattr(environment, "setup_scripts", None)
    return EnvironmentSpec(
        pip_packages=list(environment.pip_packages),
        env_vars=dict(environment.env_vars),
        extras=list(environment.extras),
        setup_scripts=None if scripts is None else list(scripts),
        **{name: value for name, value in newer.items() if value},
    )


def state_of(state: Any) -> JobStatus:
    """Return the status for one of Iris's `JobState`."""
    return STATES.get(str(state.name), JobStatus.FAILED)
