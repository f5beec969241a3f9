"""Fray for asyncio: the classes and functions of `fray`, awaited in an asyncio loop. See docs/asyncio.md.

In order of dependency:

    crossing    requests of asyncio code to Fray's loop, their cancellation, and ``async with`` blocks
    mirror      classes made from those of `fray`, and what crosses between the two loops
    nouns       the classes, and `open_cluster`

Type checkers see the classes of `fray` themselves: what can be called, and with what, is the same.
"""

from typing import TYPE_CHECKING

from fray.missing_names import MODULE_LINES, missing_name

if TYPE_CHECKING:
    from fray.api.actor_server import ActorServer
    from fray.api.actors.group import ActorGroup
    from fray.api.actors.handle import ActorHandle, ActorMethod, metrics_of
    from fray.api.actors.host import ActorHost
    from fray.api.actors.monitor import Monitor
    from fray.api.cluster import Cluster, current_cluster
    from fray.api.jobs.job import Job
    from fray.api.jobs.job_group import JobGroup
    from fray.api.open import open_cluster
    from fray.api.pools.worker_pool import WorkerPool
    from fray.api.port_forward import open_forward
    from fray.api.reservation import Reservation
    from fray.api.resolver import ActorPool, ClusterResolver, FixedResolver
    from fray.api.scope import Scope
    from fray.runtime.calls.streams import CallStream as Stream
    from fray.runtime.calls.streams import DuplexStream
else:
    from fray.aio.nouns import (
        ActorGroup,
        ActorHandle,
        ActorHost,
        ActorMethod,
        ActorPool,
        ActorServer,
        Cluster,
        ClusterResolver,
        DuplexStream,
        FixedResolver,
        Job,
        JobGroup,
        Monitor,
        Reservation,
        Scope,
        Stream,
        WorkerPool,
        current_cluster,
        metrics_of,
        open_cluster,
        open_forward,
    )

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module 'fray.aio' has no attribute {name!r}")
        from fray import public_names

        meant = {each: f"fray.{each}" for each in public_names.__all__} | MODULE_LINES
        raise missing_name("module 'fray.aio'", name, [*__all__, *public_names.__all__], meant)


__all__ = [
    "ActorGroup",
    "ActorHandle",
    "ActorHost",
    "ActorMethod",
    "ActorPool",
    "ActorServer",
    "Cluster",
    "ClusterResolver",
    "DuplexStream",
    "FixedResolver",
    "Job",
    "JobGroup",
    "Monitor",
    "Reservation",
    "Scope",
    "Stream",
    "WorkerPool",
    "current_cluster",
    "metrics_of",
    "open_cluster",
    "open_forward",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
