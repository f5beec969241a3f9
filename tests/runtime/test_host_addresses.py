"""Addresses that a host of actors registers: what others can dial, as the machine is reached now."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import evolve

import fray
from fray.model.messages.client import ActorEndpoint
from fray.net.transport import Credential
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ActorHostServer, host_of
from fray.runtime.calls.wire import CALLER_KEY_ID
from fray.runtime.runtime import Runtime
from tests.support.ports import free_port


@asynccontextmanager
async def open_host(directory: Path) -> AsyncIterator[ActorHostServer]:
    async with trio.open_nursery() as nursery:
        rng = random.Random(1)
        host = ActorHostServer(WebSocketNetwork(rng), incarnation="h", rng=rng, directory=lambda: str(directory))
        await nursery.start(host.run)
        yield host
        nursery.cancel_scope.cancel()


async def test_a_host_that_other_machines_cannot_reach_opens_no_port(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        assert await host.listen() == (f"unix:{tmp_path}/calls.sock",)
        assert host.public_address == ""


async def test_addresses_follow_that_of_the_machine(tmp_path: Path) -> None:
    own = "127.0.0.2"
    async with open_host(tmp_path) as host:
        host.advertise = lambda: own
        first = await host.listen()
        found = re.fullmatch(r"tls:127\.0\.0\.2:(\d+)#([0-9a-f]{64})", first[1])
        assert found is not None
        assert first == (f"unix:{tmp_path}/calls.sock", host.public_address)
        own = "127.0.0.3"
        assert (await host.listen())[1] == f"tls:127.0.0.3:{found[1]}#{found[2]}"
        credential = Credential(CALLER_KEY_ID, host.key)
        (await WebSocketNetwork().dial(host.public_address, credential, timeout_s=5)).abort()


async def test_a_host_that_becomes_reachable_opens_its_port_then(tmp_path: Path) -> None:
    own = ""
    async with open_host(tmp_path) as host:
        host.advertise = lambda: own
        assert len(await host.listen()) == 1
        own = "127.0.0.2"
        assert len(await host.listen()) == 2
        assert len(await host.listen()) == 2
        own = ""
        assert host.public_address == ""


async def test_loopback_is_not_registered_where_callers_may_be_on_other_machines(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        unix = await host.listen_local()
        place = await host.listen_tcp()
        assert host.addresses == (unix, f"tcp:{place}")
        host.is_networked = True
        assert await host.listen() == (unix,), "opened once, and kept"
        host.advertise = lambda: "10.0.0.7"
        assert await host.listen() == (unix, host.public_address)


async def test_a_server_on_all_addresses_is_named_by_the_one_that_others_reach(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        host.advertise = lambda: "10.0.0.7"
        assert re.fullmatch(r"10\.0\.0\.7:\d+#[0-9a-f]{64}", await host.listen_tcp("0.0.0.0"))
        assert re.fullmatch(r"127\.0\.0\.1:\d+", await host.listen_tcp("127.0.0.1"))
        host.has_tls = False
        assert re.fullmatch(r"10\.0\.0\.7:\d+", await host.listen_tcp("0.0.0.0"))


class Adder:
    def add(self, a: int, b: int) -> int:
        return a + b


async def test_an_actor_server_has_an_address_for_other_machines_where_they_reach_its_process() -> None:
    async with fray.open_cluster("local", logs=False) as cluster:
        host = host_of(cluster._runtime)
        async with fray.ActorServer(cluster) as closed:
            assert re.fullmatch(r"127\.0\.0\.1:\d+", closed.address)
        host.is_networked, host.advertise = True, lambda: "127.0.0.2"
        for port in (0, free_port()):
            async with fray.ActorServer(cluster, port=port) as server:
                assert re.fullmatch(rf"127\.0\.0\.2:{port or '[0-9]+'}#[0-9a-f]{{64}}", server.address)
                await server.register("adder", Adder())
                assert f"tls:{server.address}" in host.addresses
                resolver = fray.FixedResolver({"adder": server.address}, token=server.token)
                pool = resolver.lookup("adder")
                await pool.wait_for_size(1, timeout=5)
                assert await pool.call().add(1, 2) == 3


async def test_actors_are_registered_again_when_the_controller_sees_their_process_elsewhere() -> None:
    async with fray.open_cluster("local", logs=False) as cluster:
        runtime = cluster._runtime
        host = host_of(runtime)
        own = "127.0.0.2"
        host.is_networked, host.advertise = True, lambda: own
        async with fray.ActorServer(cluster) as server, open_watch(runtime, "adder") as reports:
            await server.register("adder", Adder(), metadata={"kind": "sum"})
            await server.register("removed", Adder())
            await server.unregister("removed")
            before = await report_of(reports, host.addresses)
            pool = fray.ClusterResolver(cluster).lookup("adder")
            await pool.wait_for_size(1, timeout=5)

            own = "127.0.0.3"
            # As the welcome of a new connection says it.
            runtime.client._channel.seen_from = own
            runtime.client.on_resumed()
            after = await report_of(reports, host.addresses)
            assert after == evolve(before, addresses=host.addresses)
            assert host.addresses[1].startswith("tls:127.0.0.3:")
            (member,) = pool.endpoints
            assert member.addresses == host.addresses, "pools follow it, too"
            assert await cluster.list_actors("removed") == []
        assert await cluster.list_actors("adder") == []


@asynccontextmanager
async def open_watch(runtime: Runtime, name: str) -> AsyncIterator[trio.MemoryReceiveChannel[ActorEndpoint]]:
    """Endpoints of ``name``, as the registry reports them."""
    send, receive = trio.open_memory_channel[ActorEndpoint](100)
    unwatch = runtime.client.names.watch(
        f"name:{runtime.namespace}/{name}", lambda names, blobs: [send.send_nowait(each) for each in names.endpoints]
    )
    yield receive
    unwatch()


async def report_of(
    reports: trio.MemoryReceiveChannel[ActorEndpoint], addresses: tuple[str, ...]
) -> ActorEndpoint | None:
    with trio.fail_after(5):
        async for endpoint in reports:
            if endpoint.addresses == addresses:
                return endpoint
    return None
