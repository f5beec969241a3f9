"""What the clusters of one process share, `fray.deploy.local` and `fray.deploy.machine`: a controller in it, and a
driver's place."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.model.ids import Namespace
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.model.messages.node import NodeHello
from fray.model.policy.policy import Policy
from fray.net.transport import Credential, Network
from fray.net.transports.memory import MemoryNetwork, is_memory
from fray.net.transports.routed_network import RoutedNetwork
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.config import NodeConfig
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.runtime import Runtime
from fray.scheduler.state.rows import SchedulerConfig

CONTROLLER = "memory:controller"
"""Where the driver finds it."""


def embedded_network(rng: random.Random) -> Network:
    """Memory within this process, sockets for all that leaves it."""
    return RoutedNetwork(WebSocketNetwork(), MemoryNetwork(rng=rng), is_memory)


async def serve_controller(
    network: Network,
    addresses: Sequence[str],
    token: str,
    rng: random.Random,
    nodes: Sequence[NodeConfig],
    workspaces: Path | None = None,
    env_vars: Mapping[str, str] | None = None,
    policy: Policy | None = None,
    task_status: trio.TaskStatus[RunningController] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be the controller of exactly these nodes, at `CONTROLLER` and the other ``addresses``, until cancelled.

    ``workspaces``: where it keeps those that travel. Default: none does.
    """
    declared = [NodeHello(node=node.name, incarnation="", boot_id="", capacity=node.capacity) for node in nodes]
    await run_controller(
        Store.memory(workspaces),
        network,
        [CONTROLLER, *addresses],
        token,
        clock=time.time,
        rng=rng,
        declared=declared,
        declares_all_nodes=True,
        in_place=workspaces is None,
        env_vars=env_vars,
        policy=policy,
        rules=SchedulerConfig(quarantine_share=0.0),  # its nodes are all of one machine, or no machines at all
        machines_directory=None if workspaces is None else workspaces.with_name("machines"),
        task_status=task_status,
    )


def open_driver(
    network: Network,
    token: str,
    rng: random.Random,
    *,
    namespace: Namespace | None,
    on_log: Callable[[Sequence[LogLine]], None] | None,
    directory: str = "",
) -> AbstractAsyncContextManager[Runtime]:
    """The driver's place beside that controller.

    ``directory``: where others dial what it serves. Default: within this process; those outside come by the relay.
    """
    place = RuntimeConfig(role=Role.DRIVER, namespace=namespace, host_directory=lambda: directory)
    return open_runtime(network, [CONTROLLER], Credential("cluster", token), place, rng=rng, on_log=on_log)
