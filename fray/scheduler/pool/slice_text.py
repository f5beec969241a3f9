"""Texts for obstacles to TPU slices: in use, incomplete, or without the attributes that say which host is of which."""

from __future__ import annotations

from collections import Counter

from fray.model.resources import Demand
from fray.scheduler.pool.pool import (
    Machine,
    MachinePool,
    admits_demand,
    variants,
)
from fray.scheduler.pool.requests import MemberGroup

HOW = (
    "give each host the attributes slice (one name for all of them) and tpu_worker (0, 1, …): TPU VMs find them by "
    "themselves, for others write them under [attributes] in the file of fray-node --config"
)
NAMES_SHOWN = 4


def slices_text(pool: MachinePool, part: MemberGroup, demand: Demand) -> str:
    """Return the number of slices and what each lacks; empty if no machine has such chips."""
    hosts = [machine for machine in pool.machines.values() if variants(demand, machine.device_counts)]
    if not hosts:
        return ""
    kind = f"{demand.device_variant} (of {part.slice_hosts} hosts)"
    nameless = [machine.name for machine in hosts if machine.slice is None]
    named: dict[tuple[str, str, str], list[Machine]] = {}
    for machine in hosts:
        if machine.slice is not None:
            named.setdefault(machine.slice, []).append(machine)
    counts = Counter(_obstacle(part, demand, group) for _, group in sorted(named.items()))
    texts = [f"{count} {'is' if count == 1 else 'are'} {what}" for what, count in counts.items()]
    text = f"of the {len(named)} slices of {kind} {', '.join(texts)}" if named else f"there is no slice of {kind}"
    if nameless:
        some = ", ".join(nameless[:NAMES_SHOWN]) + ("…" if len(nameless) > NAMES_SHOWN else "")
        text += f"; {some} name{'s' if len(nameless) == 1 else ''} no slice: {HOW}"
    elif any("under one name" in what for what in counts):
        text += f"; {HOW}"
    return text


def _obstacle(part: MemberGroup, demand: Demand, group: list[Machine]) -> str:
    """Return the first obstacle that keeps a slice from being given."""
    there = [machine for machine in group if machine.is_open]
    missing = part.slice_hosts - len(group)
    if missing > 0:
        return f"without {missing} of {'its' if len(group) else 'the'} hosts"
    if len(there) < part.slice_hosts:
        return "with hosts that are not available"
    if len(there) > part.slice_hosts or len({machine.worker for machine in there}) < len(there):
        return "several under one name, or with two hosts of one number"
    if not all(admits_demand(demand, machine.capacity) for machine in there):
        return "not where it may run"
    if any(
        len(machine.devices[v]) < machine.device_counts[v]
        for machine in there
        for v in variants(demand, machine.device_counts)
    ):
        return "in use"
    if all(_has_room(demand, machine) for machine in there):
        return "free"
    return "with too little CPU, memory, disk or ports free on a host"


def _has_room(demand: Demand, machine: Machine) -> bool:
    return (
        machine.cpu_milli >= demand.cpu_milli
        and machine.memory_bytes >= demand.memory_bytes
        and machine.disk_bytes >= demand.disk_bytes
        and machine.ports.free >= demand.ports
    )
