"""From a name to the actors behind it, for sync code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fray import resolver as native
from fray.blocking.cluster import Cluster, current_cluster
from fray.blocking.futures import ActorFuture
from fray.blocking.portal import Portal
from fray.model.messages.client import ActorEndpoint


class Resolver(Protocol):
    """Maps actor names to pools."""

    def lookup(self, name: str) -> ActorPool:
        """The actors of this name: a pool that follows them as they come and go. It may be empty."""
        ...


class ActorPool:
    """All actors registered under one name, now and later; for any thread."""

    def __init__(self, portal: Portal, pool: native.ActorPool) -> None:
        self._portal, self._native = portal, pool

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def size(self) -> int:
        """How many actors are there now, as far as is known here."""
        return self._native.size

    @property
    def endpoints(self) -> list[ActorEndpoint]:
        """A snapshot of the actors, oldest first."""
        return self._native.endpoints

    def wait_for_size(self, min_size: int, timeout: float = 60.0) -> None:
        """Wait until at least ``min_size`` actors are there. Raises DeadlineExceeded (a TimeoutError)."""
        self._portal.call(self._native.wait_for_size, min_size, timeout)

    def call(self) -> _Turn:
        """A proxy: each ``proxy.method(...)`` goes to the next actor in turn, and waits for its answer."""
        return _Turn(self)

    def broadcast(self) -> _Broadcast:
        """A proxy: ``proxy.method(...)`` calls every actor and returns one future each."""
        return _Broadcast(self)

    def close(self) -> None:
        """Stop following the registry."""
        self._portal.run(self._native.close)

    def __repr__(self) -> str:
        return repr(self._native)


class _Turn:
    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._pool._native.call(), method)
        return lambda *args, **kwargs: self._pool._portal.call(lambda: call(*args, **kwargs))


class _Broadcast:
    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool

    def __getattr__(self, method: str) -> Callable[..., list[ActorFuture]]:
        call = getattr(self._pool._native.broadcast(), method)
        portal = self._pool._portal

        def start(*args: Any, **kwargs: Any) -> list[ActorFuture]:
            return portal.run(lambda: [ActorFuture(answer, portal) for answer in call(*args, **kwargs)])

        return start


class ClusterResolver:
    """Looks names up in the cluster's registry, in the namespace of the cluster connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._portal = cluster._portal
        self._native = native.ClusterResolver(cluster._native)

    def lookup(self, name: str) -> ActorPool:
        """The actors of this name; at once, and empty until the registry has answered. Raises InvalidRequest."""
        return ActorPool(self._portal, self._portal.run(self._native.lookup, name))


class FixedResolver:
    """Known addresses instead of a registry: for tests and for endpoints outside the cluster.

    Args:
        addresses: actor name to ``"host:port"``, or a list of them.
        token: the `ActorServer.token` of the servers; not needed for servers of this same process.
        cluster: through which the calls are made. Default `current_cluster()`.
    """

    def __init__(
        self,
        addresses: Mapping[str, str | Sequence[str]],
        *,
        token: str | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._portal = (cluster or current_cluster())._portal
        self._native = native.FixedResolver(addresses, token=token)

    def lookup(self, name: str) -> ActorPool:
        """The pool of fixed addresses for ``name``; empty for a name it was not told."""
        return ActorPool(self._portal, self._portal.run(self._native.lookup, name))
