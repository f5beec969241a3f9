"""TPU slices of several hosts, each placed as a unit or not at all.

The hosts of a slice are the open machines that name it (attribute ``slice``, of one region and zone), in the order of
their own numbers (``tpu_worker``). A slice can be given while exactly as many of them are open as its type has hosts,
no two with the same number, and all chips of each are free. So a slice is not given if one of its hosts is missing,
silent, cordoned or has a busy chip, or if two slices share its name.

Several slices are taken of one zone if it has enough of them, else of one region, else of as few zones as possible;
among zones with enough, of the zone with the fewest left.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import define, field

from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.pool.machine import (
    AUTO,
    Machine,
    SliceId,
    held_empty,
)
from fray.scheduler.pool.machine_index import (
    EVERYWHERE,
    AttributeFilter,
    ChangeLog,
    Locality,
    PoolListener,
)

Chips: TypeAlias = tuple[str, int, int]
"""Variant, number of hosts, chips of each."""


@define(eq=False)
class Slice:
    """All open hosts that name a slice, and the least that is free on any of them."""

    id: SliceId
    hosts: list[Machine] = field(factory=list)
    """Hosts in order."""
    chips: tuple[Chips, ...] = ()
    """Chips it has; empty if hosts differ, or two have the same number."""
    kinds: tuple[Chips, ...] = ()
    """Chips, if all of them are free."""
    free: tuple[int, int, int] = (0, 0, 0)
    """Free milli-CPUs, bytes of memory and bytes of disk."""
    admitted: dict[AttributeFilter, bool] = field(factory=dict)

    def set_hosts(self, hosts: Iterable[Machine]) -> None:
        """Set the hosts, after machines joined, left, opened or closed."""
        # Open ones only: silent hosts of a slice that was deleted and created again under its name do not count.
        self.hosts = sorted((host for host in hosts if host.is_open), key=lambda host: (host.worker, host.name))
        self.admitted = {}
        whole = self.hosts[0].device_counts if self.hosts else {}
        is_sound = len({host.worker for host in self.hosts}) == len(self.hosts)
        # Two hosts with one number belong to two slices under one name, of which neither may be given in part.
        alike = is_sound and all(host.device_counts == whole for host in self.hosts)
        chips = ((variant[1], len(self.hosts), count) for variant, count in whole.items() if variant[0] == "tpu")
        self.chips = tuple(chips) if alike else ()

    def count_free(self) -> None:
        """Count what is free."""
        hosts = self.hosts
        self.kinds = tuple(
            kind for kind in self.chips if all(len(host.devices["tpu", kind[0]]) == kind[2] for host in hosts)
        )
        # Not computed while a chip is in use: nothing fits then, whatever else is free.
        if self.kinds:
            self.free = (
                min([host.cpu_milli for host in hosts]),
                min([host.memory_bytes for host in hosts]),
                min([host.disk_bytes for host in hosts]),
            )


def has_ports(demand: Demand, one: Slice) -> bool:
    """Return whether enough ports are free on every host; costs a look at all of them."""
    return all(host.ports.free >= demand.ports for host in one.hosts)


class Slices(PoolListener):
    """All slices of a pool."""

    def __init__(self, machines: Mapping[NodeName, Machine]) -> None:
        super().__init__(EVERYWHERE, machines)
        self.members: dict[SliceId, dict[NodeName, None]] = {}
        """Machines by the slice they name, open or not."""
        self._slices: dict[SliceId, Slice] = {}
        self._whole: dict[Chips, dict[SliceId, Slice]] = {}
        """Slices with all chips free, by what they have."""
        self._stale: dict[SliceId, bool] = {}
        """Slices to examine, and whether their hosts have changed."""

    def on_machine_changed(self, machine: Machine) -> None:
        """Record a machine that was added, removed, opened or closed."""
        if machine.slice is None:
            return
        members = self.members.setdefault(machine.slice, {})
        if self._machines.get(machine.name) is machine:
            members[machine.name] = None
        else:
            members.pop(machine.name, None)
        # Hosts that come or go change what the slice is; other changes only what is free on it, which is cheaper to
        # examine.
        self._stale[machine.slice] = True

    def _update(self, name: NodeName, machine: Machine | None) -> None:
        if machine is not None and machine.slice is not None:
            self._stale.setdefault(machine.slice, False)

    def _refresh(self) -> None:
        """Examine all slices that have changed."""
        for id, others in self._stale.items():
            one = self._slices.setdefault(id, Slice(id))
            # Taken out under the old kinds, before these are computed again.
            for kind in one.kinds:
                del self._whole[kind][id]
            if others:
                one.set_hosts(self._machines[name] for name in self.members[id])
            one.count_free()
            for kind in one.kinds:
                self._whole.setdefault(kind, {})[id] = one
            if not self.members[id]:
                del self.members[id], self._slices[id]
        self._stale = {}

    def could_hold(self, demand: Demand, hosts: int, wanted: int, log: ChangeLog) -> bool:
        """Return whether that many slices could be given if all were empty."""
        self.catch_up(log)
        if self._stale:
            self._refresh()
        filter = AttributeFilter.of(demand)
        for one in self._slices.values():
            if wanted > 0 and any(_has_chips(demand, hosts, chips) for chips in one.chips):
                # Stops counting once there are enough: the rest is not examined.
                wanted -= (filter == EVERYWHERE or _is_admitted(one, filter)) and _holds(demand, one)
        return wanted <= 0

    def usable(
        self, demand: Demand, hosts: int, log: ChangeLog, closed: Container[NodeName], place: Locality | None
    ) -> list[Slice]:
        """Return the slices that can be given now, without regard to ports."""
        self.catch_up(log)
        if self._stale:
            self._refresh()
        filter = AttributeFilter.of(demand, place)
        cpu, memory, disk = demand.cpu_milli, demand.memory_bytes, demand.disk_bytes
        found: list[Slice] = []
        for kind, whole in self._whole.items():
            if _has_chips(demand, hosts, kind):
                for one in whole.values():
                    room = one.free
                    if room[0] >= cpu and room[1] >= memory and room[2] >= disk:
                        found.append(one)
        # Capacity first: the filter is cached by slice, but has to look at every host the first time.
        if filter != EVERYWHERE:
            found = [one for one in found if _is_admitted(one, filter)]
        if closed:
            found = [one for one in found if not any(host.name in closed for host in one.hosts)]
        return found


def _has_chips(demand: Demand, hosts: int, chips: Chips) -> bool:
    # The number of hosts has to be exact: a larger slice cannot be given in part.
    return chips[1] == hosts and chips[2] >= demand.device_count and demand.device_variant.lower() in (chips[0], AUTO)


def _holds(demand: Demand, one: Slice) -> bool:
    return all(held_empty(demand, host) for host in one.hosts)


def _is_admitted(one: Slice, filter: AttributeFilter) -> bool:
    known = one.admitted.get(filter)
    if known is None:
        known = one.admitted[filter] = all(map(filter.test(), one.hosts))
    return known


# Choosing ------------------------------------------------------------------------------------------------------------


def choose_slices(usable: Sequence[Slice], wanted: int, liked: Collection[SliceId] = ()) -> list[Slice] | None:
    """Choose that many slices by the rule of the module, preferred ones first; None if there are too few."""
    if len(usable) < wanted:
        return None
    for parts in (2, 1, 0):  # one zone, one region, anywhere
        near: dict[tuple[str, ...], list[Slice]] = {}
        for one in usable:
            near.setdefault(one.id[:parts], []).append(one)
        # In this order: most preferred slices, then the tightest zone or region, then its name.
        enough = [
            (_count_preferred(group, liked), len(group), name) for name, group in near.items() if len(group) >= wanted
        ]
        if enough:
            return _choose_in_group(near[min(enough)[2]], wanted, liked)
    return None


def _count_preferred(group: Sequence[Slice], liked: Collection[SliceId]) -> int:
    return -sum(one.id in liked for one in group) if liked else 0


def _choose_in_group(group: Sequence[Slice], wanted: int, liked: Collection[SliceId]) -> list[Slice]:
    """Choose from the zones with the most: preferred ones, then by name; returned in the order of their names."""
    zones: dict[tuple[str, ...], int] = {}
    for one in group:
        zones[one.id[:2]] = zones.get(one.id[:2], 0) + 1
    ranked = sorted(group, key=lambda one: (one.id not in liked, -zones[one.id[:2]], one.id))
    # By region, zone and name: ranks of members follow this order, so that those of one zone are consecutive.
    return sorted(ranked[:wanted], key=lambda one: one.id)
