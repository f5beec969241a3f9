"""Actors on machines that the driver cannot dial, and a driver that cannot be dialed: real processes, real sockets.

The wall between them is in the driver alone: it lets through nothing but the controller's address, and tells others an
address of its own that leads nowhere (TEST-NET-3, RFC 5737), as behind NAT. The jobs dial that address for real.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import fray
from fray.api.cluster import Cluster, cluster_of
from fray.errors import Unreachable
from fray.model.messages.client import Role
from fray.net.auth import Authorize
from fray.net.transport import Credential, Transport
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.open import RuntimeConfig, open_runtime
from tests.support import job_functions

sys.path.insert(0, str(Path(__file__).parent))
from cut_network import as_wire, open_saboteur

from tests.processes.lab import (
    SMALL,
    TOKEN,
    Lab,
    connected,
)

NOWHERE = "tcp:203.0.113.1:9"


class Walled:
    """A network behind NAT."""

    def __init__(self, allowed: str) -> None:
        self._real = WebSocketNetwork()
        self._allowed = allowed
        self.stopped: list[str] = []

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        if address == self._allowed:
            return await self._real.dial(address, credential, timeout_s=timeout_s)
        self.stopped.append(address)
        await trio.sleep(timeout_s)
        raise Unreachable(f"no answer from {address} within {timeout_s} s", address=address)

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        task_status.started(NOWHERE)
        await trio.sleep_forever()


@asynccontextmanager
async def walled_driver(lab: Lab, controller: str | None = None) -> AsyncIterator[tuple[Cluster, Walled]]:
    controller = controller or f"tcp:127.0.0.1:{lab.port}"
    network = Walled(controller)
    credential = Credential("cluster", TOKEN)
    rng = random.SystemRandom()
    async with open_runtime(network, [controller], credential, RuntimeConfig(role=Role.DRIVER), rng=rng) as runtime:
        cluster = cluster_of(runtime)
        yield cluster, network
        await cluster._root.wait_jobs_then_end_actors()


async def test_an_actor_that_the_driver_cannot_dial_answers_through_a_restart_of_the_controller(lab: Lab) -> None:
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    with trio.fail_after(90):
        async with walled_driver(lab) as (cluster, network), cluster.open_scope("run") as scope:
            counter = await scope.create_actor(job_functions.Counter, 0)
            assert await counter.add(1) == 1
            assert network.stopped, "the direct way was tried, and did not answer"
            made = [counter.add.start(1) for _ in range(2000)]
            slow = counter.slow_add.start(1000, 3.0)
            assert lab.kill("controller") == -signal.SIGKILL
            lab.start_controller()
            assert [await call for call in made] == list(range(2, 2002))
            assert await slow == 3001


async def test_a_driver_that_cannot_be_dialed_hosts_an_actor_for_its_jobs(lab: Lab) -> None:
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    with trio.fail_after(60):
        async with walled_driver(lab) as (cluster, _), fray.ActorServer(cluster) as server:
            await server.register("at-home", job_functions.Counter(10))
            async with cluster.open_scope("run") as scope:
                assert await scope.run(job_functions.call_by_name, "at-home", 5, resources=SMALL) == 15


async def test_relayed_calls_over_a_conversation_that_is_cut_again_and_again_are_answered_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_wire(monkeypatch, f"tcp:127.0.0.1:{lab.port}")
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    with trio.fail_after(90):
        async with (
            open_saboteur(f"tcp:127.0.0.1:{lab.port}", seed=3) as saboteur,
            walled_driver(lab, saboteur.address) as (cluster, _),
            cluster.open_scope("run") as scope,
        ):
            counter = await scope.create_actor(job_functions.Counter, 0)
            answers: list[int] = []
            while len(answers) < 2000 or saboteur.cuts < 5:
                made = [counter.add.start(1) for _ in range(100)]
                answers += [await call for call in made]
            assert answers == list(range(1, len(answers) + 1))
            saboteur.calm = True
