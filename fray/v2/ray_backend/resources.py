"""Translation of `ResourceConfig` to options of Ray; does not import Ray.

Ray has no counterpart of ``disk``, ``priority``, and the ``device_alternatives`` of TPUs, which are ignored.
"""

from __future__ import annotations

from typing import Any

from fray.model.resources import parse_bytes
from fray.v2.ray_backend.specs import SliceRequest
from fray.v2.types import ActorConfig, GpuConfig, JobRequest, ResourceConfig, TpuConfig, get_tpu_topology

HEAD_NODE = "head_node"
"""Resource of the machine that is not preemptible: the head of the Ray cluster offers it."""
A_LITTLE = 0.0001
"""Amount of it that a job reserves: it selects the machine, and ten thousand jobs fit."""
DEFAULTS = ResourceConfig()


def job_options(resources: ResourceConfig) -> dict[str, Any]:
    """Return the options of the Ray task of a job, or of a member of a gang."""
    return {"num_cpus": resources.cpu, **_options(resources)}


def actor_options(resources: ResourceConfig, config: ActorConfig) -> dict[str, Any]:
    """Return the options of a Ray actor. It reserves no CPU if ``cpu`` has its default, as actors mostly wait. The
    default number of restarts and of repeated calls is 0."""
    cpu = 0 if resources.cpu == DEFAULTS.cpu else resources.cpu
    return {
        "num_cpus": cpu,
        **_options(resources),
        "max_concurrency": config.max_concurrency,
        "max_restarts": config.max_restarts or 0,
        "max_task_retries": config.max_task_retries or 0,
    }


def _options(resources: ResourceConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if resources.ram not in resources.usual_ram():  # a default reserves nothing
        options["memory"] = parse_bytes(resources.ram, "ram")
    device = resources.device
    custom: dict[str, float] = {}
    labels: dict[str, str] = {}
    if isinstance(device, GpuConfig):
        options["num_gpus"] = device.count
        if wanted := [kind for kind in (device.variant, *(resources.device_alternatives or ())) if kind != "auto"]:
            labels["ray.io/accelerator-type"] = _any_of(wanted)
    elif isinstance(device, TpuConfig):
        custom["TPU"] = get_tpu_topology(device.variant).chips_per_vm
    elif not resources.preemptible:
        custom[HEAD_NODE] = A_LITTLE
    if resources.regions:
        labels["ray.io/availability-region"] = _any_of(resources.regions)
    if resources.zone:
        labels["ray.io/availability-zone"] = resources.zone
    if set(labels) == {"ray.io/accelerator-type"} and "(" not in labels["ray.io/accelerator-type"]:
        options["accelerator_type"] = labels.pop("ray.io/accelerator-type")  # any Ray has this option
    return options | ({"resources": custom} if custom else {}) | ({"label_selector": labels} if labels else {})


def _any_of(values: Any) -> str:
    first, *others = values
    return f"in({','.join((first, *others))})" if others else str(first)


def bundle(options: dict[str, Any]) -> dict[str, float]:
    """Return the options as a bundle of a placement group."""
    amounts: dict[str, float] = {
        "CPU": options.get("num_cpus", 0),
        "GPU": options.get("num_gpus", 0),
        "memory": options.get("memory", 0),
    }
    if kind := options.get("accelerator_type"):
        amounts[f"accelerator_type:{kind}"] = 0.001  # the amount that Ray itself reserves for a type
    amounts.update(options.get("resources", {}))
    return {name: amount for name, amount in amounts.items() if amount}


def slice_request(request: JobRequest) -> SliceRequest | None:
    """Return the TPU slices that a job requests: its replicas are VMs, all VMs of each slice.

    Raises:
        ValueError: the replicas are not a whole number of slices.
    """
    device = request.resources.device
    if not isinstance(device, TpuConfig):
        return None
    topology = get_tpu_topology(device.variant)
    replicas = request.replicas or 1
    slices, rest = divmod(replicas, topology.vm_count)
    if rest:
        raise ValueError(
            f"job {request.name!r}: replicas={replicas} are not whole slices of {topology.name}, which has "
            f"{topology.vm_count} VMs: write ResourceConfig.with_tpu({topology.name!r}, slice_count=N)"
        )
    head = f"TPU-{topology.name.replace('tpu7x', 'v7x')}-head"
    return SliceRequest(head, slices, topology.vm_count, topology.chips_per_vm)


def failures(request: JobRequest) -> int:
    """Return the number of restarts after failures of the job's own code. On Ray both budgets are one, the larger."""
    return max(request.max_retries_failure, request.max_task_failures)


def tries(request: JobRequest) -> int:
    """Return the number of restarts in all: Ray counts failures and losses together.

    The registry counts failures of the job's own code separately, and lets Ray retry only `RetryableError`. A crash of
    the process counts as a loss.
    """
    return failures(request) + request.max_retries_preemption
