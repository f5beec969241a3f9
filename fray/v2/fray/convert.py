"""Translation of values of `fray.v2` for a cluster of Fray: requests, resources, environments, states.

Amounts that a caller did not give reserve and limit nothing: the default of `fray.v2.ResourceConfig` is ``"128m"``, and
such a memory limit, which the caller never requested, would kill jobs. An explicit ``ram="128m"`` cannot be
distinguished from the default and is ignored, too.
"""

from __future__ import annotations

import os

from attrs import evolve

from fray.model import requests as native
from fray.model import resources as amounts
from fray.model.environment import EnvironmentConfig as NativeEnvironment
from fray.model.environment import Secret
from fray.model.specs import ActorConfig as NativeActorConfig
from fray.model.specs import JobState
from fray.v2.types import (
    ActorConfig,
    DeviceConfig,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobRequest,
    JobStatus,
    ResourceConfig,
    TpuConfig,
    credentials_of,
    get_tpu_topology,
    refuse_iris_only,
    refuse_setup_scripts,
)

DEFAULTS = ResourceConfig()
# As the default of `fray.api` for jobs: a preemption says nothing about the actor.
MAX_LOSSES = 100
"""Default number of restarts of an actor after preemption or the loss of its machine."""

# Resources -----------------------------------------------------------------------------------------------------------


def job_resources(resources: ResourceConfig) -> amounts.ResourceConfig:
    """Return the resources of each process of a job.

    A given ``ram`` is reserved and is the limit; otherwise 2 GB (16 with GPUs) are reserved without a limit. Disk is
    reserved only if ``disk`` was given.

    Raises:
        ValueError: an invalid amount or device.
    """
    return amounts.ResourceConfig(
        device=_device(resources.device),
        cpu=resources.cpu,
        # Equal to the default means "not given"; see the module.
        memory=None if resources.ram in resources.usual_ram() else resources.ram,
        disk=0 if resources.disk in resources.usual_disk() else resources.disk,
        preemptible=resources.preemptible,
        regions=None if resources.regions is None else tuple(resources.regions),
        zone=resources.zone,
        device_alternatives=tuple(resources.device_alternatives or ()),
    )


def actor_resources(resources: ResourceConfig, name: str) -> amounts.ResourceConfig:
    """Return the resources of an actor, where amounts that were not given reserve nothing, not even a CPU.

    Raises:
        ValueError: an invalid amount or device, or more than one process.
    """
    if resources.replicas != 1:
        raise ValueError(
            f"actor {name!r}: an actor has one process, but its resources have replicas={resources.replicas}: use "
            "create_actor_group(count=…) for several; for a TPU slice of several VMs submit a job whose processes "
            "host_actor"
        )
    given = job_resources(resources)
    # Most actors wait: with one CPU each, a laptop's cluster would be full after a few.
    cpu = 0 if resources.cpu == DEFAULTS.cpu else given.cpu
    return evolve(given, cpu=cpu, memory=0 if given.memory is None else given.memory)


def _device(device: DeviceConfig) -> amounts.DeviceConfig:
    if isinstance(device, TpuConfig):
        return amounts.TpuConfig(device.variant)
    if isinstance(device, GpuConfig):
        return amounts.GpuConfig(device.variant, device.count)
    return amounts.CpuConfig()


def replicas(request: JobRequest) -> int | None:
    """Return the replicas of the gang as Fray counts them (TPU jobs: slices); None if the job is not a gang.

    Raises:
        ValueError: the number of VMs is not a multiple of the VMs of a slice.
    """
    wanted, device = request.replicas or 1, request.resources.device
    if not isinstance(device, TpuConfig):
        return None if wanted == 1 else wanted
    vms = get_tpu_topology(device.variant).vm_count
    if wanted % vms:
        lower, upper = wanted // vms * vms, (wanted // vms + 1) * vms
        near = f"{lower} or {upper}" if lower else str(upper)
        raise ValueError(
            f"job {request.name!r}: replicas={wanted} is not a whole number of {device.variant} slices: it counts VMs, "
            f"and each slice has {vms}: write {near}, or ResourceConfig.with_tpu({device.variant!r}, slice_count=…)"
        )
    return wanted // vms


# Jobs ----------------------------------------------------------------------------------------------------------------


def band(priority: int) -> str | None:
    """Return the priority band for a number: above 0 ``production``, below 0 ``batch``, at 0 None, which means the band
    of the submitting job (for a driver: ``interactive``)."""
    return "production" if priority > 0 else "batch" if priority < 0 else None


def environment(config: EnvironmentConfig | None, image: str | None = None) -> NativeEnvironment | None:
    """Return the environment; ``image`` of the resources applies if it names none. Raises ValueError: a reserved
    variable, …"""
    if config is None:
        return None if image is None else NativeEnvironment(docker_image=image)
    return NativeEnvironment(
        extras=tuple(config.extras),
        pip_packages=tuple(config.pip_packages),
        env_vars=_variables(config),
        workspace=None if config.workspace is None or _is_empty(config.workspace) else config.workspace,
        docker_image=config.docker_image or image,
    )


def _variables(config: EnvironmentConfig) -> dict[str, str | Secret]:
    """Return the variables of an environment. Marin's has credentials too: they become secrets, read in this process
    when a job starts.

    Raises:
        ValueError: a credential that is not a variable of this process, with this value; setup scripts.
    """
    variables: dict[str, str | Secret] = dict(config.env_vars)
    refuse_setup_scripts(config)
    for name, value in credentials_of(config).items():
        if os.environ.get(name) != value:
            raise ValueError(
                f"secrets={{{name!r}: …}}: a cluster of Fray reads secrets from this process: set {name} here"
            )
        variables[name] = Secret(name)
    return variables


def _is_empty(directory: str) -> bool:
    """Return whether a directory is empty: `create_environment` names the working directory, and an empty one cannot be
    uploaded."""
    return os.path.isdir(directory) and not os.listdir(directory)


def entrypoint(entry: Entrypoint | None, name: str) -> native.Entrypoint:
    """Return the entrypoint. Raises ValueError if there is none."""
    if entry is not None and (program := entry.binary_entrypoint) is not None:
        return native.Entrypoint.from_binary(program.command, program.args)
    if entry is not None and (call := entry.callable_entrypoint) is not None:
        return native.Entrypoint.from_callable(call.callable, call.args, call.kwargs)
    raise ValueError(f"job {name!r} has no entrypoint: Entrypoint.from_callable or from_binary makes one")


def job_request(request: JobRequest) -> native.JobRequest:
    """Return the request for Fray, with the function unchanged.

    A gang restarts as a whole, so the failures of all its processes are those of the job: ``max_retries_failure`` and
    ``max_task_failures`` are one budget, the larger of the two.

    Raises:
        ValueError: the request is invalid.
    """
    refuse_iris_only(request)
    return native.JobRequest(
        name=request.name,
        resources=job_resources(request.resources),
        entrypoint=entrypoint(request.entrypoint, request.name),
        environment=environment(request.environment, request.resources.image),
        replicas=replicas(request),
        max_retries_failure=max(request.max_retries_failure, request.max_task_failures),
        max_retries_preemption=request.max_retries_preemption,
        priority=band(request.priority),
    )


_STATUS = {state: JobStatus(state.value) for state in JobState}


def status(state: JobState) -> JobStatus:
    """Return the status of the same name."""
    return _STATUS[state]


# Actors --------------------------------------------------------------------------------------------------------------


def actor_request(
    name: str, resources: ResourceConfig, config: ActorConfig, wanted: EnvironmentConfig | None = None
) -> native.JobRequest:
    """Return the request for the job of each member. Raises as `actor_resources`.

    An actor restarts after the loss of its machine, which callers notice by `ActorGroup.discover_new`; after its own
    failure as `actor_config` has it.
    """
    return native.JobRequest(
        name=name,
        resources=actor_resources(resources, name),
        environment=environment(wanted, resources.image),
        max_retries_failure=0,
        max_retries_preemption=MAX_LOSSES if resources.preemptible else 0,
        priority=band(config.priority),
    )


def actor_config(config: ActorConfig) -> NativeActorConfig:
    """Return the options of an actor.

    With ``max_restarts`` None an actor restarts after failures as often as its calls are repeated, as on Iris. A
    ``max_concurrency`` of 1 limits sync classes only; a class with async methods runs any number of calls, as in
    `fray.api`.
    """
    restarts = config.max_task_retries if config.max_restarts is None else config.max_restarts
    return NativeActorConfig(max_concurrency=concurrency(config), max_restarts=restarts)


def concurrency(config: ActorConfig) -> int | None:
    """Return the limit of concurrent calls if the caller gave one."""
    return config.max_concurrency if config.max_concurrency > 1 else None
