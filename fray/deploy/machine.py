"""The ``machine`` cluster: the controller in this process, nodes as child processes, jobs as real processes.

The driver is neither a subreaper nor a session leader: its other children stay its own. The nodes watch the driver by
its pidfd, so that a ``kill -9`` of it ends them, and everything below them, at once.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio
from attrs import evolve

from fray.deploy.run_directory import RunDirectory, open_run_directory, remove_abandoned
from fray.errors import LaunchFailed
from fray.model.ids import Namespace
from fray.model.log_records import LogLine
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, parse_bytes
from fray.net.codec import to_json
from fray.node.config import NodeConfig, PidNamespaceMode
from fray.node.inventory import read_capacity
from fray.node.job_process.bootstrap import node_environ
from fray.node.linux.process_wait import wait_process_end
from fray.node.ports import OFFERED_EMBEDDED, find_ports
from fray.runtime.background import open_background_nursery
from fray.runtime.runtime import Runtime

log = logging.getLogger("fray.deploy.machine")

END_WITHIN_S = 3.0
"""Seconds that a node may take to exit after SIGTERM, once nothing runs on it any more."""


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
    nodes: int,
    cpu: float | None,
    memory: str | None,
    pid_namespace: str = "auto",
    *,
    namespace: Namespace | None,
    on_log: Callable[[Sequence[LogLine]], None] | None,
    env_vars: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> AsyncIterator[Runtime]:
    """Open a cluster of processes on this machine as its driver; all of it ends on exit.

    Raises:
        LaunchFailed: a node could not be started; its last output is in the message.
    """
    with open_run_directory() as directory:
        # Started first: the nodes import while this process imports and starts the controller.
        children = [NodeProcess(f"node-{index}", directory) for index in range(nodes)]
        try:
            async with _open_with_nodes(
                children, directory, cpu, memory, pid_namespace, namespace, on_log, env_vars, policy
            ) as runtime:
                yield runtime
        finally:
            for child in children:
                child.drop()


@asynccontextmanager
async def _open_with_nodes(
    children: Sequence[NodeProcess],
    directory: RunDirectory,
    cpu: float | None,
    memory: str | None,
    pid_namespace: str,
    namespace: Namespace | None,
    on_log: Callable[[Sequence[LogLine]], None] | None,
    env_vars: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> AsyncIterator[Runtime]:
    """Run the controller of nodes that are starting, and the driver beside it."""
    from fray.deploy.embedded_controller import (  # imported here: meanwhile the nodes start
        embedded_network,
        open_driver,
        serve_controller,
    )

    rng = random.SystemRandom()
    token = f"{rng.getrandbits(256):064x}"
    socket = f"unix:{directory.path}/controller.sock"
    total = read_capacity()
    claims = [find_ports(OFFERED_EMBEDDED, rng) for _ in children]
    configs = [
        NodeConfig(
            name=child.name,
            controller=socket,
            token=token,
            capacity=evolve(node_capacity(total, index, len(children), cpu, memory), ports=claims[index].ports),
            state_dir=child.state_dir,
            parent_pid=os.getpid(),
            pid_namespace=PidNamespaceMode(pid_namespace),
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
            driver_directory = f"{directory.path}/driver"  # jobs connect to it directly, and may share its memory
            os.mkdir(driver_directory, 0o700)
            driver = open_driver(network, token, rng, namespace=namespace, on_log=on_log, directory=driver_directory)
            async with driver as runtime:
                yield runtime
        finally:
            with trio.CancelScope(shield=True):
                # While the controller still runs: the nodes report what they end.
                await _end(children)
            for claim in claims:
                claim.close()


class NodeProcess:
    """Process of one embedded node, started by the loop's own thread, never from a pool; `configure` follows."""

    def __init__(self, name: str, directory: RunDirectory) -> None:
        self.name = name
        self.state_dir = f"{directory.path}/{name}"
        self.leaving = False
        self._log_path = f"{directory.path}/{name}.log"
        read, self._config_fd = os.pipe()
        try:
            with open(self._log_path, "wb") as out:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "fray.node.embedded_main", str(read)],
                    # The lock stays held until the last node has ended, even if the driver is killed.
                    pass_fds=[read, directory.lock_fd],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    # Ctrl-C in the terminal is for the driver, which ends the nodes in order.
                    start_new_session=True,
                    env=node_environ(os.environ, self.state_dir),
                )
        finally:
            # The node reads until the end of the pipe, so no copy of its reading end may stay here.
            os.close(read)

    def configure(self, config: NodeConfig) -> None:
        """Send the node its configuration: until now it has only imported."""
        with suppress(BrokenPipeError):  # it has ended already: `watch` reports why
            os.write(self._config_fd, to_json(config).encode())
        os.close(self._config_fd)
        self._config_fd = -1

    def drop(self) -> None:
        """Kill it, unless it has ended."""
        if self._config_fd >= 0:
            os.close(self._config_fd)
            self._config_fd = -1
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    async def watch(self) -> None:
        """Log when the node's process ends early. The controller detects it by itself, being on the same machine.

        Raises:
            LaunchFailed: it ended by itself, which a node does only if it cannot work.
        """
        await self.wait_exit()
        code = self.process.poll()
        if self.leaving:
            return
        # Exit codes above 0 are the node's own verdict that it cannot work; by signal it may have been killed by
        # anyone, and its attempts are lost like a machine.
        if code is not None and code > 0:
            raise LaunchFailed(f"{self.name} cannot work on this machine (exit code {code}): {self.last_output()}")
        log.warning("%s ended (%s)", self.name, _exit_text(code))

    async def wait_exit(self) -> None:
        if self.process.poll() is None:
            await wait_process_end(self.process.pid)
        self.process.poll()

    def last_output(self) -> str:
        try:
            with open(self._log_path, errors="replace") as file:
                return file.read()[-2000:].strip()
        except OSError:
            return ""

    async def end(self) -> None:
        """Send SIGTERM, then SIGKILL after `END_WITHIN_S`."""
        self.leaving = True
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with trio.move_on_after(END_WITHIN_S):
            await self.wait_exit()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.wait_exit()


def _exit_text(code: int | None) -> str:
    return "unknown" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"


async def _end(children: Sequence[NodeProcess]) -> None:
    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(child.end)
