"""Server of actors that are objects of this process: `ActorServer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio
from attrs import evolve

from fray.api.cluster import Cluster
from fray.errors import FrayError
from fray.model.ids import ActorId, check_name, mint
from fray.model.messages.client import ActorEndpoint, Register, Unregister
from fray.runtime.actors.endpoints import make_endpoint
from fray.runtime.actors.server import host_of

UNREGISTER_WITHIN_S = 1.0


class ActorServer:
    """Serve objects of this process as actors, under names that several servers may share.

    Use as ``async with ActorServer(cluster) as server``, or call `shutdown` yourself; the cluster's end ends it too.

    Args:
        cluster: where the names are registered.
        host: address to bind. Default loopback; beyond it only where the node is networked and authenticated. None:
            where actors that are jobs listen: at a socket of the machine and, where the node is networked, at an
            address that other machines reach.
        port: 0 picks one.
    """

    def __init__(self, cluster: Cluster, host: str | None = "127.0.0.1", port: int = 0) -> None:
        self._runtime = cluster._runtime
        self._host, self._port = host, port
        self._endpoints: dict[ActorId, ActorEndpoint] = {}
        self._address: str | None = None
        self._over = trio.Event()

    async def __aenter__(self) -> ActorServer:
        await self._listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    @property
    def address(self) -> str:
        """``host:port`` once it listens (after entering, or after the first `register`).

        Raises:
            FrayError: it does not listen yet.
        """
        if self._address is None:
            raise FrayError("this ActorServer does not listen yet: enter it with `async with`, or register an actor")
        return self._address

    @property
    def token(self) -> str:
        """What a `FixedResolver` of another process must know to call these actors. Keep it secret."""
        return host_of(self._runtime).key

    async def _listen(self) -> None:
        host = host_of(self._runtime)
        if self._address is None and self._host is None:
            self._address = (await host.listen())[0]
        elif self._address is None and self._host is not None:
            self._address = await host.listen_tcp(self._host, self._port)

    async def register(
        self,
        name: str,
        actor: Any,
        metadata: dict[str, str] | None = None,
        *,
        max_concurrency: int | None = None,
        concurrency_groups: Mapping[str, int] | None = None,
    ) -> ActorId:
        """Serve ``actor`` under ``name``; returns its unique id.

        Args:
            max_concurrency: calls under way at once. Default: any number for a class with an async method, else 1.
            concurrency_groups: name to limit; a method says its group with `fray.method`.

        Raises:
            InvalidRequest: the name has blanks or other forbidden characters, a limit is below 1, or a method names a
                group that has none.
            ConnectionFailed: the conversation with the controller has ended.
        """
        check_name(name, "an actor")
        await self._listen()
        host = host_of(self._runtime)
        actor_id = f"{name}-{mint(self._runtime.rng)}"
        number = host.register(
            actor, name, actor_id=actor_id, max_concurrency=max_concurrency, concurrency_groups=concurrency_groups
        )
        endpoint = make_endpoint(self._runtime, actor_id, name, number, metadata)
        try:
            await self._runtime.link.request(Register(endpoint=endpoint))
        except BaseException:
            host.unregister(number)
            raise
        self._endpoints[actor_id] = evolve(endpoint, key="")
        return actor_id

    async def unregister(self, name: str) -> None:
        """Take every actor this server has under ``name`` (or with this id) off the registry and stop serving it."""
        for actor_id, endpoint in list(self._endpoints.items()):
            if name in (endpoint.name, actor_id):
                del self._endpoints[actor_id]
                await self._runtime.link.request(Unregister(actor_id=actor_id))
                host_of(self._runtime).unregister(endpoint.number)

    async def serve(self) -> None:
        """Serve until `shutdown`, or until cancelled."""
        await self._listen()
        await self._over.wait()

    async def shutdown(self, grace_period: float = 5.0) -> None:
        """Take the names back, let running calls finish for ``grace_period`` seconds, then end them."""
        endpoints, self._endpoints = list(self._endpoints.values()), {}
        with trio.move_on_after(grace_period + UNREGISTER_WITHIN_S, shield=True):
            async with trio.open_nursery() as nursery:
                for endpoint in endpoints:
                    nursery.start_soon(self._retire, endpoint, grace_period)
        self._address = None
        self._over.set()
        self._over = trio.Event()

    async def _retire(self, endpoint: ActorEndpoint, grace_s: float) -> None:
        with trio.move_on_after(UNREGISTER_WITHIN_S):
            try:
                await self._runtime.link.request(Unregister(actor_id=endpoint.actor_id))
            except FrayError:
                pass  # the conversation has ended, and the name with it
        await host_of(self._runtime).drain(endpoint.number, grace_s)


class InProcessActorServer(ActorServer):
    """`ActorServer` that opens no port: only threads and jobs of this process can call its actors."""

    async def _listen(self) -> None:
        if self._address is None:
            self._address = await host_of(self._runtime).listen_local()
