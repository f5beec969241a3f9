"""Server of actors that are objects of this process: `ActorServer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio
from attrs import evolve

from fray.api.cluster import Cluster
from fray.errors import FrayError
from fray.model.ids import ActorId, check_name, mint
from fray.model.messages.client import ActorEndpoint
from fray.runtime.actors.endpoints import make_endpoint, registrations_of
from fray.runtime.actors.server import EVERYWHERE, host_of

AUTO = "auto"
"""Value of ``host`` for the address that suits the cluster."""
LOOPBACK = "127.0.0.1"
UNREGISTER_WITHIN_S = 1.0


class ActorServer:
    """Server of actors that are objects of this process, under names that several servers may share.

    Use it as ``async with ActorServer(cluster) as server``, or call `shutdown`; the end of the cluster ends it too.

    Args:
        cluster: where the names are registered.
        host: address to bind. Default: where the controller is another machine and sees this one at an address of its
            own, that address, with TLS, and a socket of the machine; else loopback. ``"127.0.0.1"`` is closed to other
            machines, which call through the relay. None: the addresses of actors that are jobs, also on one machine.
        port: default 0: a free one.
    """

    def __init__(self, cluster: Cluster, host: str | None = AUTO, port: int = 0) -> None:
        self._runtime = cluster._runtime
        self._host, self._port = host, port
        self._endpoints: dict[ActorId, ActorEndpoint] = {}
        self._address: str | None = None
        self._stopped = trio.Event()

    async def __aenter__(self) -> ActorServer:
        await self._listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    @property
    def address(self) -> str:
        """``host:port``, with TLS ``host:port#fingerprint``, once the server listens (after entering it, or after the
        first `register`).

        Raises:
            FrayError: it does not listen yet.
        """
        if self._address is None:
            raise FrayError("this ActorServer does not listen yet: enter it with `async with`, or register an actor")
        return self._address

    @property
    def token(self) -> str:
        """Secret with which a `FixedResolver` of another process may call these actors."""
        return host_of(self._runtime).key

    async def _listen(self) -> None:
        if self._address is not None:
            return
        host = host_of(self._runtime)
        if host.is_networked:
            # For callers on this machine: an address of loopback is not registered.
            await host.listen_local()
        if self._host is None:
            self._address = (await host.listen())[0]
        elif self._host != AUTO:
            self._address = await host.listen_tcp(self._host, self._port)
        elif not host.advertise():
            self._address = await host.listen_tcp(LOOPBACK, self._port)
        elif self._port:
            self._address = await host.listen_tcp(EVERYWHERE[":" in host.advertise()], self._port)
        else:
            await host.listen()
            self._address = host.public_address.partition(":")[2]

    async def register(
        self,
        name: str,
        actor: Any,
        metadata: dict[str, str] | None = None,
        *,
        max_concurrency: int | None = None,
        concurrency_groups: Mapping[str, int] | None = None,
    ) -> ActorId:
        """Serve ``actor`` under ``name``; return its unique id.

        Args:
            max_concurrency: calls that may run at once. Default: any number for a class with an async method, else 1.
            concurrency_groups: limit of each group by its name; `fray.method` puts a method into a group.

        Raises:
            InvalidRequest: the name has blanks or other forbidden characters, a limit is below 1, or a method is
                in a group without a limit.
            ConnectionFailed: the connection to the controller has ended.
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
            await registrations_of(self._runtime).add(endpoint)
        except BaseException:
            host.unregister(number)
            raise
        self._endpoints[actor_id] = evolve(endpoint, key="")
        return actor_id

    async def unregister(self, name: str) -> None:
        """Remove every actor of this server with the name (or id) ``name`` from the registry, and stop serving it."""
        for actor_id, endpoint in list(self._endpoints.items()):
            if name in (endpoint.name, actor_id):
                del self._endpoints[actor_id]
                await registrations_of(self._runtime).remove(actor_id)
                host_of(self._runtime).unregister(endpoint.number)

    async def serve(self) -> None:
        """Serve until `shutdown`, or until cancelled."""
        await self._listen()
        await self._stopped.wait()

    async def shutdown(self, grace_period: float = 5.0) -> None:
        """Unregister the actors, let running calls finish for ``grace_period`` seconds, then cancel them."""
        endpoints, self._endpoints = list(self._endpoints.values()), {}
        with trio.move_on_after(grace_period + UNREGISTER_WITHIN_S, shield=True):
            async with trio.open_nursery() as nursery:
                for endpoint in endpoints:
                    nursery.start_soon(self._retire, endpoint, grace_period)
        self._address = None
        self._stopped.set()
        self._stopped = trio.Event()

    async def _retire(self, endpoint: ActorEndpoint, grace_s: float) -> None:
        with trio.move_on_after(UNREGISTER_WITHIN_S):
            try:
                await registrations_of(self._runtime).remove(endpoint.actor_id)
            except FrayError:
                pass  # the connection has ended, and the registration with it
        await host_of(self._runtime).drain(endpoint.number, grace_s)


class InProcessActorServer(ActorServer):
    """`ActorServer` that opens no port: only threads and jobs of this process can call its actors."""

    async def _listen(self) -> None:
        if self._address is None:
            self._address = await host_of(self._runtime).listen_local()
