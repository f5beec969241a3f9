"""Registry of actors for sync code: the registered actors by name."""

from __future__ import annotations

from typing import Any

from fray.api.pools.actor_pool import ActorPool, RegistrySource
from fray.blocking.bridge.portal import Portal
from fray.model.ids import check_name
from fray.model.messages.client import ActorEndpoint


class Metadata:
    """Registered actors by name, in the namespace of the connection: ``cluster.metadata``.

    `ActorServer` registers actors and removes them; the end of a job removes its own. To call actors, use a resolver.
    """

    def __init__(self, portal: Portal, cluster: Any) -> None:
        self._portal, self._native = portal, cluster

    def lookup(self, name: str) -> ActorEndpoint | None:
        """Return the actor that has been registered under this name for the longest time; None if none is. Raises
        InvalidRequest.
        """
        return next(iter(self.lookup_all(name)), None)

    def lookup_all(self, name: str) -> list[ActorEndpoint]:
        """Return all actors of this name, oldest first. Raises InvalidRequest: not a valid name of an actor."""
        source = RegistrySource(self._native.namespace)
        pool: ActorPool = self._portal.run(ActorPool, check_name(name, "an actor"), source, self._native._runtime)
        try:
            self._portal.call(pool.wait_known)
            return self._portal.run(lambda: pool.endpoints)
        finally:
            self._portal.run(pool.close)

    def list_actors(self, prefix: str = "") -> list[ActorEndpoint]:
        """Return all actors whose names start with ``prefix``."""
        names = {info.name: None for info in self._portal.call(self._native.list_actors, prefix)}
        return [endpoint for name in names for endpoint in self.lookup_all(name)]
