"""What an actor of `FrayClient` knows of itself, and actors that a process hosts."""

from __future__ import annotations

import threading
from typing import Any

from fray.api.actors import current_actor
from fray.blocking import ActorServer, Cluster
from fray.errors import FrayError, NameInUse
from fray.v2.fray import convert
from fray.v2.fray.actors import FrayActorHandle, handle_of
from fray.v2.interface import ActorContext, HostedActor, _reset_current_actor, _set_current_actor
from fray.v2.job import JobAlreadyExists
from fray.v2.types import ActorConfig

LOOPBACK = "127.0.0.1"
"""Who cannot reach it comes by the relay."""

_hosted: dict[str, ActorContext] = {}
"""By actor id: of those this process hosts."""


class ThreadShutdownEvent:
    """Set once the actor has been asked to end, by itself, its owner or a cancellation; in the shape of
    `threading.Event`."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_set(self) -> bool:
        return bool(self._event.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it on a thread; whether it is set."""
        return bool(self._event.wait_sync(timeout))


def context_of_actor() -> ActorContext | None:
    """The actor whose code runs; None: none."""
    try:
        me = current_actor.current_actor()
    except FrayError:
        return None
    if (hosted := _hosted.get(me.actor_id)) is not None:
        return hosted
    handle = FrayActorHandle(me.name, me.handle)
    event = ThreadShutdownEvent(me.shutdown_event)
    return ActorContext(
        handle, me.index, me.group or me.name, shutdown_event=event, terminate=me.shutdown, fail=me.fail
    )


def host(
    cluster: Cluster, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, config: ActorConfig
) -> HostedActor:
    """Make it here, and let it be called under ``name``.

    Raises:
        BaseException: what its constructor raised.
        JobAlreadyExists: an actor that is a job of its own has this name, and is on its way.
        ValueError: this can be no name.
    """
    in_job = cluster._runtime.job_id is not None  # a driver's own place may be its memory: there it takes a port
    server, handle = ActorServer(cluster, None if in_job else LOOPBACK), FrayActorHandle(name, cluster=cluster)
    about = ActorContext(handle, 0, name)
    token = _set_current_actor(about)
    try:
        instance = cls(*args, **kwargs)
    finally:
        _reset_current_actor(token)
    try:
        actor_id = server.register(name, instance, max_concurrency=convert.concurrency(config))
    except NameInUse as taken:
        raise taken_by_actor(name) from taken
    known = handle_of(cluster, name, actor_id, cls, config)
    handle._native, handle._retries = known._native, known._retries
    _hosted[actor_id] = about
    hosted = HostedActor(handle, lambda: _end(server, actor_id))
    about._terminate = lambda: threading.Thread(target=hosted.shutdown, daemon=True).start()
    return hosted


def taken_by_actor(name: str) -> JobAlreadyExists:
    """An actor cannot be adopted: it may be of another class, or made of other arguments."""
    error = JobAlreadyExists(name)
    error.add_note(f"{name!r} shall be an actor: end the one that has the name, or choose another")
    return error


def _end(server: ActorServer, actor_id: str) -> None:
    about = _hosted.pop(actor_id, None)
    if about is not None:
        about.shutdown_event.set()
    server.shutdown()
