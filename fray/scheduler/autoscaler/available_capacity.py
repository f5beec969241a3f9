"""What can be had of each group, and where: the machines of the policy as the law of matching sees them."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from fray.model.policy.machine_groups import GroupConfig
from fray.model.resources import Capacity
from fray.scheduler.autoscaler.bin_packing import UnitOffer
from fray.scheduler.state.machine_groups import MachineGroupIndex
from fray.scheduler.state.state import State


def unit_offers(books: MachineGroupIndex, config: GroupConfig, now: float) -> Iterator[UnitOffer]:
    """One a zone, in order; where none can be had now it says why."""
    for zone in config.zones_in_order():
        capacity = host_capacity(books, config, zone, "a unit", 0)
        yield UnitOffer(
            config.name, zone, capacity, config.hosts, config.price(zone), zone_closed_text(books, config, zone, now)
        )


def zone_closed_text(books: MachineGroupIndex, config: GroupConfig, zone: str, now: float) -> str:
    """Why nothing is asked of a zone now; empty: it may be."""
    row = books.groups.get(config.name)
    if row is not None and row.stop_reason:
        return f"group {config.name} is stopped until the policy is read again: {row.stop_reason}"
    if config.provider not in books.listed_providers:
        trouble = books.provider_errors.get(config.provider, "")
        return f"provider {config.provider} has not said yet what it has" + (f": {trouble}" if trouble else "")
    resting = row.backoffs.get(zone) if row is not None else None
    if resting is not None and resting.until > now:
        place = f"{config.name} in {zone}" if zone else config.name
        return f"group {place} rests for {resting.until - now:.0f} s after {resting.kind}: {resting.message}"
    return ""


def declared_shape(config: GroupConfig) -> str:
    """What the policy says of the shape of a machine."""
    shape = (
        config.cpu,
        config.memory,
        config.disk,
        config.gpu,
        config.gpus,
        config.tpu,
        sorted(config.attributes.items()),
    )
    return repr(shape)


def host_capacity(books: MachineGroupIndex, config: GroupConfig, zone: str, machine: str, worker: int) -> Capacity:
    """One host of a unit: as its last one was, where one has come; until then as it is declared.

    A machine that offers less than its group declares would otherwise be made again and again for a job that does not
    fit on it.
    """
    capacity = config.capacity(zone, machine, worker)
    row = books.groups.get(config.name)
    if row is None or row.observed_capacity is None or row.observed_declaration != declared_shape(config):
        return capacity
    return evolve(row.observed_capacity, attributes=row.observed_capacity.attributes | capacity.attributes)


def possible_machines(books: MachineGroupIndex, members: int) -> Iterator[tuple[str, Capacity]]:
    """Machines that could be had, by a name, as many as so many members could need: of each group in each zone."""
    for config in books.policy.groups:
        row = books.groups.get(config.name)
        units = min(max(config.max, row.max or 0 if row else 0), members)
        for zone in config.zones:
            for unit in range(units):
                name = f"unit {unit + 1} of group {config.name}" + (f" in {zone}" if zone else "")
                for worker in range(config.hosts):
                    which = f"host {worker} of {name}" if config.hosts > 1 else name
                    yield which, host_capacity(books, config, zone, name, worker)


def knows_all_machines(state: State) -> bool:
    """It is known what the cluster has, or can have: what fits none of that never will."""
    return state.declares_all_nodes or bool(state.policy.groups)


def known_machines(state: State) -> dict[str, Capacity]:
    """Declared and joined machines by name."""
    declared = {hello.node: hello.capacity for hello in state.declared_nodes}
    return declared | {node.name: node.capacity for node in state.nodes.values()}


def all_machines(state: State, members: int) -> dict[str, Capacity]:
    """And those that could be had, as many as so many members could need."""
    return known_machines(state) | dict(possible_machines(state.fleet, members))
