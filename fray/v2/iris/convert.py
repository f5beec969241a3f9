"""Translation between values of `fray.v2` and those of Iris's client library."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from fray.v2.job import JobStatus, refuse_async
from fray.v2.types import (
    ANY_REGION,
    DeviceConfig,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobRequest,
    ResourceConfig,
    TpuConfig,
)

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


JOB_VARIABLES = ("IRIS_TASK_ID", "IRIS_JOB_ID")
"""Variables that Iris sets in its jobs: today's, and the one of releases before."""


def iris_context() -> Any:
    """Return the context of the Iris job that this process is; None if it is not a job of Iris.

    Raises:
        RuntimeError: the variables of this process say that it is one, but Iris cannot be imported, knows no context,
            or its context has no client.
    """
    variable = next((name for name in JOB_VARIABLES if os.environ.get(name)), None)
    try:
        context = _find_context()
    except ImportError as error:
        if variable is None:
            return None  # another package may be called iris
        raise _unusable(variable, f"Iris's client library cannot be imported ({error}): install marin-iris") from error
    if context is None and variable is not None:
        raise _unusable(variable, "Iris's client library finds no job: it may be of another release than the cluster")
    if context is not None and context.client is None:
        raise RuntimeError("this job of Iris has no address of its controller, so it has no client")
    return context


def _find_context() -> Any:
    try:
        from iris.client.client import get_iris_ctx
    except ImportError as error:
        try:
            from iris.client import get_iris_ctx  # where it was until January 2026
        except ImportError:
            raise error from None
    return get_iris_ctx()


def _unusable(variable: str, why: str) -> RuntimeError:
    # Never a LocalClient: the jobs of a whole pipeline would run in this one container, without a word.
    return RuntimeError(
        f"{variable} says that this process is a job of Iris, but {why}, or choose a client with FRAY_CLIENT_SPEC"
    )


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


def convert_entrypoint(entrypoint: Entrypoint, what: str = "the job") -> Any:
    """Return Iris's entrypoint. Raises ValueError: ``what`` has none, or an async function."""
    from iris.cluster.types import Entrypoint as IrisEntrypoint

    if entrypoint is not None and (call := entrypoint.callable_entrypoint) is not None:
        refuse_async(call.callable, what)
        return IrisEntrypoint.from_callable(call.callable, *call.args, **call.kwargs)
    if entrypoint is not None and (program := entrypoint.binary_entrypoint) is not None:
        return IrisEntrypoint.from_command(program.command, *program.args)
    raise ValueError(f"{what} has no entrypoint: Entrypoint.from_callable or from_binary makes one")


NSYS_TASKS_ENV = "IRIS_NSYS_TASKS"
"""Variable of the submitter that names the tasks to profile with Nsight Systems: ``first``, ``all`` or indices."""


def wrap_nsys(entrypoint: Any) -> Any:
    """Return the entrypoint of Iris, run under ``nsys`` by Iris's module for it where `NSYS_TASKS_ENV` is set."""
    tasks = os.environ.get(NSYS_TASKS_ENV)
    if not tasks:
        return entrypoint
    profiler = ["$IRIS_PYTHON", "-m", "iris.hooks.nsys_main", "--tasks", tasks, "--"]
    command = list(entrypoint.command)
    if len(command) == 3 and command[:2] == ["bash", "-c"]:  # a function: Iris's script starts Python
        return _with_command(
            entrypoint, ["bash", "-c", f"exec {' '.join(profiler)} {command[2].removeprefix('exec ')}"]
        )
    return _with_command(entrypoint, [*profiler, *command])


def wrap_multiprocess(entrypoint: Any, resources: Any, processes_per_task: int) -> Any:
    """Return the entrypoint of Iris, run in ``processes_per_task`` processes that share the GPUs of each task. Raises
    ValueError: the GPUs cannot be shared out so."""
    from iris.jax.multigpu import build_multigpu_hook

    return _with_command(entrypoint, build_multigpu_hook(resources, processes_per_task).wrap(entrypoint.command))


def _with_command(entrypoint: Any, command: Sequence[str]) -> Any:
    return type(entrypoint)(
        command=command, workdir_files=entrypoint.workdir_files, workdir_file_refs=entrypoint.workdir_file_refs
    )


def convert_resources(resources: ResourceConfig) -> Any:
    """Return the `ResourceSpec` of one replica."""
    from iris.cluster.types import ResourceSpec, gpu_device, tpu_device

    device = None
    if isinstance(resources.device, TpuConfig):
        device = tpu_device(resources.device.variant)
    elif isinstance(resources.device, GpuConfig):
        device = gpu_device(resources.device.variant, resources.device.count)
    return ResourceSpec(cpu=resources.cpu, memory=resources.ram, disk=resources.disk, device=device)


def resolve_coscheduling(resources: ResourceConfig, replicas: int) -> Any:
    """Return the rule that the replicas of a job start together: on one TPU slice, or on GPU machines as near to each
    other as Iris puts so many; None where each may start alone.

    Raises:
        ValueError: GPU types of ``device_alternatives`` would be grouped differently.
    """
    from iris.cluster.types import CoschedulingConfig

    device = resources.device
    if replicas > 1 and isinstance(device, TpuConfig) and device.vm_count() > 1:
        return CoschedulingConfig(group_by="tpu-name")
    if replicas > 1 and isinstance(device, GpuConfig):
        from iris.cluster.platforms.k8s.coreweave_topology import gpu_gang_coscheduling_level

        types = [device.variant, *(resources.device_alternatives or ())]
        levels = {each: gpu_gang_coscheduling_level(each, device.count, replicas) for each in types}
        if len(set(levels.values())) > 1:
            listed = ", ".join(f"{each}: {level}" for each, level in levels.items())
            raise ValueError(f"{replicas} replicas on {' or '.join(types)} would be grouped differently: {listed}")
        return CoschedulingConfig(group_by=levels[device.variant])
    return None


def convert_constraints(resources: ResourceConfig) -> list[Any]:
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


def convert_container_profile(resources: ResourceConfig) -> int:
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


def convert_environment(env: EnvironmentConfig | None, device: DeviceConfig | None = None) -> Any:
    """Return an `EnvironmentSpec`; the workspace belongs to Iris's client, and the image to the job.

    The variables that a device of Marin's modules sets (``JAX_PLATFORMS``) are there if the environment has no others.
    """
    from iris.cluster.types import EnvironmentSpec

    usual: dict[str, str] = getattr(device, "default_env_vars", dict)()
    if env is None:
        return EnvironmentSpec(env_vars=usual) if usual else None
    newer = {name: getattr(env, name, None) for name in ("secrets", "secret_behavior", "sync_packages")}
    # None builds the script of Iris, and an empty list stands for no script.
    scripts = getattr(env, "setup_scripts", None)
    return EnvironmentSpec(
        pip_packages=list(env.pip_packages),
        env_vars=usual | dict(env.env_vars),
        extras=list(env.extras),
        setup_scripts=None if scripts is None else list(scripts),
        **{name: value for name, value in newer.items() if value},
    )


def map_iris_job_state(iris_state: Any) -> JobStatus:
    """Return the status for one of Iris's `JobState`."""
    return STATES.get(str(iris_state.name), JobStatus.FAILED)
