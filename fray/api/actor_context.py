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
    """What an actor's method may use to reach others (seed 000).

    A method whose first parameter is named ``ctx``, or annotated with this class, receives it.
    """

    cluster: Cluster
    resolver: Resolver
    job_id: JobId
    namespace: Namespace

    @classmethod
    def from_environment(cls) -> ActorContext:
        """The context of the running code: of its job, or of the driver (``job_id`` is then empty).

        Raises:
            FrayError: neither in a job nor in `open_cluster`.
        """
        return context_of(current())


ACTOR_CONTEXT: ServiceKey[ActorContext] = ServiceKey("actor context")


def context_of(runtime: Runtime) -> ActorContext:
    """The context of a runtime; one resolver for all its calls, so that pools are followed once."""

    def make() -> ActorContext:
        cluster = cluster_of(runtime)
        return ActorContext(cluster, ClusterResolver(cluster), runtime.job_id or "", runtime.namespace)

    return runtime.services.get_or_make(ACTOR_CONTEXT, make)
