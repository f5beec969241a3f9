"""The books of the fleet: units and groups as rows, which nodes are whose, and what the policy says of them.

Without decisions: those are in `scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from fray.model.ids import NodeName
from fray.model.policy.machine_groups import GroupConfig, MachineState
from fray.model.policy.policy import Policy
from fray.scheduler.lifecycle import next_phase
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.state.rows import Node
from fray.scheduler.state.unit_rows import (
    UNIT_TABLE,
    CloudUnit,
    GroupRow,
    UnitEvent,
    UnitPhase,
)


def unit_name(node: Node) -> str:
    """The unit a node belongs to: the one it names, else the machine of its own name (of provider ``fixed``)."""
    return node.capacity.attributes.get("machine") or node.name


def zone_suffix(unit: CloudUnit) -> str:
    """For messages."""
    return f" in {unit.zone}" if unit.zone else ""


class MachineGroupIndex:
    """Part of `Tables`; every change of a row goes through here and is marked to be saved."""

    def __init__(self, touch: Callable[[str, str], None]) -> None:
        self._touch = touch
        self.units: dict[str, CloudUnit] = {}
        self.groups: dict[str, GroupRow] = {}
        self.units_of_group: dict[str, dict[str, CloudUnit]] = {}
        """Units by group, those that are gone among them."""
        self.nodes_of_unit: dict[str, dict[NodeName, None]] = {}
        """Nodes by the unit they name; also units that are not ours."""
        self.pending_orders: dict[str, None] = {}
        """Units with something to do for their provider."""
        self.has_new_orders = False
        """There are orders that were not there."""
        self.policy = Policy()
        self.cluster = ""
        """What is part of every name that is made."""
        self.node_used_at: dict[NodeName, float] = {}
        """When an attempt came or went last; since the last start of the controller."""
        self.unit_busy_at: dict[str, float] = {}
        """When a unit was last seen to hold something."""
        self.units_in_use: dict[str, None] = {}
        """Units that held something when the last plan began."""
        self.listed_providers: dict[str, None] = {}
        """Providers that have listed what they have since the controller started: before that nothing is asked for."""
        self.provider_errors: dict[str, str] = {}
        """Why a provider's last list failed."""
        self.limit_reasons: dict[PlacementShape, str] = {}
        """Why machines for what waits are not asked for, as the last plan found it."""
        self.plan_at: float | None = None
        """When the next plan is due."""
        self.touched_units: dict[str, None] = {}
        """Units whose nodes have come or gone: looked at before anything else."""
        self.is_plan_due_soon = False
        """Something has changed that the next plan wants to know soon."""

    # Policy

    def group(self, name: str) -> GroupConfig | None:
        """As the policy has it, with what was set at run time."""
        config = self._configs.get(name)
        row = self.groups.get(name)
        if config is None or row is None or (row.min is None and row.max is None):
            return config
        most = config.max if row.max is None else row.max
        least = config.min if row.min is None else row.min
        return evolve(config, max=most, min=min(least, most))

    def configs(self) -> Iterator[GroupConfig]:
        """All groups, as written."""
        return (config for config in map(self.group, self._configs) if config is not None)

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._configs = {group.name: group for group in policy.groups}

    def row(self, group: str) -> GroupRow:
        """What is remembered of a group; call `group_changed` after a change."""
        return self.groups.setdefault(group, GroupRow(name=group))

    def group_changed(self, row: GroupRow) -> None:
        self.groups[row.name] = row
        self._touch("machine_group", row.name)
        self.is_plan_due_soon = True

    # Units

    def put_unit(self, unit: CloudUnit) -> None:
        self.units[unit.name] = unit
        self.units_of_group.setdefault(unit.group, {})[unit.name] = unit
        self.unit_changed(unit)

    def unit_changed(self, unit: CloudUnit) -> None:
        self._index(unit)
        self._touch("unit", unit.name)
        self.is_plan_due_soon = True

    def _index(self, unit: CloudUnit) -> None:
        if unit.has_order:
            self.pending_orders[unit.name] = None
            self.has_new_orders = True
        else:
            self.pending_orders.pop(unit.name, None)

    def apply_event(self, unit: CloudUnit, turn: UnitEvent, now: float) -> None:
        """The next phase by the table."""
        unit.phase, unit.since = next_phase(UNIT_TABLE, unit.phase, turn), now
        unit.delete_accepted, unit.delete_failures, unit.order_not_before = False, 0, now
        self.unit_changed(unit)

    def drop_unit(self, unit: CloudUnit) -> None:
        del self.units[unit.name], self.units_of_group[unit.group][unit.name]
        self.pending_orders.pop(unit.name, None)
        self.unit_busy_at.pop(unit.name, None)
        self._touch("unit", unit.name)

    def rebuild(self) -> None:
        """Indexes, from the rows."""
        self.units = dict(sorted(self.units.items(), key=lambda item: item[1].order))
        self.groups = dict(sorted(self.groups.items()))
        for unit in self.units.values():
            self.units_of_group.setdefault(unit.group, {})[unit.name] = unit
            self._index(unit)

    def live_units(self, group: str) -> list[CloudUnit]:
        """That count towards its max: on their way, or here to stay."""
        return [unit for unit in self.units_of_group.get(group, {}).values() if unit.is_live]

    def spent_per_hour(self) -> float:
        """For all that may be there, those that are going among them; what is dead costs nothing."""
        dead = (MachineState.PREEMPTED, MachineState.FAILED)
        there = (
            unit for unit in self.units.values() if unit.phase is not UnitPhase.GONE and unit.provider_state not in dead
        )
        return sum(unit.price_per_hour for unit in there)

    # Nodes

    def on_node_joined(self, node: Node) -> None:
        self.nodes_of_unit.setdefault(unit_name(node), {})[node.name] = None
        self.touched_units[unit_name(node)] = None
        self.is_plan_due_soon = True

    def on_node_dropped(self, node: Node) -> None:
        of = self.nodes_of_unit.get(unit_name(node))
        if of is not None:
            of.pop(node.name, None)
            if not of:
                del self.nodes_of_unit[unit_name(node)]
        self.node_used_at.pop(node.name, None)
        self.is_plan_due_soon = True

    def is_leaving(self, node: Node) -> bool:
        """Its unit is being given back: nothing new is placed there."""
        unit = self.units.get(unit_name(node))
        return unit is not None and not unit.is_live

    def on_node_used(self, node: NodeName, now: float) -> None:
        """An attempt came to it, or left it."""
        self.node_used_at[node] = now
        self.is_plan_due_soon = True
