"""Embedded controller of the clusters within a driver: `fray.deploy.local` and `fray.deploy.machine`."""

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
"""Address of the controller for the driver."""


def embedded_network(rng: random.Random) -> Network:
    """Return a network that uses memory within this process, and sockets otherwise."""
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
    """Run the controller of exactly these nodes, at `CONTROLLER` and the other ``addresses``, until cancelled.

    ``workspaces``: directory for workspaces and large values. Default: none, then workspaces are not supported, and
    values are in memory.
    """
    declared = [NodeHello(node=node.name, incarnation="", boot_id="", capacity=node.capacity) for node in nodes]
    await run_controller(
        # An embedded cluster ends with its driver, so there is nothing to restore.
        Store.memory(workspaces),
        network,
        [CONTROLLER, *addresses],
        token,
        clock=time.time,
        rng=rng,
        declared=declared,
        # "Never schedulable" can be decided at once, as no further machine will join.
        declares_all_nodes=True,
        in_place=workspaces is None,
        env_vars=env_vars,
        policy=policy,
        rules=SchedulerConfig(
            quarantine_share=0.0,  # all its nodes are on one machine
            # Without a directory results are in the memory of this process.
            results_limit_bytes=(8 if workspaces is None else 20) * 1000**3,
        ),
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
    """Return the context manager of the driver's runtime beside that controller.

    ``directory``: directory for sockets on which others reach what the driver serves. Default: reachable within this
    process only; other processes use the relay.
    """
    config = RuntimeConfig(role=Role.DRIVER, namespace=namespace, host_directory=lambda: directory)
    return open_runtime(network, [CONTROLLER], Credential("cluster", token), config, rng=rng, on_log=on_log)
