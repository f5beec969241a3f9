"""Capacity of the cluster by kind and zone, and what becomes of it at one moment."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import asdict, define

from fray.model.messages.history import CapacitySample
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.nodes.view import service_state
from fray.scheduler.pool.machine import Machine
from fray.scheduler.state.rows import Node
from fray.scheduler.state.tables import Tables

PAIRS_LIMIT = 200
"""Pairs of kind and zone that are counted each for itself; what is beyond them counts as ``other``."""
OTHER = "other"


@define
class _Sum:
    total: float = 0
    used: float = 0
    reserved: float = 0
    idle: float = 0
    quarantined: float = 0
    closed: float = 0


def capacity_samples(state: Tables, now: float) -> tuple[CapacitySample, ...]:
    """Return the capacity of all machines that are not known to be dead, by kind and zone."""
    sums: dict[tuple[str, str], _Sum] = {}
    for name, node in state.nodes.items():
        if node.phase is NodePhase.LOST:
            continue
        zone = node.capacity.attributes.get("zone", "")
        for kind, part in _parts(state, name, node):
            key = kind, zone
            if key not in sums and len(sums) >= PAIRS_LIMIT:
                family, of_variant, _ = kind.partition(":")
                key = family + of_variant + (OTHER if of_variant else ""), OTHER
            found = sums.setdefault(key, _Sum())
            found.total += part.total
            found.used += part.used
            found.reserved += part.reserved
            found.idle += part.idle
            found.quarantined += part.quarantined
            found.closed += part.closed
    return tuple(
        CapacitySample(at=now, kind=kind, zone=zone, **asdict(found)) for (kind, zone), found in sorted(sums.items())
    )


def _parts(state: Tables, name: str, node: Node) -> Iterator[tuple[str, _Sum]]:
    """Yield the parts of one machine by kind."""
    machine, capacity = state.pool.machines[name], node.capacity
    # A unit is taken out of the cluster's pool as a whole; what no job in it uses is free in the reservation's own.
    inside = [state.reservation_pools[each].machines[name] for each in state.reservations_on.get(name, ())]
    whole, free = capacity.cpu_milli / 1000, machine.cpu_milli / 1000
    yield "cpu", _part(node, whole, free, sum(one.cpu_milli for one in inside) / 1000)
    yield "memory", _part(node, capacity.memory_bytes, machine.memory_bytes, sum(one.memory_bytes for one in inside))
    for variant, count in machine.device_counts.items():
        reserved = sum(len(one.devices.get(variant, ())) for one in inside)
        withheld = sum(_withheld(one, variant) for one in (machine, *inside))
        part = _part(node, count, len(machine.devices[variant]) + withheld, reserved)
        if part.idle:  # else all that is not used is out of service already
            part.idle -= withheld
            part.closed += withheld
        yield ":".join(filter(None, variant)), part


def _withheld(machine: Machine, variant: tuple[str, str]) -> int:
    """Return the number of devices that no attempt has, and that their node withholds."""
    return sum(is_free and machine.device_places[device][0] == variant for device, is_free in machine.withheld.items())


def _part(node: Node, total: float, free: float, reserved: float) -> _Sum:
    part = _Sum(total, total - free - reserved)
    if node.is_schedulable:
        part.reserved, part.idle = reserved, free
    elif service_state(node) == "quarantined" and node.phase is NodePhase.ALIVE:
        part.quarantined = free + reserved
    else:
        part.closed = free + reserved
    return part
