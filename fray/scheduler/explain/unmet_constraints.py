"""What of one machine stands in the way of one member: constraint by constraint, in a word and in full."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.resources import Capacity, Demand
from fray.scheduler.pool.pool import Machine, Variant, variants
from fray.scheduler.pool.resource_text import cpus, device, size

FEW_CPUS = "too few CPUs free"


def unmet_constraints(demand: Demand, machine: Machine) -> Iterator[tuple[str, str]]:
    """Every constraint the machine does not meet now: in a word, and in full."""
    yield from _wrong_place(demand, machine.capacity)
    capacity = machine.capacity
    if capacity.cpu_milli < demand.cpu_milli:
        yield "too few CPUs", f"has {cpus(capacity.cpu_milli)} in all"
    elif machine.cpu_milli < demand.cpu_milli:
        yield FEW_CPUS, f"has {machine.cpu_milli / 1000:g} of {cpus(capacity.cpu_milli)} free"
    if machine.memory_bytes < demand.memory_bytes:
        yield _little("memory", demand.memory_bytes, machine.memory_bytes, capacity.memory_bytes)
    if machine.disk_bytes < demand.disk_bytes:
        yield _little("disk", demand.disk_bytes, machine.disk_bytes, capacity.disk_bytes)
    if machine.ports.free < demand.ports:
        offered = (
            f"has {machine.ports.free} of the ports {capacity.ports} free"
            if capacity.ports.count
            else "offers no ports"
        )
        yield "too few ports free", offered
    if demand.device_count:
        yield from _wrong_devices(demand, machine)


def _little(what: str, asked: int, free: int, whole: int) -> tuple[str, str]:
    if whole < asked:
        return f"too little {what}", f"has {size(whole)} {what} in all"
    return f"too little {what} free", f"has {size(free)} of {size(whole)} {what} free"


def _wrong_place(demand: Demand, capacity: Capacity) -> Iterator[tuple[str, str]]:
    region, zone = capacity.attributes.get("region"), capacity.attributes.get("zone")
    if demand.regions and region not in demand.regions:
        yield "in another region", f"is in region {region}" if region else "names no region"
    if demand.zones and zone not in demand.zones:
        yield "in another zone", f"is in zone {zone}" if zone else "names no zone"
    if not demand.preemptible and capacity.attributes.get("preemptible", "false").lower() == "true":
        yield "preemptible", "is preemptible"
    if demand.containers and not capacity.attributes.get("containers"):
        yield "without docker or podman", "has neither a docker daemon that answers nor podman"
    for constraint in demand.constraints:
        if not constraint.meets(capacity.attributes):
            have = capacity.attributes.get(constraint.key)
            yield f"without {constraint}", f"has {constraint.key} {have}" if have else f"has no {constraint.key}"


def _wrong_devices(demand: Demand, machine: Machine) -> Iterator[tuple[str, str]]:
    fitting = variants(demand, machine.devices)
    if not fitting:
        yield f"without {device(demand)}", f"has no {device(demand)}"
    elif max(_whole(machine, v) for v in fitting) < demand.device_count:
        there = " and ".join(f"{_whole(machine, v)} {v[0]} {v[1]}" for v in fitting)
        yield f"too few {device(demand)}", f"has {there} in all"
    elif max(len(machine.devices[v]) for v in fitting) < demand.device_count:
        free = " and ".join(f"{len(machine.devices[v])} of {_whole(machine, v)} {v[0]} {v[1]}" for v in fitting)
        yield f"too few {device(demand)} free", f"has {free} free"


def _whole(machine: Machine, variant: Variant) -> int:
    return sum((d.kind, d.variant.lower()) == variant for d in machine.capacity.devices)
