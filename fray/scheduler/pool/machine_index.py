"""Indexes over the machines of a pool, so that a placement examines few of them.

A `PoolListener` records which machines have changed and examines them when it is next used: an unused listener costs
nothing. Each examines only machines that pass an `AttributeFilter`, since zones and regions are few and do not change.

- `PreferenceOrder`: machines in order of preference. It finds the first one a demand fits on.
- `FitCounter`: how many members of one demand fit now, and where. A gang that cannot fit is refused without a try.
- `UsableCounter`: how many members would fit on machines if these were empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import TypeAlias

from attrs import frozen

from fray.model.constraints import Constraint
from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.pool.machine import (
    Machine,
    Variant,
    admits_demand,
    held_in,
    held_now,
)

Locality: TypeAlias = tuple[str, str]
"""(``"region"`` or ``"zone"``, its name); an empty name for machines without the attribute."""
Entry: TypeAlias = tuple[int, int, NodeName]
"""(free milli-CPUs, free bytes of memory, machine): order within a level."""

CHUNK_ENTRIES = 256
"""Entries of a chunk: moving that many costs less than searching for them."""
MAX_LOG = 1024
"""Changes after which the log is truncated, see `ChangeLog`."""
MAX_PARTS = 8
"""Number of truncated parts that a log keeps; older ones are joined."""


# Demands that differ in amounts only share a filter, and with it an index of the machines that pass.
@frozen(cache_hash=True)
class AttributeFilter:
    """Part of a demand that concerns attributes only; the machines that pass never change."""

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
        """Return a function that tells whether a machine passes."""
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
        """Return groups of attributes: a machine that passes has at least one of each group."""
        named = [("region", self.regions), ("zone", self.zones)]
        named += [(one.key, one.values) for one in self.constraints if one.op in ("==", "in")]
        # The empty name means machines without the attribute, which no index lists.
        groups = [[(key, value) for value in values] for key, values in named if values and "" not in values]
        return groups + ([[self.place]] if self.place and self.place[1] else [])


EVERYWHERE = AttributeFilter()


class ChangeLog:
    """Names of machines that have changed: the newest in order, the older ones by truncated parts.

    Parts are shared by all listeners that have not read them: a copy for each of hundreds would cost more than the
    changes. Joined parts may have names that a listener knows already: to examine a machine again is harmless.
    """

    def __init__(self) -> None:
        self.names: list[NodeName] = []
        self.truncations = 0
        self._parts: list[tuple[int, dict[NodeName, None]]] = []
        """Number of the truncation, and the names before it."""

    def truncate(self) -> None:
        """Move all names to a part of their own."""
        self.truncations += 1
        # Names, not entries: a machine that has changed a hundred times is examined once.
        self._parts.append((self.truncations, dict.fromkeys(self.names)))
        self.names.clear()
        if len(self._parts) > MAX_PARTS:
            (_, older), (number, newer) = self._parts[:2]
            self._parts[:2] = [(number, older | newer)]

    def since(self, truncations: int) -> dict[NodeName, None]:
        """Return the names in the parts after that many truncations."""
        found: dict[NodeName, None] = {}
        for number, names in self._parts:
            if number > truncations:
                found |= names
        return found


class PoolListener:
    """Base of indexes that examine changed machines when they are used."""

    def __init__(self, filter: AttributeFilter, machines: Mapping[NodeName, Machine]) -> None:
        self.log_position = 0
        """Number of the names in the pool's log that it has examined."""
        self.truncations = 0
        """Number of truncations of the log before these names."""
        self.used_at = 0
        """Number of truncations of the log when it was last used."""
        # Attributes of a machine never change while it is in the pool: it is tested once (`_passes`).
        self._test = filter.test() if filter != EVERYWHERE else None
        self._machines = machines
        self._pending: dict[NodeName, None] = {}
        self._passes: dict[NodeName, bool] = {}

    def start(self, log: ChangeLog) -> None:
        """Begin at the end of the log: all machines have been examined."""
        self.log_position, self.truncations, self.used_at = len(log.names), log.truncations, log.truncations

    def before_truncation(self, log: ChangeLog) -> None:
        """Copy the rest of the log, which is truncated now, if a part of it was examined."""
        if self.log_position:
            self._pending.update(dict.fromkeys(log.names[self.log_position :]))
            self.log_position, self.truncations = 0, log.truncations + 1

    def forget(self, name: NodeName) -> None:
        """Drop what is known of a machine's attributes, as it was replaced."""
        self._passes.pop(name, None)

    def catch_up(self, log: ChangeLog) -> None:
        """Examine all machines that have changed."""
        # Only what has changed since its last use, however many machines there are.
        news: Collection[NodeName] = log.names[self.log_position :]
        # Together with what was truncated meanwhile: each machine is examined once.
        if self._pending or self.truncations != log.truncations:
            news = self._pending | log.since(self.truncations) | dict.fromkeys(news)
            self._pending = {}
        elif len(news) > 1:
            news = dict.fromkeys(news)  # a search changes some machines many times
        self.start(log)
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
        """Index a machine; None if it is absent, closed or does not pass the filter."""
        raise NotImplementedError


# In order of preference ----------------------------------------------------------------------------------------------


# Not sortedcontainers: it has no bounds, and without them a demand that one machine in 10,000 can hold would look at
# all the others.
class PreferenceBucket:
    """Machines that are equally preferred, but for their size: a sorted list in chunks.

    For each chunk the maximum of free memory and disk of a machine in it is known, so that chunks without enough room
    are skipped. The bound is not lowered when a machine leaves, but when a search in the chunk fails.
    """

    def __init__(self) -> None:
        self.chunks: list[list[Entry]] = []
        self.lasts: list[Entry] = []
        self.bounds: list[tuple[int, int]] = []
        self.is_bound_stale: list[bool] = []

    def fill(self, entries: list[Entry], machines: Mapping[NodeName, Machine]) -> None:
        """Fill an empty bucket with sorted entries."""
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
        # The bound of the whole chunk holds for both halves, and is lowered when a search has failed there.
        self.bounds[at : at + 1] = [self.bounds[at]] * 2
        self.is_bound_stale[at : at + 1] = [True, True]

    def remove(self, entry: Entry) -> bool:
        """Remove an entry; return whether it was the last one."""
        at = bisect_left(self.lasts, entry)
        chunk = self.chunks[at]
        del chunk[bisect_left(chunk, entry)]
        # Too high a bound costs a look at the chunk, too low a bound would hide a machine. The exact one needs all
        # entries.
        self.is_bound_stale[at] = True
        if not chunk:
            del self.chunks[at], self.lasts[at], self.bounds[at], self.is_bound_stale[at]
            return not self.chunks
        if entry == self.lasts[at]:
            self.lasts[at] = chunk[-1]
        return False

    def first(self, demand: Demand, closed: Container[NodeName], machines: Mapping[NodeName, Machine]) -> Entry | None:
        """Return the first machine with room for the demand; devices are examined elsewhere."""
        least = (demand.cpu_milli,)
        memory, disk, ports = demand.memory_bytes, demand.disk_bytes, demand.ports
        # Chunks before it have too few CPUs in all entries.
        start = bisect_left(self.lasts, least)  # a prefix of an entry sorts before it
        for at in range(start, len(self.chunks)):
            bound = self.bounds[at]
            # CPU needs no bound: entries are sorted by it.
            if bound[0] < memory or bound[1] < disk:
                continue
            chunk = self.chunks[at]
            for index in range(bisect_left(chunk, least) if at == start else 0, len(chunk)):
                entry = chunk[index]
                if entry[1] < memory:
                    continue
                machine = machines[entry[2]]
                # The costlier tests last: ``closed`` may compute its answer.
                has_rest = machine.disk_bytes >= disk and (not ports or machine.ports.free >= ports)
                if has_rest and (not closed or entry[2] not in closed):
                    return entry
            # A search has just read its entries in vain: the exact bound spares the next one.
            if self.is_bound_stale[at]:
                self.bounds[at], self.is_bound_stale[at] = _bound_of(chunk, machines), False
        return None


def _bound_of(chunk: list[Entry], machines: Mapping[NodeName, Machine]) -> tuple[int, int]:
    return max(entry[1] for entry in chunk), max(machines[entry[2]].disk_bytes for entry in chunk)


Rank: TypeAlias = tuple[int, Entry, int]
"""Level, entry, and free bytes of disk."""


class PreferenceOrder(PoolListener):
    """Open machines in the order of preference of one kind of demand: by level, then by size, then by name."""

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
        """Fill an empty order with these machines."""
        entries: dict[int, list[Entry]] = {}
        for name in names:
            machine = self._machines[name]
            # All at once: sorting is much cheaper than as many insertions.
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
        # A change that does not move it, as of ports only, costs no search in the lists.
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
            # Empty levels are dropped: a search would look into each of them.
            del self._levels[old[0]]
            del self._sorted[bisect_left(self._sorted, old[0])]

    def first(self, demand: Demand, least: int, closed: Container[NodeName]) -> tuple[int, Entry] | None:
        """Return the best machine for the demand among levels from ``least`` on, and its level."""
        levels = self._sorted
        # Levels are numbers of free devices: those with too few are skipped.
        for at in range(bisect_left(levels, least) if least else 0, len(levels)):
            level = self._levels[levels[at]]
            if level.lasts[-1][0] < demand.cpu_milli:
                continue  # in a full cluster this is so of most levels
            entry = level.first(demand, closed, self._machines)
            if entry is not None:
                return levels[at], entry
        return None


def by_size(machine: Machine) -> Rank:
    """Rank for demands without devices: fewest idle devices first, then the tightest fit."""
    return machine.free_devices, (machine.cpu_milli, machine.memory_bytes, machine.name), machine.disk_bytes


def by_attempts(machine: Machine) -> Rank:
    """Rank for demands that take nothing: fewest attempts first."""
    # Size does not matter to what takes nothing: the entry changes only with the number of attempts.
    return machine.attempts, (0, 0, machine.name), 0


def by_variant(variant: Variant) -> Callable[[Machine], Rank | None]:
    """Return the rank for demands of devices: fewest of them left first, then the tightest fit."""

    def where(machine: Machine) -> Rank | None:
        ids = machine.devices.get(variant)
        if ids is None:
            return None
        return len(ids), (machine.cpu_milli, machine.memory_bytes, machine.name), machine.disk_bytes

    return where


# Counting ------------------------------------------------------------------------------------------------------------


class FitCounter(PoolListener):
    """Count of the members of a demand that fit on open machines now, without regard to ports: an upper bound."""

    def __init__(self, demand: Demand, machines: Mapping[NodeName, Machine]) -> None:
        super().__init__(AttributeFilter.of(demand), machines)
        self.total = 0
        self.counts: dict[NodeName, int] = {}
        """Number of members by machine, where at least one fits."""
        self.places: dict[Locality, int] = {}
        """Number of members by region and by zone."""
        self._demand = demand
        self._at: dict[NodeName, tuple[Locality, ...]] = {}

    def fill(self, names: Iterable[NodeName]) -> None:
        """Examine these machines."""
        machines, (cpu_milli, memory_bytes) = self._machines, (self._demand.cpu_milli, self._demand.memory_bytes)
        for name in names:
            machine = machines[name]
            # Nearly all machines of a full cluster fail this test, which costs a fraction of the others.
            if machine.cpu_milli < cpu_milli or machine.memory_bytes < memory_bytes:
                continue
            if machine.is_open and self._admitted(machine):
                self._update(name, machine)

    def forget(self, name: NodeName) -> None:
        super().forget(name)
        # With the old attributes: a machine that returns under this name may be in another region.
        self._put(name, 0)
        self._at.pop(name, None)

    def _update(self, name: NodeName, machine: Machine | None) -> None:
        count = self._count(machine) if machine is not None else 0
        if count or name in self.counts:
            if machine is not None and name not in self._at:
                self._at[name] = machine.localities
            self._put(name, count)

    def _put(self, name: NodeName, count: int) -> None:
        # Totals follow each change: a gang that cannot fit is refused without a look at any machine.
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
        if machine.cpu_milli < self._demand.cpu_milli or machine.memory_bytes < self._demand.memory_bytes:
            return 0  # as in `fill`
        return held_now(self._demand, machine)


class UsableCounter(FitCounter):
    """Count of the members that would fit if these machines were empty.

    Its log has only the machines that came, left, opened or closed.
    """

    def fill_alike(self, alike: Iterable[Collection[NodeName]]) -> None:
        """Examine open machines, in groups of equal size, region and zone."""
        # One of each group is examined: a cluster has thousands of machines, but few kinds of them.
        for names in alike:
            machine = self._machines[next(iter(names))]
            count = held_in(self._demand, machine)
            if not count:
                continue
            passing = names if self._test is None else [name for name in names if self._admitted(self._machines[name])]
            self.counts.update(dict.fromkeys(passing, count))
            self._at.update(dict.fromkeys(passing, machine.localities))
            self.total += count * len(passing)
            for place in machine.localities:
                self.places[place] = self.places.get(place, 0) + count * len(passing)

    def _count(self, machine: Machine) -> int:
        return held_in(self._demand, machine)
