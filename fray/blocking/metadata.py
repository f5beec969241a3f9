"""Who is registered under which name, for sync code: the part of the registry that may be read."""

from __future__ import annotations

from typing import Any

from fray.api.pools.actor_pool import ActorPool, RegistrySource
from fray.blocking.bridge.portal import Portal
from fray.model.ids import check_name
from fray.model.messages.client import ActorEndpoint


class Metadata:
    """The names of a cluster's actors, in the namespace of the connection: ``cluster.metadata``.

    `ActorServer` registers and takes back; the end of a job takes back all of its own. To call actors, use a resolver.
    """

    def __init__(self, portal: Portal, cluster: Any) -> None:
        self._portal, self._native = portal, cluster

    def lookup(self, name: str) -> ActorEndpoint | None:
        """The actor that has had this name for longest; None if none has. Raises InvalidRequest."""
        return next(iter(self.lookup_all(name)), None)

    def lookup_all(self, name: str) -> list[ActorEndpoint]:
        """All actors of this name, oldest first. Raises InvalidRequest: this can be no actor's name."""
        source = RegistrySource(self._native.namespace)
        pool = self._portal.run(ActorPool, check_name(name, "an actor"), source, self._native._runtime)
        try:
            self._portal.call(pool.wait_known)
            return self._portal.run(lambda: pool.endpoints)
        finally:
            self._portal.run(pool.close)

    def list_actors(self, prefix: str = "") -> list[ActorEndpoint]:
        """All actors whose names begin so."""
        names = {info.name: None for info in self._portal.call(self._native.list_actors, prefix)}
        return [endpoint for name in names for endpoint in self.lookup_all(name)]
