"""Hosts of light actors for sync code: one process, many actors."""

from __future__ import annotations

from typing import Any

from fray.api.actors import host as native
from fray.blocking.actors import ActorHandle
from fray.blocking.bridge.portal import Portal
from fray.blocking.groups import ActorGroup


class ActorHost:
    """A process for light actors; made by `Scope.create_host`. It ends with its scope. As `fray.ActorHost`."""

    def __init__(self, portal: Portal, host: native.ActorHost) -> None:
        self._portal, self._native = portal, host

    @property
    def name(self) -> str:
        return self._native.name

    def create_actor(self, cls: type, *args: Any, **kwargs: Any) -> ActorHandle:
        """Create ``cls(*args, **kwargs)`` in this host's process. As `fray.ActorHost.create_actor`."""
        return ActorHandle(self._portal.call(lambda: self._native.create_actor(cls, *args, **kwargs)))

    def create_actors(self, cls: type, *args: Any, count: int, **kwargs: Any) -> ActorGroup:
        """Create the same light actor ``count`` times, in one message. As `fray.ActorHost.create_actors`."""
        return ActorGroup(self._portal.call(lambda: self._native.create_actors(cls, *args, count=count, **kwargs)))

    def __repr__(self) -> str:
        return repr(self._native)
