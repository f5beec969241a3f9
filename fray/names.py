"""All that `fray` re-exports, and nothing else. Imported when the first of it is asked for (see `fray.__getattr__`)."""

import importlib
from typing import TYPE_CHECKING, Any

from fray.actor_self import CurrentActor, current_actor
from fray.actors import ActorContext, ActorHandle, ActorServer, metrics_of
from fray.cluster import Cluster, current_cluster, open_cluster
from fray.errors import (
    ActorDied,
    ActorFailed,
    CallCancelled,
    CallCycle,
    CancelIgnored,
    ConnectionFailed,
    DeadlineExceeded,
    FrayError,
    FutureForgotten,
    GroupFailed,
    InvalidRequest,
    JobFailed,
    JobStopped,
    LinkedActorDied,
    MachineLost,
    MessageTooLarge,
    NameTaken,
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
    WrongPlace,
)
from fray.futures import Future, as_completed, wait_any
from fray.groups import ActorGroup
from fray.hosts import ActorHost
from fray.job_groups import JobGroup
from fray.jobs import Job
from fray.model.actors import ActorInfo, ActorStatus
from fray.model.constraints import Constraint
from fray.model.environment import EnvironmentConfig, Secret
from fray.model.health import HealthCheck, OnStall, Progress
from fray.model.job_groups import JobGroupConfig, JobGroupInfo, JobRole
from fray.model.lines import LineKind, LogLine
from fray.model.messages.calls import ActorMetrics
from fray.model.messages.client import ActorEndpoint
from fray.model.messages.maintenance import Forecast, Verdict
from fray.model.requests import Entrypoint, JobRequest
from fray.model.reservations import Change, ChangeKind, ReservationConfig, ReservationInfo, ReservationState
from fray.model.resources import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from fray.model.retries import ExitRule
from fray.model.specs import ActorConfig, AttemptInfo, Cause, JobInfo, JobState, Ladder, Peer
from fray.monitors import Down, Link, Monitor, Up, link, monitor
from fray.reservations import Reservation
from fray.runtime.host_input import BlockingStream, Stream
from fray.runtime.methods import method
from fray.runtime.own_job import CurrentJob, current_job
from fray.runtime.voice import progress
from fray.scopes import Scope
from fray.supervision import Child, child

if TYPE_CHECKING:
    from fray.forwards import open_forward
    from fray.pools import PoolStats, WorkerInfo, WorkerPool
    from fray.resolver import ActorPool, ClusterResolver, FixedResolver, Resolver

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
    "BlockingStream",
    "CallCancelled",
    "CallCycle",
    "CancelIgnored",
    "Cause",
    "Change",
    "ChangeKind",
    "Child",
    "Cluster",
    "ClusterResolver",
    "ConnectionFailed",
    "Constraint",
    "CpuConfig",
    "CurrentActor",
    "CurrentJob",
    "DeadlineExceeded",
    "Down",
    "Entrypoint",
    "EnvironmentConfig",
    "ExitRule",
    "FixedResolver",
    "Forecast",
    "FrayError",
    "Future",
    "FutureForgotten",
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
    "Ladder",
    "LineKind",
    "Link",
    "LinkedActorDied",
    "LogLine",
    "MachineLost",
    "MessageTooLarge",
    "Monitor",
    "NameTaken",
    "NeverSchedulable",
    "NoSuchActor",
    "NoSuchJob",
    "NoSuchMethod",
    "NoSuchReservation",
    "NotPicklable",
    "ObjectLost",
    "OnStall",
    "OutcomeUnknown",
    "Peer",
    "PoolStats",
    "Progress",
    "RemoteError",
    "Reservation",
    "ReservationConfig",
    "ReservationInfo",
    "ReservationState",
    "Resolver",
    "ResourceConfig",
    "Scope",
    "ScopeCancelled",
    "Secret",
    "SessionEnded",
    "Stream",
    "TpuConfig",
    "Unauthorized",
    "UnknownClusterSpec",
    "Unreachable",
    "Up",
    "Verdict",
    "WorkerInfo",
    "WorkerPool",
    "WrongPlace",
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
    "wait_any",
]

_LATER = {
    "open_forward": "fray.forwards",
    "PoolStats": "fray.pools",
    "WorkerInfo": "fray.pools",
    "WorkerPool": "fray.pools",
    "ActorPool": "fray.resolver",
    "ClusterResolver": "fray.resolver",
    "FixedResolver": "fray.resolver",
    "Resolver": "fray.resolver",
}
"""Imported when first asked for: not every program needs them, and every one of its processes starts here."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fray.names' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value
