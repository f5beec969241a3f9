"""Hosts of a simulated TPU cloud: a real ``fray-node`` process for each host of each node that is ready.

Simulated are the VM, its boot and the installation of Fray (the start-up script is not run), the chips (fake devices by
name), and the identity of a host (its configuration has it, where a TPU VM asks its metadata server). Real are the
configuration that the provider wrote, the one-time join token, and everything after that. A preempted host is killed
without notice, as Google does in the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from attrs import define, field
from google.cloud import tpu_v2

from fray.controller.providers.tpu_options import KEY_NODE, KEY_TOKEN, WORKER
from fray.model.topology import tpu_topology
from fray.testing.tpu_cloud import TpuCloud

END_S = 10.0


@define(eq=False)
class TpuHosts:
    """Processes of the nodes of a cloud; a context manager that ends them all.

    Args:
        directory: directory of their state and logs.
        host: their configuration as lines of TOML, in place of what is detected on this machine.
        environ: additional variables of their environment.
    """

    cloud: TpuCloud
    directory: Path
    host: str = 'cpu = 4\nmemory = "1GB"\n'
    environ: dict[str, str] = field(factory=dict)
    running: dict[str, list[subprocess.Popen[bytes]]] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def __enter__(self) -> TpuHosts:
        self.cloud.on_ready, self.cloud.on_gone = self.start, self.end
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cloud.on_ready = self.cloud.on_gone = lambda node: None
        with self._lock:
            every = [process for processes in self.running.values() for process in processes]
            self.running.clear()
        _end(every, lambda process: process.terminate())

    def start(self, node: tpu_v2.Node) -> None:
        """Boot all hosts of a node."""
        name = node.name.rpartition("/")[2]
        hosts = [self._boot(node, f"{name}-{worker}", worker) for worker in range(len(node.network_endpoints))]
        with self._lock:
            self.running[name] = hosts

    def end(self, node: tpu_v2.Node) -> None:
        """Kill all hosts of a node."""
        with self._lock:
            hosts = self.running.pop(node.name.rpartition("/")[2], [])
        _end(hosts, lambda process: process.kill())

    def logs(self) -> str:
        """Return the logs of all hosts."""
        return "".join(file.read_text(errors="replace") for file in sorted(self.directory.glob("*.log")))

    def _boot(self, node: tpu_v2.Node, name: str, worker: int) -> subprocess.Popen[bytes]:
        file = self.directory / f"{name}.toml"
        file.write_text(self._configuration(node, name, worker))
        environ = {**os.environ, **self.environ, "FRAY_JOIN_TOKEN": node.metadata[KEY_TOKEN]}
        environ.pop("FRAY_TOKEN", None)
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "fray.node", "--config", str(file), "--log-json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def _configuration(self, node: tpu_v2.Node, name: str, worker: int) -> str:
        """Return the provider's configuration with this host's number, paths on this machine, and fake chips."""
        written = node.metadata[KEY_NODE].replace(WORKER, str(worker))
        settings, _, attributes = written.partition("[attributes]")
        own = ("state_dir", "cache_dir", "join_token_file")
        common = "".join(line for line in settings.splitlines(keepends=True) if line.partition(" ")[0] not in own)
        chips = [node.accelerator_type] * tpu_topology(node.accelerator_type).chips_per_host
        paths = f"state_dir = {json.dumps(str(self.directory / name))}\ncache_dir = {json.dumps(str(self.directory))}\n"
        return f"{common}{paths}tpus = {json.dumps(chips)}\n{self.host}\n[attributes]{attributes}"


def _end(processes: list[subprocess.Popen[bytes]], how: Callable[[subprocess.Popen[bytes]], None]) -> None:
    for process in processes:
        how(process)
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
