"""Units and machine groups: their rows, the nodes of each unit, and the groups of the policy.

Decisions about them are in `fray.scheduler.autoscaler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from fray.model.ids import NodeName
from fray.model.policy.machine_groups import GroupConfig, MachineState
from fray.model.policy.policy import Policy
from fray.scheduler.lifecycle import next_phase
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.reasons import Reason
from fray.scheduler.state.rows import Node
from fray.scheduler.state.unit_rows import (
    UNIT_TABLE,
    CloudUnit,
    GroupRow,
    UnitEvent,
    UnitPhase,
)

PLAN_S = 2.0
"""Minimum seconds between two plans of the autoscaler; a millisecond more for each unit, so that plans take at most a
few percent of the time."""


def unit_name(node: Node) -> str:
    """Return the unit of a node: the one it names, else the machine of its own name (of provider ``fixed``)."""
    return node.capacity.attributes.get("machine") or node.name


def zone_suffix(unit: CloudUnit) -> str:
    """Return the zone of a unit as the end of a phrase in messages."""
    return f" in {unit.zone}" if unit.zone else ""


class MachineGroupIndex:
    """Rows and indexes of units and machine groups; every change of a row is made here and marked to be saved."""

    def __init__(self, touch: Callable[[str, str], None]) -> None:
        self._touch = touch
        self.units: dict[str, CloudUnit] = {}
        self.groups: dict[str, GroupRow] = {}
        self.units_of_group: dict[str, dict[str, CloudUnit]] = {}
        """Units by group, including those that are gone."""
        self.nodes_of_unit: dict[str, dict[NodeName, None]] = {}
        """Nodes by the unit they name, including units that the scheduler did not create."""
        self.pending_orders: dict[str, None] = {}
        """Units their provider has to create or delete."""
        self.has_new_orders = False
        """True if orders were added since the controller read them."""
        self.policy = Policy()
        self.limits_changed_at: float | None = None
        """Time of the last change of the policy, or of a group's limits."""
        self.cluster = ""
        """Id of the cluster, which is part of the name of every unit."""
        self.node_used_at: dict[NodeName, float] = {}
        """Time at which an attempt was last placed on or left a node, since the start of the controller."""
        self.unit_busy_at: dict[str, float] = {}
        """Time at which a unit was last seen in use."""
        self.units_in_use: dict[str, None] = {}
        """Units that were in use when the last plan began."""
        self.listed_providers: dict[str, None] = {}
        """Providers that have listed their machines since the controller started: nothing is requested before."""
        self.provider_errors: dict[str, str] = {}
        """Error of a provider's last list."""
        self.limit_reasons: dict[PlacementShape, tuple[Reason, ...]] = {}
        """Reasons why no machines are requested for waiting shapes, as of the last plan."""
        self.plan_at: float | None = None
        """Time of the next plan."""
        self.planned_at: float | None = None
        """Time of the last plan; None before the first."""
        self.touched_units: dict[str, None] = {}
        """Units whose nodes joined or left, which the next plan examines first."""
        self.is_plan_due_soon = False
        """True if something changed that makes a plan due soon."""

    # Policy

    def group(self, name: str) -> GroupConfig | None:
        """Return the group of the policy with the limits that were set at run time."""
        config = self._configs.get(name)
        row = self.groups.get(name)
        # Mostly no limits were set at run time, and the policy's own object is returned.
        if config is None or row is None or (row.min is None and row.max is None):
            return config
        most = config.max if row.max is None else row.max
        least = config.min if row.min is None else row.min
        # A maximum that was set by hand wins over the policy's minimum.
        return evolve(config, max=most, min=min(least, most))

    def configs(self) -> Iterator[GroupConfig]:
        """Yield all groups of the policy, with the limits that were set at run time."""
        return (config for config in map(self.group, self._configs) if config is not None)

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._configs = {group.name: group for group in policy.groups}

    # Plans

    @property
    def pace_s(self) -> float:
        """Return the least time between two plans."""
        # A plan looks at each unit: about 10 ms for 1,000 of them, 40 ms for 10,000.
        return PLAN_S + len(self.units) / 1000

    @property
    def due_at(self) -> float | None:
        """Return when the next plan is due; None: when something changes."""
        # What has changed in the step of the last plan, but after it, may be the last change for a long time.
        if self.plan_at is None and self.planned_at is not None and self.is_plan_due_soon and self.units:
            return self.planned_at + self.pace_s
        return self.plan_at

    # Groups

    def row(self, group: str) -> GroupRow:
        """Return the row of a group, a new one if necessary; call `group_changed` after a change."""
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
            # Derived from the row and read by the provider driver: an order is never in a message, so none can be lost.
            self.pending_orders[unit.name] = None
            self.has_new_orders = True
        else:
            self.pending_orders.pop(unit.name, None)

    def apply_event(self, unit: CloudUnit, event: UnitEvent, now: float) -> None:
        """Move a unit to its next phase by the table."""
        unit.phase, unit.since = next_phase(UNIT_TABLE, unit.phase, event), now
        # Failures and waits belong to the order of the phase that ends here.
        unit.delete_accepted, unit.delete_failures, unit.order_not_before = False, 0, now
        self.unit_changed(unit)

    def drop_unit(self, unit: CloudUnit) -> None:
        del self.units[unit.name], self.units_of_group[unit.group][unit.name]
        self.pending_orders.pop(unit.name, None)
        self.unit_busy_at.pop(unit.name, None)
        self._touch("unit", unit.name)

    def rebuild(self) -> None:
        """Build the indexes from the rows."""
        self.units = dict(sorted(self.units.items(), key=lambda item: item[1].order))
        self.groups = dict(sorted(self.groups.items()))
        for unit in self.units.values():
            self.units_of_group.setdefault(unit.group, {})[unit.name] = unit
            self._index(unit)

    def live_units(self, group: str) -> list[CloudUnit]:
        """Return the units that count towards the group's maximum: on their way, or here to stay."""
        return [unit for unit in self.units_of_group.get(group, {}).values() if unit.is_live]

    def spent_per_hour(self) -> float:
        """Return the price of all units that may exist, including leaving ones; dead ones are free."""
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
        """Return whether the node's unit is being deleted: nothing new is placed there."""
        unit = self.units.get(unit_name(node))
        # Nodes of machines that no provider made are of no unit, and stay.
        return unit is not None and not unit.is_live

    def on_node_used(self, node: NodeName, now: float) -> None:
        """Record that an attempt was placed on or left the node."""
        self.node_used_at[node] = now
        self.is_plan_due_soon = True
