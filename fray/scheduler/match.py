"""Which machines can take a demand, and which of them should.

A `Pool` keeps every machine's free capacity and a few sorted lists over it, so that one placement looks at few
machines. The choice is a plain minimum (`preference`), and the tests compare the pool with a twin that computes just
that over all machines.

- A demand without devices goes where the fewest devices lie idle, then to the tightest CPU, memory and name.
- A demand for devices goes where the fewest of the wanted kind are left, then as above.
- A demand for nothing (an actor) goes where the fewest attempts are.
- A gang is placed member by member, all or none. Members that prefer a machine (they were there before) get it first
  if it fits; as members are alike, that never keeps a gang from fitting.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from attrs import define, field

from fray.model.ids import NodeName
from fray.model.resources import Capacity, Demand
from fray.scheduler.asks import Ask, Grant, Part, Placed, weightless, within
from fray.scheduler.ports import Ports

Variant: TypeAlias = tuple[str, str]
"""(kind, variant in lower case) of devices."""
Key: TypeAlias = tuple[int, int, int, str, NodeName]
"""Order of preference within one list: the first that fits is the best."""

AUTO = "auto"
_MANY = 1 << 30
FEW = 50
TOLD_S = 5.0
TOLD_LIMIT = 1000


@define(eq=False)
class Machine:
    """One machine's free capacity."""

    name: NodeName
    capacity: Capacity
    open: bool
    """New attempts may be placed on it."""
    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    devices: dict[Variant, list[str]]
    """Free ids, in the order the machine names them."""
    places: dict[str, tuple[Variant, int]]
    """Of each device id: its variant, and its place in the machine's order."""
    ports: Ports
    attempts: int = 0
    withheld: dict[str, bool] = field(factory=dict)
    """Ids that may not be given now; True: nobody has been given it either, so it is free as soon as it is let go."""

    @classmethod
    def empty(cls, name: NodeName, capacity: Capacity, open: bool = True) -> Machine:
        devices: dict[Variant, list[str]] = {}
        places: dict[str, tuple[Variant, int]] = {}
        for place, device in enumerate(capacity.devices):
            variant = device.kind, device.variant.lower()
            devices.setdefault(variant, []).append(device.id)
            places[device.id] = variant, place
        size = capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes
        return cls(name, capacity, open, *size, devices, places, Ports(capacity.ports))

    @property
    def free_devices(self) -> int:
        return sum(len(ids) for ids in self.devices.values())


def admits(demand: Demand, capacity: Capacity) -> bool:
    """The machine's attributes (region, zone, preemptible, and those it has constraints on) allow the demand."""
    attributes = capacity.attributes
    return (
        (demand.preemptible or attributes.get("preemptible", "false").lower() != "true")
        and (not demand.regions or attributes.get("region", "") in demand.regions)
        and (not demand.zones or attributes.get("zone", "") in demand.zones)
        and (not demand.containers or bool(attributes.get("containers")))
        and (not demand.constraints or all(constraint.meets(attributes) for constraint in demand.constraints))
    )


def variants(demand: Demand, known: Iterable[Variant]) -> list[Variant]:
    """Those of ``known`` that serve the demand, in alphabetical order."""
    wanted = demand.device_variant.lower()
    return sorted(v for v in known if v[0] == demand.device_kind and wanted in (AUTO, v[1]))


def _room(demand: Demand, machine: Machine) -> bool:
    return (
        machine.cpu_milli >= demand.cpu_milli
        and machine.memory_bytes >= demand.memory_bytes
        and machine.disk_bytes >= demand.disk_bytes
        and machine.ports.free >= demand.ports
    )


def takes(machine: Machine, demand: Demand) -> bool:
    """One member fits on this machine as it is now."""
    if not (machine.open and _room(demand, machine) and admits(demand, machine.capacity)):
        return False
    count = demand.device_count
    return not count or any(len(machine.devices[v]) >= count for v in variants(demand, machine.devices))


def fit(demand: Demand, machine: Machine, now: float = 0.0) -> Grant | None:
    """The place of one member on this machine as it is now, or None. All devices granted are of one variant."""
    if not takes(machine, demand):
        return None
    ports = machine.ports.peek(demand.ports, now)
    if not demand.device_count:
        return Grant(machine.name, ports=ports)
    enough = [v for v in variants(demand, machine.devices) if len(machine.devices[v]) >= demand.device_count]
    best = min(enough, key=lambda v: (len(machine.devices[v]), v[1]))
    return Grant(machine.name, tuple(machine.devices[best][: demand.device_count]), ports)


def preference(demand: Demand, machine: Machine) -> tuple[object, ...]:
    """Among machines that `fit`, the least goes first."""
    if weightless(demand):
        return machine.attempts, machine.name
    size = machine.cpu_milli, machine.memory_bytes
    if not demand.device_count:
        return machine.free_devices, *size, machine.name
    counts = [(len(machine.devices[v]), v[1]) for v in variants(demand, machine.devices)]
    count, variant = min(c for c in counts if c[0] >= demand.device_count)
    return count, *size, variant, machine.name


def members_held(demand: Demand, capacity: Capacity) -> int:
    """How many members of this demand the empty machine holds."""
    if not admits(demand, capacity):
        return 0
    pairs = [
        (capacity.cpu_milli, demand.cpu_milli),
        (capacity.memory_bytes, demand.memory_bytes),
        (capacity.disk_bytes, demand.disk_bytes),
        (capacity.ports.count, demand.ports),
    ]
    held = min((have // want for have, want in pairs if want), default=_MANY)
    if not demand.device_count:
        return held
    devices = Machine.empty("", capacity).devices
    groups = (len(devices[v]) // demand.device_count for v in variants(demand, devices))
    return min(held, sum(groups))


class Pool:
    """All machines, and where the next member goes."""

    def __init__(self) -> None:
        self.machines: dict[NodeName, Machine] = {}
        self.now = 0.0
        """Of the law, when something was last placed."""
        self.version = 0
        """Grows when what did not fit before may fit now on any machine."""
        self.freed: dict[NodeName, None] = {}
        """Machines on which something has become free since the last look; whoever looks clears it."""
        self.changes = 0
        """Grows with every change."""
        self._idle: dict[int, list[tuple[int, int, NodeName]]] = {}
        self._by_variant: dict[Variant, list[Key]] = {}
        self._calm: list[tuple[int, NodeName]] = []
        self._usable: dict[Demand, dict[NodeName, int]] = {}
        self._told: dict[Demand, tuple[int, float, str]] = {}

    # Machines

    def add(self, name: NodeName, capacity: Capacity, open: bool = True) -> None:
        """An empty machine; one of the same name is replaced."""
        self.remove(name)
        self.machines[name] = Machine.empty(name, capacity, False)
        self.set_open(name, open)

    def remove(self, name: NodeName) -> None:
        if name in self.machines:
            self.set_open(name, False)
            self.freed.pop(name, None)
            del self.machines[name]

    @property
    def open_machines(self) -> int:
        return len(self._calm)

    def set_open(self, name: NodeName, open: bool) -> None:
        machine = self.machines[name]
        if machine.open is open:
            return
        if not open:
            self._unlist(machine)
        machine.open = open
        if open:
            self._list(machine)
            self.freed[name] = None
        else:
            self.version += 1  # a gang that it was kept for may be impossible now, and others need not wait for it
        self.changes += 1
        self._usable.clear()

    def take(self, name: NodeName, demand: Demand, devices: tuple[str, ...], ports: Iterable[int] = ()) -> None:
        self._shift(self.machines[name], demand, devices, -1)
        self.machines[name].ports.take(ports)

    def release(self, name: NodeName, demand: Demand, devices: tuple[str, ...], ports: Iterable[int] = ()) -> None:
        self._shift(self.machines[name], demand, devices, +1)
        self.machines[name].ports.release(ports)
        self.freed[name] = None

    def _shift(self, machine: Machine, demand: Demand, devices: tuple[str, ...], sign: int) -> None:
        self.changes += 1
        if machine.open:
            self._unlist(machine)
        machine.cpu_milli += sign * demand.cpu_milli
        machine.memory_bytes += sign * demand.memory_bytes
        machine.disk_bytes += sign * demand.disk_bytes
        machine.attempts -= sign
        if devices:
            self._shift_devices(machine, devices, sign)
        if machine.open:
            self._list(machine)

    def _shift_devices(self, machine: Machine, devices: tuple[str, ...], sign: int) -> None:
        for device in devices:
            variant, _ = machine.places[device]
            if device in machine.withheld:
                machine.withheld[device] = sign > 0
            elif sign < 0:
                machine.devices[variant].remove(device)
            else:
                insort(machine.devices[variant], device, key=machine.places.__getitem__)

    def withhold(self, name: NodeName, devices: Collection[str]) -> None:
        """These ids of a machine may not be given now, whether somebody has them or not; all others may."""
        machine = self.machines[name]
        wanted = [device for device in devices if device in machine.places]
        if set(wanted) == set(machine.withheld):
            return
        if machine.open:
            self._unlist(machine)
        for device in set(machine.withheld).difference(wanted):
            self._let_go(machine, device)
        for device in set(wanted).difference(machine.withheld):
            free = machine.devices[machine.places[device][0]]
            machine.withheld[device] = device in free
            if device in free:
                free.remove(device)
        if machine.open:
            self._list(machine)
        self.changes += 1
        self.version += 1  # a gang that they were kept for may be impossible now, and others need not wait for it
        self.freed[name] = None

    def _let_go(self, machine: Machine, device: str) -> None:
        if machine.withheld.pop(device):
            insort(machine.devices[machine.places[device][0]], device, key=machine.places.__getitem__)

    # Lists

    def _list(self, machine: Machine) -> None:
        size = machine.cpu_milli, machine.memory_bytes
        insort(self._idle.setdefault(machine.free_devices, []), (*size, machine.name))
        for variant, ids in machine.devices.items():
            insort(self._by_variant.setdefault(variant, []), (len(ids), *size, variant[1], machine.name))
        insort(self._calm, (machine.attempts, machine.name))

    def _unlist(self, machine: Machine) -> None:
        size = machine.cpu_milli, machine.memory_bytes
        _drop(self._idle[machine.free_devices], (*size, machine.name))
        for variant, ids in machine.devices.items():
            _drop(self._by_variant[variant], (len(ids), *size, variant[1], machine.name))
        _drop(self._calm, (machine.attempts, machine.name))

    # Placing

    def place(
        self, ask: Ask, closed: Container[NodeName] = (), preferred: Sequence[Sequence[NodeName]] = ()
    ) -> tuple[Placed, ...] | None:
        """Take places for all parts of an ask and return them part by part, or None and nothing is taken.

        Args:
            closed: machines that may not be used.
            preferred: for each part in turn what `place_members` is told; empty: nothing.
        """
        if ask.same:
            found = (self.place(within(ask, ask.same, at), closed, preferred) for at in self.localities(ask.same))
            return next((placed for placed in found if placed is not None), None)
        placed: list[Placed] = []
        for index, part in enumerate(ask.parts):
            one = self._place_part(part, closed, preferred[index] if index < len(preferred) else ())
            if one is None:
                for done, of in zip(placed, ask.parts, strict=False):
                    self._give_back(of.choices[done.choice], done.grants)
                return None
            placed.append(one)
        return tuple(placed)

    def localities(self, same: str) -> list[str]:
        """Regions or zones of the machines, in order; empty is that of those that name none."""
        return sorted({machine.capacity.attributes.get(same, "") for machine in self.machines.values()})

    def _place_part(self, part: Part, closed: Container[NodeName], preferred: Sequence[NodeName]) -> Placed | None:
        for choice, demand in enumerate(part.choices):
            grants = self.place_members(demand, part.members, closed, preferred)
            if grants is not None:
                return Placed(tuple(grants), choice)
        return None

    def place_members(
        self, demand: Demand, members: int, closed: Container[NodeName] = (), preferred: Sequence[NodeName] = ()
    ) -> list[Grant] | None:
        """Take places for a whole gang and return them, or None and nothing is taken.

        Args:
            closed: machines that may not be used.
            preferred: for each member in turn, the machine it would like to have; empty: none.
        """
        grants: dict[int, Grant] = {}
        for member, name in enumerate(preferred[:members]):
            self._grant(demand, grants, member, self._at(demand, name, closed))
        for member in range(members):
            if member not in grants and not self._grant(demand, grants, member, self._best(demand, closed)):
                self._give_back(demand, grants.values())
                return None
        return [grants[member] for member in range(members)]

    def _grant(self, demand: Demand, grants: dict[int, Grant], member: int, grant: Grant | None) -> bool:
        if grant is None:
            return False
        self.take(grant.node, demand, grant.devices, grant.ports)
        grants[member] = grant
        return True

    def give_back(self, ask: Ask, placed: Sequence[Placed]) -> None:
        """Undo a `place` that was only a question."""
        for part, one in zip(ask.parts, placed, strict=True):
            self._give_back(part.choices[one.choice], one.grants)

    def _give_back(self, demand: Demand, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self._shift(self.machines[grant.node], demand, grant.devices, +1)
            self.machines[grant.node].ports.release(grant.ports)

    def _at(self, demand: Demand, name: NodeName, closed: Container[NodeName]) -> Grant | None:
        machine = self.machines.get(name)
        return fit(demand, machine, self.now) if machine is not None and name not in closed else None

    def _best(self, demand: Demand, closed: Container[NodeName]) -> Grant | None:
        for name in self._in_order(demand):
            if name not in closed:
                grant = fit(demand, self.machines[name], self.now)
                if grant is not None:
                    return grant
        return None

    def _in_order(self, demand: Demand) -> Iterator[NodeName]:
        """Open machines by `preference`, without most of those that cannot fit."""
        if weightless(demand):
            return (name for _, name in self._calm)
        if demand.device_count:
            return self._by_devices(demand)
        return self._by_size(demand)

    def _by_size(self, demand: Demand) -> Iterator[NodeName]:
        for idle in sorted(self._idle):
            entries = self._idle[idle]
            for at in range(bisect_left(entries, (demand.cpu_milli, 0, "")), len(entries)):
                yield entries[at][2]

    def _by_devices(self, demand: Demand) -> Iterator[NodeName]:
        lists = [self._by_variant[v] for v in variants(demand, self._by_variant)]
        merged = heapq.merge(*(_from(entries, demand.device_count) for entries in lists))
        return (key[4] for key in merged)

    # Judging

    def usable(self, demand: Demand) -> dict[NodeName, int]:
        """Open machines that could hold members of this demand if they were empty, and how many."""
        known = self._usable.get(demand)
        if known is None:
            held = {m.name: members_held(demand, m.capacity) for m in self.machines.values() if m.open}
            known = self._usable[demand] = {name: count for name, count in held.items() if count}
        return known

    def told(self, demand: Demand, now: float, text: Callable[[], str]) -> str:
        """``text()``, which looks at all machines: up to `TOLD_S` old where there are many of them."""
        changes, at, known = self._told.get(demand, (-1, 0.0, ""))
        is_new = changes == self.changes or (changes >= 0 and now - at < TOLD_S and len(self.machines) > FEW)
        if not is_new:
            if len(self._told) >= TOLD_LIMIT:
                self._told.clear()
            known = text()
            self._told[demand] = self.changes, now, known
        return known


def _from(entries: list[Key], count: int) -> Iterator[Key]:
    """Those with so many devices of their variant free, or more."""
    return (entries[at] for at in range(bisect_left(entries, (count, 0, 0, "", "")), len(entries)))


E = TypeVar("E", Key, tuple[int, int, NodeName], tuple[int, NodeName])


def _drop(entries: list[E], entry: E) -> None:
    del entries[bisect_left(entries, entry)]


def ever(demand: Demand, members: int, capacities: Iterable[Capacity]) -> bool:
    """The gang would fit if all these machines were empty."""
    return sum(members_held(demand, capacity) for capacity in capacities) >= members
