"""State of an actor as clients see it: `ActorInfo` and `ActorStatus`."""

from __future__ import annotations

from enum import StrEnum

from fray.model.frozen import frozen
from fray.model.ids import ActorId, JobId, Namespace
from fray.model.monitoring.served_calls import ActorMetrics, CallingProcess


class ActorStatus(StrEnum):
    """Stage of an actor's life."""

    CREATING = "creating"
    """Accepted: waiting for a machine, or the constructor has not returned yet."""
    READY = "ready"
    """Accepts calls."""
    RESTARTING = "restarting"
    """Was READY and may be again: it is restarting, or its machine is silent."""
    FAILED = "failed"
    """Ended by a failure and will not be restarted; ``reason`` gives the failure."""
    ENDED = "ended"
    """Ended in order (deleted, idle, with its owner), or is being ended."""


@frozen(kw_only=True)
class ActorInfo:
    """One actor, as recorded by the controller. Times are seconds since the epoch."""

    actor_id: ActorId
    name: str
    namespace: Namespace
    status: ActorStatus
    node: str = ""
    """Machine that runs it; empty without a machine, and for an actor that a driver serves."""
    pid: int | None = None
    restarts: int = 0
    """Number of restarts so far."""
    reason: str = ""
    """Reason for not being READY, or how the actor ended."""
    started: float | None = None
    """Time its process was first seen running."""
    ended: float | None = None
    """Time of its end; None while it is alive, also while it is being ended."""
    detached: bool = False
    """Owned by the cluster: it outlives the job or driver that created it."""
    incarnation: str = ""
    """Attempt id of its process, or session id of the driver that serves it; empty without a process."""
    calls: ActorMetrics | None = None
    """Calls as its process last reported them; None if it reports none, or none were made."""
    callers: tuple[CallingProcess, ...] = ()
    """Processes that call the actors of its process."""
    parent: JobId = ""
    """Job whose process created it, or serves it if it is ``served``; empty for an actor of a driver."""
    served: bool = False
    """Registered by a server in another process: that process ends it, not the cluster."""
