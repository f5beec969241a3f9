"""Current actor of `FrayClient`, and actors that this process hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fray.api.actors import current_actor
from fray.blocking import ActorServer, Cluster
from fray.errors import FrayError, NameInUse
from fray.v2.fray import convert
from fray.v2.fray.actors import FrayActorHandle, handle_of
from fray.v2.interface import ActorContext, HostedActor, _reset_current_actor, _set_current_actor
from fray.v2.job import JobAlreadyExists
from fray.v2.types import ActorConfig

_hosted: dict[str, ActorContext] = {}
"""Contexts of the actors that this process hosts, by actor id."""


class ThreadShutdownEvent:
    """Event that is set once the end of the actor was requested, by itself, its owner or a cancellation. It has the
    methods of `threading.Event` that wait; `set` requests the end."""

    def __init__(self, event: Any, end: Callable[[], None]) -> None:
        self._event, self._end = event, end

    def set(self) -> None:
        """Request an orderly end of the actor; return at once."""
        if not self.is_set():
            self._end()

    def is_set(self) -> bool:
        return bool(self._event.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait on a thread; return whether the event is set."""
        return bool(self._event.wait_sync(timeout))


def context_of_actor() -> ActorContext | None:
    """Return the actor whose code is running; None if there is none."""
    try:
        me = current_actor.current_actor()
    except FrayError:
        return None
    if (hosted := _hosted.get(me.actor_id)) is not None:
        return hosted
    handle = FrayActorHandle(me.name, me.handle)
    event = ThreadShutdownEvent(me.shutdown_event, me.shutdown)
    return ActorContext(
        handle, me.index, me.group or me.name, shutdown_event=event, terminate=me.shutdown, fail=me.fail
    )


def host(
    cluster: Cluster, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, config: ActorConfig
) -> HostedActor:
    """Make an actor in this process and register it under ``name``.

    Raises:
        BaseException: what its constructor raised.
        JobAlreadyExists: an actor with a process of its own has this name, or is about to have it.
        ValueError: the name is invalid.
    """
    in_job = cluster._runtime.job_id is not None  # the transport of a driver may be in memory, so the actor gets a port
    server = ActorServer(cluster, None) if in_job else ActorServer(cluster)
    handle = FrayActorHandle(name, cluster=cluster)
    hosted: HostedActor | None = None

    def end() -> None:
        # On another thread: `shutdown` waits for the running calls, one of which may be calling this.
        if hosted is not None:
            threading.Thread(target=hosted.shutdown, daemon=True).start()

    # Set as current actor while the constructor runs, which may give its own handle away.
    about = ActorContext(handle, 0, name, terminate=end)
    token = _set_current_actor(about)
    try:
        instance = cls(*args, **kwargs)
    finally:
        _reset_current_actor(token)
    try:
        actor_id = server.register(name, instance, max_concurrency=convert.concurrency(config))
    except NameInUse as taken:
        raise name_in_use_error(name) from taken
    known = handle_of(cluster, name, actor_id, cls, config)
    # Filled in place: the constructor may have copied the handle.
    handle._native, handle._retries = known._native, known._retries
    _hosted[actor_id] = about
    hosted = HostedActor(handle, lambda: _end_hosted(server, actor_id))
    if about.shutdown_event.is_set():  # by the constructor
        end()
    return hosted


def name_in_use_error(name: str) -> JobAlreadyExists:
    """Return the error for a name in use. Actors are not adopted: the class or the arguments may differ."""
    error = JobAlreadyExists(name)
    error.add_note(f"{name!r} is requested for an actor: end the holder of the name, or choose another name")
    return error


def _end_hosted(server: ActorServer, actor_id: str) -> None:
    about = _hosted.pop(actor_id, None)
    if about is not None:
        about.shutdown_event.set()
    server.shutdown()
