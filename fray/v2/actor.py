"""Names of actors as callers of `fray.v2` import them, and `current_actor`."""

from __future__ import annotations

from fray.v2.interface import (
    ActorContext,
    ActorFuture,
    ActorGroup,
    ActorHandle,
    ActorMethod,
    HostedActor,
    _known_actor,
    _reset_current_actor,
    _set_current_actor,
)


def current_actor() -> ActorContext:
    """Return the actor whose code is running: in its constructor and methods and, on a cluster, in its threads too.

    Raises:
        RuntimeError: no actor's code is running.
    """
    from fray.v2.fray.client import running_actor

    found = _known_actor() or running_actor()
    if found is None:
        raise RuntimeError("current_actor() must be called from the code of an actor; this code belongs to none")
    return found


__all__ = [
    "ActorContext",
    "ActorFuture",
    "ActorGroup",
    "ActorHandle",
    "ActorMethod",
    "HostedActor",
    "_reset_current_actor",
    "_set_current_actor",
    "current_actor",
]
