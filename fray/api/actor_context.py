"""Context of an actor's method: `ActorContext`, by which the method reaches other actors and jobs."""

from __future__ import annotations

from attrs import frozen

from fray.api.cluster import Cluster, cluster_of
from fray.api.resolver import ClusterResolver, Resolver
from fray.model.ids import JobId, Namespace
from fray.model.service_key import ServiceKey
from fray.runtime.runtime import Runtime, current


@frozen
class ActorContext:
    """Connections of an actor's method to other actors and jobs.

    A method whose first parameter is named ``ctx``, or annotated with this class, receives it.
    """

    cluster: Cluster
    resolver: Resolver
    job_id: JobId
    namespace: Namespace

    @classmethod
    def from_environment(cls) -> ActorContext:
        """Return the context of the running code: of its job, or of the driver (``job_id`` is then empty).

        Raises:
            FrayError: neither in a job nor in `open_cluster`.
        """
        return context_of(current())


ACTOR_CONTEXT: ServiceKey[ActorContext] = ServiceKey("actor context")


def context_of(runtime: Runtime) -> ActorContext:
    """Return the context of a runtime. It is made once, so that all calls share a resolver and each name is watched
    once.
    """

    def make() -> ActorContext:
        cluster = cluster_of(runtime)
        return ActorContext(cluster, ClusterResolver(cluster), runtime.job_id or "", runtime.namespace)

    return runtime.services.get_or_make(ACTOR_CONTEXT, make)
