"""Requests and resources under the name that Marin's older code imports. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.types import (
    ANY_REGION,
    CpuConfig,
    DeviceConfig,
    DeviceKind,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    GpuType,
    JobRequest,
    JobStatus,
    ResourceConfig,
    TpuConfig,
    TpuTopologyInfo,
    TpuType,
    create_environment,
    get_tpu_topology,
)
from fray.v2.marin.version import unknown_name

__all__ = [
    "ANY_REGION",
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
    "TpuConfig",
    "TpuTopologyInfo",
    "TpuType",
    "create_environment",
    "get_tpu_topology",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
