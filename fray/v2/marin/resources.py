"""Resources as Marin has them today: its defaults, devices and TPU tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from fray.model.resources import parse_bytes
from fray.v2 import types as april
from fray.v2.marin.device_flops import device_flops
from fray.v2.marin.version import SameInstances, marin_parameters
from fray.v2.types import ANY_REGION as ANY_REGION
from fray.v2.types import DeviceKind, GpuType, TpuTopologyInfo, TpuType

TpuFamily = Literal["v4", "v5e", "v5p", "v6e"]
"""Generation of TPUs."""

# TPU slices ----------------------------------------------------------------------------------------------------------


def _slices(family: str, sizes: Sequence[int], chips_of: float, hosts_of: int = 1) -> list[TpuTopologyInfo]:
    """Return the topologies of a family: VMs of 4 chips, ``hosts_of`` VMs on each host."""
    made = []
    for size in sizes:
        chips = int(size * chips_of)
        made.append(TpuTopologyInfo(f"{family}-{size}", chips, chips // 4 // hosts_of, chips // 4, 4))
    return made


def _single(family: str, sizes: Sequence[int]) -> list[TpuTopologyInfo]:
    return [TpuTopologyInfo(f"{family}-{size}", size, 1, 1, size) for size in sizes]


_POWERS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TPU_TOPOLOGIES: list[TpuTopologyInfo] = [
    *_slices("v4", _POWERS, 0.5),
    *_single("v5litepod", (1, 2, 4, 8)),
    *_slices("v5litepod", (16, 32, 64, 128, 256), 1, hosts_of=2),
    *_slices("v5p", (*_POWERS, 8192, 12288), 0.5),
    *_single("v6e", (1, 4, 8)),
    *_slices("v6e", (16, 32, 64, 128, 256), 1),
]
"""Slice types; ``host_count`` counts machines, of which those of ``v5litepod-16`` and larger have two VMs."""

_GIB = 1024**3
TPU_HBM_BYTES_PER_CHIP: Mapping[str, int] = MappingProxyType(
    {"v4": 32 * _GIB, "v5e": 16 * _GIB, "v5p": 95 * _GIB, "v6e": 32 * _GIB}
)
"""Memory of one chip in bytes by family."""


@dataclass(frozen=True)
class TpuHostResources:
    """CPUs, and memory in GB, of one VM of a TPU slice."""

    cpu: int
    ram_gb: int


TPU_HOST_RESOURCES: dict[str, TpuHostResources] = {
    "v4": TpuHostResources(240, 400),
    "v5e": TpuHostResources(112, 192),
    "v5p": TpuHostResources(208, 448),
    "v6e": TpuHostResources(180, 720),
}
"""Sizes of VMs by family."""
DEFAULT_TPU_HOST_FRACTION = 0.5
"""Part of a VM that `ResourceConfig.with_tpu` requests, so that jobs without TPUs fit beside it."""


def get_tpu_topology(tpu_type: str) -> TpuTopologyInfo:
    """Return the topology of a slice type: that of `TPU_TOPOLOGIES`, else of `fray.v2.get_tpu_topology`.

    Raises:
        ValueError: there is no such type; the message names the most similar ones.
    """
    for known in TPU_TOPOLOGIES:
        if known.name == tpu_type:
            return known
    return april.get_tpu_topology(tpu_type)


_PREFIXES: dict[str, TpuFamily] = {"v4": "v4", "v5litepod": "v5e", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e"}


def tpu_family(tpu_type: str) -> TpuFamily:
    """Return the family of a slice type: ``v5e`` for ``v5litepod-16``. Raises ValueError for an unknown one."""
    prefix, dash, _ = tpu_type.partition("-")
    if not dash or prefix not in _PREFIXES:
        raise ValueError(f"TPU type {tpu_type!r}: unknown family; expected {', '.join(_PREFIXES)}, and a size")
    return _PREFIXES[prefix]


def tpu_hbm_bytes_per_chip(family: str) -> int:
    """Return the memory of one chip in bytes. Raises ValueError for an unknown family."""
    if family not in TPU_HBM_BYTES_PER_CHIP:
        raise ValueError(f"unknown TPU family {family!r}; expected one of {', '.join(sorted(TPU_HBM_BYTES_PER_CHIP))}")
    return TPU_HBM_BYTES_PER_CHIP[family]


def tpu_hbm_capacity_bytes(tpu_type: str) -> int:
    """Return the memory of all chips of a slice in bytes. Raises ValueError for an unknown type."""
    return get_tpu_topology(tpu_type).chip_count * tpu_hbm_bytes_per_chip(tpu_family(tpu_type))


# Devices -------------------------------------------------------------------------------------------------------------


def _known_flops(variant: str, dtype: str) -> float:
    found = device_flops(variant, dtype)
    if found is None:
        raise ValueError(f"the peak FLOP/s of {variant} in {dtype!r} are not known; see fray.device_flops.DEVICE_FLOPS")
    return found


class CpuConfig(april.CpuConfig, metaclass=SameInstances):
    """CPU only, with Marin's methods and order of parameters."""

    _same_as = april.CpuConfig
    __match_args__ = ("kind", "variant")

    def __init__(self, kind: str = "cpu", variant: Literal["cpu"] = "cpu") -> None:
        if kind != "cpu":
            raise ValueError(f"CpuConfig({kind!r}): kind must be 'cpu'")
        super().__init__(variant)

    def device_flops(self, dtype: str = "bf16") -> float:
        """Raise NotImplementedError: there are no figures of CPUs."""
        raise NotImplementedError("the peak FLOP/s of CPUs are not known")

    def default_env_vars(self) -> dict[str, str]:
        """Return the variables of jobs on this device."""
        return {"JAX_PLATFORMS": "cpu"}


class GpuConfig(april.GpuConfig, metaclass=SameInstances):
    """``count`` GPUs of one machine, with Marin's methods and order of parameters."""

    _same_as = april.GpuConfig
    __match_args__ = ("variant", "kind", "count")

    def __init__(self, variant: GpuType, kind: str = "gpu", count: int = 1) -> None:
        if kind != "gpu":
            raise ValueError(f"GpuConfig({variant!r}, {kind!r}): kind must be 'gpu': write count={kind!r}")
        super().__init__(variant, count)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.variant, "gpu", self.count)

    def device_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of one GPU. Raises ValueError for one that is not in the table."""
        return _known_flops(self.variant, dtype)

    def total_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of all of them."""
        return self.device_flops(dtype) * self.count

    def default_env_vars(self) -> dict[str, str]:
        """Return the variables of jobs on this device."""
        return {"JAX_PLATFORMS": ""}


_LIBTPU_ARGS = "--xla_tpu_scoped_vmem_limit_kib="


class TpuConfig(april.TpuConfig, metaclass=SameInstances):
    """One TPU slice, with Marin's methods and order of parameters; ``topology`` is a text such as ``2x2x1``."""

    _same_as = april.TpuConfig
    __match_args__ = ("variant", "kind", "topology")

    def __init__(self, variant: TpuType, kind: str = "tpu", topology: Any = None) -> None:
        if kind != "tpu":
            raise ValueError(f"TpuConfig({variant!r}, {kind!r}): kind must be 'tpu': write topology={kind!r}")
        super().__init__(variant, topology)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.variant, "tpu", self.topology)

    def chip_count(self) -> int:
        """Return the number of chips of one VM of the slice."""
        return get_tpu_topology(self.variant).chips_per_vm

    def device_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of one chip. Raises ValueError for one that is not in the table."""
        return _known_flops(self.variant, dtype)

    def total_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of the chips of one VM."""
        return self.device_flops(dtype) * self.chip_count()

    def default_env_vars(self) -> dict[str, str]:
        """Return the variables of jobs on this device: with larger scoped memory for XLA from v5e on."""
        limit = {"v5e": 50000, "v5p": 50000, "v6e": 98304}.get(tpu_family(self.variant))
        return {"JAX_PLATFORMS": ""} | ({"LIBTPU_INIT_ARGS": f"{_LIBTPU_ARGS}{limit}"} if limit else {})


DeviceConfig = CpuConfig | GpuConfig | TpuConfig

# Resources -----------------------------------------------------------------------------------------------------------


def _scaled(size: str, factor: float) -> str:
    if factor == 1:
        return size
    amount = parse_bytes(size, "size") * factor
    for suffix, unit in (("t", 1024**4), ("g", _GIB), ("m", 1024**2), ("k", 1024)):
        if amount >= unit:
            return f"{amount / unit:g}{suffix}"
    return f"{round(amount)}B"


def _half(amount: int) -> int:
    return max(1, int(amount * DEFAULT_TPU_HOST_FRACTION))


@marin_parameters(
    "cpu ram disk device preemptible regions zone target_cluster replicas device_alternatives image container_profile"
)
@dataclass(unsafe_hash=True)
class ResourceConfig(april.ResourceConfig, metaclass=SameInstances):
    """Resources of one replica, with Marin's defaults.

    Attributes:
        ram, disk: defaults ``"4g"`` and ``"64g"``. As in `fray.v2`, `FrayClient` reserves nothing for a default.
        device_alternatives: other acceptable types.
        target_cluster: name of the peer cluster of Iris where the job shall run. Default: this one.
        container_profile: Iris's security profile of the container. Default: the cluster's.
    """

    _same_as = april.ResourceConfig

    ram: str = "4g"
    disk: str = "64g"
    device: april.DeviceConfig = field(default_factory=CpuConfig)
    target_cluster: str | None = None
    container_profile: str | None = None

    def usual_ram(self) -> tuple[str, ...]:
        """Return the values of ``ram`` that count as not given."""
        if isinstance(self.device, april.TpuConfig):
            return "4g", f"{_half(TPU_HOST_RESOURCES[tpu_family(self.device.variant)].ram_gb)}g"
        return ("4g",)

    def usual_disk(self) -> tuple[str, ...]:
        """Return the values of ``disk`` that count as not given."""
        return ("64g", "50g") if isinstance(self.device, april.TpuConfig) else ("64g",)

    def device_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of one chip. Raises ValueError for an unlisted one, NotImplementedError for CPUs."""
        found: float = _with_methods(self.device).device_flops(dtype)
        return found

    def total_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of all chips; without a device 1e11."""
        return 1e11 if isinstance(self.device, april.CpuConfig) else self.device_flops(dtype) * self.chip_count()

    def scale(
        self,
        factor: float | None = None,
        /,
        *,
        cpu: float | None = None,
        ram: float | None = None,
        disk: float | None = None,
    ) -> ResourceConfig:
        """Return a copy with CPUs, memory and disk times ``factor``, or each times its own factor (default 1).

        Raises:
            ValueError: ``factor`` and another are given.
        """
        given = {"cpu": cpu, "ram": ram, "disk": disk}
        if factor is not None and any(value is not None for value in given.values()):
            raise ValueError(f"scale({factor}, …): give either one factor, or cpu=, ram= and disk=")
        usual = 1.0 if factor is None else factor
        times = {name: usual if value is None else value for name, value in given.items()}
        return replace(
            self,
            cpu=self.cpu * times["cpu"],
            ram=_scaled(self.ram, times["ram"]),
            disk=_scaled(self.disk, times["disk"]),
        )

    @staticmethod
    def with_cpu(**kwargs: Any) -> ResourceConfig:
        """Return resources without an accelerator; other fields by keyword."""
        return ResourceConfig(device=CpuConfig(), **kwargs)

    @staticmethod
    def with_gpu(gpu_type: GpuType = "auto", count: int = 1, **kwargs: Any) -> ResourceConfig:
        """Return resources with ``count`` GPUs of one machine; other fields by keyword."""
        return ResourceConfig(device=GpuConfig(gpu_type, count=count), **kwargs)

    @staticmethod
    def with_tpu(tpu_type: TpuType | Sequence[TpuType], slice_count: int = 1, **kwargs: Any) -> ResourceConfig:
        """Return resources of ``slice_count`` TPU slices: a replica for each VM, with half of the VM's CPUs and memory
        and 50 GB of disk unless given. Of several types any is acceptable.

        Raises:
            ValueError: an unknown type, types that differ in VMs or in chips per VM, or ``slice_count`` below 1.
        """
        types = [tpu_type] if isinstance(tpu_type, str) else list(tpu_type)
        if not types:
            raise ValueError("no TPU type given: pass one, such as 'v5litepod-16', or several acceptable ones")
        shapes = {each: (get_tpu_topology(each).vm_count, get_tpu_topology(each).chips_per_vm) for each in types}
        if len(set(shapes.values())) > 1:
            listed = ", ".join(f"{each}: {vms} VMs of {chips} chips" for each, (vms, chips) in shapes.items())
            raise ValueError(f"alternatives must have the same number of VMs and of chips per VM; {listed}")
        if slice_count < 1:
            raise ValueError(f"slice_count={slice_count} must be 1 or more")
        host = TPU_HOST_RESOURCES[tpu_family(types[0])]
        usual: dict[str, Any] = {"cpu": _half(host.cpu), "ram": f"{_half(host.ram_gb)}g", "disk": "50g"}
        usual |= {"replicas": slice_count * shapes[types[0]][0], "device_alternatives": types[1:] or None}
        return ResourceConfig(device=TpuConfig(types[0]), **usual | kwargs)


def _with_methods(device: april.DeviceConfig) -> Any:
    """Return the device with Marin's methods: one of `fray.v2` has none."""
    if hasattr(device, "default_env_vars"):
        return device
    if device.kind is DeviceKind.CPU:
        return CpuConfig()
    make = partial(GpuConfig, count=device.count) if isinstance(device, april.GpuConfig) else TpuConfig
    return make(device.variant)
