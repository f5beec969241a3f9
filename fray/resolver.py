"""From a name to the actors behind it: `ClusterResolver` asks the cluster, `FixedResolver` is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import trio

from fray.errors import DeadlineExceeded, FrayError, NoSuchActor
from fray.model.ids import check_name
from fray.model.messages.client import ActorEndpoint, Names
from fray.runtime.context import Runtime, current
from fray.runtime.future import CallFuture

if TYPE_CHECKING:
    from fray.cluster import Cluster

log = logging.getLogger("fray.resolver")

BIND_WITHIN_S = 30.0
KNOWN_WITHIN_S = 5.0
"""How long the first call of a pool waits for the registry's first answer."""


class Resolver(Protocol):
    """Maps actor names to pools."""

    def lookup(self, name: str) -> ActorPool:
        """The actors of this name: a pool that follows them as they come and go. It may be empty."""
        ...


class ActorPool:
    """All actors registered under one name, now and later.

    It follows the registry until the cluster connection ends; `close` stops it earlier.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.name = name
        self._runtime = runtime
        self._endpoints: tuple[ActorEndpoint, ...] = ()
        self._known = trio.Event()
        self._changed = trio.Event()
        self._turn = 0
        self._unwatch: Callable[[], None] = lambda: None

    def _follow(self, key: str) -> None:
        self._unwatch = self._runtime.link.watch(key, self._on_names)

    def _on_names(self, names: Names, blobs: Sequence[Any]) -> None:
        self._set(names.endpoints)

    def _set(self, endpoints: Sequence[ActorEndpoint]) -> None:
        self._endpoints = tuple(endpoints)
        self._known.set()
        self._changed.set()
        self._changed = trio.Event()

    @property
    def size(self) -> int:
        """How many actors are there now, as far as is known here."""
        return len(self._endpoints)

    @property
    def endpoints(self) -> list[ActorEndpoint]:
        """A snapshot of the actors, oldest first."""
        return list(self._endpoints)

    async def wait_for_size(self, min_size: int, timeout: float = 60.0) -> None:
        """Wait until at least ``min_size`` actors are there.

        Raises:
            DeadlineExceeded: (a TimeoutError) not within ``timeout`` seconds.
        """
        with trio.move_on_after(timeout):
            while self.size < min_size:
                await self._changed.wait()
            return
        raise DeadlineExceeded(
            f"pool {self.name!r} has {self.size} of {min_size} actors after {timeout:g} s", size=self.size
        )

    def call(self) -> _Turn:
        """A proxy: each ``await proxy.method(...)`` goes to the next actor in turn."""
        return _Turn(self)

    def broadcast(self) -> _Broadcast:
        """A proxy: ``proxy.method(...)`` calls every actor and returns one future each."""
        return _Broadcast(self)

    def close(self) -> None:
        """Stop following the registry."""
        self._unwatch()

    def _next(self) -> ActorEndpoint:
        if not self._endpoints:
            raise NoSuchActor(f"no actor named {self.name!r} is there; use wait_for_size to wait for one")
        self._turn += 1
        return self._endpoints[(self._turn - 1) % len(self._endpoints)]

    def __repr__(self) -> str:
        return f"<ActorPool {self.name!r} of {self.size}>"


class _Turn:
    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        pool = self._pool

        async def call(*args: Any, **kwargs: Any) -> Any:
            if not pool._known.is_set():
                with trio.move_on_after(KNOWN_WITHIN_S):
                    await pool._known.wait()
            caller = pool._runtime.caller
            return await caller.call(caller.route_to(pool._next()), method, args, kwargs)

        return call


class _Broadcast:
    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool

    def __getattr__(self, method: str) -> Callable[..., list[CallFuture]]:
        if method.startswith("_"):
            raise AttributeError(method)
        pool = self._pool

        def call(*args: Any, **kwargs: Any) -> list[CallFuture]:
            caller = pool._runtime.caller
            return [caller.start(caller.route_to(endpoint), method, args, kwargs) for endpoint in pool.endpoints]

        return call


class ClusterResolver:
    """Looks names up in the cluster's registry, in the namespace of the cluster connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._runtime = cluster._runtime
        self._pools: dict[str, ActorPool] = {}

    def lookup(self, name: str) -> ActorPool:
        """The actors of this name; at once, and empty until the registry has answered.

        Raises:
            InvalidRequest: this can be no actor's name.
        """
        check_name(name, "an actor")
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = ActorPool(self._runtime, name)
            pool._follow(f"name:{self._runtime.namespace}/{name}")
        return pool


class FixedResolver:
    """Known addresses instead of a registry: for tests and for endpoints outside the cluster.

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
        """The pool of fixed addresses for ``name``; empty for a name it was not told."""
        runtime = current()
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = ActorPool(runtime, name)
            key = self._token if self._token is not None else runtime.host.key
            for address in self._addresses.get(name, []):
                runtime.nursery.start_soon(self._bind, pool, runtime, f"tcp:{address}", key)
        return pool

    async def _bind(self, pool: ActorPool, runtime: Runtime, address: str, key: str) -> None:
        """Ask the host there for the actor; one that cannot be reached does not join the pool, and says so."""
        try:
            endpoint = await runtime.caller.bind([address], pool.name, key=key, timeout_s=BIND_WITHIN_S)
        except FrayError as error:
            log.warning("%s at %s: %s", pool.name, address, error)
        else:
            pool._set((*pool.endpoints, endpoint))
