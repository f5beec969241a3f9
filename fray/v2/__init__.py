"""Fray v2: jobs and actors for sync code, on threads, on Fray, on Ray or on Iris. See docs/v2.md.

From the bottom up:

- `types` (requests, resources, environments), `flops`, `job` (handles, errors, `wait_all`): values without a backend.
- `interface`: protocols of clients and actors, and the context variables of the running code.
- backends, which import `interface` and nothing above it: `local_backend` (threads of this process, with
  `subprocesses`), `fray` (a cluster of Fray), `ray_backend`, and `iris_backend` with `iris`.
- `actor` (`current_actor`) and `client` (`current_client`, `client_of`), which choose among the backends and import
  them when they are first used.
- `marin`: what differs in the flat modules that Marin imports.

Callers import the names from here, and from `actor`, `client`, `types`, `local_backend`, `iris_backend` and
`ray_backend.backend`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fray.missing_names import missing_name
from fray.v2.actor import ActorContext, ActorFuture, ActorGroup, ActorHandle, ActorMethod, HostedActor, current_actor
from fray.v2.client import Client, current_client, set_current_client
from fray.v2.fray.client import FrayClient
from fray.v2.job import JobAlreadyExists, JobFailed, JobHandle, wait_all
from fray.v2.local_backend import LocalActorHandle, LocalActorMethod, LocalClient, LocalJobHandle
from fray.v2.marin.installed import warn_of_marin_fray
from fray.v2.types import (
    ActorConfig,
    BinaryEntrypoint,
    CallableEntrypoint,
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

__all__ = [
    "ActorConfig",
    "ActorContext",
    "ActorFuture",
    "ActorGroup",
    "ActorHandle",
    "ActorMethod",
    "BinaryEntrypoint",
    "CallableEntrypoint",
    "Client",
    "CpuConfig",
    "DeviceConfig",
    "DeviceKind",
    "Entrypoint",
    "EnvironmentConfig",
    "FrayClient",
    "GpuConfig",
    "GpuType",
    "HostedActor",
    "JobAlreadyExists",
    "JobFailed",
    "JobHandle",
    "JobRequest",
    "JobStatus",
    "LocalActorHandle",
    "LocalActorMethod",
    "LocalClient",
    "LocalJobHandle",
    "ResourceConfig",
    "TpuConfig",
    "TpuTopologyInfo",
    "TpuType",
    "create_environment",
    "current_actor",
    "current_client",
    "get_tpu_topology",
    "set_current_client",
    "wait_all",
]

warn_of_marin_fray(Path(__file__).parents[1])

if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str) -> NoReturn:
        raise missing_name("module 'fray.v2'", name, __all__, {})
