"""Two places of one cluster that cannot dial one another: only the controller, on a host of its own, reaches both."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from attrs import define, field

from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.model.messages.client import ActorEndpoint, Role
from fray.net.auth import Authorize
from fray.net.transport import Credential, Transport
from fray.net.transports.memory import MemoryNetwork
from fray.net.tunnels.transport import Tunnels
from fray.runtime.actors.server import host_of
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import CallOptions
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.runtime import Runtime

TOKEN = "a-long-random-token"
CONTROLLER = "memory:controller/main"


@define(eq=False)
class Split:
    """``near`` and ``far`` are drivers on hosts of these names, cut off from one another."""

    network: MemoryNetwork
    store: Store
    nursery: trio.Nursery
    rng: random.Random
    controller: RunningController | None = None
    places: dict[str, Runtime] = field(factory=dict)
    life: trio.CancelScope = field(factory=trio.CancelScope)
    _clock: float = 1000.0

    async def start_controller(self) -> None:
        self.life = trio.CancelScope()

        async def run(task_status: trio.TaskStatus[RunningController]) -> None:
            with self.life:
                await run_controller(
                    self.store,
                    self.network.at("controller"),
                    [CONTROLLER],
                    TOKEN,
                    clock=lambda: self._clock + trio.current_time(),
                    rng=self.rng,
                    task_status=task_status,
                )

        self.controller = await self.nursery.start(run)

    def kill_controller(self) -> None:
        """Kill the controller like SIGKILL; its store stays."""
        self.network.crash("controller")
        self.life.cancel()

    async def enter(self, name: str, **options: Any) -> Runtime:
        """A driver on host ``name``; it stays until the end."""

        async def stay(task_status: trio.TaskStatus[Runtime]) -> None:
            async with open_runtime(
                self.network.at(name),
                [CONTROLLER],
                Credential("cluster", TOKEN),
                RuntimeConfig(role=Role.DRIVER, host_directory=lambda: f"memory:{name}/calls", **options),
                rng=self.rng,
            ) as runtime:
                task_status.started(runtime)
                await trio.sleep_forever()

        runtime: Runtime = await self.nursery.start(stay)
        for other in self.places:
            self.network.cut(name, other)
        self.places[name] = runtime
        return runtime

    def tunnels(self, name: str) -> Tunnels:
        tunnels = self.places[name].client.tunnels
        assert tunnels is not None
        return tunnels

    async def serve(self, name: str, instance: Any) -> ActorEndpoint:
        """``instance`` on the host of ``name``."""
        host = host_of(self.places[name])
        await host.listen()
        number = host.register(instance, "a", actor_id="a")
        return ActorEndpoint(
            actor_id="a",
            name="a",
            job_id="",
            namespace="",
            incarnation=host.incarnation,
            number=number,
            addresses=host.addresses,
            key=host.key,
        )

    def way(self, name: str, endpoint: ActorEndpoint) -> Way:
        return Way(self.places[name], endpoint)

    def relayed_tunnels(self) -> int:
        """Half tunnels that the controller holds."""
        gateway: Any = self.controller.gateway if self.controller else None
        return sum(len(link.tunnels.flows) for link in gateway._clients.values())


class Way:
    """Short words for calls of one endpoint."""

    def __init__(self, runtime: Runtime, endpoint: ActorEndpoint) -> None:
        self.caller = runtime.caller
        self.route = runtime.caller.route_to(endpoint)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await self.route.call(method, args, {}, CallOptions(**options))

    def start(self, method: str, *args: Any, **options: Any) -> CallFuture:
        return self.route.start(method, args, {}, CallOptions(**options))


@asynccontextmanager
async def open_split(seed: int = 1) -> AsyncIterator[Split]:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        split = Split(MemoryNetwork(rng), Store.memory(), nursery, rng)
        await split.start_controller()
        await split.enter("near")
        await split.enter("far")
        yield split
        nursery.cancel_scope.cancel()


class TwoEnds:
    """A `Network` whose dialer and whose listener are different places."""

    def __init__(self, near: Tunnels, far: Tunnels) -> None:
        self._near, self._far = near, far

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        return await self._near.dial(address, credential, timeout_s=timeout_s)

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        await self._far.listen(address, authorize, handler, task_status=task_status)


__all__ = ["CONTROLLER", "Split", "TwoEnds", "Way", "open_split", "partial"]
