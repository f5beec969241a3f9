"""Free capacity of one machine as plain numbers, for questions asked too often for a `HypotheticalPool`."""

from __future__ import annotations

from attrs import define

from fray.model.resources import Demand
from fray.scheduler.pool.pool import Machine, Variant, variants

MANY = 1 << 30


# No ids of devices and no port numbers: enough to compare candidates. What is chosen is placed in the pool.
@define
class FreeCapacity:
    """Free amounts of one machine. They may become negative, when more is promised than the machine has."""

    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    ports: int
    devices: dict[Variant, int]

    @classmethod
    def of(cls, machine: Machine) -> FreeCapacity:
        """Return what the machine has free now."""
        devices = {variant: len(ids) for variant, ids in machine.devices.items()}
        return cls(machine.cpu_milli, machine.memory_bytes, machine.disk_bytes, machine.ports.free, devices)

    def copy(self) -> FreeCapacity:
        return FreeCapacity(self.cpu_milli, self.memory_bytes, self.disk_bytes, self.ports, dict(self.devices))

    def minimum(self, other: FreeCapacity) -> FreeCapacity:
        """Return the smaller of each amount."""
        return FreeCapacity(
            min(self.cpu_milli, other.cpu_milli),
            min(self.memory_bytes, other.memory_bytes),
            min(self.disk_bytes, other.disk_bytes),
            min(self.ports, other.ports),
            {variant: min(count, other.devices.get(variant, 0)) for variant, count in self.devices.items()},
        )

    def add(self, machine: Machine, demand: Demand, devices: tuple[str, ...]) -> None:
        """Add the share of an attempt or unit on that machine."""
        self.cpu_milli += demand.cpu_milli
        self.memory_bytes += demand.memory_bytes
        self.disk_bytes += demand.disk_bytes
        self.ports += demand.ports
        for device in devices:
            # A device that its node reports as busy does not become free with the attempt.
            if device not in machine.withheld:
                self.devices[machine.device_places[device][0]] += 1

    def take(self, demand: Demand) -> bool:
        """Take one member's share; return False, without any change, if it does not fit."""
        if not self.holds(demand):
            return False
        self.cpu_milli -= demand.cpu_milli
        self.memory_bytes -= demand.memory_bytes
        self.disk_bytes -= demand.disk_bytes
        self.ports -= demand.ports
        if demand.device_count:
            # The variant that `machine.best_variant` would give: that with the fewest left.
            fitting = [v for v in variants(demand, self.devices) if self.devices[v] >= demand.device_count]
            self.devices[min(fitting, key=lambda v: (self.devices[v], v))] -= demand.device_count
        return True

    def holds(self, demand: Demand) -> bool:
        """Return whether one member fits."""
        return (
            self.cpu_milli >= demand.cpu_milli
            and self.memory_bytes >= demand.memory_bytes
            and self.disk_bytes >= demand.disk_bytes
            and self.ports >= demand.ports
            and (not demand.device_count or self._groups(demand) > 0)
        )

    def count(self, demand: Demand) -> int:
        """Return how many members fit."""
        if not self.holds(demand):
            return 0
        # What takes nothing fits any number of times. A search for victims asks this of hundreds of machines.
        held = self.cpu_milli // demand.cpu_milli if demand.cpu_milli else MANY
        if demand.memory_bytes:
            held = min(held, self.memory_bytes // demand.memory_bytes)
        if demand.disk_bytes:
            held = min(held, self.disk_bytes // demand.disk_bytes)
        if demand.ports:
            held = min(held, self.ports // demand.ports)
        return min(held, self._groups(demand)) if demand.device_count else held

    def _groups(self, demand: Demand) -> int:
        # Devices of one member are of one variant: remainders of two variants do not add up.
        return sum(self.devices[v] // demand.device_count for v in variants(demand, self.devices))
