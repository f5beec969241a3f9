"""Free capacity of one machine, whether a member fits, and the order of preference among machines.

These are the plain definitions. `fray.scheduler.pool.pool` finds the same places without examining every machine.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Collection, Iterable
from typing import TypeAlias

from attrs import define, field

from fray.model.ids import NodeName
from fray.model.resources import Capacity, Demand
from fray.model.topology import find_topology
from fray.scheduler.pool.ports import Ports
from fray.scheduler.pool.requests import MemberPlacement, MemberShare, is_weightless

Variant: TypeAlias = tuple[str, str]
"""(kind, variant in lower case) of devices."""
SliceId: TypeAlias = tuple[str, str, str]
"""(region, zone, name); names of slices are unique in a zone."""

AUTO = "auto"
MANY = 1 << 30
# Of all pools: only compared for equality.
_STAMPS = itertools.count(1)


@define(eq=False)
class Machine:
    """One machine's free capacity."""

    name: NodeName
    capacity: Capacity
    is_open: bool
    """True if new attempts may be placed on it."""
    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    devices: dict[Variant, list[str]]
    """Free ids by variant, in the order of the machine's capacity."""
    device_places: dict[str, tuple[Variant, int]]
    """Variant of each device id, and its place in the machine's order."""
    device_counts: dict[Variant, int]
    """Number of devices by variant, free or not."""
    ports: Ports
    free_devices: int = 0
    """Number of free devices of all kinds."""
    attempts: int = 0
    stamp: int = field(default=0, eq=False, repr=False)
    """Another number after each member that comes or leaves, also in trials; a trial that is undone restores it."""
    withheld: dict[str, bool] = field(factory=dict)
    """Ids that may not be given now; True for an id that no attempt has, so that it is free once it is released."""
    slice: SliceId | None = None
    """TPU slice it is a host of."""
    worker: int = 0
    """Number of the host in its slice."""
    localities: tuple[tuple[str, str], ...] = ()
    """Region and zone."""

    @classmethod
    def empty(cls, name: NodeName, capacity: Capacity, open: bool = True) -> Machine:
        devices: dict[Variant, list[str]] = {}
        places: dict[str, tuple[Variant, int]] = {}
        for place, device in enumerate(capacity.devices):
            # A TPU type has several spellings (v5e-16 is v5litepod-16): demands and machines must agree on one.
            variant = device.kind, _normalize_variant(device.kind, device.variant)
            devices.setdefault(variant, []).append(device.id)
            places[device.id] = variant, place
        whole = {variant: len(ids) for variant, ids in devices.items()}
        size = capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes
        machine = cls(name, capacity, open, *size, devices, places, whole, Ports(capacity.ports), len(places))
        machine.slice, machine.worker = slice_of(capacity)
        machine.localities = tuple((key, capacity.attributes.get(key, "")) for key in ("region", "zone"))
        return machine

    @property
    def kind(self) -> object:
        """Return a value that machines of equal size, region and zone have in common."""
        capacity = self.capacity
        size = capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes, capacity.ports.count
        return size, tuple(self.device_counts.items()), self.localities

    def shift(self, demand: Demand, devices: tuple[str, ...], sign: int) -> None:
        """Count a member that comes (-1) or has gone (+1)."""
        # Also in trials, so that a cached value of this machine is recognized as stale (`RemainingCapacity`).
        self.stamp = next(_STAMPS)
        self.cpu_milli += sign * demand.cpu_milli
        self.memory_bytes += sign * demand.memory_bytes
        self.disk_bytes += sign * demand.disk_bytes
        self.attempts -= sign
        if devices:
            self._shift_devices(devices, sign)

    def shift_all(self, shares: Iterable[MemberShare], sign: int) -> None:
        """Count several members that come (-1) or have gone (+1), as one change."""
        self.stamp = next(_STAMPS)
        count = cpu_milli = memory_bytes = disk_bytes = 0
        for demand, devices, ports in shares:
            count += 1
            cpu_milli += demand.cpu_milli
            memory_bytes += demand.memory_bytes
            disk_bytes += demand.disk_bytes
            if devices:
                self._shift_devices(devices, sign)
            if ports and sign < 0:
                self.ports.take(ports)
            elif ports:
                self.ports.release(ports)
        self.cpu_milli += sign * cpu_milli
        self.memory_bytes += sign * memory_bytes
        self.disk_bytes += sign * disk_bytes
        self.attempts -= sign * count

    def shift_cpu(self, cpu_milli: int) -> None:
        """Count more CPU for a member that is there."""
        self.stamp = next(_STAMPS)
        self.cpu_milli -= cpu_milli

    def _shift_devices(self, devices: tuple[str, ...], sign: int) -> None:
        # Device by device only if the node reports busy ones, which is rare.
        if self.withheld:
            self._shift_some(devices, sign)
        elif sign < 0:
            self._give(devices)
        else:
            self._get_back(devices)

    def _give(self, devices: tuple[str, ...]) -> None:
        free = self.devices[self.device_places[devices[0]][0]]
        if tuple(free[: len(devices)]) == devices:  # as `fit` chooses them
            del free[: len(devices)]
        else:
            for device in devices:
                self.devices[self.device_places[device][0]].remove(device)
        self.free_devices -= len(devices)

    def _get_back(self, devices: tuple[str, ...]) -> None:
        for device in devices:
            # In the machine's order: which devices come next depends on what is free, not on the order of earlier ends.
            insort(self.devices[self.device_places[device][0]], device, key=self.device_places.__getitem__)
        self.free_devices += len(devices)

    def _shift_some(self, devices: tuple[str, ...], sign: int) -> None:
        for device in devices:
            # Nothing becomes free or is taken: the device comes back when its node no longer reports it as busy.
            if device in self.withheld:
                self.withheld[device] = sign > 0
            elif sign < 0:
                self._give((device,))
            else:
                self._get_back((device,))

    def withhold(self, devices: Collection[str]) -> bool:
        """Stop giving out exactly these ids, in use or not; return whether that changes anything."""
        wanted = [device for device in devices if device in self.device_places]
        if set(wanted) == set(self.withheld):
            return False
        # Sorted, since sets have another order in each process.
        for device in sorted(set(self.withheld).difference(wanted)):
            if self.withheld.pop(device):
                self._get_back((device,))
        for device in sorted(set(wanted).difference(self.withheld)):
            # A device in use may be reported as well: the remains of an attempt hold it after the attempt's end.
            is_free = device in self.devices[self.device_places[device][0]]
            if is_free:
                self._give((device,))
            self.withheld[device] = is_free
        return True


def _normalize_variant(kind: str, variant: str) -> str:
    """Return the variant in lower case; TPU variants are spelled as the cloud does."""
    topology = find_topology(variant) if kind == "tpu" else None
    return topology.variant if topology else variant.lower()


def slice_of(capacity: Capacity) -> tuple[SliceId | None, int]:
    """Return the slice a host belongs to, and its number there."""
    attributes = capacity.attributes
    if not attributes.get("slice"):
        return None, 0
    worker = attributes.get("tpu_worker", "")
    key = attributes.get("region", ""), attributes.get("zone", ""), attributes["slice"]
    # Hosts without a number all get 0, so that two of them do not make a slice (`Slice.set_hosts`).
    return key, int(worker) if worker.isdecimal() else 0


def admits_demand(demand: Demand, capacity: Capacity) -> bool:
    """Return whether the machine's attributes (region, zone, preemptible, constraints) allow the demand."""
    attributes = capacity.attributes
    return (
        # The cheapest tests first; for nearly all demands the last one has nothing to examine.
        (demand.preemptible or attributes.get("preemptible", "false").lower() != "true")
        and (not demand.regions or attributes.get("region", "") in demand.regions)
        and (not demand.zones or attributes.get("zone", "") in demand.zones)
        and (not demand.containers or bool(attributes.get("containers")))
        and (not demand.constraints or all(constraint.meets(attributes) for constraint in demand.constraints))
    )


def variants(demand: Demand, known: Iterable[Variant]) -> list[Variant]:
    """Return those of ``known`` that serve the demand, in alphabetical order."""
    wanted = demand.device_variant.lower()
    # In a fixed order, on which the choice among equal variants depends.
    return sorted(v for v in known if v[0] == demand.device_kind and wanted in (AUTO, v[1]))


def _room(demand: Demand, machine: Machine) -> bool:
    return (
        machine.cpu_milli >= demand.cpu_milli
        and machine.memory_bytes >= demand.memory_bytes
        and machine.disk_bytes >= demand.disk_bytes
        and machine.ports.free >= demand.ports
    )


def can_hold(machine: Machine, demand: Demand) -> bool:
    """Return whether one member fits on this machine as it is now."""
    if not (machine.is_open and _room(demand, machine) and admits_demand(demand, machine.capacity)):
        return False
    count = demand.device_count
    return not count or any(len(machine.devices[v]) >= count for v in variants(demand, machine.devices))


def fit(demand: Demand, machine: Machine, now: float = 0.0) -> MemberPlacement | None:
    """Return the place of one member on this machine as it is now, or None. All its devices are of one variant."""
    return grant(demand, machine, now) if can_hold(machine, demand) else None


def grant(demand: Demand, machine: Machine, now: float = 0.0) -> MemberPlacement:
    """Return the place of one member on a machine that `can_hold` it."""
    ports = machine.ports.peek(demand.ports, now) if demand.ports else ()
    if not demand.device_count:
        return MemberPlacement(machine.name, (), ports)
    if len(machine.devices) == 1:
        # The usual machine has one kind of accelerator, and it fits, as `can_hold` has found.
        (ids,) = machine.devices.values()
    else:
        ids = machine.devices[demand.device_kind or "", best_variant(demand, machine)[1]]
    return MemberPlacement(machine.name, tuple(ids[: demand.device_count]), ports)


def best_variant(demand: Demand, machine: Machine) -> tuple[int, str]:
    """Return the free count and name of the variant to give: of those that suffice, the one with the fewest left."""
    # Best fit: larger groups of equal devices stay whole for members that need many.
    counts = ((len(machine.devices[v]), v[1]) for v in variants(demand, machine.devices))
    return min(one for one in counts if one[0] >= demand.device_count)


def preference(demand: Demand, machine: Machine) -> tuple[object, ...]:
    """Return the sort key of machines that `fit` the demand; the least one is used first."""
    if is_weightless(demand):
        return machine.attempts, machine.name
    size = machine.cpu_milli, machine.memory_bytes
    if not demand.device_count:
        # Jobs without devices stay off machines with idle accelerators, whose CPUs are needed to use these.
        return machine.free_devices, *size, machine.name
    count, variant = best_variant(demand, machine)
    return count, *size, variant, machine.name


def members_held(demand: Demand, capacity: Capacity) -> int:
    """Return how many members of this demand the empty machine holds."""
    return held_empty(demand, Machine.empty("", capacity))


def held_empty(demand: Demand, machine: Machine) -> int:
    """Return how many members the machine holds when it is empty."""
    return held_in(demand, machine) if admits_demand(demand, machine.capacity) else 0


def held_in(demand: Demand, machine: Machine) -> int:
    """Return the same; attributes are not examined."""
    capacity = machine.capacity
    size = capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes, capacity.ports.count
    return _held(demand, size, machine.device_counts)


def held_now(demand: Demand, machine: Machine) -> int:
    """Return how many members the machine holds beside those that are there; attributes are not examined."""
    size = machine.cpu_milli, machine.memory_bytes, machine.disk_bytes, machine.ports.free
    return _held(demand, size, {v: len(ids) for v, ids in machine.devices.items()} if demand.device_count else {})


def _held(demand: Demand, size: tuple[int, int, int, int], devices: dict[Variant, int]) -> int:
    wanted = demand.cpu_milli, demand.memory_bytes, demand.disk_bytes, demand.ports
    held = MANY
    for have, want in zip(size, wanted, strict=True):
        if want and have // want < held:
            held = have // want
    if demand.device_count:
        # Devices of one member are of one variant: remainders of two variants do not add up.
        held = min(held, sum(devices[v] // demand.device_count for v in variants(demand, devices)))
    return max(held, 0)  # more may be lent of a machine than it has
