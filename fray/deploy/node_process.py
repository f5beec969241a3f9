"""Processes of the nodes of a ``machine`` cluster.

Imports little, so that they are started before the driver imports what it needs itself.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from fray.deploy.run_directory import RunDirectory, open_run_directory
from fray.errors import LaunchFailed
from fray.node.job_process.inherited_environ import mark_argument, node_environ
from fray.node.linux.process_wait import wait_process_end

if TYPE_CHECKING:
    from fray.node.config import NodeConfig

log = logging.getLogger("fray.deploy.machine")

END_WITHIN_S = 3.0
"""Seconds that a node may take to exit after SIGTERM, once nothing runs on it any more."""


@frozen
class NodeProcesses:
    """Nodes that are starting, and the directory of their cluster."""

    directory: RunDirectory
    children: Sequence[NodeProcess]


@contextmanager
def open_node_processes(count: int) -> Iterator[NodeProcesses]:
    """Start ``count`` nodes, which import until they are configured; all have ended on exit.

    Raises:
        OSError: a process cannot be started.
    """
    with open_run_directory() as directory:
        children: list[NodeProcess] = []
        try:
            for index in range(count):
                children.append(NodeProcess(f"node-{index}", directory))  # noqa: PERF401 - ended if a later one fails
            yield NodeProcesses(directory, children)
        finally:
            for child in children:
                child.drop()


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
                environ = node_environ(os.environ, self.state_dir)
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "fray.node.embedded_main", str(read), mark_argument(environ)],
                    # The lock stays held until the last node has ended, even if the driver is killed.
                    pass_fds=[read, directory.lock_fd],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    # Ctrl-C in the terminal is for the driver, which ends the nodes in order.
                    start_new_session=True,
                    env=environ,
                )
        finally:
            # The node reads until the end of the pipe, so no copy of its reading end may stay here.
            os.close(read)

    def configure(self, config: NodeConfig) -> None:
        """Send the node its configuration: until now it has only imported."""
        from fray.net.codec import to_json

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
