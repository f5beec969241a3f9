"""A caller and hosts on a network in memory, and a directory that says what the test wants."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import define, field

from fray.model.messages.client import ActorEndpoint, Names
from fray.model.specs import EndReason, Outcome
from fray.net.transports.memory import InFlightMessage, MemoryNetwork, MessageFault
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls.caller import Caller
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.route import CallOptions, Route
from fray.runtime.threads.executor import InlineExecutor, SerialExecutor

OnNames = Callable[[Names, Sequence[bytes]], None]


class FakeDirectory:
    """A directory whose words are the test's."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Names, Sequence[bytes]]] = {}
        self.listeners: dict[str, list[OnNames]] = {}
        self.is_away = False

    def watch(self, key: str, on_names: OnNames) -> Callable[[], None]:
        self.listeners.setdefault(key, []).append(on_names)
        if key in self.known:
            on_names(*self.known[key])
        return lambda: self.listeners[key].remove(on_names)

    def say(
        self,
        key: str,
        *endpoints: ActorEndpoint,
        ended: Outcome | None = None,
        error: bytes | None = None,
        may_return: bool = False,
    ) -> None:
        names = Names(key=key, endpoints=endpoints, ended=ended, may_return=may_return)
        self.known[key] = (names, [error] if error is not None else [])
        for listener in list(self.listeners.get(key, [])):
            listener(*self.known[key])

    def end(self, key: str, cause: EndReason, message: str = "", error: bytes | None = None) -> None:
        self.say(key, ended=Outcome(cause=cause, message=message), error=error)


def inline(name: str, threads: int) -> SerialExecutor:
    return InlineExecutor()


@define(eq=False)
class Stage:
    """Everything of one test; `caller` sits on host ``driver`` of the network, each `Host` on its own."""

    network: MemoryNetwork
    directory: FakeDirectory
    caller: Caller
    nursery: trio.Nursery
    rng: random.Random
    hosts: dict[str, ActorHostServer] = field(factory=dict)
    scopes: dict[str, trio.CancelScope] = field(factory=dict)

    async def host(
        self, incarnation: str, *, machine: str = "", make_runner: Any = inline, **options: Any
    ) -> ActorHostServer:
        """A host that runs and listens, at ``memory:MACHINE``."""
        machine = machine or incarnation
        host = ActorHostServer(
            self.network.at(machine),
            incarnation=incarnation,
            rng=self.rng,
            directory=lambda: f"memory:{machine}",
            make_executor=make_runner,
            **options,
        )
        scope = self.scopes[incarnation] = trio.CancelScope()

        async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            with scope:
                await host.run(task_status=task_status)

        await self.nursery.start(run)
        await host.listen()
        self.hosts[incarnation] = host
        return host

    def endpoint(self, host: ActorHostServer, number: int, actor_id: str = "a") -> ActorEndpoint:
        return ActorEndpoint(
            actor_id=actor_id,
            name=actor_id,
            job_id="",
            namespace="",
            incarnation=host.incarnation,
            number=number,
            addresses=host.addresses,
            key=host.key,
        )

    async def actor(self, instance: Any, incarnation: str = "h1", **options: Any) -> Way:
        """``instance`` on a new host, and the way to it by its endpoint."""
        host = await self.host(incarnation)
        number = host.register(instance, "a", actor_id="a", **options)
        return self.way(self.caller.route_to(self.endpoint(host, number)))

    def way(self, route: Route) -> Way:
        return Way(self.caller, route)

    def kill(self, incarnation: str) -> None:
        """Kill the host like SIGKILL: listeners and connections are lost without a goodbye."""
        machine = self.hosts[incarnation].addresses[0].removeprefix("memory:")
        self.network.crash(machine)
        self.scopes[incarnation].cancel()


@define
class Way:
    """Short words for calls on one route."""

    caller: Caller
    route: Route

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await self.route.call(method, args, {}, CallOptions(**options))

    def start(self, method: str, *args: Any, **options: Any) -> CallFuture:
        return self.route.start(method, args, {}, CallOptions(**options))


@asynccontextmanager
async def open_stage(seed: int = 1) -> AsyncIterator[Stage]:
    rng = random.Random(seed)
    network = MemoryNetwork(rng)
    directory = FakeDirectory()
    caller = Caller(network.at("driver"), directory, session="driver", rng=rng)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller.run)
        yield Stage(network, directory, caller, nursery, rng)
        nursery.cancel_scope.cancel()


def cut_at(number: int, fate: MessageFault) -> Callable[[InFlightMessage], MessageFault]:
    """A fault hook: the n-th message of the whole test meets ``fate``, all others arrive."""
    seen = 0

    def on_hop(hop: InFlightMessage) -> MessageFault:
        nonlocal seen
        seen += 1
        return fate if seen == number else MessageFault.DELIVER

    return on_hop
