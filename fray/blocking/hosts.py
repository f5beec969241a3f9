"""Hosts of light actors for sync code: one process, many actors."""

from __future__ import annotations

from fray.api.actors import host as native
from fray.blocking.actors import actor_handle
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.groups import actor_group


class ActorHost:
    """Process for light actors; made by `Scope.create_host`. It ends with its scope. As `fray.ActorHost`."""

    def __init__(self, portal: Portal, host: native.ActorHost) -> None:
        self._portal, self._native = portal, host

    @property
    def name(self) -> str:
        return self._native.name

    create_actor = make_blocking(native.ActorHost.create_actor, actor_handle)
    create_actors = make_blocking(native.ActorHost.create_actors, actor_group)

    def __repr__(self) -> str:
        return repr(self._native)
