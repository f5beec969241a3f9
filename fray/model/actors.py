"""What is known of an actor: `ActorInfo`, and its `ActorStatus` in a word."""

from __future__ import annotations

from enum import StrEnum

from fray.model.frozen import frozen
from fray.model.ids import ActorId, Namespace


class ActorStatus(StrEnum):
    """Where an actor is in its life (seed 004, and `ENDED`)."""

    CREATING = "creating"
    """Accepted: it waits for a machine, or its constructor has not returned yet."""
    READY = "ready"
    """It takes calls."""
    RESTARTING = "restarting"
    """It was there, is not now, and will or may be again: being made anew, or on a machine that is silent."""
    FAILED = "failed"
    """It ended by a failure, and will not be made anew; ``why`` says which."""
    ENDED = "ended"
    """It ended in order (deleted, idle, with its owner), or is being ended."""


@frozen(kw_only=True)
class ActorInfo:
    """One actor, as the controller knows it. Times are seconds since the epoch."""

    actor_id: ActorId
    name: str
    namespace: Namespace
    status: ActorStatus
    node: str = ""
    """The machine it is on; empty for none, and for an actor that a driver serves."""
    pid: int | None = None
    restarts: int = 0
    """How often it has been made anew."""
    reason: str = ""
    """Why it is not READY, or how it ended."""
    started: float | None = None
    """When its process was first seen running."""
    ended: float | None = None
    """When it ended; None while it lives, also while it is being ended."""
    detached: bool = False
    """Owned by the cluster: it outlives whoever made it."""
    served: bool = False
    """Registered by a server in another process: that process ends it, not the cluster."""
