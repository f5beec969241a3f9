"""From a name to the actors behind it, for sync code."""

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
    """Maps actor names to pools."""

    def lookup(self, name: str) -> ActorPool[Any]:
        """The actors of this name: a pool that follows them as they come and go. It may be empty."""
        ...


class ActorPool(Generic[T]):
    """All actors registered under one name, now and later; for any thread. ``T``, for type checkers, is their class."""

    def __init__(self, portal: Portal, pool: NativePool) -> None:
        self._portal, self._native = portal, pool

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it arrives it follows the same names from there."""
        return _arrived, (self._native,)

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

    wait_for_size = make_blocking(NativePool.wait_for_size)

    def call(self, policy: Policy = "round_robin") -> T:
        """A proxy: each ``proxy.method(...)`` goes to one of the actors, and waits for its answer; also
        ``proxy.method.remote(...)`` and ``proxy.method.options(...)``. As `fray.ActorPool.call`."""
        return cast(T, PoolCall(self._portal, self._portal.run(self._native.call, policy)))

    def broadcast(self) -> BroadcastHandle[T]:
        """A proxy: ``proxy.method(...)`` calls every actor and returns one future each, whose ``result()`` is what the
        actor returned, or the exception that its call came to."""
        return BroadcastHandle(self._portal, self._native.broadcast())

    def on_size(self, callback: Callable[[int], object]) -> Callable[[], None]:
        """Have ``callback(size)`` called in the loop's thread when actors come or go; call the result to end that."""
        end = self._portal.run(self._native.on_size, callback)
        return lambda: self._portal.run(end)

    def close(self) -> None:
        """Stop following the registry."""
        self._portal.run(self._native.close)

    def __repr__(self) -> str:
        return repr(self._native)


def _arrived(pool: NativePool) -> ActorPool[Any]:
    """It is followed from now on: `ActorPool.size` looks at it from any thread."""

    def follow(portal: Portal) -> ActorPool[Any]:
        pool._follow()
        return ActorPool(portal, pool)

    return pickling.unpickle_in_loop(follow)


class PoolCall:
    """One of a pool's actors, chosen anew for each call. As a handle."""

    def __init__(self, portal: Portal, turn: Any) -> None:
        self._portal, self._native = portal, turn

    def __getattr__(self, name: str) -> TurnMethod:
        return TurnMethod(self._portal, getattr(self._native, name))


class TurnMethod:
    """A method of whichever actor is chosen."""

    def __init__(self, portal: Portal, method: Any) -> None:
        self._portal, self._native = portal, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and wait for its result. Raises as `ActorMethod`, and NoSuchActor: nobody is there."""
        return self._portal.call(lambda: self._native(*args, **kwargs))

    def remote(self, *args: Any, **kwargs: Any) -> ActorFuture[Any]:
        """Make the call and return a future of its result."""
        return self._portal.run(lambda: ActorFuture(self._native.start(*args, **kwargs), self._portal))

    def options(self, **options: Any) -> TurnMethod:
        """The same method with other options: those of `fray.api.actors.handle.ActorMethod.options`."""
        return TurnMethod(self._portal, self._native.options(**options))


class BroadcastHandle(Generic[T]):
    """All actors of a pool at once."""

    def __init__(self, portal: Portal, broadcast: Any) -> None:
        self._portal, self._native = portal, broadcast

    def options(self, **options: Any) -> BroadcastHandle[T]:
        """The same with other options: those of `fray.ActorPool.broadcast`."""
        return BroadcastHandle(self._portal, self._native.options(**options))

    def __getattr__(self, method_name: str) -> Callable[..., list[ActorFuture[Any]]]:
        method, portal = getattr(self._native, method_name), self._portal

        def call_all(*args: Any, **kwargs: Any) -> list[ActorFuture[Any]]:
            return portal.run(lambda: [BroadcastFuture(answer, portal) for answer in method(*args, **kwargs)])

        return call_all


class ClusterResolver:
    """Looks names up in the cluster's registry, in the namespace of the cluster connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._portal = cluster._portal
        self._native = native.ClusterResolver(cluster._native)

    def lookup(self, name: str) -> ActorPool[Any]:
        """The actors of this name; none is no error: `ActorPool.wait_for_size` waits for some.

        It waits for the registry's first answer, so that `ActorPool.size` and `ActorPool.broadcast` mean those that
        are there now. Raises InvalidRequest: this can be no actor's name.
        """
        pool = self._portal.run(self._native.lookup, name)
        self._portal.call(pool.wait_known)
        return ActorPool(self._portal, pool)


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

    def lookup(self, name: str) -> ActorPool[Any]:
        """The pool of fixed addresses for ``name``; empty for a name it was not told."""
        return ActorPool(self._portal, self._portal.run(self._native.lookup, name))
