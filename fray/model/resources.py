"""What a job asks for and what a machine has.

`ResourceConfig` is the user's word; `Demand` is the same in integers (milli-CPUs, bytes), so that adding and
subtracting capacity never rounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import Factory, field

from fray.errors import InvalidRequest
from fray.model.topology import tpu_topology
from fray.model.word import frozen

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*\Z", re.IGNORECASE)
MEMORY, GPU_MEMORY = "2GB", "16GB"
"""What is reserved for one member, without and with GPUs, unless it says something else."""
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(size: str | int, what: str = "size") -> int:
    """Bytes of ``"2GB"``, ``"512m"``, ``"1.5GiB"`` or a plain number; units are powers of 1024, case is ignored.

    Raises:
        InvalidRequest: anything else, or a negative number.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match is None:
        raise InvalidRequest(f"{what}={size!r} is no size: write a number of bytes or for example '512MB', '2GB'")
    return int(float(match[1]) * 1024 ** _POWER[match[2].lower()])


def show_bytes(amount: int) -> str:
    """In the largest unit that leaves a number of 1 or more, as `parse_bytes` reads it: ``1.5GB``."""
    value = float(amount)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}TB"


@frozen
class CpuConfig:
    """No accelerator."""

    kind: str = "cpu"
    variant: str = "default"


@frozen
class GpuConfig:
    """``count`` GPUs of one machine; ``variant`` such as ``h100``, or ``auto`` for any."""

    variant: str = "auto"
    count: int = 1
    kind: str = "gpu"


@frozen
class TpuConfig:
    """A TPU slice type such as ``v5litepod-16``. ``count`` is the number of slices and stays 1 in new code."""

    variant: str
    count: int = 1
    kind: str = "tpu"


DeviceConfig: TypeAlias = CpuConfig | GpuConfig | TpuConfig


@frozen
class Demand:
    """What one member of a job takes from one machine."""

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
    """How many; see `fray.model.gangs.port_names`."""
    containers: bool = False
    """Only machines that run containers."""


def _names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


@frozen
class ResourceConfig:
    """Resources of one replica.

    Attributes:
        device: accelerator of each replica; default none.
        cpu: CPUs, fractions allowed (0.5). Default 1.
        memory: size such as ``"2GB"``; units are powers of 1024. What is written here is also the limit: a process tree
            that takes more is ended as ``out_of_memory``. Default: 2 GB are reserved (16 GB with GPUs), and there is
            no limit; 0: nothing is reserved, and there is none either.
        pin_cpus: its processes run on CPUs of their own among the pinned jobs of the machine: ``cpu`` must be a whole
            number then, and OMP_NUM_THREADS and the like are set to it. Default False.
        disk: scratch disk. Default 0.
        replicas: whole gang, all or none. For a TPU type of several hosts each replica is one slice.
        preemptible: may run on machines that can be taken away. Default True.
        regions, zones: where it may run; empty means anywhere.
    """

    device: DeviceConfig = Factory(CpuConfig)
    cpu: float = 1
    memory: str | int | None = None
    disk: str | int = 0
    replicas: int = 1
    preemptible: bool = True
    regions: tuple[str, ...] = field(default=(), converter=_names)
    zones: tuple[str, ...] = field(default=(), converter=_names)
    pin_cpus: bool = False

    @classmethod
    def with_cpu(cls, cpu: float = 1, memory: str | int | None = None, **more: Any) -> ResourceConfig:
        """CPU only."""
        return cls(device=CpuConfig(), cpu=cpu, memory=memory, **more)

    @classmethod
    def with_gpu(
        cls, gpu_type: str = "auto", count: int = 1, cpu: float = 4, memory: str | int | None = None, **more: Any
    ) -> ResourceConfig:
        """``count`` GPUs of one type on one machine."""
        return cls(device=GpuConfig(variant=gpu_type, count=count), cpu=cpu, memory=memory, **more)

    @classmethod
    def with_tpu(cls, tpu_type: str, slice_count: int = 1, **more: Any) -> ResourceConfig:
        """``slice_count`` slices of a TPU type (``v4-8``, ``v5litepod-16``, …); each slice is whole or absent."""
        return cls(device=TpuConfig(variant=tpu_type), replicas=slice_count, **more)

    def demand(self) -> Demand:
        """The same in integers.

        Raises:
            InvalidRequest: a negative or unreadable amount, an unknown TPU type, part of a CPU to pin.
        """
        if not isinstance(self.cpu, int | float) or self.cpu < 0:
            raise InvalidRequest(f"cpu={self.cpu!r} must be a number of CPUs, 0 or more")
        if not isinstance(self.replicas, int) or self.replicas < 1:
            raise InvalidRequest(f"replicas={self.replicas!r} must be a whole number, 1 or more")
        if self.pin_cpus and (self.cpu < 1 or self.cpu != int(self.cpu)):
            raise InvalidRequest(f"pin_cpus=True needs whole CPUs, 1 or more, not cpu={self.cpu:g}: write cpu=1")
        kind, count = self._device()
        return Demand(
            cpu_milli=round(self.cpu * 1000),
            memory_bytes=self._reserved_bytes(),
            disk_bytes=parse_bytes(self.disk, "disk"),
            device_kind=kind,
            device_variant=self.device.variant if kind else "auto",
            device_count=count,
            preemptible=self.preemptible,
            regions=self.regions,
            zones=self.zones,
        )

    def memory_limit_bytes(self) -> int:
        """What one member may take; 0: no limit, as nothing was written.

        Raises:
            InvalidRequest: an unreadable amount.
        """
        return 0 if self.memory is None else parse_bytes(self.memory, "memory")

    def _reserved_bytes(self) -> int:
        default = GPU_MEMORY if isinstance(self.device, GpuConfig) else MEMORY
        return parse_bytes(default if self.memory is None else self.memory, "memory")

    def hosts_per_replica(self) -> int:
        """Machines one replica spans: the hosts of its TPU slice type, else 1."""
        return tpu_topology(self.device.variant).hosts if isinstance(self.device, TpuConfig) else 1

    def _device(self) -> tuple[str | None, int]:
        if isinstance(self.device, TpuConfig):
            return "tpu", tpu_topology(self.device.variant).chips_per_host
        if isinstance(self.device, GpuConfig):
            if self.device.count < 1:
                raise InvalidRequest(f"GpuConfig(count={self.device.count}) must be 1 or more")
            return "gpu", self.device.count
        return None, 0


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
    """What one machine offers."""

    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    devices: tuple[Device, ...] = ()
    attributes: dict[str, str] = Factory(dict)
    """``region``, ``zone``, ``slice``, ``preemptible`` (``"true"``/``"false"``), and what the operator adds."""
    ports: PortRange = PortRange()
    """Which it may give to jobs; no other node of the machine offers them."""
