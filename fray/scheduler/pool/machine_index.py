"""What a pool remembers about its machines, so that a placement looks at few of them.

A `Follower` is told which machines have changed, and looks at them when it is next asked: what nobody asks costs
nothing. Each looks only at machines that a `Filter` lets through, as the fleet's zones and pools are few and lasting.

- `Order`: the machines in order of preference. It finds the first that a demand fits on.
- `Tally`: how many members of one demand fit now, and where. A gang that cannot fit is refused without trying.
- `Usable`: how many members would fit on machines if these were empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypeAlias

from attrs import frozen

from fray.model.constraints import Constraint
from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.pool.machine import (
    Machine,
    Variant,
    admits_demand,
    held_empty,
    held_now,
)

Locality: TypeAlias = tuple[str, str]
"""(``"region"`` or ``"zone"``, its name; empty: that of machines that name none)"""
Entry: TypeAlias = tuple[int, int, NodeName]
"""(milli-CPUs free, bytes of memory free, machine): order within a level."""

CHUNK_ENTRIES = 256
"""Entries of a chunk: moving them costs less than looking for them."""
MAX_LOG = 1024
"""Changes after which each follower notes for itself what it has not looked at."""


@frozen(cache_hash=True)
class AttributeFilter:
    """What of a demand concerns attributes only; machines that pass never change that."""

    preemptible: bool = True
    regions: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    containers: bool = False
    constraints: tuple[Constraint, ...] = ()
    place: Locality | None = None

    @classmethod
    def of(cls, demand: Demand, place: Locality | None = None) -> AttributeFilter:
        return cls(demand.preemptible, demand.regions, demand.zones, demand.containers, demand.constraints, place)

    def test(self) -> Callable[[Machine], bool]:
        """Whether a machine passes."""
        place, demand = (
            self.place,
            Demand(
                preemptible=self.preemptible,
                regions=self.regions,
                zones=self.zones,
                containers=self.containers,
                constraints=self.constraints,
            ),
        )

        def passes(machine: Machine) -> bool:
            there = place is None or machine.capacity.attributes.get(place[0], "") == place[1]
            return there and admits_demand(demand, machine.capacity)

        return passes

    def likely(self) -> list[list[Locality]]:
        """Attributes of which a machine must have one, group by group."""
        named = [("region", self.regions), ("zone", self.zones)]
        named += [(one.key, one.values) for one in self.constraints if one.op in ("==", "in")]
        groups = [[(key, value) for value in values] for key, values in named if values and "" not in values]
        return groups + ([[self.place]] if self.place and self.place[1] else [])


EVERYWHERE = AttributeFilter()


class PoolListener:
    """Told of changes, it looks when it is asked."""

    def __init__(self, filter: AttributeFilter, machines: Mapping[NodeName, Machine]) -> None:
        self.log_position = 0
        """Of the pool's log."""
        self.missed_truncations = 0
        """How often it was told to note what it has not looked at, since it last looked."""
        self._test = filter.test() if filter != EVERYWHERE else None
        self._machines = machines
        self._pending: dict[NodeName, None] = {}
        self._passes: dict[NodeName, bool] = {}

    def on_log_truncated(self, log: list[NodeName]) -> None:
        """The log is cut."""
        self._pending.update(dict.fromkeys(log[self.log_position :]))
        self.log_position = 0
        self.missed_truncations += 1

    def forget(self, name: NodeName) -> None:
        """The machine is another one now."""
        self._passes.pop(name, None)

    def catch_up(self, log: list[NodeName]) -> None:
        """At everything that has changed."""
        self.missed_truncations = 0
        news: Iterable[NodeName] = log[self.log_position :]
        self.log_position = len(log)
        if self._pending:
            self._pending.update(dict.fromkeys(news))
            news, self._pending = self._pending, {}
        for name in news:
            machine = self._machines.get(name)
            self._update(name, machine if machine is not None and machine.is_open and self._admitted(machine) else None)

    def _admitted(self, machine: Machine) -> bool:
        if self._test is None:
            return True
        known = self._passes.get(machine.name)
        if known is None:
            known = self._passes[machine.name] = self._test(machine)
        return known

    def _update(self, name: NodeName, machine: Machine | None) -> None:
        """None: it is not there, not open, or none of those that are followed."""
        raise NotImplementedError


# In order of preference ----------------------------------------------------------------------------------------------


class PreferenceBucket:
    """Machines that are liked alike, but for their size: a sorted list in chunks.

    For each chunk it is known how much memory and disk one of its machines may have free at most, so that chunks where
    nobody has enough are passed over. The bound is not lowered when a machine goes; when a search was in vain, it is.
    """

    def __init__(self) -> None:
        self.chunks: list[list[Entry]] = []
        self.lasts: list[Entry] = []
        self.bounds: list[tuple[int, int]] = []
        self.is_bound_stale: list[bool] = []

    def fill(self, entries: list[Entry], machines: Mapping[NodeName, Machine]) -> None:
        """It is empty, and these are sorted."""
        for start in range(0, len(entries), CHUNK_ENTRIES):
            chunk = entries[start : start + CHUNK_ENTRIES]
            self.chunks.append(chunk)
            self.lasts.append(chunk[-1])
            self.bounds.append(_bound_of(chunk, machines))
            self.is_bound_stale.append(False)

    def add(self, entry: Entry, disk_bytes: int) -> None:
        lasts = self.lasts
        if not lasts:
            lasts.append(entry)
            self.chunks.append([entry])
            self.bounds.append((entry[1], disk_bytes))
            self.is_bound_stale.append(False)
            return
        at = bisect_left(lasts, entry)
        if at == len(lasts):
            at -= 1
            lasts[at] = entry
        chunk = self.chunks[at]
        insort(chunk, entry)
        memory, disk = self.bounds[at]
        if entry[1] > memory or disk_bytes > disk:
            self.bounds[at] = max(memory, entry[1]), max(disk, disk_bytes)
        if len(chunk) > 2 * CHUNK_ENTRIES:
            self._split(at)

    def _split(self, at: int) -> None:
        chunk = self.chunks[at]
        halves = [chunk[:CHUNK_ENTRIES], chunk[CHUNK_ENTRIES:]]
        self.chunks[at : at + 1] = halves
        self.lasts[at : at + 1] = [half[-1] for half in halves]
        self.bounds[at : at + 1] = [self.bounds[at]] * 2
        self.is_bound_stale[at : at + 1] = [True, True]

    def remove(self, entry: Entry) -> bool:
        """True: it was the last one."""
        at = bisect_left(self.lasts, entry)
        chunk = self.chunks[at]
        del chunk[bisect_left(chunk, entry)]
        self.is_bound_stale[at] = True
        if not chunk:
            del self.chunks[at], self.lasts[at], self.bounds[at], self.is_bound_stale[at]
            return not self.chunks
        if entry == self.lasts[at]:
            self.lasts[at] = chunk[-1]
        return False

    def first(self, demand: Demand, closed: Container[NodeName], machines: Mapping[NodeName, Machine]) -> Entry | None:
        """The first machine with room for the demand, whose devices are looked at elsewhere."""
        least = (demand.cpu_milli,)
        memory, disk, ports = demand.memory_bytes, demand.disk_bytes, demand.ports
        start = bisect_left(self.lasts, least)  # the beginning of an entry goes before it
        for at in range(start, len(self.chunks)):
            bound = self.bounds[at]
            if bound[0] < memory or bound[1] < disk:
                continue
            chunk = self.chunks[at]
            for index in range(bisect_left(chunk, least) if at == start else 0, len(chunk)):
                entry = chunk[index]
                if entry[1] < memory:
                    continue
                machine = machines[entry[2]]
                has_rest = machine.disk_bytes >= disk and (not ports or machine.ports.free >= ports)
                if has_rest and (not closed or entry[2] not in closed):
                    return entry
            if self.is_bound_stale[at]:
                self.bounds[at], self.is_bound_stale[at] = _bound_of(chunk, machines), False
        return None


def _bound_of(chunk: list[Entry], machines: Mapping[NodeName, Machine]) -> tuple[int, int]:
    return max(entry[1] for entry in chunk), max(machines[entry[2]].disk_bytes for entry in chunk)


Rank: TypeAlias = tuple[int, Entry, int]
"""Level, entry, and bytes of disk free."""


class PreferenceOrder(PoolListener):
    """Open machines in the order in which demands of one kind like them: by level, then by size, then by name."""

    def __init__(
        self, filter: AttributeFilter, machines: Mapping[NodeName, Machine], where: Callable[[Machine], Rank | None]
    ) -> None:
        super().__init__(filter, machines)
        self._rank = where
        self._levels: dict[int, PreferenceBucket] = {}
        self._sorted: list[int] = []
        self._ranks: dict[NodeName, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def fill(self, names: Iterable[NodeName]) -> None:
        """It is empty: take in these machines at once."""
        entries: dict[int, list[Entry]] = {}
        for name in names:
            machine = self._machines[name]
            where = self._rank(machine) if machine.is_open and self._admitted(machine) else None
            if where is not None:
                self._ranks[name] = where
                entries.setdefault(where[0], []).append(where[1])
        self._sorted = sorted(entries)
        for number, found in entries.items():
            self._levels[number] = PreferenceBucket()
            self._levels[number].fill(sorted(found), self._machines)

    def _update(self, name: NodeName, machine: Machine | None) -> None:
        new = None if machine is None else self._rank(machine)
        old = self._ranks.get(name)
        if new == old:
            return
        if old is not None:
            self._remove(old)
        if new is None:
            del self._ranks[name]
            return
        self._ranks[name] = new
        level = self._levels.get(new[0])
        if level is None:
            level = self._levels[new[0]] = PreferenceBucket()
            insort(self._sorted, new[0])
        level.add(new[1], new[2])

    def _remove(self, old: Rank) -> None:
        if self._levels[old[0]].remove(old[1]):
            del self._levels[old[0]]
            del self._sorted[bisect_left(self._sorted, old[0])]

    def first(self, demand: Demand, least: int, closed: Container[NodeName]) -> tuple[int, Entry] | None:
        """The best machine for the demand among levels from ``least`` on, and its level."""
        levels = self._sorted
        for at in range(bisect_left(levels, least) if least else 0, len(levels)):
            entry = self._levels[levels[at]].first(demand, closed, self._machines)
            if entry is not None:
                return levels[at], entry
        return None


def by_size(machine: Machine) -> Rank:
    """For demands without devices: where the fewest devices lie idle, then the tightest."""
    return machine.free_devices, (machine.cpu_milli, machine.memory_bytes, machine.name), machine.disk_bytes


def by_attempts(machine: Machine) -> Rank:
    """For demands of nothing: where the fewest attempts are."""
    return machine.attempts, (0, 0, machine.name), 0


def by_variant(variant: Variant) -> Callable[[Machine], Rank | None]:
    """For demands of devices: where the fewest of them are left, then the tightest."""

    def where(machine: Machine) -> Rank | None:
        ids = machine.devices.get(variant)
        if ids is None:
            return None
        return len(ids), (machine.cpu_milli, machine.memory_bytes, machine.name), machine.disk_bytes

    return where


# Counting ------------------------------------------------------------------------------------------------------------


class FitCounter(PoolListener):
    """How many members of a demand fit on open machines now, but for their ports: so many at most can be placed."""

    def __init__(self, demand: Demand, machines: Mapping[NodeName, Machine]) -> None:
        super().__init__(AttributeFilter.of(demand), machines)
        self.total = 0
        self.counts: dict[NodeName, int] = {}
        """Machines on which some fit."""
        self.places: dict[Locality, int] = {}
        """By region and by zone."""
        self._demand = demand
        self._at: dict[NodeName, tuple[Locality, ...]] = {}

    def fill(self, names: Iterable[NodeName]) -> None:
        """Look at these machines."""
        for name in names:
            machine = self._machines[name]
            self._update(name, machine if machine.is_open and self._admitted(machine) else None)

    def forget(self, name: NodeName) -> None:
        super().forget(name)
        self._put(name, 0)
        self._at.pop(name, None)

    def _update(self, name: NodeName, machine: Machine | None) -> None:
        if machine is not None and name not in self._at:
            attributes = machine.capacity.attributes
            self._at[name] = tuple((key, attributes.get(key, "")) for key in ("region", "zone"))
        self._put(name, self._count(machine) if machine is not None else 0)

    def _put(self, name: NodeName, count: int) -> None:
        change = count - self.counts.get(name, 0)
        if not change:
            return
        if count:
            self.counts[name] = count
        else:
            del self.counts[name]
        self.total += change
        for place in self._at[name]:
            self.places[place] = self.places.get(place, 0) + change

    def _count(self, machine: Machine) -> int:
        return held_now(self._demand, machine)


class UsableCounter(FitCounter):
    """The same as if nobody else were on these machines."""

    def _count(self, machine: Machine) -> int:
        return held_empty(self._demand, machine)
