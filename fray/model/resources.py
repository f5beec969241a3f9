"""Resources: what a job requests and what a machine has.

`ResourceConfig` is what users write; `Demand` is the same in integers (milli-CPUs, bytes), so that adding and
subtracting capacity never rounds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from attrs import Factory

from fray.errors import InvalidRequest
from fray.model.constraints import Constraint, parse_constraints
from fray.model.frozen import frozen
from fray.model.text import near_text, plural
from fray.model.topology import tpu_topology
from fray.tracebacks import short_tracebacks

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*\Z", re.IGNORECASE)
MEMORY, GPU_MEMORY = "2GB", "16GB"
"""Memory reserved for one member by default, without and with GPUs."""
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


AMOUNT_LIMIT = 2**60
"""Limit of bytes, milli-CPUs or devices: above any real cluster, and small enough to compute shares exactly."""


def parse_bytes(size: str | int, what: str = "size") -> int:
    """Return the bytes of ``"2GB"``, ``"512m"``, ``"1.5GiB"`` or a plain number; units are powers of 1024.

    Raises:
        InvalidRequest: anything else, a negative number, or more than `AMOUNT_LIMIT`.
    """
    if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= AMOUNT_LIMIT:
        return size
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match is not None and (found := float(match[1]) * 1024 ** _POWER[match[2].lower()]) <= AMOUNT_LIMIT:
        return int(found)
    raise InvalidRequest(
        f"{what}={short_repr(size)} is not a valid size: write a number of bytes or for example '512MB', '2GB'; "
        f"at most {AMOUNT_LIMIT}"
    )


def short_repr(value: object, limit_chars: int = 100) -> str:
    """Return the `repr` of an invalid value for an error message, truncated."""
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= limit_chars else f"{text[:limit_chars]}…"


@frozen
class CpuConfig:
    """No accelerator."""

    kind: str = "cpu"
    variant: str = "default"


@frozen
class GpuConfig:
    """``count`` GPUs of one machine, all of one type; ``variant`` such as ``h100``, or ``auto`` for any."""

    variant: str = "auto"
    count: int = 1
    kind: str = "gpu"


@frozen
class TpuConfig:
    """A TPU slice type such as ``v5litepod-16``. ``count`` stays 1: the number of slices is ``replicas``."""

    variant: str
    count: int = 1
    kind: str = "tpu"


DeviceConfig: TypeAlias = CpuConfig | GpuConfig | TpuConfig


@attrs.frozen(cache_hash=True)
class Demand:
    """Resources of one member of a job on one machine. Looked up often, so its hash is cached."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    device_kind: str | None = None
    device_variant: str = "auto"
    device_count: int = 0
    preemptible: bool = True
    regions: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    ports: int = 0
    """Number of ports; see `fray.model.gangs.port_names`."""
    containers: bool = False
    """Only machines that run containers."""
    constraints: tuple[Constraint, ...] = ()
    """Constraints on the machine, all of which must be met."""


_WORDS = {
    **dict.fromkeys(("gpu", "gpus", "num_gpus", "gpu_count", "gpu_type"), "gpu_type"),
    **dict.fromkeys(("tpu", "tpus", "num_tpus", "tpu_type"), "tpu_type"),
    **dict.fromkeys(("cpus", "num_cpus", "cpu_count"), "cpu"),
    **dict.fromkeys(("memory", "mem", "memory_gb", "ram_gb"), "memory"),
}
"""Names that other libraries have for resources, and ours."""


def explain_unknown(init: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of a class of resources with an error that names the parameter that was meant."""
    code = init.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in names:
                raise TypeError(f"ResourceConfig has no parameter {name!r}{_advice(name, value, names)}")
        init(*args, **kwargs)

    return checked


def _advice(name: str, value: object, names: Sequence[str]) -> str:
    """Return the end of the message about a parameter that does not exist."""
    ours = _WORDS.get(name)
    if ours == "memory":
        return ": write memory='2GB'" if ours in names else ": write ram='2g'"  # the latter in `fray.v2`
    if ours == "cpu":
        return f": write cpu={value!r}"
    return near_text(name, names) if ours is None else f": write {_device_line(ours, value)}"


def _device_line(parameter: str, value: object) -> str:
    """Return the constructor for a GPU or TPU, of which only the number or the type was given."""
    if parameter == "gpu_type":
        return (
            f"ResourceConfig.with_gpu({value!r})"
            if isinstance(value, str)
            else f"ResourceConfig.with_gpu(count={value!r})"
        )
    return f"ResourceConfig.with_tpu({value if isinstance(value, str) else f'v5litepod-{value}'!r})"


@short_tracebacks
@attrs.frozen(init=False)
class ResourceConfig:
    """Resources of one replica.

    Attributes:
        device: accelerator of each replica; default none.
        cpu: number of CPUs, fractions allowed (0.5). Default 1.
        memory: size such as ``"2GB"``; units are powers of 1024. A given size is also the limit: a process tree that
            uses more is ended as ``out_of_memory``. Default: 2 GB are reserved (16 GB with GPUs), without a limit;
            0: nothing is reserved, also without a limit. ``ram`` is another name for it.
        disk: scratch disk. Default 0.
        replicas: size of the gang, placed all or none. For a TPU type of several hosts each replica is one slice. 0 is
            only valid for the minimum of a reservation.
        preemptible: may run on machines that can be taken away. Default True.
        regions, zones: where it may run; empty means anywhere. ``zone`` is a single zone.
        pin_cpus: run its processes on exclusive CPUs (among the pinned jobs of the machine): ``cpu`` must be a whole
            number, and OMP_NUM_THREADS and similar variables are set to it. Default False.
        device_alternatives: acceptable replacements of ``device``, best first: devices, or their types alone
            (``"v5p-32"``). All members get the same. Default none.
        constraints: conditions on the machine's attributes: ``"pool == a"``, ``"disk in ssd,nvme"``,
            ``"kernel != 5.4"``, ``"nvlink exists"``, or `Constraint`; all must be met. Default none.

    Raises:
        InvalidRequest: a negative, infinite or unreadable amount, an unknown TPU type, a fraction of a CPU to pin, two
            different sizes of memory, devices that cannot replace each other, or an invalid constraint.
        TypeError: an unknown parameter; the message names the one that was meant.
    """

    device: DeviceConfig
    cpu: float
    memory: str | int | None
    replicas: int
    disk: str | int
    preemptible: bool
    regions: tuple[str, ...]
    zones: tuple[str, ...]
    pin_cpus: bool
    device_alternatives: tuple[DeviceConfig, ...]
    constraints: tuple[Constraint, ...]

    def __init__(
        self,
        device: DeviceConfig | None = None,
        cpu: float = 1,
        memory: str | int | None = None,
        replicas: int = 1,
        disk: str | int = 0,
        preemptible: bool = True,
        regions: str | Sequence[str] | None = None,
        zones: str | Sequence[str] | None = None,
        pin_cpus: bool = False,
        device_alternatives: Sequence[DeviceConfig | str] | None = None,
        constraints: str | Constraint | Sequence[str | Constraint] | None = None,
        *,
        ram: str | int | None = None,
        zone: str | Sequence[str] | None = None,
    ) -> None:
        device = CpuConfig() if device is None else device
        self.__attrs_init__(
            device=device,
            cpu=cpu,
            memory=_either("memory", memory, "ram", ram),
            disk=disk,
            replicas=replicas,
            preemptible=preemptible,
            regions=_names(regions, "regions"),
            zones=_names(_either("zones", zones, "zone", zone), "zones"),
            pin_cpus=pin_cpus,
            device_alternatives=_alternatives(device, device_alternatives),
            constraints=parse_constraints(constraints),
        )
        self._check()

    if not TYPE_CHECKING:  # type checkers know the parameters from the signature itself
        __init__ = explain_unknown(__init__)

    @classmethod
    def with_cpu(cls, cpu: float = 1, memory: str | int | None = None, **more: Any) -> ResourceConfig:
        """Return resources without accelerators."""
        return cls(device=CpuConfig(), cpu=cpu, memory=memory, **more)

    @classmethod
    def with_gpu(
        cls,
        gpu_type: str | Sequence[str] = "auto",
        count: int = 1,
        cpu: float = 4,
        memory: str | int | None = None,
        **more: Any,
    ) -> ResourceConfig:
        """Return ``count`` GPUs of one type on one machine; several types are alternatives, the first is preferred."""
        first, *others = device_types(gpu_type, "gpu_type")
        device = GpuConfig(variant=first, count=count)
        return cls(device=device, cpu=cpu, memory=memory, **({"device_alternatives": others} | more))

    @classmethod
    def with_tpu(cls, tpu_type: str | Sequence[str], slice_count: int = 1, **more: Any) -> ResourceConfig:
        """Return ``slice_count`` slices of a TPU type (``v4-8``, ``v5litepod-16``, …), placed as a whole.

        Several types are alternatives, the first is preferred; they must have the same number of hosts.
        """
        first, *others = device_types(tpu_type, "tpu_type")
        alternatives = {"device_alternatives": others} | more
        return cls(device=TpuConfig(variant=first), replicas=slice_count, **alternatives)

    @property
    def ram(self) -> str | int | None:
        """Alias of ``memory``."""
        return self.memory

    @property
    def zone(self) -> str | None:
        """Single zone, if exactly one is given."""
        return self.zones[0] if len(self.zones) == 1 else None

    @property
    def devices(self) -> tuple[DeviceConfig, ...]:
        """All acceptable devices, best first."""
        return self.device, *self.device_alternatives

    def demand(self) -> Demand:
        """Return the resources of one member on a machine, in integers, with the preferred device."""
        return self._demand(self.device)

    def alternatives(self) -> tuple[Demand, ...]:
        """Return the same with each alternative device; these differ from `demand` in the device alone."""
        return tuple(map(self._demand, self.device_alternatives))

    def memory_limit_bytes(self) -> int:
        """Return the memory limit of one member; 0 without a limit (no size was given)."""
        return 0 if self.memory is None else parse_bytes(self.memory, "memory")

    def members(self, replicas: int | None, what: str) -> int:
        """Return the number of processes of a gang: replicas times the hosts of one replica.

        Args:
            replicas: number of replicas; None: that of these resources.
            what: whose they are, for the error.

        Raises:
            InvalidRequest: fewer than one replica.
        """
        count = self.replicas if replicas is None else replicas
        if count < 1:
            raise InvalidRequest(f"{what}: replicas={count} must be 1 or more")
        return count * self.hosts_per_replica()

    def hosts_per_replica(self) -> int:
        """Return how many machines one replica spans: the hosts of its TPU slice type, else 1."""
        return _hosts(self.device)

    def _demand(self, device: DeviceConfig) -> Demand:
        kind, variant, count = _device(device)
        return Demand(
            cpu_milli=round(self.cpu * 1000),
            memory_bytes=self._reserved_bytes(),
            disk_bytes=parse_bytes(self.disk, "disk"),
            device_kind=kind,
            device_variant=variant,
            device_count=count,
            preemptible=self.preemptible,
            regions=self.regions,
            zones=self.zones,
            constraints=self.constraints,
        )

    def _reserved_bytes(self) -> int:
        default = GPU_MEMORY if isinstance(self.device, GpuConfig) else MEMORY
        return parse_bytes(default if self.memory is None else self.memory, "memory")

    def _check(self) -> None:
        if not _is_number(self.cpu) or not 0 <= self.cpu <= AMOUNT_LIMIT / 1000:
            raise InvalidRequest(f"cpu={short_repr(self.cpu)} must be a number of CPUs, 0 or more")
        if not _is_whole(self.replicas) or self.replicas < 0:
            raise InvalidRequest(f"replicas={self.replicas!r} must be a whole number, 1 or more (0 in reservations)")
        if self.pin_cpus and (self.cpu < 1 or self.cpu != int(self.cpu)):
            raise InvalidRequest(f"pin_cpus=True needs whole CPUs, 1 or more, not cpu={self.cpu:g}: write cpu=1")
        parse_bytes(self.disk, "disk")
        self.memory_limit_bytes()
        for device in self.devices:
            _device(device)
            first, other = _hosts(self.device), _hosts(device)
            if first != other:
                raise InvalidRequest(
                    f"{self.device.variant} spans {plural(first, 'host')} and {device.variant} "
                    f"{plural(other, 'host')}: alternatives must span the same number"
                )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Return the argument that was given under either of two names."""
    if value is not None and other is not None and value != other:
        raise InvalidRequest(f"{name}={value!r} and {other_name}={other!r} mean the same: write one of them")
    return other if value is None else value


def _names(value: str | Sequence[str] | None, what: str) -> tuple[str, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) and name for name in names):
        raise InvalidRequest(f"{what}={value!r} must be names, as [{'us-central1' + ('-a' * (what == 'zones'))!r}]")
    return names


def device_types(value: str | Sequence[str], what: str) -> tuple[str, ...]:
    """Return the types of the argument ``what`` (``"gpu_type"``), one or several.

    Raises:
        InvalidRequest: it has no type, or is a number; the message says the line that was meant.
    """
    if _is_whole(value):
        raise InvalidRequest(f"{what}={value} must be a type or a list of types: write {_device_line(what, value)}")
    types = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not types or not all(isinstance(one, str) for one in types):
        raise InvalidRequest(f"{what}={value!r} must be a type or a list of types, best first")
    return types


def _alternatives(device: DeviceConfig, given: Sequence[DeviceConfig | str] | None) -> tuple[DeviceConfig, ...]:
    """Return the alternative devices; a type alone stands for the same number of devices. Duplicates are dropped."""
    if isinstance(given, str):
        raise InvalidRequest(f"device_alternatives={given!r} must be a list: write [{given!r}]")
    found = [attrs.evolve(device, variant=one) if isinstance(one, str) else one for one in given or ()]
    if isinstance(device, CpuConfig) and found:
        raise InvalidRequest(f"device_alternatives={given!r}: a job without a device has nothing to replace")
    return tuple(one for one in dict.fromkeys(found) if one != device)


def _device(device: DeviceConfig) -> tuple[str | None, str, int]:
    """Return kind, type and number on one host.

    Raises:
        InvalidRequest: no device, an unknown TPU type, or an impossible number.
    """
    if isinstance(device, TpuConfig):
        if device.count != 1:
            count = f"TpuConfig({device.variant!r}, count={device.count!r})"
            raise InvalidRequest(f"{count}: the number of slices is set with replicas= or with_tpu(…, slice_count=)")
        topology = tpu_topology(device.variant)
        return "tpu", topology.variant, topology.chips_per_host
    if isinstance(device, GpuConfig):
        if not _is_whole(device.count) or device.count < 1:
            raise InvalidRequest(f"GpuConfig(count={device.count!r}) must be a whole number, 1 or more")
        if not isinstance(device.variant, str) or not device.variant:
            raise InvalidRequest(f"GpuConfig(variant={device.variant!r}) must be a type such as 'h100', or 'auto'")
        return "gpu", device.variant, device.count
    if not isinstance(device, CpuConfig):
        raise InvalidRequest(
            f"device={device!r} must be a CpuConfig, a GpuConfig or a TpuConfig: write ResourceConfig.with_gpu('h100') "
            "or ResourceConfig.with_tpu('v5litepod-8')"
        )
    return None, "auto", 0


def _hosts(device: DeviceConfig) -> int:
    return tpu_topology(device.variant).hosts if isinstance(device, TpuConfig) else 1


@frozen
class Device:
    """One accelerator of one machine, by the id its driver gives it (``gpu-0``, ``tpu-3``)."""

    id: str
    kind: str
    variant: str


@frozen
class PortRange:
    """TCP ports ``first`` to ``first + count - 1`` of one machine."""

    first: int = 0
    count: int = 0

    def __str__(self) -> str:
        return f"{self.first}-{self.first + self.count - 1}" if self.count else "none"


@frozen
class Capacity:
    """Resources that one machine offers."""

    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    devices: tuple[Device, ...] = ()
    attributes: dict[str, str] = Factory(dict)
    """``region``, ``zone``, ``slice``, ``preemptible`` (``"true"``/``"false"``), and what the operator adds."""
    ports: PortRange = PortRange()
    """Ports it may allocate to jobs; no other node of the machine offers them."""
