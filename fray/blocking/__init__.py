"""Fray for sync code: the nouns and verbs of `fray` without ``await``. See docs/blocking.md."""

from fray.blocking.actors import ActorContext, ActorHandle, ActorMethod, ActorServer, Conversation, Stream, metrics_of
from fray.blocking.cluster import Cluster, Scope, current_cluster, open_cluster
from fray.blocking.futures import ActorFuture, as_completed, wait_any
from fray.blocking.groups import ActorGroup
from fray.blocking.hosts import ActorHost
from fray.blocking.job_groups import JobGroup
from fray.blocking.jobs import Job
from fray.blocking.pools import WorkerPool
from fray.blocking.reservations import Reservation
from fray.blocking.resolver import ActorPool, ClusterResolver, FixedResolver, Resolver
from fray.jobs import CurrentJob, current_job
from fray.model.constraints import Constraint
from fray.model.environment import EnvironmentConfig, Secret
from fray.model.job_groups import JobGroupConfig, JobGroupInfo, JobRole
from fray.model.requests import Entrypoint, JobRequest
from fray.model.reservations import Change, ReservationConfig, ReservationInfo, ReservationState
from fray.model.resources import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from fray.model.specs import ActorConfig, Cause, JobInfo, JobState

__all__ = [
    "ActorConfig",
    "ActorContext",
    "ActorFuture",
    "ActorGroup",
    "ActorHandle",
    "ActorHost",
    "ActorMethod",
    "ActorPool",
    "ActorServer",
    "Cause",
    "Change",
    "Cluster",
    "ClusterResolver",
    "Constraint",
    "Conversation",
    "CpuConfig",
    "CurrentJob",
    "Entrypoint",
    "EnvironmentConfig",
    "FixedResolver",
    "GpuConfig",
    "Job",
    "JobGroup",
    "JobGroupConfig",
    "JobGroupInfo",
    "JobInfo",
    "JobRequest",
    "JobRole",
    "JobState",
    "Reservation",
    "ReservationConfig",
    "ReservationInfo",
    "ReservationState",
    "Resolver",
    "ResourceConfig",
    "Scope",
    "Secret",
    "Stream",
    "TpuConfig",
    "WorkerPool",
    "as_completed",
    "current_cluster",
    "current_job",
    "metrics_of",
    "open_cluster",
    "wait_any",
]
