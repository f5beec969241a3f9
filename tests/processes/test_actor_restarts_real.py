"""Actors that keep their state and groups that restart, with real processes that are really killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio

import fray
from fray import ActorConfig, ActorStatus


class Server:
    """Lives in the loop."""

    def __init__(self) -> None:
        self.n = 0

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def keep(self) -> int:
        await fray.current_actor().checkpoint()
        return self.n

    def __fray_checkpoint__(self) -> int:
        return self.n

    def __fray_restore__(self, n: int) -> None:
        self.n = n


class ThreadServer:
    """Lives on its process's main thread."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    def __fray_checkpoint__(self) -> int:
        return self.n

    def __fray_restore__(self, n: int) -> None:
        self.n = n


async def pid_of(cluster: fray.Cluster, actor: fray.ActorHandle) -> int:
    pid = (await cluster.actor_info(actor)).pid
    assert pid is not None
    return pid


async def wait_restarts(cluster: fray.Cluster, **wanted: int) -> None:
    with trio.fail_after(30):
        while {info.name: info.restarts for info in await cluster.list_actors()} != wanted:  # noqa: ASYNC110
            await trio.sleep(0.02)


def test_a_killed_actor_is_back_with_its_state_and_its_name() -> None:
    async def main() -> None:
        async with fray.open_cluster("machine?nodes=1", logs=False) as cluster:
            server = await cluster.create_actor(Server, name="server", max_restarts=3)
            await server.add(5)
            assert await server.keep() == 5
            await server.add(1)
            os.kill(await pid_of(cluster, server), signal.SIGKILL)
            with pytest.raises(fray.ActorDied):
                for _ in range(1_000):
                    await server.add(0)
            assert await (await cluster.get_actor("server")).add(1) == 6
            assert await cluster.actor_status("server") is ActorStatus.READY

    trio.run(main)


def test_an_actor_whose_machine_is_gone_is_back_on_another_with_its_state() -> None:
    async def main() -> None:
        async with fray.open_cluster("machine?nodes=2&cpu=2", logs=False) as cluster:
            server = await cluster.create_actor(Server, name="server", max_restarts=3)
            await server.add(5)
            await server.keep()
            info = await cluster.actor_info(server)
            node = next(node for node in await cluster.nodes() if node.name == info.node)
            assert node.pid is not None
            os.kill(node.pid, signal.SIGKILL)
            await wait_restarts(cluster, server=1)
            assert await server.add.options(retry=3, idempotent=True)(1) == 6
            assert (await cluster.actor_info(server)).node != info.node

    trio.run(main)


def test_siblings_restart_in_order_and_a_sync_one_saves_its_state_when_it_is_ended() -> None:
    async def main() -> None:
        async with fray.open_cluster("machine?nodes=1", logs=False) as cluster, cluster.open_scope("s") as scope:
            group: list[Any] = [fray.child(Server, name="a"), fray.child(ThreadServer, name="b")]
            a, b = await scope.supervise(group, strategy="one_for_all")
            assert [await a.add(1), await b.add(2)] == [1, 2]
            os.kill(await pid_of(cluster, a), signal.SIGKILL)
            await wait_restarts(cluster, a=1, b=1)
            assert [await a.add(0), await b.add(0)] == [0, 2]

    trio.run(main)


def test_an_actor_with_periodic_checkpoints_loses_at_most_one_period() -> None:
    async def main() -> None:
        async with fray.open_cluster("machine?nodes=1", logs=False) as cluster:
            config = ActorConfig(max_restarts=1, checkpoint_every_s=0.05)
            server = await cluster.create_actor(ThreadServer, name="server", actor_config=config)
            await server.add(5)
            await trio.sleep(0.5)
            os.kill(await pid_of(cluster, server), signal.SIGKILL)
            await wait_restarts(cluster, server=1)
            assert await server.add(1) == 6

    trio.run(main)
