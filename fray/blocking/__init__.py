"""Fray for sync code: the classes and functions of `fray` without ``await``. See docs/blocking.md.

In order of dependency:

    bridge                            requests of threads to the loop; only it imports trio and the runtime
    futures, logs, actors             futures, output of jobs, handles of actors
    jobs, job_groups, reservations, groups, hosts
                                      handles of jobs, job groups, reservations, actor groups and hosts
    launching, cluster                `Scope` and `Cluster`
    open                              `open_cluster`, `current_cluster`, `LocalCluster`, `FrayCluster`
    metadata, resolver, pools         registered actors, pools of actors, pools of workers
    executor, joblib_backend          pools of workers for other libraries
    actor_context, actor_server       contexts of methods, serving objects as actors

Methods that only wait for their async twin are made from it by `fray.blocking.bridge.mirror`.
"""

from typing import TYPE_CHECKING

from fray.api.jobs.job import CurrentJob, current_job
from fray.blocking.actor_context import ActorContext
from fray.blocking.actor_server import ActorServer, LocalActorServer
from fray.blocking.actors import ActorHandle, ActorMethod, DuplexStream, Stream, metrics_of
from fray.blocking.bridge.objects import ObjectRef, allocate, put
from fray.blocking.cluster import Cluster, Scope
from fray.blocking.executor import Executor
from fray.blocking.futures import ActorFuture, BroadcastFuture, as_completed, wait_any
from fray.blocking.groups import ActorGroup
from fray.blocking.hosts import ActorHost
from fray.blocking.job_groups import JobGroup
from fray.blocking.jobs import Job
from fray.blocking.metadata import Metadata
from fray.blocking.open import (
    FrayCluster,
    LocalCluster,
    current_cluster,
    open_cluster,
)
from fray.blocking.pools import WorkerPool
from fray.blocking.reservations import Reservation
from fray.blocking.resolver import ActorPool, BroadcastHandle, ClusterResolver, FixedResolver, Resolver
from fray.missing_names import MODULE_LINES, blocking_lines, missing_name
from fray.model.constraints import Constraint
from fray.model.environment import EnvironmentConfig, Secret
from fray.model.ids import ActorId, Namespace
from fray.model.ids import JobId as JobName
from fray.model.job_groups import JobGroupConfig, JobGroupInfo, JobRole
from fray.model.messages.client import ActorEndpoint
from fray.model.requests import Entrypoint, JobRequest
from fray.model.reservations import (
    ReservationConfig,
    ReservationEvent,
    ReservationId,
    ReservationInfo,
    ReservationState,
)
from fray.model.resources import CpuConfig, DeviceConfig, GpuConfig, ResourceConfig, TpuConfig
from fray.model.specs import ActorConfig, EndReason, JobInfo, JobState

__all__ = [
    "ActorConfig",
    "ActorContext",
    "ActorEndpoint",
    "ActorFuture",
    "ActorGroup",
    "ActorHandle",
    "ActorHost",
    "ActorId",
    "ActorMethod",
    "ActorPool",
    "ActorServer",
    "BroadcastFuture",
    "BroadcastHandle",
    "Cluster",
    "ClusterResolver",
    "Constraint",
    "CpuConfig",
    "CurrentJob",
    "DeviceConfig",
    "DuplexStream",
    "EndReason",
    "Entrypoint",
    "EnvironmentConfig",
    "Executor",
    "FixedResolver",
    "FrayCluster",
    "GpuConfig",
    "Job",
    "JobGroup",
    "JobGroupConfig",
    "JobGroupInfo",
    "JobInfo",
    "JobName",
    "JobRequest",
    "JobRole",
    "JobState",
    "LocalActorServer",
    "LocalCluster",
    "Metadata",
    "Namespace",
    "ObjectRef",
    "Reservation",
    "ReservationConfig",
    "ReservationEvent",
    "ReservationId",
    "ReservationInfo",
    "ReservationState",
    "Resolver",
    "ResourceConfig",
    "Scope",
    "Secret",
    "Stream",
    "TpuConfig",
    "WorkerPool",
    "allocate",
    "as_completed",
    "current_cluster",
    "current_job",
    "metrics_of",
    "open_cluster",
    "put",
    "wait_any",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module 'fray.blocking' has no attribute {name!r}")
        from fray import public_names

        meant = {each: f"fray.{each}" for each in public_names.__all__} | blocking_lines(MODULE_LINES)
        raise missing_name("module 'fray.blocking'", name, __all__, meant)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
