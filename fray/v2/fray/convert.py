"""What the words of `fray.v2` come to on a cluster of Fray: requests, resources, environments, states.

What a caller did not write reserves and limits nothing: the default of `fray.v2.ResourceConfig` is ``"128m"``, and a
limit of memory that nobody asked for would kill jobs.
"""

from __future__ import annotations

import os

from attrs import evolve

from fray.model import requests as native
from fray.model import resources as amounts
from fray.model.environment import EnvironmentConfig as NativeEnvironment
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
    get_tpu_topology,
)

UNWRITTEN = ResourceConfig()
TPU_UNWRITTEN = ResourceConfig.with_tpu("v4-8")
"""What `ResourceConfig.with_tpu` gives who says nothing of memory and disk."""
LOSSES = 100
"""How often a job or actor whose caller says nothing is made anew after preemption or the loss of its machine."""

# Resources -----------------------------------------------------------------------------------------------------------


def job_resources(resources: ResourceConfig) -> amounts.ResourceConfig:
    """Of each process of a job. ``ram`` that was written is reserved and is the limit; that was not: 2 GB (16 with
    GPUs) are reserved, and there is no limit. ``disk`` that was not written reserves none.

    Raises:
        ValueError: an impossible amount or device.
    """
    usual = TPU_UNWRITTEN if isinstance(resources.device, TpuConfig) else UNWRITTEN
    return amounts.ResourceConfig(
        device=_device(resources.device),
        cpu=resources.cpu,
        memory=None if resources.ram in (UNWRITTEN.ram, usual.ram) else resources.ram,
        disk=0 if resources.disk in (UNWRITTEN.disk, usual.disk) else resources.disk,
        preemptible=resources.preemptible,
        regions=None if resources.regions is None else tuple(resources.regions),
        zone=resources.zone,
        device_alternatives=tuple(resources.device_alternatives or ()),
    )


def actor_resources(resources: ResourceConfig, name: str) -> amounts.ResourceConfig:
    """Of an actor: what was not written reserves nothing, not even the one CPU.

    Raises:
        ValueError: an impossible amount or device, or more than one process.
    """
    if resources.replicas != 1:
        raise ValueError(
            f"actor {name!r}: an actor has one process, and its resources have replicas={resources.replicas}: write "
            "create_actor_group(count=…) for more of them; for a TPU slice of several VMs submit a job whose processes "
            "host_actor"
        )
    given = job_resources(resources)
    cpu = 0 if resources.cpu == UNWRITTEN.cpu else given.cpu
    return evolve(given, cpu=cpu, memory=0 if given.memory is None else given.memory)


def _device(device: DeviceConfig) -> amounts.DeviceConfig:
    if isinstance(device, TpuConfig):
        return amounts.TpuConfig(device.variant)
    if isinstance(device, GpuConfig):
        return amounts.GpuConfig(device.variant, device.count)
    return amounts.CpuConfig()


def replicas(request: JobRequest) -> int | None:
    """Processes of the gang as Fray counts them: of TPU jobs, slices. None: it is no gang.

    Raises:
        ValueError: a number of VMs that is no whole number of slices.
    """
    wanted, device = request.replicas or 1, request.resources.device
    if not isinstance(device, TpuConfig):
        return None if wanted == 1 else wanted
    vms = get_tpu_topology(device.variant).vm_count
    if wanted % vms:
        lower, upper = wanted // vms * vms, (wanted // vms + 1) * vms
        near = f"{lower} or {upper}" if lower else str(upper)
        raise ValueError(
            f"job {request.name!r}: replicas={wanted} is no whole number of {device.variant} slices: it counts VMs, "
            f"and each slice has {vms}: write {near}, or ResourceConfig.with_tpu({device.variant!r}, slice_count=…)"
        )
    return wanted // vms


# Jobs ----------------------------------------------------------------------------------------------------------------


def band(priority: int) -> str | None:
    """Fray has bands in place of numbers: more than 0 is ``production``, less is ``batch``, 0 that of the job it comes
    from (a driver's: ``interactive``)."""
    return "production" if priority > 0 else "batch" if priority < 0 else None


def environment(config: EnvironmentConfig | None, image: str | None = None) -> NativeEnvironment | None:
    """``image``: of the resources; it is for who names none here. Raises ValueError: a variable of Fray's own, …"""
    if config is None:
        return None if image is None else NativeEnvironment(docker_image=image)
    return NativeEnvironment(
        extras=tuple(config.extras),
        pip_packages=tuple(config.pip_packages),
        env_vars=dict(config.env_vars),
        workspace=None if config.workspace is None or _is_empty(config.workspace) else config.workspace,
        docker_image=config.docker_image or image,
    )


def _is_empty(directory: str) -> bool:
    """`create_environment` names the working directory, whatever is in it; of nothing nothing can travel."""
    return os.path.isdir(directory) and not os.listdir(directory)


def entrypoint(entry: Entrypoint | None, name: str) -> native.Entrypoint:
    """Raises ValueError: there is none."""
    if entry is not None and (program := entry.binary_entrypoint) is not None:
        return native.Entrypoint.from_binary(program.command, program.args)
    if entry is not None and (call := entry.callable_entrypoint) is not None:
        return native.Entrypoint.from_callable(call.callable, call.args, call.kwargs)
    raise ValueError(f"job {name!r} has no entrypoint: Entrypoint.from_callable or from_binary makes one")


def job_request(request: JobRequest) -> native.JobRequest:
    """The same for Fray, its function as it is.

    A gang begins anew as a whole, so the failures of all its processes are those of the job: ``max_retries_failure``
    and ``max_task_failures`` are one budget, the larger of them.

    Raises:
        ValueError: something of it cannot be.
    """
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
    """The same word."""
    return _STATUS[state]


# Actors --------------------------------------------------------------------------------------------------------------


def actor_request(name: str, resources: ResourceConfig, config: ActorConfig) -> native.JobRequest:
    """The job that each member is. Raises as `actor_resources`."""
    return native.JobRequest(
        name=name,
        resources=actor_resources(resources, name),
        environment=environment(None, resources.image),
        max_retries_failure=0,
        max_retries_preemption=LOSSES if resources.preemptible else 0,
        priority=band(config.priority),
    )


def actor_config(config: ActorConfig) -> NativeActorConfig:
    """``max_restarts`` None: the budgets of `actor_request` count, none for failures. ``max_concurrency`` 1 limits sync
    classes alone; one with async methods takes any number of calls, as natively."""
    return NativeActorConfig(max_concurrency=concurrency(config), max_restarts=config.max_restarts)


def concurrency(config: ActorConfig) -> int | None:
    """Calls at once, where that was written."""
    return config.max_concurrency if config.max_concurrency > 1 else None
