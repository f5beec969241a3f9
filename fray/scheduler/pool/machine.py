"""One machine: what is free of it, whether a member fits, and which of those that fit is liked best.

These are the plain definitions. `fray.scheduler.pool.pool` finds the same places without looking at every machine.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from typing import TypeAlias

from attrs import define, field

from fray.model.ids import NodeName
from fray.model.resources import Capacity, Demand
from fray.model.topology import find_topology
from fray.scheduler.pool.ports import Ports
from fray.scheduler.pool.requests import MemberPlacement, is_weightless

Variant: TypeAlias = tuple[str, str]
"""(kind, variant in lower case) of devices."""
SliceId: TypeAlias = tuple[str, str, str]
"""(region, zone, name): names of slices are those of a zone."""

AUTO = "auto"
MANY = 1 << 30


@define(eq=False)
class Machine:
    """One machine's free capacity."""

    name: NodeName
    capacity: Capacity
    is_open: bool
    """New attempts may be placed on it."""
    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    devices: dict[Variant, list[str]]
    """Free ids, in the order the machine names them."""
    device_places: dict[str, tuple[Variant, int]]
    """Of each device id: its variant, and its place in the machine's order."""
    device_counts: dict[Variant, int]
    """How many devices it has."""
    ports: Ports
    free_devices: int = 0
    """Of all kinds."""
    attempts: int = 0
    shifts: int = field(default=0, eq=False, repr=False)
    """Grows with each member that comes or goes, also for a try."""
    withheld: dict[str, bool] = field(factory=dict)
    """Ids that may not be given now; True: nobody has been given it either, so it is free as soon as it is let go."""
    slice: SliceId | None = None
    """The TPU slice it is a host of."""
    worker: int = 0
    """Its number in that slice."""

    @classmethod
    def empty(cls, name: NodeName, capacity: Capacity, open: bool = True) -> Machine:
        devices: dict[Variant, list[str]] = {}
        places: dict[str, tuple[Variant, int]] = {}
        for place, device in enumerate(capacity.devices):
            variant = device.kind, _normalize_variant(device.kind, device.variant)
            devices.setdefault(variant, []).append(device.id)
            places[device.id] = variant, place
        whole = {variant: len(ids) for variant, ids in devices.items()}
        size = capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes
        machine = cls(name, capacity, open, *size, devices, places, whole, Ports(capacity.ports), len(places))
        machine.slice, machine.worker = slice_of(capacity)
        return machine

    def shift(self, demand: Demand, devices: tuple[str, ...], sign: int) -> None:
        """A member comes (-1) or has gone (+1)."""
        self.shifts += 1
        self.cpu_milli += sign * demand.cpu_milli
        self.memory_bytes += sign * demand.memory_bytes
        self.disk_bytes += sign * demand.disk_bytes
        self.attempts -= sign
        if devices and self.withheld:
            self._shift_some(devices, sign)
        elif devices and sign < 0:
            self._give(devices)
        elif devices:
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
            insort(self.devices[self.device_places[device][0]], device, key=self.device_places.__getitem__)
        self.free_devices += len(devices)

    def _shift_some(self, devices: tuple[str, ...], sign: int) -> None:
        for device in devices:
            if device in self.withheld:
                self.withheld[device] = sign > 0
            elif sign < 0:
                self._give((device,))
            else:
                self._get_back((device,))

    def withhold(self, devices: Collection[str]) -> bool:
        """These ids may not be given now, whether somebody has them or not; False: nothing has changed."""
        wanted = [device for device in devices if device in self.device_places]
        if set(wanted) == set(self.withheld):
            return False
        for device in sorted(set(self.withheld).difference(wanted)):
            if self.withheld.pop(device):
                self._get_back((device,))
        for device in sorted(set(wanted).difference(self.withheld)):
            is_free = device in self.devices[self.device_places[device][0]]
            if is_free:
                self._give((device,))
            self.withheld[device] = is_free
        return True


def _normalize_variant(kind: str, variant: str) -> str:
    """In lower case, and of TPUs as the cloud writes it."""
    topology = find_topology(variant) if kind == "tpu" else None
    return topology.variant if topology else variant.lower()


def slice_of(capacity: Capacity) -> tuple[SliceId | None, int]:
    """The slice a host belongs to, and its number there."""
    attributes = capacity.attributes
    if not attributes.get("slice"):
        return None, 0
    worker = attributes.get("tpu_worker", "")
    key = attributes.get("region", ""), attributes.get("zone", ""), attributes["slice"]
    return key, int(worker) if worker.isdecimal() else 0


def admits_demand(demand: Demand, capacity: Capacity) -> bool:
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


def can_hold(machine: Machine, demand: Demand) -> bool:
    """One member fits on this machine as it is now."""
    if not (machine.is_open and _room(demand, machine) and admits_demand(demand, machine.capacity)):
        return False
    count = demand.device_count
    return not count or any(len(machine.devices[v]) >= count for v in variants(demand, machine.devices))


def fit(demand: Demand, machine: Machine, now: float = 0.0) -> MemberPlacement | None:
    """The place of one member on this machine as it is now, or None. All devices granted are of one variant."""
    return grant(demand, machine, now) if can_hold(machine, demand) else None


def grant(demand: Demand, machine: Machine, now: float = 0.0) -> MemberPlacement:
    """The place of one member on a machine that `takes` it."""
    ports = machine.ports.peek(demand.ports, now) if demand.ports else ()
    if not demand.device_count:
        return MemberPlacement(machine.name, (), ports)
    if len(machine.devices) == 1:
        (ids,) = machine.devices.values()
    else:
        ids = machine.devices[demand.device_kind or "", best_variant(demand, machine)[1]]
    return MemberPlacement(machine.name, tuple(ids[: demand.device_count]), ports)


def best_variant(demand: Demand, machine: Machine) -> tuple[int, str]:
    """Of which variant a machine that `takes` the demand gives devices, and how many of it are free: the fewest."""
    counts = ((len(machine.devices[v]), v[1]) for v in variants(demand, machine.devices))
    return min(one for one in counts if one[0] >= demand.device_count)


def preference(demand: Demand, machine: Machine) -> tuple[object, ...]:
    """Among machines that `fit`, the least goes first."""
    if is_weightless(demand):
        return machine.attempts, machine.name
    size = machine.cpu_milli, machine.memory_bytes
    if not demand.device_count:
        return machine.free_devices, *size, machine.name
    count, variant = best_variant(demand, machine)
    return count, *size, variant, machine.name


def members_held(demand: Demand, capacity: Capacity) -> int:
    """How many members of this demand the empty machine holds."""
    return held_empty(demand, Machine.empty("", capacity))


def held_empty(demand: Demand, machine: Machine) -> int:
    """How many members the machine holds when nobody else is there."""
    capacity = machine.capacity
    if not admits_demand(demand, capacity):
        return 0
    size = capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes, capacity.ports.count
    return _held(demand, size, machine.device_counts)


def held_now(demand: Demand, machine: Machine) -> int:
    """How many members the machine holds beside those that are there; its attributes are looked at elsewhere."""
    size = machine.cpu_milli, machine.memory_bytes, machine.disk_bytes, machine.ports.free
    return _held(demand, size, {v: len(ids) for v, ids in machine.devices.items()} if demand.device_count else {})


def _held(demand: Demand, size: tuple[int, int, int, int], devices: dict[Variant, int]) -> int:
    wanted = demand.cpu_milli, demand.memory_bytes, demand.disk_bytes, demand.ports
    held = MANY
    for have, want in zip(size, wanted, strict=True):
        if want and have // want < held:
            held = have // want
    if demand.device_count:
        held = min(held, sum(devices[v] // demand.device_count for v in variants(demand, devices)))
    return held
