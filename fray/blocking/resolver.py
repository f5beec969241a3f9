"""Resolvers for sync code: actor pools by name, from the cluster's registry or from given addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from fray.api import resolver as native
from fray.api.pools.actor_pool import ActorPool as NativePool
from fray.api.pools.actor_pool import Policy
from fray.blocking.bridge import pickling
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import Portal
from fray.blocking.cluster import Cluster
from fray.blocking.futures import ActorFuture, BroadcastFuture
from fray.blocking.open import current_cluster
from fray.model.messages.client import ActorEndpoint

T = TypeVar("T")


class Resolver(Protocol):
    """Map from actor names to pools."""

    def lookup(self, name: str) -> ActorPool[Any]:
        """Return the pool of the actors of this name, which follows them as they come and go. It may be empty."""
        ...


class ActorPool(Generic[T]):
    """All actors registered under one name, now and later; usable on any thread. ``T``, for type checkers, is
    their class.
    """

    def __init__(self, portal: Portal, pool: NativePool) -> None:
        self._portal, self._native = portal, pool

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as a pool that follows the same name where it arrives."""
        return _arrived, (self._native,)

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def size(self) -> int:
        """Number of actors at present, as far as is known here."""
        return self._native.size

    @property
    def endpoints(self) -> list[ActorEndpoint]:
        """Snapshot of the actors, oldest first."""
        return self._native.endpoints

    wait_for_size = make_blocking(NativePool.wait_for_size)

    def call(self, policy: Policy = "round_robin") -> T:
        """Return a proxy: each ``proxy.method(...)`` calls one of the actors and waits; also
        ``proxy.method.remote(...)`` and ``proxy.method.options(...)``. As `fray.ActorPool.call`.
        """
        return cast(T, PoolCall(self._portal, self._portal.run(self._native.call, policy)))

    def broadcast(self) -> BroadcastHandle[T]:
        """Return a proxy: ``proxy.method(...)`` calls every actor and returns one future each, whose ``result()`` is
        what the actor returned, or the exception of its call.
        """
        return BroadcastHandle(self._portal, self._native.broadcast())

    def on_size(self, callback: Callable[[int], object]) -> Callable[[], None]:
        """Call ``callback(size)`` in the loop's thread when actors come or go; return a function that stops it."""
        end = self._portal.run(self._native.on_size, callback)
        return lambda: self._portal.run(end)

    def close(self) -> None:
        """Stop following the registry."""
        self._portal.run(self._native.close)

    def __repr__(self) -> str:
        return repr(self._native)


def _arrived(pool: NativePool) -> ActorPool[Any]:
    """Return the pool for sync code, followed from now on: `ActorPool.size` may then be read on any thread."""

    def follow(portal: Portal) -> ActorPool[Any]:
        pool._follow()
        return ActorPool(portal, pool)

    return pickling.unpickle_in_loop(follow)


class PoolCall:
    """Proxy of the actors of a pool, which chooses one for each call."""

    def __init__(self, portal: Portal, proxy: Any) -> None:
        self._portal, self._native = portal, proxy

    def __getattr__(self, name: str) -> PoolMethod:
        return PoolMethod(self._portal, getattr(self._native, name))


class PoolMethod:
    """Method of the chosen actor."""

    def __init__(self, portal: Portal, method: Any) -> None:
        self._portal, self._native = portal, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and wait for its result. Raises as `ActorMethod`, and NoSuchActor: the pool is empty."""
        return self._portal.call(lambda: self._native(*args, **kwargs))

    def remote(self, *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Make the call and return a future of its result."""
        return self._portal.run(lambda: ActorFuture(self._native.start(*args, **kwargs), self._portal))

    def options(self, **options: Any) -> PoolMethod:
        """Return the same method with other call options: those of `fray.api.actors.handle.ActorMethod.options`."""
        return PoolMethod(self._portal, self._native.options(**options))


class BroadcastHandle(Generic[T]):
    """Proxy of all actors of a pool."""

    def __init__(self, portal: Portal, broadcast: Any) -> None:
        self._portal, self._native = portal, broadcast

    def options(self, **options: Any) -> BroadcastHandle[T]:
        """Return the same proxy with other options: those of `fray.ActorPool.broadcast`."""
        return BroadcastHandle(self._portal, self._native.options(**options))

    def __getattr__(self, method_name: str) -> Callable[..., list[ActorFuture[Any]]]:
        method, portal = getattr(self._native, method_name), self._portal

        def call_all(*args: Any, **kwargs: Any) -> list[ActorFuture[Any]]:
            return portal.run(lambda: [BroadcastFuture(call, portal) for call in method(*args, **kwargs)])

        return call_all


class ClusterResolver:
    """Resolver that watches the cluster's registry, in the namespace of the cluster connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._portal = cluster._portal
        self._native = native.ClusterResolver(cluster._native)

    def lookup(self, name: str) -> ActorPool[Any]:
        """Return the pool of the actors of this name; it may be empty: `ActorPool.wait_for_size` waits for actors.

        Waits for the registry's first answer, so that `ActorPool.size` and `ActorPool.broadcast` use the present
        actors. Raises InvalidRequest: not a valid name of an actor.
        """
        pool = self._portal.run(self._native.lookup, name)
        self._portal.call(pool.wait_known)
        return ActorPool(self._portal, pool)


class FixedResolver:
    """Resolver with known addresses instead of a registry: for tests and for endpoints outside the cluster.

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

    def lookup(self, name: str) -> ActorPool[Any]:
        """Return the pool of the given addresses of ``name``; empty for a name without addresses."""
        return ActorPool(self._portal, self._portal.run(self._native.lookup, name))
