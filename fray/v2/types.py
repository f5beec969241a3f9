"""What callers of `fray.v2` write and read: resources, entrypoints, environments, requests, states.

They are plain dataclasses, frozen and equal by value, as callers use `dataclasses.replace` on them; bad values are
`ValueError`. What they come to on a cluster of Fray is said by `fray.v2.fray.convert`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from fray.errors import InvalidRequest
from fray.model.resources import parse_bytes
from fray.model.topology import tpu_topology
from fray.v2.flops import peak_flops

TpuType: TypeAlias = str
"""A slice type, such as ``"v5litepod-16"``: any that `get_tpu_topology` knows."""
GpuType: TypeAlias = str
"""Such as ``"H100"``; ``"auto"``: whichever there is."""


class DeviceKind(StrEnum):
    """Which kind of device a job computes on."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


@dataclass(frozen=True)
class TpuTopologyInfo:
    """One slice type: ``chip_count = vm_count * chips_per_vm``; hosts are VMs."""

    name: str
    chip_count: int
    host_count: int
    vm_count: int
    chips_per_vm: int


def get_tpu_topology(tpu_type: str) -> TpuTopologyInfo:
    """The topology of a slice type; ``v5e-16`` is ``v5litepod-16``.

    Raises:
        ValueError: there is no such type; the message names the nearest ones.
    """
    try:
        found = tpu_topology(tpu_type)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    return TpuTopologyInfo(found.variant, found.chips, found.hosts, found.hosts, found.chips_per_host)


# Devices -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuConfig:
    """No accelerator."""

    kind: DeviceKind = field(default=DeviceKind.CPU, init=False)
    variant: Literal["cpu"] = "cpu"

    def chip_count(self) -> int:
        """0."""
        return 0


@dataclass(frozen=True)
class GpuConfig:
    """``count`` GPUs of one machine."""

    variant: GpuType = "auto"
    count: int = 1
    kind: DeviceKind = field(default=DeviceKind.GPU, init=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"GpuConfig(count={self.count}) must be 1 or more")

    def chip_count(self) -> int:
        """GPUs of one machine."""
        return self.count


@dataclass(frozen=True)
class TpuConfig:
    """One TPU slice of a type such as ``v5litepod-16``; ``topology`` is for callers that lay out meshes."""

    variant: TpuType
    topology: tuple[int, ...] | None = None
    kind: DeviceKind = field(default=DeviceKind.TPU, init=False)

    def __post_init__(self) -> None:
        get_tpu_topology(self.variant)

    def chip_count(self) -> int:
        """Chips of the slice."""
        return get_tpu_topology(self.variant).chip_count

    def vm_count(self) -> int:
        """VMs of the slice."""
        return get_tpu_topology(self.variant).vm_count


DeviceConfig: TypeAlias = CpuConfig | GpuConfig | TpuConfig


@dataclass(frozen=True)
class ResourceConfig:
    """Resources of one replica, and how many of them.

    Attributes:
        cpu: CPUs, fractions allowed (0.5). Default 1.
        ram, disk: sizes such as ``"4g"``, in powers of 1024. Defaults ``"128m"`` and ``"1g"``.
        device: default none but the CPU.
        preemptible: may run on machines that can be taken away. Default True.
        regions, zone: where it may run; None: anywhere.
        replicas: processes of the gang, one a machine: of TPU slices, slices times their VMs. Default 1.
        device_alternatives: other types that would do, best first.
        image: container image to run in.

    Raises:
        ValueError: an amount that is negative or unreadable.
    """

    cpu: float = 1
    ram: str = "128m"
    disk: str = "1g"
    device: DeviceConfig = field(default_factory=CpuConfig)
    preemptible: bool = True
    regions: Sequence[str] | None = None
    zone: str | None = None
    replicas: int = 1
    device_alternatives: Sequence[str] | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.cpu < float("inf"):
            raise ValueError(f"cpu={self.cpu!r} must be a number of CPUs, 0 or more")
        if not isinstance(self.replicas, int) or self.replicas < 1:
            raise ValueError(f"replicas={self.replicas!r} must be a whole number, 1 or more")
        for name in ("ram", "disk"):
            try:
                parse_bytes(getattr(self, name), name)
            except InvalidRequest as error:
                raise ValueError(str(error)) from None

    @staticmethod
    def with_cpu(**kwargs: Any) -> ResourceConfig:
        """No accelerator; other fields by keyword."""
        return ResourceConfig(device=CpuConfig(), **kwargs)

    @staticmethod
    def with_gpu(gpu_type: GpuType = "auto", count: int = 1, **kwargs: Any) -> ResourceConfig:
        """``count`` GPUs of one machine; other fields by keyword."""
        return ResourceConfig(device=GpuConfig(variant=gpu_type, count=count), **kwargs)

    @staticmethod
    def with_tpu(tpu_type: TpuType | Sequence[TpuType], slice_count: int = 1, **kwargs: Any) -> ResourceConfig:
        """``slice_count`` slices: that many times the VMs of one as replicas, each with 32 CPUs, 128 GB and 50 GB of
        disk unless given. Of several types any will do, the first is liked best.

        Raises:
            ValueError: an unknown type, types that differ in VMs, or ``slice_count`` below 1.
        """
        if not tpu_type:
            raise ValueError("no TPU type: name one, such as 'v5litepod-16', or several of which any will do")
        first, *others = (tpu_type,) if isinstance(tpu_type, str) else tuple(tpu_type)
        vms = get_tpu_topology(first).vm_count
        for other in others:
            if get_tpu_topology(other).vm_count != vms:
                raise ValueError(
                    f"{first} has {vms} VMs and {other} has {get_tpu_topology(other).vm_count}: one can only stand for "
                    "the other if both have as many"
                )
        if slice_count < 1:
            raise ValueError(f"slice_count={slice_count} must be 1 or more")
        usual: dict[str, Any] = {"cpu": 32, "ram": "128g", "disk": "50g", "device_alternatives": tuple(others) or None}
        return ResourceConfig(device=TpuConfig(first), **{"replicas": slice_count * vms} | usual | kwargs)

    def chip_count(self) -> int:
        """Accelerator chips of all replicas; 0 without a device."""
        if isinstance(self.device, TpuConfig):
            return get_tpu_topology(self.device.variant).chips_per_vm * self.replicas
        return self.device.chip_count() * self.replicas

    def device_flops(self, dtype: str = "bf16") -> float:
        """Peak FLOP/s of one chip (see `fray.v2.flops`). Raises ValueError: it is not known there."""
        return peak_flops(self.device.kind, self.device.variant, dtype)

    def total_flops(self, dtype: str = "bf16") -> float:
        """Peak FLOP/s of all chips; of a job without a device, of one CPU machine a replica."""
        return self.device_flops(dtype) * (self.chip_count() or self.replicas)


# What runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallableEntrypoint:
    """A function and its arguments."""

    callable: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BinaryEntrypoint:
    """A program and its arguments."""

    command: str
    args: Sequence[str] = ()


@dataclass(frozen=True)
class Entrypoint:
    """What a job runs: make one with `from_callable` or `from_binary`."""

    callable_entrypoint: CallableEntrypoint | None = None
    binary_entrypoint: BinaryEntrypoint | None = None

    @staticmethod
    def from_callable(
        c: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Entrypoint:
        """Run ``c(*args, **kwargs)``. Raises ValueError: ``c`` is not callable."""
        if not callable(c):
            raise ValueError(f"Entrypoint.from_callable needs a callable, not {c!r}")
        return Entrypoint(callable_entrypoint=CallableEntrypoint(c, tuple(args), dict(kwargs or {})))

    @staticmethod
    def from_binary(command: str, args: Sequence[str] = ()) -> Entrypoint:
        """Run the program ``command``. Raises ValueError: no program, or an argument that is no string."""
        if not command or not all(isinstance(part, str) for part in (command, *args)):
            raise ValueError(f"Entrypoint.from_binary needs a program and strings, not {command!r} and {list(args)!r}")
        return Entrypoint(binary_entrypoint=BinaryEntrypoint(command, tuple(args)))


@dataclass(frozen=True)
class EnvironmentConfig:
    """What a job's process is made of: exactly one of ``workspace`` (a directory that travels) and ``docker_image``.

    Raises:
        ValueError: both, or none of them.
    """

    workspace: str | None = None
    docker_image: str | None = None
    pip_packages: Sequence[str] = ()
    env_vars: Mapping[str, str] = field(default_factory=dict)
    extras: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.workspace is None) == (self.docker_image is None):
            raise ValueError(
                f"EnvironmentConfig needs exactly one of workspace ({self.workspace!r}) and docker_image "
                f"({self.docker_image!r}); create_environment() takes the working directory if you name none"
            )


FROM_HERE = ("HF_TOKEN", "WANDB_API_KEY")
"""Variables that go along with every environment that `create_environment` makes, when they are set."""


def create_environment(
    workspace: str | None = None,
    docker_image: str | None = None,
    pip_packages: Sequence[str] | None = None,
    env_vars: Mapping[str, str | None] | None = None,
    extras: Sequence[str] | None = None,
) -> EnvironmentConfig:
    """An environment with the usual variables: the workspace is the working directory unless something is named.

    HF_DATASETS_TRUST_REMOTE_CODE is 1, TOKENIZERS_PARALLELISM is false, HF_TOKEN and WANDB_API_KEY are those of this
    process; ``env_vars`` may say otherwise, and with None that one is not to be set.
    """
    if workspace is None and docker_image is None:
        workspace = os.getcwd()
    usual: dict[str, str | None] = {"HF_DATASETS_TRUST_REMOTE_CODE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables = usual | {name: os.environ.get(name) for name in FROM_HERE} | dict(env_vars or {})
    return EnvironmentConfig(
        workspace=workspace,
        docker_image=docker_image,
        pip_packages=tuple(pip_packages or ()),
        env_vars={name: value for name, value in variables.items() if value is not None},
        extras=tuple(extras or ()),
    )


# Jobs and actors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobRequest:
    """A job to submit.

    Attributes:
        name: without blanks.
        entrypoint: what to run.
        resources: of each replica. Default 1 CPU.
        environment: default: that of the cluster.
        replicas: processes of the gang. Default None: ``resources.replicas``.
        max_retries_failure: how often it begins again after a failure. Default 0.
        max_retries_preemption: the same after a preemption or the loss of a machine. Default 100.
        priority: 0 is usual; more comes earlier, less later.
        processes_per_task: processes on each machine. Only 1 is supported.
        max_task_failures: failures of all its processes together that it may have, over its whole life. Default 0.

    Raises:
        ValueError: a name with blanks, an impossible number.
    """

    name: str
    entrypoint: Entrypoint
    resources: ResourceConfig = field(default_factory=ResourceConfig)
    environment: EnvironmentConfig | None = None
    replicas: int | None = None
    max_retries_failure: int = 0
    max_retries_preemption: int = 100
    priority: int = 0
    processes_per_task: int = 1
    max_task_failures: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"a job's name is a string, not {self.name!r}")
        if not self.name or any(character.isspace() for character in self.name):
            raise ValueError(f"job name {self.name!r} must not be empty or have blanks: write {_dashed(self.name)!r}")
        if self.replicas is None:
            object.__setattr__(self, "replicas", self.resources.replicas)
        if not isinstance(self.replicas, int) or self.replicas < 1:
            raise ValueError(f"job {self.name!r}: replicas={self.replicas!r} must be a whole number, 1 or more")
        if self.processes_per_task != 1:
            raise ValueError(
                f"job {self.name!r}: processes_per_task={self.processes_per_task}: only 1 is supported; start more in "
                "the job itself, or ask for more replicas"
            )
        for name in ("max_retries_failure", "max_retries_preemption", "max_task_failures"):
            if getattr(self, name) < 0:
                raise ValueError(f"job {self.name!r}: {name}={getattr(self, name)} must be 0 or more")


def _dashed(name: str) -> str:
    return "-".join(name.split()) or "a-name"


class JobStatus(StrEnum):
    """How a job stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @staticmethod
    def finished(status: JobStatus) -> bool:
        """Whether it stays so."""
        return status in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


@dataclass(frozen=True)
class ActorConfig:
    """How an actor is run.

    Attributes:
        max_concurrency: calls of it that run at once. Default 1. (`LocalClient` runs all at once, whatever it says.)
        max_restarts: how often it is made anew after it has failed. Default None: the client's own default.
        max_task_retries: how often a call is repeated when its actor was lost. Default None: never.
        priority: as of jobs.
    """

    max_concurrency: int = 1
    max_restarts: int | None = None
    max_task_retries: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency={self.max_concurrency} must be 1 or more")
        for name in ("max_restarts", "max_task_retries"):
            amount = getattr(self, name)
            if amount is not None and amount < -1:
                raise ValueError(f"{name}={amount} must be 0 or more, or -1 for always")
