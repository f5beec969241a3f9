"""Context of a sync method of an actor, by which it reaches other actors and jobs.

It has the classes of the blocking API: code on a thread cannot await.
"""

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
    """Connections of a sync method to other actors and jobs: `fray.ActorContext` for sync code."""

    cluster: Cluster
    resolver: ClusterResolver
    job_id: JobId
    namespace: Namespace

    @classmethod
    def from_environment(cls) -> ActorContext:
        """Return the context of the running code: of its job, or of the driver (``job_id`` is then empty).

        Raises:
            FrayError: neither in a job nor in a driver that has a cluster open.
        """
        return context_of(current_cluster()._runtime)


BLOCKING_CONTEXT: ServiceKey[ActorContext] = ServiceKey("blocking actor context")


def context_of(runtime: Any) -> ActorContext:
    """Return the context of a runtime. It is made once, so that all calls share a resolver and each name is
    watched once.
    """

    def make() -> ActorContext:
        cluster = cluster_of(runtime)
        return ActorContext(cluster, ClusterResolver(cluster), runtime.job_id or "", runtime.namespace)

    context: ActorContext = runtime.services.get_or_make(BLOCKING_CONTEXT, make)
    return context
