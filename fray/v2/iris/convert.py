"""Translation between values of `fray.v2` and those of Iris's client library."""

from __future__ import annotations

from typing import Any

from fray.v2.job import JobStatus, refuse_async
from fray.v2.types import EnvironmentConfig, GpuConfig, JobRequest, ResourceConfig, TpuConfig

STATES = {
    "PENDING": JobStatus.PENDING,
    "BUILDING": JobStatus.PENDING,
    "RUNNING": JobStatus.RUNNING,
    "SUCCEEDED": JobStatus.SUCCEEDED,
    "KILLED": JobStatus.STOPPED,
}
"""Statuses by the names of Iris's states without their prefix; all other states are failures."""


def iris_client() -> Any:
    """Return Iris's client module.

    Raises:
        RuntimeError: Iris is not installed.
    """
    try:
        import iris.client
    except ImportError as error:
        raise RuntimeError(
            "Iris is not installed here (no module iris.client): install the lab's Iris client, or choose another "
            "cluster with FRAY_CLIENT_SPEC"
        ) from error
    return iris.client


def iris_context() -> Any:
    """Return the context of the Iris job that this process is; None if it is not a job of Iris."""
    try:
        import iris.client.client as holder  # since January
    except ImportError:
        try:
            import iris.client as holder
        except ImportError:
            return None
    return holder.get_iris_ctx()


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


def resources_of(resources: ResourceConfig, replicas: int) -> Any:
    """Return a `ResourceSpec`, which in Iris includes ``replicas``."""
    from iris.cluster.types import ResourceSpec, gpu_device, tpu_device

    device = None
    if isinstance(resources.device, TpuConfig):
        device = tpu_device(resources.device.variant)
    elif isinstance(resources.device, GpuConfig):
        device = gpu_device(resources.device.variant, resources.device.count)
    return ResourceSpec(cpu=resources.cpu, memory=resources.ram, disk=resources.disk, device=device, replicas=replicas)


def constraints_of(resources: ResourceConfig) -> list[Any]:
    """Return the constraints on the machines where a job may run."""
    from iris.cluster.types import Constraint, ConstraintOp, preemptible_constraint, region_constraint

    found = [] if resources.preemptible else [preemptible_constraint(False)]
    if resources.regions:
        found.append(region_constraint(list(resources.regions)))
    if resources.zone:
        found.append(Constraint(key="zone", op=ConstraintOp.EQ, value=resources.zone))
    return found


def environment_of(environment: EnvironmentConfig | None) -> Any:
    """Return an `EnvironmentSpec`. The workspace is not part of it: in Iris it belongs to the client.

    Raises:
        ValueError: the environment names an image, which Iris does not accept from a job.
    """
    from iris.cluster.types import EnvironmentSpec

    if environment is None:
        return None
    if environment.docker_image is not None:
        raise ValueError(f"docker_image={environment.docker_image!r}: jobs on Iris run in the cluster's own image")
    return EnvironmentSpec(
        pip_packages=list(environment.pip_packages),
        env_vars=dict(environment.env_vars),
        extras=list(environment.extras),
    )


def state_of(state: Any) -> JobStatus:
    """Return the status for a number of Iris's `JobState`."""
    from iris.rpc import cluster_pb2

    name = str(cluster_pb2.JobState.Name(state))
    return STATES.get(name.removeprefix("JOB_STATE_"), JobStatus.FAILED)
