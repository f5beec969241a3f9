"""The ``machine`` cluster: the controller in this process, nodes as child processes, jobs as real processes.

The driver is neither a subreaper nor a session leader: its other children stay its own. The nodes watch the driver by
its pidfd, so that a ``kill -9`` of it ends them, and everything below them, at once.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import evolve

from fray.deploy.cluster_spec import Spec
from fray.deploy.embedded_controller import embedded_network, open_driver, serve_controller
from fray.deploy.node_process import NodeProcess, NodeProcesses
from fray.deploy.run_directory import remove_abandoned
from fray.model.ids import Namespace
from fray.model.log_records import LogLine
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, parse_bytes
from fray.node.config import NodeConfig, PidNamespaceMode
from fray.node.inventory import read_capacity
from fray.node.ports import OFFERED_EMBEDDED, find_ports
from fray.runtime.background import open_background_nursery
from fray.runtime.runtime import Runtime


def node_capacity(total: Capacity, index: int, nodes: int, cpu: float | None, memory: str | None) -> Capacity:
    """Return the capacity of embedded node ``index``: its share of the machine, so that nothing is offered twice.

    Args:
        total: the capacity of the machine.
        cpu, memory: what each node offers instead of its share.
    """

    def share(amount: int) -> int:
        # The shares of all nodes add up to the amount.
        return amount * (index + 1) // nodes - amount * index // nodes

    return evolve(
        total,
        cpu_milli=max(1, share(total.cpu_milli)) if cpu is None else round(cpu * 1000),
        memory_bytes=share(total.memory_bytes) if memory is None else parse_bytes(memory, "memory"),
        disk_bytes=share(total.disk_bytes),
        devices=total.devices[index::nodes],
    )


@asynccontextmanager
async def open_machine(
    processes: NodeProcesses,
    spec: Spec,
    *,
    namespace: Namespace | None,
    on_log: Callable[[Sequence[LogLine]], None] | None,
    env_vars: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> AsyncIterator[Runtime]:
    """Open the cluster of these nodes, which are starting, as its driver; all of it ends on exit.

    Raises:
        LaunchFailed: a node cannot work; its last output is in the message.
    """
    directory, children = processes.directory, processes.children
    rng = random.SystemRandom()
    token = f"{rng.getrandbits(256):064x}"
    # Nothing but sockets is there: containers see it.
    sockets = f"{directory.path}/sockets"
    os.mkdir(sockets, 0o700)
    socket = f"unix:{sockets}/controller"
    total = read_capacity()
    claims = [find_ports(OFFERED_EMBEDDED, rng) for _ in children]
    configs = [
        NodeConfig(
            name=child.name,
            controller=socket,
            token=token,
            capacity=evolve(
                node_capacity(total, index, len(children), spec.cpu, spec.memory),
                ports=claims[index].ports,
            ),
            state_dir=child.state_dir,
            parent_pid=os.getpid(),
            pid_namespace=PidNamespaceMode(spec.pid_namespace),
            preload=spec.preload,
        )
        for index, child in enumerate(children)
    ]
    network = embedded_network(rng)
    async with open_background_nursery() as nursery:
        try:
            workspaces = Path(directory.path, "workspaces")
            await nursery.start(serve_controller, network, [socket], token, rng, configs, workspaces, env_vars, policy)
            for child, config in zip(children, configs, strict=True):
                # By a pipe and not by an argument or a variable, as the configuration contains the token.
                child.configure(config)
                nursery.start_soon(child.watch)
            # Here, while the nodes start and there is time.
            remove_abandoned()
            # Jobs connect to it directly, and may share its memory.
            driver = open_driver(network, token, rng, namespace=namespace, on_log=on_log, directory=sockets)
            async with driver as runtime:
                yield runtime
        finally:
            with trio.CancelScope(shield=True):
                # While the controller still runs: the nodes report what they end.
                await _end(children)
            for claim in claims:
                claim.close()


async def _end(children: Sequence[NodeProcess]) -> None:
    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(child.end)
