"""Resolvers: actor pools by name, from the cluster's registry or from given addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from fray.api.pools.actor_pool import ActorPool, AddressSource, RegistrySource
from fray.model.ids import check_name
from fray.runtime.actors.server import host_of
from fray.runtime.runtime import current

if TYPE_CHECKING:
    from fray.api.cluster import Cluster

__all__ = ["ActorPool", "ClusterResolver", "FixedResolver", "Resolver"]


class Resolver(Protocol):
    """Map from actor names to pools."""

    def lookup(self, name: str) -> ActorPool:
        """Return the pool of the actors of this name, which follows them as they come and go. It may be empty."""
        ...


class ClusterResolver:
    """Resolver that watches the cluster's registry, in the namespace of the cluster connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._runtime = cluster._runtime
        self._pools: dict[str, ActorPool] = {}

    def lookup(self, name: str) -> ActorPool:
        """Return the pool of the actors of this name, at once; it is empty until the registry has answered.

        Raises:
            InvalidRequest: not a valid name of an actor.
        """
        check_name(name, "an actor")
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = ActorPool(name, RegistrySource(self._runtime.namespace), self._runtime)
        return pool


class FixedResolver:
    """Resolver with known addresses instead of a registry: for tests and for endpoints outside the cluster.

    An actor that is not there, or no longer there, is looked for repeatedly.

    Args:
        addresses: actor name to ``"host:port"``, or a list of them.
        token: the `ActorServer.token` of the servers; not needed for servers of this same process.
    """

    def __init__(self, addresses: Mapping[str, str | Sequence[str]], *, token: str | None = None) -> None:
        self._addresses = {
            name: [value] if isinstance(value, str) else list(value) for name, value in addresses.items()
        }
        self._token = token
        self._pools: dict[str, ActorPool] = {}

    def lookup(self, name: str) -> ActorPool:
        """Return the pool of the given addresses of ``name``; empty for a name without addresses."""
        pool = self._pools.get(name)
        if pool is None:
            runtime = current()
            key = self._token if self._token is not None else host_of(runtime).key
            source = AddressSource(tuple(self._addresses.get(name, ())), key)
            pool = self._pools[name] = ActorPool(name, source, runtime)
        return pool
