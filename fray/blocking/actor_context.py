"""Context of a sync method of an actor: `ActorContext`, by which the method reaches other actors and jobs."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from fray.blocking.cluster import Cluster
from fray.blocking.open import cluster_of, current_cluster
from fray.blocking.resolver import ClusterResolver
from fray.model.ids import JobId, Namespace
from fray.model.service_key import ServiceKey


@frozen
class ActorContext:
    """What a sync method may use to reach others: as `fray.ActorContext`, of this face."""

    cluster: Cluster
    resolver: ClusterResolver
    job_id: JobId
    namespace: Namespace

    @classmethod
    def from_environment(cls) -> ActorContext:
        """The context of the running code: of its job, or of the driver (``job_id`` is then empty).

        Raises:
            FrayError: neither in a job nor in a driver that has a cluster open.
        """
        return context_of(current_cluster()._runtime)


BLOCKING_CONTEXT: ServiceKey[ActorContext] = ServiceKey("blocking actor context")


def context_of(runtime: Any) -> ActorContext:
    """The context of a runtime; one resolver for all its calls, so that pools are followed once."""

    def make() -> ActorContext:
        cluster = cluster_of(runtime)
        return ActorContext(cluster, ClusterResolver(cluster), runtime.job_id or "", runtime.namespace)

    context: ActorContext = runtime.services.get_or_make(BLOCKING_CONTEXT, make)
    return context
