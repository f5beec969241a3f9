"""Machines of a pool, with the log of their changes and the indexes that follow it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from typing import TypeVar

from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.pool.machine import Machine, Variant, variants
from fray.scheduler.pool.machine_index import (
    MAX_LOG,
    AttributeFilter,
    FitCounter,
    Locality,
    PoolListener,
    PreferenceOrder,
    UsableCounter,
    by_attempts,
    by_size,
    by_variant,
)
from fray.scheduler.pool.requests import MemberGroup, is_weightless
from fray.scheduler.pool.slices import Slice, Slices

MAX_LISTENERS = 512
"""Indexes that are kept; beyond it, those that were not used for longest are dropped first."""
SIZE, CALM = "size", "calm"
F = TypeVar("F", bound=PoolListener)


class PoolIndex:
    """Machines, and the indexes that follow their changes."""

    def __init__(self) -> None:
        self.machines: dict[NodeName, Machine] = {}
        self.machines_version = 0
        """Count of the machines that were added or removed."""
        self.open_machines = 0
        self.changes = 0
        """Count of the changes of any machine."""
        self.slices = Slices(self.machines)
        self._log: list[NodeName] = []
        """Names of machines that have changed, in order; truncated from time to time."""
        self._variants: dict[Variant, int] = {}
        """Number of machines by variant of their devices."""
        self._by_attribute: dict[tuple[str, str], dict[NodeName, None]] = {}
        """Names of machines by attribute and value."""
        self._listeners: dict[object, PoolListener] = {}
        self._orders: dict[tuple[Demand, Locality | None], list[tuple[str, int, PreferenceOrder]]] = {}

    def _add_machine(self, machine: Machine) -> None:
        self.machines[machine.name] = machine
        self.machines_version += 1
        self.slices.on_machine_changed(machine)
        for attribute in machine.capacity.attributes.items():
            self._by_attribute.setdefault(attribute, {})[machine.name] = None
        for variant in machine.device_counts:
            self._variants[variant] = self._variants.get(variant, 0) + 1
            if self._variants[variant] == 1:
                self._orders.clear()  # demands for any variant have one more order to search

    def _remove_machine(self, machine: Machine) -> None:
        self._changed(machine.name)
        self.machines_version += 1
        for attribute in machine.capacity.attributes.items():
            del self._by_attribute[attribute][machine.name]
            if not self._by_attribute[attribute]:
                del self._by_attribute[attribute]
        for variant in machine.device_counts:
            self._variants[variant] -= 1
        del self.machines[machine.name]
        self.slices.on_machine_changed(machine)
        for follower in self._listeners.values():
            follower.forget(machine.name)

    # What has changed

    def _changed(self, name: NodeName) -> None:
        self.changes += 1
        self._log.append(name)
        if len(self._log) > MAX_LOG:
            self._truncate_log()

    def _all_changed(self, names: list[NodeName]) -> None:
        self.changes += len(names)
        self._log.extend(names)
        if len(self._log) > MAX_LOG:
            self._truncate_log()

    def _truncate_log(self) -> None:
        for follower in (self.slices, *self._listeners.values()):
            follower.on_log_truncated(self._log)
        self._log.clear()
        if len(self._listeners) > MAX_LISTENERS:
            by_use = sorted(self._listeners, key=lambda key: self._listeners[key].missed_truncations)
            for key in by_use[MAX_LISTENERS // 2 :]:
                del self._listeners[key]
            self._orders.clear()

    def _listener(self, key: object, make: Callable[[], F]) -> F:
        """Return the index of this key, up to date."""
        known = self._listeners.get(key)
        if known is None:  # not `not known`: an index without machines is falsy
            known = self._listeners[key] = make()
            known.log_position = len(self._log)
        else:
            known.catch_up(self._log)
        found: F = known  # type: ignore[assignment]  # the key determines the class
        return found

    def _orders_for(self, demand: Demand, place: Locality | None) -> list[tuple[str, int, PreferenceOrder]]:
        """Return the orders to search for the demand: variant, fewest devices, machines in order."""
        key = demand, place
        orders = self._orders.get(key)
        if orders is None:
            if len(self._orders) >= 2 * MAX_LISTENERS:
                self._orders.clear()
            orders = self._orders[key] = self._orders_of(demand, place)
        return orders

    def _orders_of(self, demand: Demand, place: Locality | None) -> list[tuple[str, int, PreferenceOrder]]:
        filter = AttributeFilter.of(demand, place)
        if is_weightless(demand):
            return [("", 0, self._order(filter, CALM))]
        if not demand.device_count:
            return [("", 0, self._order(filter, SIZE))]
        return [(v[1], demand.device_count, self._order(filter, v)) for v in variants(demand, self._variants)]

    def _order(self, filter: AttributeFilter, kind: str | Variant) -> PreferenceOrder:
        def make() -> PreferenceOrder:
            where = by_variant(kind) if isinstance(kind, tuple) else by_attempts if kind == CALM else by_size
            order = PreferenceOrder(filter, self.machines, where)
            order.fill(self._likely_machines(filter))
            return order

        return self._listener((filter, kind), make)

    def _likely_machines(self, filter: AttributeFilter) -> Iterable[NodeName]:
        """Return a small set of machines that includes all that pass."""
        found: Collection[NodeName] = self.machines
        for group in filter.likely():
            named = [self._by_attribute.get(attribute, {}) for attribute in group]
            if sum(map(len, named)) < len(found):
                found = [name for names in named for name in names]
        return found

    def _slices(
        self, demand: Demand, hosts: int, closed: Container[NodeName] = (), place: Locality | None = None
    ) -> list[Slice]:
        return self.slices.usable(demand, hosts, self._log, closed, place)

    # Counting

    def _fit_counter(self, demand: Demand) -> FitCounter:
        def make() -> FitCounter:
            tally = FitCounter(demand, self.machines)
            tally.fill(self._likely_machines(AttributeFilter.of(demand)))
            return tally

        return self._listener(("now", demand), make)

    def held_now(self, demand: Demand) -> int:
        """Return how many members fit beside what runs on open machines: an upper bound, as ports are not examined."""
        return self._fit_counter(demand).total

    def usable(self, demand: Demand) -> dict[NodeName, int]:
        """Return open machines that could hold the demand if they were empty, and how many members. Do not modify."""
        return self._usable(demand).counts

    def _usable(self, demand: Demand) -> UsableCounter:
        def make() -> UsableCounter:
            usable = UsableCounter(demand, self.machines)
            usable.fill(self._likely_machines(AttributeFilter.of(demand)))
            return usable

        return self._listener(("usable", demand), make)

    def could_hold(self, part: MemberGroup) -> bool:
        """Return whether open machines could hold the part in one of its choices, if they were empty."""
        if not part.slice_hosts:
            return any(self._usable(demand).total >= part.members for demand in part.choices)
        wanted = part.members // part.slice_hosts
        return any(self.slices.could_hold(one, part.slice_hosts, wanted, self._log) for one in part.choices)

    # Places

    def localities(self, same: str) -> list[str]:
        """Return regions or zones of the machines, in order; empty for machines without the attribute."""
        return sorted({machine.capacity.attributes.get(same, "") for machine in self.machines.values()})

    def regions_of(self, zone: str) -> list[str]:
        """Return the regions of the machines in this zone."""
        named = self._by_attribute.get(("zone", zone), {})
        return sorted({region for name in named if (region := self.machines[name].capacity.attributes.get("region"))})
