"""Capacities of known machines: joined ones, declared ones, and those that the groups of the policy could add."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from fray.model.policy.machine_groups import GroupConfig
from fray.model.resources import Capacity
from fray.scheduler.state.machine_groups import MachineGroupIndex
from fray.scheduler.state.state import State


def declared_shape(config: GroupConfig) -> str:
    """Return a text that is equal for equal shapes of machines in the policy."""
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


def host_capacity(fleet: MachineGroupIndex, config: GroupConfig, zone: str, machine: str, worker: int) -> Capacity:
    """Return the capacity of one host: that of the group's last host that joined, until then the declared one.

    A machine that offers less than its group declares would otherwise be created again and again for a job that does
    not fit on it.
    """
    capacity = config.capacity(zone, machine, worker)
    row = fleet.groups.get(config.name)
    # An observation holds for the declaration that it was made under: an operator who changes the policy is believed
    # again.
    if row is None or row.observed_capacity is None or row.observed_declaration != declared_shape(config):
        return capacity
    return evolve(row.observed_capacity, attributes=row.observed_capacity.attributes | capacity.attributes)


def possible_machines(fleet: MachineGroupIndex, members: int) -> Iterator[tuple[str, Capacity]]:
    """Yield machines that could be requested: of each group in each zone, as many as that many members could need."""
    for config in fleet.policy.groups:
        row = fleet.groups.get(config.name)
        # As many as the members could use and not as many as are allowed: groups may have thousands.
        units = min(max(config.max, row.max or 0 if row else 0), members)
        for zone in config.zones:
            for unit in range(units):
                name = f"unit {unit + 1} of group {config.name}" + (f" in {zone}" if zone else "")
                for worker in range(config.hosts):
                    which = f"host {worker} of {name}" if config.hosts > 1 else name
                    yield which, host_capacity(fleet, config, zone, name, worker)


def known_machines(state: State) -> dict[str, Capacity]:
    """Return declared and joined machines by name."""
    declared = {hello.node: hello.capacity for hello in state.declared_nodes}
    return declared | {node.name: node.capacity for node in state.nodes.values()}


def all_machines(state: State, members: int) -> dict[str, Capacity]:
    """Return known machines, and those that could be requested for that many members."""
    return known_machines(state) | dict(possible_machines(state.fleet, members))
