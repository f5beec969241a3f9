"""Texts for requested and offered resources."""

from __future__ import annotations

from collections import Counter

from fray.model.resources import Capacity, Demand
from fray.scheduler.pool.pool import AUTO


def cpus(milli: int) -> str:
    return f"{milli / 1000:g} CPU" + ("" if milli == 1000 else "s")


def size(amount: int) -> str:
    """Return an amount of bytes in the largest unit that leaves a number of 1 or more."""
    value = float(amount)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TB"


def needs(demand: Demand, *others: Demand) -> str:
    """Return what one member needs; with ``others``, any of these devices."""
    parts, any_of = [], (demand, *others)
    if demand.cpu_milli:
        parts.append(cpus(demand.cpu_milli))
    if demand.memory_bytes:
        parts.append(f"{size(demand.memory_bytes)} memory")
    if demand.disk_bytes:
        parts.append(f"{size(demand.disk_bytes)} disk")
    if demand.device_count:
        parts.append(" or ".join(f"{one.device_count} {device(one)}" if one.device_count else "none" for one in any_of))
    if demand.ports:
        parts.append(f"{demand.ports} port{'s' if demand.ports > 1 else ''}")
    parts += _places(demand)
    return ", ".join(parts) or "nothing of a machine"


def device(demand: Demand) -> str:
    return f"{demand.device_kind}" + (f" {demand.device_variant}" if demand.device_variant.lower() != AUTO else "")


def _places(demand: Demand) -> list[str]:
    parts = []
    if demand.regions:
        parts.append(f"region {' or '.join(map(_named, demand.regions))}")
    if demand.zones:
        parts.append(f"zone {' or '.join(map(_named, demand.zones))}")
    if not demand.preemptible:
        parts.append("a machine that is not preemptible")
    if demand.containers:
        parts.append("docker (a daemon that answers) or podman")
    return parts + [str(constraint) for constraint in demand.constraints]


def _named(place: str) -> str:
    return place or "without a name"


def has(capacity: Capacity) -> str:
    """Return what a machine offers when it is empty."""
    kinds = Counter(f"{device.kind} {device.variant}" for device in capacity.devices)
    devices = "".join(f", {count} {kind}" for kind, count in kinds.items())
    devices += "".join(f", {key} {value}" for key, value in capacity.attributes.items() if key in ("region", "zone"))
    devices += f", {capacity.ports.count} ports" if capacity.ports.count else ""
    devices += ", preemptible" if capacity.attributes.get("preemptible", "false").lower() == "true" else ""
    return f"{cpus(capacity.cpu_milli)}, {size(capacity.memory_bytes)} memory{devices}"
