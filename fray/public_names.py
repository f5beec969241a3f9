"""Public names of `fray`: all that the package re-exports.

A module of its own, and not part of ``fray/__init__.py``: type checkers need these imports written out, and at run time
they must not happen at ``import fray`` (80 ms instead of 250 ms for ``fray --help``). Here one list of imports serves
both, and no table of names has to repeat it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fray import name_modules
from fray.api.actor_context import ActorContext
from fray.api.actor_server import ActorServer
from fray.api.actors.current_actor import CurrentActor, current_actor
from fray.api.actors.group import ActorGroup
from fray.api.actors.handle import ActorHandle, metrics_of
from fray.api.actors.host import ActorHost
from fray.api.actors.monitor import (
    Down,
    Link,
    Monitor,
    Up,
    link,
    monitor,
)
from fray.api.cluster import Cluster, current_cluster
from fray.api.futures import Future, as_completed, wait_any
from fray.api.jobs.job import Job
from fray.api.jobs.job_group import JobGroup
from fray.api.jobs.job_spec import ChildSpec, child
from fray.api.objects import ObjectRef, allocate, put
from fray.api.open import open_cluster
from fray.api.reservation import Reservation
from fray.api.scope import Scope
from fray.errors import (
    ActorDied,
    ActorFailed,
    BlockingNotAllowed,
    CallCancelled,
    CallCycle,
    CancelIgnored,
    ConnectionFailed,
    DeadlineExceeded,
    FrayError,
    FutureExpired,
    GroupFailed,
    InvalidRequest,
    JobFailed,
    JobStopped,
    LinkedActorDied,
    MachineLost,
    MessageTooLarge,
    NameInUse,
    NeverSchedulable,
    NoSuchActor,
    NoSuchJob,
    NoSuchMethod,
    NoSuchReservation,
    NotPicklable,
    ObjectLost,
    OutcomeUnknown,
    RemoteError,
    ScopeCancelled,
    SessionEnded,
    Unauthorized,
    UnknownClusterSpec,
    Unreachable,
)
from fray.model.actors import ActorInfo, ActorStatus
from fray.model.constraints import Constraint
from fray.model.environment import EnvironmentConfig, Secret
from fray.model.job_groups import JobGroupConfig, JobGroupInfo, JobRole
from fray.model.log_records import LogLine, LogLineKind
from fray.model.messages.client import ActorEndpoint
from fray.model.messages.maintenance import Forecast, ForecastVerdict
from fray.model.monitoring.health import HealthCheck, OnStall, Progress
from fray.model.monitoring.served_calls import ActorMetrics
from fray.model.requests import Entrypoint, JobRequest
from fray.model.reservations import (
    ReservationConfig,
    ReservationEvent,
    ReservationEventKind,
    ReservationInfo,
    ReservationState,
)
from fray.model.resources import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from fray.model.specs import (
    ActorConfig,
    AttemptInfo,
    EndReason,
    ExitRule,
    GangMember,
    JobInfo,
    JobState,
    TerminationPolicy,
)
from fray.runtime.actors.method_streams import BlockingStream, Stream
from fray.runtime.actors.methods import method
from fray.runtime.calls.streams import DuplexStream
from fray.runtime.process.current_job import CurrentJob, current_job
from fray.runtime.process.progress import progress

if TYPE_CHECKING:
    from fray.api.pools.task_pool import PoolStats, WorkerInfo
    from fray.api.pools.worker_pool import WorkerPool
    from fray.api.port_forward import open_forward
    from fray.api.resolver import (
        ActorPool,
        ClusterResolver,
        FixedResolver,
        Resolver,
    )

__all__ = [
    "ActorConfig",
    "ActorContext",
    "ActorDied",
    "ActorEndpoint",
    "ActorFailed",
    "ActorGroup",
    "ActorHandle",
    "ActorHost",
    "ActorInfo",
    "ActorMetrics",
    "ActorPool",
    "ActorServer",
    "ActorStatus",
    "AttemptInfo",
    "BlockingNotAllowed",
    "BlockingStream",
    "CallCancelled",
    "CallCycle",
    "CancelIgnored",
    "ChildSpec",
    "Cluster",
    "ClusterResolver",
    "ConnectionFailed",
    "Constraint",
    "CpuConfig",
    "CurrentActor",
    "CurrentJob",
    "DeadlineExceeded",
    "Down",
    "DuplexStream",
    "EndReason",
    "Entrypoint",
    "EnvironmentConfig",
    "ExitRule",
    "FixedResolver",
    "Forecast",
    "ForecastVerdict",
    "FrayError",
    "Future",
    "FutureExpired",
    "GangMember",
    "GpuConfig",
    "GroupFailed",
    "HealthCheck",
    "InvalidRequest",
    "Job",
    "JobFailed",
    "JobGroup",
    "JobGroupConfig",
    "JobGroupInfo",
    "JobInfo",
    "JobRequest",
    "JobRole",
    "JobState",
    "JobStopped",
    "Link",
    "LinkedActorDied",
    "LogLine",
    "LogLineKind",
    "MachineLost",
    "MessageTooLarge",
    "Monitor",
    "NameInUse",
    "NeverSchedulable",
    "NoSuchActor",
    "NoSuchJob",
    "NoSuchMethod",
    "NoSuchReservation",
    "NotPicklable",
    "ObjectLost",
    "ObjectRef",
    "OnStall",
    "OutcomeUnknown",
    "PoolStats",
    "Progress",
    "RemoteError",
    "Reservation",
    "ReservationConfig",
    "ReservationEvent",
    "ReservationEventKind",
    "ReservationInfo",
    "ReservationState",
    "Resolver",
    "ResourceConfig",
    "Scope",
    "ScopeCancelled",
    "Secret",
    "SessionEnded",
    "Stream",
    "TerminationPolicy",
    "TpuConfig",
    "Unauthorized",
    "UnknownClusterSpec",
    "Unreachable",
    "Up",
    "WorkerInfo",
    "WorkerPool",
    "allocate",
    "as_completed",
    "child",
    "current_actor",
    "current_cluster",
    "current_job",
    "link",
    "method",
    "metrics_of",
    "monitor",
    "open_cluster",
    "open_forward",
    "progress",
    "put",
    "wait_any",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fray.public_names' has no attribute {name!r}")
    # Imported on first use: most programs, and each of their processes, do without it.
    value = globals()[name] = getattr(importlib.import_module(name_modules.modules_of_names()[name]), name)
    return value
