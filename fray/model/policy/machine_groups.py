"""Machine groups as declared by the operator, and what their providers report.

A *unit* is created and deleted as a whole: one machine, or one TPU slice with all its hosts. ``min``, ``max``,
``buffer`` and prices count units. Errors are reported by kind, because the kind decides whether to try again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from attrs import Factory

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.resources import Capacity, Device, PortRange, parse_bytes, short_repr
from fray.model.topology import tpu_topology

IDLE_S = 300.0
BOOT_TIMEOUT_S = 900.0
UNITS_LIMIT = 100_000
"""Limit of units in one group."""
CPUS_LIMIT, GPUS_LIMIT = 100_000, 1_000
"""Limits of one host."""
PRICE_LIMIT = 1e9
IDLE_LIMIT_S, BOOT_LIMIT_S = 1e9, 30 * 86_400.0
ZONE_LIMIT_CHARS = 100
PORTS = PortRange(30_000, 512)
"""Ports assumed of an empty machine; a node reports its own."""
TPU_HOST_CPUS = {"v4": 240, "v5litepod": 112, "v5p": 208, "v6e": 180}
TPU_HOST_MEMORY = {"v4": "400GB", "v5litepod": "180GB", "v5p": "440GB", "v6e": "700GB"}
"""Memory of one host, for groups that do not set it; the smallest of hosts with several chips."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?\Z")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]\Z")


class ErrorKind(StrEnum):
    """Kind of a provider's error, which decides about further attempts."""

    QUOTA = "quota"
    """Quota of the account exhausted: other zones are tried, this zone later."""
    STOCKOUT = "stockout"
    """The zone has no capacity: other zones are tried, this zone later."""
    INVALID = "invalid"
    """Permanently invalid request: nothing is tried again before the policy changes."""
    PERMISSION = "permission"
    """Missing permission: nothing is tried again before the policy changes."""
    TRANSIENT = "transient"
    """Any other error, such as a time-out: tried again later."""


class MachineState(StrEnum):
    """State of a unit as reported by its provider."""

    CREATING = "creating"
    RUNNING = "running"
    DELETING = "deleting"
    PREEMPTED = "preempted"
    """Preempted by the provider: all processes there are dead."""
    FAILED = "failed"
    """Will never run, or no longer runs: all processes there are dead."""


@frozen
class SeenMachine:
    """One unit, as listed by its provider."""

    name: str
    group: str
    zone: str = ""
    state: MachineState = MachineState.RUNNING
    hosts: int = 1
    """Number of existing machines; fewer than the group's type has: an incomplete slice."""
    message: str = ""
    error: ErrorKind | None = None
    """Kind of error of a FAILED unit."""


@frozen
class GroupConfig:
    """One ``[[group]]`` of the policy file: machines of one kind that can be created.

    Attributes:
        name: lower-case letters, digits and ``-``, at most 32, beginning with a letter.
        provider: ``fixed``, ``command``, ``process`` or ``tpu``.
        cpu, memory, disk: resources of one host. For a TPU type they default to those of its hosts.
        gpu, gpus: variant and number of GPUs on one host; default none.
        tpu: slice type such as ``v5litepod-16``, which determines hosts and chips.
        attributes: attributes of every node, beside ``group``, ``machine``, ``zone``, ``region``, ``preemptible``.
        zones: zones in order of preference; default one zone without a name.
        regions: region by zone, for zones whose name does not contain it (``europe-west4-b`` is in ``europe-west4``).
        zone_order: ``stated`` tries zones in the given order, ``price`` the cheapest first.
        spot: machines that can be taken away, only for preemptible jobs. Default False.
        min, buffer, max: minimum number of units, idle units beyond it, and maximum.
        price_per_hour, prices: price of one unit, and by zone where it differs. Default 0.
        idle_s: seconds of idleness after which a unit is deleted.
        boot_timeout_s: seconds from the request of a unit until all its nodes have joined; then it has failed.
        controller: address of the controller as seen by nodes of this group. Default: where it listens.
        options: options of the provider.
    """

    name: str
    provider: str
    cpu: float = 1
    memory: str | int = "1GB"
    disk: str | int = "100GB"
    gpu: str = "auto"
    gpus: int = 0
    tpu: str = ""
    attributes: dict[str, str] = Factory(dict)
    zones: tuple[str, ...] = ("",)
    regions: dict[str, str] = Factory(dict)
    zone_order: str = "stated"
    spot: bool = False
    min: int = 0
    buffer: int = 0
    max: int = 1
    price_per_hour: float = 0.0
    prices: dict[str, float] = Factory(dict)
    idle_s: float = IDLE_S
    boot_timeout_s: float = BOOT_TIMEOUT_S
    controller: str = ""
    options: dict[str, Any] = Factory(dict)

    @property
    def hosts(self) -> int:
        """Number of machines of one unit."""
        return tpu_topology(self.tpu).hosts if self.tpu else 1

    def price(self, zone: str) -> float:
        """Return the price of one unit per hour, in the operator's currency."""
        return self.prices.get(zone, self.price_per_hour)

    def zones_in_order(self) -> tuple[str, ...]:
        if self.zone_order == "price":
            return tuple(sorted(self.zones, key=self.price))  # stable: as written among equals
        return self.zones

    def region(self, zone: str) -> str:
        """Return the region of a zone; empty if unknown."""
        return self.regions.get(zone) or (zone.rpartition("-")[0] if _ZONE.match(zone) else "")

    def node_attributes(self, zone: str, machine: str = "", worker: int = 0) -> dict[str, str]:
        """Return the attributes of the node on one host of a unit, as ``fray-node`` must be started with."""
        found = {"group": self.name, "machine": machine, "zone": zone, "region": self.region(zone)}
        if self.tpu:
            found |= {"slice": machine, "tpu_worker": str(worker), "tpu_type": self.tpu}
        found["preemptible"] = "true" if self.spot else "false"
        return {key: value for key, value in (self.attributes | found).items() if value}

    def capacity(self, zone: str, machine: str = "", worker: int = 0) -> Capacity:
        """Return the declared capacity of one host."""
        return Capacity(
            cpu_milli=round(self.cpu * 1000),
            memory_bytes=parse_bytes(self.memory, "memory"),
            disk_bytes=parse_bytes(self.disk, "disk"),
            devices=self._devices(),
            attributes=self.node_attributes(zone, machine, worker),
            ports=PORTS,
        )

    def _devices(self) -> tuple[Device, ...]:
        tpus = tpu_topology(self.tpu).chips_per_host if self.tpu else 0
        return (
            *(Device(f"gpu-{index}", "gpu", self.gpu) for index in range(self.gpus)),
            *(Device(f"tpu-{index}", "tpu", self.tpu) for index in range(tpus)),
        )


# Reading -------------------------------------------------------------------------------------------------------------

PROVIDERS = ("fixed", "command", "process", "tpu")
_KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "provider", "gpu", "tpu", "zone_order", "controller"), (str,)),
    **dict.fromkeys(("memory", "disk"), (str, int)),
    **dict.fromkeys(("cpu", "price_per_hour", "idle_s", "boot_timeout_s"), (int, float)),
    **dict.fromkeys(("gpus", "min", "buffer", "max"), (int,)),
    **dict.fromkeys(("attributes", "regions", "prices", "options"), (dict,)),
    "zones": (list, tuple, str),
    "spot": (bool,),
}


def read_group(table: Mapping[str, Any]) -> GroupConfig:
    """Return a group from its table in the policy file.

    Raises:
        InvalidRequest: an unknown key or provider, a value of another type, ``min`` above ``max``, an unknown TPU type;
            the message names the group, the key, and what to write.
    """
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidRequest(
            f"[[group]] name={short_repr(name)}: write up to 32 lower-case letters, digits and '-', a letter first"
        )
    where = f"[[group]] {name!r}"
    for key, value in table.items():
        _check_key(where, key, value)
    provider = table.get("provider")
    if provider not in PROVIDERS:
        raise InvalidRequest(f"{where}: provider={provider!r}; write one of {', '.join(PROVIDERS)}")
    zones = table.get("zones", ("",))
    found = dict(table) | {"zones": (zones,) if isinstance(zones, str) else tuple(zones)}
    if provider == "fixed":
        found |= _fixed(where, table)
    try:
        if table.get("tpu"):
            # Machines, demands and the cloud agree on one spelling: v5e-16 is v5litepod-16.
            found["tpu"] = tpu_topology(table["tpu"]).variant
            found = _tpu_host(found["tpu"]) | found
        group = GroupConfig(**found)
        _check_group(where, group)
        group.capacity("")
    except InvalidRequest as error:
        text = str(error)
        raise InvalidRequest(text if text.startswith(where) else f"{where}: {text}") from error
    return group


def _tpu_host(variant: str) -> dict[str, Any]:
    kind = variant.rpartition("-")[0]
    return {"cpu": TPU_HOST_CPUS.get(kind, 96), "memory": TPU_HOST_MEMORY.get(kind, "180GB")}


def _fixed(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of a fixed group: as many units as machines are named."""
    machines = table.get("options", {}).get("machines")
    if not isinstance(machines, list) or not machines or not all(isinstance(name, str) for name in machines):
        raise InvalidRequest(f'{where}: a fixed group names its machines: options.machines = ["host-1", "host-2"]')
    for key in ("min", "max", "buffer"):
        if key in table:
            raise InvalidRequest(
                f"{where}: {key}={table[key]!r}: the number of machines follows from options.machines; leave {key} out"
            )
    return {"min": 0, "max": len(machines)}


def _check_key(where: str, key: str, value: object) -> None:
    types = _KEYS.get(key)
    if types is None:
        near = difflib.get_close_matches(key, _KEYS, 2)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; expected one of {', '.join(_KEYS)}"
        raise InvalidRequest(f"{where}: unknown key {short_repr(key)}{hint}")
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InvalidRequest(
            f"{where}: {key}={short_repr(value)} must be {' or '.join(kind.__name__ for kind in types)}"
        )


def _check_group(where: str, group: GroupConfig) -> None:
    if not 0 <= group.min <= group.max <= UNITS_LIMIT:
        raise InvalidRequest(
            f"{where}: min={short_repr(group.min)} and max={short_repr(group.max)}: "
            f"write 0 <= min <= max <= {UNITS_LIMIT}"
        )
    if not 0 <= group.buffer <= UNITS_LIMIT or not 0 <= group.gpus <= GPUS_LIMIT or not 0 < group.cpu <= CPUS_LIMIT:
        raise InvalidRequest(
            f"{where}: buffer={short_repr(group.buffer)} must be 0 to {UNITS_LIMIT}, "
            f"gpus={short_repr(group.gpus)} 0 to {GPUS_LIMIT}, "
            f"cpu={short_repr(group.cpu)} more than 0 and at most {CPUS_LIMIT}"
        )
    if not all(isinstance(zone, str) and len(zone) <= ZONE_LIMIT_CHARS for zone in group.zones):
        raise InvalidRequest(
            f"{where}: zones={short_repr(group.zones)}: each must be a string of at most {ZONE_LIMIT_CHARS} characters"
        )
    if group.zone_order not in ("stated", "price"):
        raise InvalidRequest(f"{where}: zone_order={group.zone_order!r}; write 'stated' or 'price'")
    if not group.zones or len(set(group.zones)) < len(group.zones):
        raise InvalidRequest(f"{where}: zones={list(group.zones)}: name each zone once, and at least one")
    for key in (*group.prices, *group.regions):
        if key not in group.zones:
            raise InvalidRequest(
                f"{where}: zone {key!r} has a price or a region, and is not among zones={list(group.zones)}"
            )
    prices = (group.price_per_hour, *group.prices.values())
    if not all(type(price) in (int, float) and 0 <= price <= PRICE_LIMIT for price in prices):
        raise InvalidRequest(f"{where}: prices must be numbers, 0 to {PRICE_LIMIT:g}")
    idles = 0 <= group.idle_s <= IDLE_LIMIT_S or group.idle_s == float("inf")
    if not idles or not 0 < group.boot_timeout_s <= BOOT_LIMIT_S:
        raise InvalidRequest(
            f"{where}: idle_s={short_repr(group.idle_s)} must be 0 or more (at most {IDLE_LIMIT_S:g}; inf: for ever), "
            f"boot_timeout_s={short_repr(group.boot_timeout_s)} more (at most {BOOT_LIMIT_S:g}, 30 days)"
        )
    if not all(isinstance(value, str) for value in (*group.attributes.values(), *group.regions.values())):
        raise InvalidRequest(f'{where}: attributes and regions must be strings: write cpu_kind = "amd"')
    for text in (*group.attributes, *group.attributes.values(), *group.zones, group.controller, group.gpu):
        if not text.isprintable():
            raise InvalidRequest(f"{where}: {short_repr(text)} has a character that cannot be printed")
