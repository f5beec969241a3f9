"""Requests, resources and environments as Marin imports them. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.v2.marin.requests import ActorConfig, EnvironmentConfig, JobRequest, SecretBehavior, create_environment
from fray.v2.marin.resources import (
    ANY_REGION,
    DEFAULT_TPU_HOST_FRACTION,
    TPU_HBM_BYTES_PER_CHIP,
    TPU_HOST_RESOURCES,
    TPU_TOPOLOGIES,
    CpuConfig,
    DeviceConfig,
    GpuConfig,
    ResourceConfig,
    TpuConfig,
    TpuFamily,
    TpuHostResources,
    get_tpu_topology,
    tpu_family,
    tpu_hbm_bytes_per_chip,
    tpu_hbm_capacity_bytes,
)
from fray.v2.marin.version import unknown_name
from fray.v2.types import (
    BinaryEntrypoint,
    CallableEntrypoint,
    DeviceKind,
    Entrypoint,
    GpuType,
    JobStatus,
    TpuTopologyInfo,
    TpuType,
)

__all__ = [
    "ANY_REGION",
    "DEFAULT_TPU_HOST_FRACTION",
    "TPU_HBM_BYTES_PER_CHIP",
    "TPU_HOST_RESOURCES",
    "TPU_TOPOLOGIES",
    "ActorConfig",
    "BinaryEntrypoint",
    "CallableEntrypoint",
    "CpuConfig",
    "DeviceConfig",
    "DeviceKind",
    "Entrypoint",
    "EnvironmentConfig",
    "GpuConfig",
    "GpuType",
    "JobRequest",
    "JobStatus",
    "ResourceConfig",
    "SecretBehavior",
    "TpuConfig",
    "TpuFamily",
    "TpuHostResources",
    "TpuTopologyInfo",
    "TpuType",
    "create_environment",
    "get_tpu_topology",
    "tpu_family",
    "tpu_hbm_bytes_per_chip",
    "tpu_hbm_capacity_bytes",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
