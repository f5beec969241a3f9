"""Values that callers of `fray.v2` write and read: resources, entrypoints, environments, requests, states.

They are plain dataclasses, equal by value, as callers use `dataclasses.replace` on them; invalid values are
`ValueError`. `fray.v2.fray.convert` translates them for a cluster of Fray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fray.errors import InvalidRequest
from fray.model.resources import device_types, explain_unknown, parse_bytes, short_repr
from fray.model.topology import tpu_topology
from fray.tracebacks import short_tracebacks
from fray.v2.flops import peak_flops

TpuType: TypeAlias = str
"""Slice type, such as ``"v5litepod-16"``: any that `get_tpu_topology` accepts."""
GpuType: TypeAlias = str
"""GPU type, such as ``"H100"``; ``"auto"`` means any type."""


class DeviceKind(StrEnum):
    """Kind of device that a job computes on."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


@dataclass(frozen=True)
class TpuTopologyInfo:
    """Sizes of a slice type: ``chip_count = vm_count * chips_per_vm``; hosts are VMs."""

    name: str
    chip_count: int
    host_count: int
    vm_count: int
    chips_per_vm: int


def get_tpu_topology(tpu_type: str) -> TpuTopologyInfo:
    """Return the topology of a slice type; ``v5e-16`` is ``v5litepod-16``.

    Raises:
        ValueError: there is no such type; the message names the most similar ones.
    """
    try:
        found = tpu_topology(tpu_type)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    return TpuTopologyInfo(found.variant, found.chips, found.hosts, found.hosts, found.chips_per_host)


# Devices -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuConfig:
    """CPU only."""

    kind: DeviceKind = field(default=DeviceKind.CPU, init=False)
    variant: Literal["cpu"] = "cpu"

    def chip_count(self) -> int:
        """Return 0."""
        return 0


@short_tracebacks
@dataclass(frozen=True)
class GpuConfig:
    """``count`` GPUs of one machine."""

    variant: GpuType = "auto"
    count: int = 1
    kind: DeviceKind = field(default=DeviceKind.GPU, init=False)

    def __post_init__(self) -> None:
        _device_types(self.variant, "gpu_type")
        if self.count < 1:
            raise ValueError(f"GpuConfig(count={self.count}) must be 1 or more")

    def chip_count(self) -> int:
        """Return the number of GPUs of one machine."""
        return self.count


@short_tracebacks
@dataclass(frozen=True)
class TpuConfig:
    """One TPU slice of a type such as ``v5litepod-16``; ``topology`` is for callers that lay out meshes."""

    variant: TpuType
    topology: tuple[int, ...] | None = None
    kind: DeviceKind = field(default=DeviceKind.TPU, init=False)

    def __post_init__(self) -> None:
        get_tpu_topology(self.variant)

    def chip_count(self) -> int:
        """Return the number of chips of the slice."""
        return get_tpu_topology(self.variant).chip_count

    def vm_count(self) -> int:
        """Return the number of VMs of the slice."""
        return get_tpu_topology(self.variant).vm_count


def _device_types(value: str | Sequence[str], what: str) -> tuple[str, ...]:
    try:
        return device_types(value, what)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None


DeviceConfig: TypeAlias = CpuConfig | GpuConfig | TpuConfig


@dataclass(unsafe_hash=True)  # not frozen: callers change their copy; a hash, as they use it as a key
class ResourceConfig:
    """Resources of one replica, and how many of them.

    Attributes:
        cpu: CPUs, fractions allowed (0.5). Default 1.
        ram, disk: sizes such as ``"4g"``, in powers of 1024. Defaults ``"128m"`` and ``"1g"``.
        device: accelerator. Default: none.
        preemptible: may run on machines that can be taken away. Default True.
        regions, zone: where it may run; None: anywhere.
        replicas: processes of the gang, one per machine; for TPU slices, slices times VMs per slice. Default 1.
        device_alternatives: other acceptable types, the preferred ones first.
        image: container image to run in.

    Raises:
        ValueError: an amount that is negative or unreadable.
        TypeError: an unknown parameter; the message names the one that was meant.
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

    def usual_ram(self) -> tuple[str, ...]:
        """Return the values of ``ram`` that count as not given: no limit, and no reservation beyond the usual one."""
        return ("128m", "128g") if isinstance(self.device, TpuConfig) else ("128m",)

    def usual_disk(self) -> tuple[str, ...]:
        """Return the values of ``disk`` that count as not given."""
        return ("1g", "50g") if isinstance(self.device, TpuConfig) else ("1g",)

    @staticmethod
    def with_cpu(**kwargs: Any) -> ResourceConfig:
        """Return resources without an accelerator; other fields by keyword."""
        return ResourceConfig(device=CpuConfig(), **kwargs)

    @staticmethod
    def with_gpu(gpu_type: GpuType = "auto", count: int = 1, **kwargs: Any) -> ResourceConfig:
        """Return resources with ``count`` GPUs of one machine; other fields by keyword."""
        return ResourceConfig(device=GpuConfig(variant=gpu_type, count=count), **kwargs)

    @staticmethod
    def with_tpu(tpu_type: TpuType | Sequence[TpuType], slice_count: int = 1, **kwargs: Any) -> ResourceConfig:
        """Return resources of ``slice_count`` TPU slices: a replica for each VM, with 32 CPUs, 128 GB of memory and 50
        GB of disk unless given. Of several types any is acceptable, and the first is preferred.

        Raises:
            ValueError: an unknown type, types that differ in VMs, or ``slice_count`` below 1.
        """
        if not tpu_type:
            raise ValueError("no TPU type given: pass one, such as 'v5litepod-16', or several acceptable ones")
        first, *others = _device_types(tpu_type, "tpu_type")
        vms = get_tpu_topology(first).vm_count
        for other in others:
            if get_tpu_topology(other).vm_count != vms:
                raise ValueError(
                    f"{first} has {vms} VMs and {other} has {get_tpu_topology(other).vm_count}: alternatives must have "
                    "the same number of VMs"
                )
        if slice_count < 1:
            raise ValueError(f"slice_count={slice_count} must be 1 or more")
        usual: dict[str, Any] = {"cpu": 32, "ram": "128g", "disk": "50g", "device_alternatives": tuple(others) or None}
        return ResourceConfig(device=TpuConfig(first), **{"replicas": slice_count * vms} | usual | kwargs)

    def chip_count(self) -> int:
        """Return the number of accelerator chips of all replicas; 0 without a device."""
        if isinstance(self.device, TpuConfig):
            return get_tpu_topology(self.device.variant).chips_per_vm * self.replicas
        return self.device.chip_count() * self.replicas

    def device_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of one chip (see `fray.v2.flops`). Raises ValueError for an unlisted chip."""
        return peak_flops(self.device.kind, self.device.variant, dtype)

    def total_flops(self, dtype: str = "bf16") -> float:
        """Return the peak FLOP/s of all chips; without a device, of one CPU machine per replica."""
        return self.device_flops(dtype) * (self.chip_count() or self.replicas)


if not TYPE_CHECKING:  # type checkers know the parameters from the fields
    ResourceConfig.__init__ = explain_unknown(ResourceConfig.__init__)
short_tracebacks(ResourceConfig)


# What runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallableEntrypoint:
    """Function and its arguments."""

    callable: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BinaryEntrypoint:
    """Program and its arguments."""

    command: str
    args: Sequence[str] = ()


@short_tracebacks
@dataclass(frozen=True)
class Entrypoint:
    """Function or program that a job runs, made with `from_callable` or `from_binary`."""

    callable_entrypoint: CallableEntrypoint | None = None
    binary_entrypoint: BinaryEntrypoint | None = None

    @staticmethod
    def from_callable(
        c: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Entrypoint:
        """Return an entrypoint that runs ``c(*args, **kwargs)``.

        Raises:
            ValueError: ``c`` is not callable, or ``args`` neither a tuple nor a list.
        """
        if not callable(c):
            raise ValueError(f"Entrypoint.from_callable needs a callable, not {c!r}")
        # Without the check, a string would become one argument for each of its characters.
        if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
            raise ValueError(
                f"args={short_repr(args)} must be a tuple or a list: write args=({short_repr(args)},) for one argument"
            )
        return Entrypoint(callable_entrypoint=CallableEntrypoint(c, tuple(args), dict(kwargs or {})))

    @staticmethod
    def from_binary(command: str, args: Sequence[str] = ()) -> Entrypoint:
        """Return an entrypoint that runs the program ``command``. Raises ValueError for arguments other than
        strings."""
        if not command or not all(isinstance(part, str) for part in (command, *args)):
            raise ValueError(f"Entrypoint.from_binary needs a program and strings, not {command!r} and {list(args)!r}")
        return Entrypoint(binary_entrypoint=BinaryEntrypoint(command, tuple(args)))


@short_tracebacks
@dataclass(frozen=True)
class EnvironmentConfig:
    """Environment of a job's process: exactly one of ``workspace`` (a directory that is uploaded) and ``docker_image``.

    Raises:
        ValueError: both or neither are given.
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


ANY_REGION = "*"
"""The only element of ``ResourceConfig.regions`` of a job that may run anywhere, wherever its parent runs."""
FROM_HERE = ("HF_TOKEN", "WANDB_API_KEY")
"""Variables of this process that `create_environment` passes on when they are set."""


def create_environment(
    workspace: str | None = None,
    docker_image: str | None = None,
    pip_packages: Sequence[str] | None = None,
    env_vars: Mapping[str, str | None] | None = None,
    extras: Sequence[str] | None = None,
) -> EnvironmentConfig:
    """Return an environment with the usual variables; the workspace defaults to the working directory.

    HF_DATASETS_TRUST_REMOTE_CODE is 1, TOKENIZERS_PARALLELISM is false, HF_TOKEN and WANDB_API_KEY are those of this
    process. ``env_vars`` overrides them; a variable whose value is None is not set.
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


def credentials_of(environment: EnvironmentConfig) -> dict[str, str]:
    """Return the credentials of an environment of Marin's modules: its own, and those of this process that it inherits;
    none for one of `fray.v2`."""
    found: dict[str, str] = dict(getattr(environment, "secrets", {}))
    if getattr(environment, "secret_behavior", None) == "inherit":
        here = {name: os.environ.get(name) for name in FROM_HERE if name not in environment.env_vars}
        found = {name: value for name, value in here.items() if value} | found
    return found


# Jobs and actors -----------------------------------------------------------------------------------------------------


@short_tracebacks
@dataclass(unsafe_hash=True)  # not frozen, as ResourceConfig
class JobRequest:
    """Job to submit.

    Attributes:
        name: without blanks.
        entrypoint: what to run; a function without arguments may be given as it is.
        resources: of each replica. Default 1 CPU.
        environment: default: that of the cluster.
        replicas: processes of the gang. Default None: ``resources.replicas``.
        max_retries_failure: number of restarts after failures. Default 0.
        max_retries_preemption: number of restarts after preemptions and losses of machines. Default 100.
        priority: higher values are scheduled first. Default 0.
        processes_per_task: processes on each machine. Only 1 is supported.
        max_task_failures: failures of all its processes together that the job may have in its life. Default 0.

    Raises:
        ValueError: a name with blanks, an impossible number, something else as entrypoint or resources.
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
            raise ValueError(f"a job's name must be a string, not {self.name!r}")
        if not self.name or any(character.isspace() for character in self.name):
            dashed = "-".join(self.name.split()) or "a-name"
            raise ValueError(f"job name {self.name!r} must not be empty or have blanks: write {dashed!r}")
        self._check_types()
        if self.replicas is None:
            self.replicas = self.resources.replicas
        if not isinstance(self.replicas, int) or self.replicas < 1:
            raise ValueError(f"job {self.name!r}: replicas={self.replicas!r} must be a whole number, 1 or more")
        self._check_processes()
        for name in ("max_retries_failure", "max_retries_preemption", "max_task_failures"):
            if getattr(self, name) < 0:
                raise ValueError(f"job {self.name!r}: {name}={getattr(self, name)} must be 0 or more")

    def _check_processes(self) -> None:
        if self.processes_per_task != 1:
            raise ValueError(
                f"job {self.name!r}: processes_per_task={self.processes_per_task}: only 1 is supported; start more in "
                "the job itself, or request more replicas"
            )

    def _check_types(self) -> None:
        # The second argument of `fray.JobRequest` is the resources: the two are easily swapped.
        entrypoint: Any = self.entrypoint
        resources: Any = self.resources
        if callable(entrypoint):
            self.entrypoint = Entrypoint.from_callable(entrypoint)
        elif entrypoint is not None and not hasattr(entrypoint, "callable_entrypoint"):
            line = "Entrypoint.from_callable(function, args=(...))"
            if hasattr(entrypoint, "device"):
                line = f"JobRequest({self.name!r}, entrypoint=..., resources=...)"
            elif isinstance(entrypoint, str):
                program, *args = entrypoint.split() or ["program"]
                line = f"Entrypoint.from_binary({program!r}, {args!r})"
            raise ValueError(
                f"job {self.name!r}: entrypoint={short_repr(entrypoint)} must be an Entrypoint of fray.v2 or a "
                f"function: write {line}"
            )
        if callable(resources) or not hasattr(resources, "replicas"):
            raise ValueError(
                f"job {self.name!r}: resources={short_repr(resources)} must be a ResourceConfig: "
                f"write JobRequest({self.name!r}, entrypoint=..., resources=ResourceConfig(...))"
            )


def check_request(request: object) -> None:
    """Check what is submitted.

    Raises:
        ValueError: it is not a `JobRequest`; the message says the line that was meant.
    """
    if isinstance(request, JobRequest) or hasattr(getattr(request, "entrypoint", None), "callable_entrypoint"):
        return
    if hasattr(request, "entrypoint") and request.entrypoint is None:
        return  # a backend refuses it
    line = "JobRequest(name='a-name', entrypoint=...)"
    if callable(request):
        name = getattr(request, "__name__", "function")
        line = f"JobRequest(name={name!r}, entrypoint=Entrypoint.from_callable({name}, args=(...)))"
    raise ValueError(f"submit takes a fray.v2.JobRequest, not {short_repr(request)}: write client.submit({line})")


def refuse_iris_only(request: JobRequest) -> None:
    """Check that a request for another cluster has nothing that only Iris has.

    Raises:
        ValueError: it has a ``timeout``, several processes per task, or scripts that set up the environment.
    """
    if request.processes_per_task != 1:
        raise ValueError(
            f"job {request.name!r}: processes_per_task={request.processes_per_task} is supported by Iris only: start "
            "them in the job itself, or request more replicas"
        )
    timeout = getattr(request, "timeout", None)
    if timeout is not None:
        raise ValueError(f"job {request.name!r}: timeout={timeout} is supported by Iris only: end the job yourself")
    refuse_setup_scripts(request.environment)


def refuse_setup_scripts(environment: EnvironmentConfig | None) -> None:
    """Raise ValueError if an environment has scripts, which only Iris runs."""
    if getattr(environment, "setup_scripts", None):
        raise ValueError("setup_scripts are run by Iris only: use pip_packages and extras, or an image")


class JobStatus(StrEnum):
    """Status of a job."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @staticmethod
    def finished(status: JobStatus) -> bool:
        """Return whether the status is final."""
        return status in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


@short_tracebacks
@dataclass(frozen=True)
class ActorConfig:
    """Options of an actor.

    Attributes:
        max_concurrency: calls that run concurrently. Default 1. (`LocalClient` runs all calls concurrently.)
        max_restarts: number of restarts after failures. Default None: the client's own default.
        max_task_retries: number of times that a call is repeated when its actor was lost. Default None: 0.
        priority: see `JobRequest`.
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
