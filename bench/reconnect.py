"""Return of all nodes after a restart of the controller: ``python -m bench.reconnect --nodes 200``.

Real processes on this machine: `fray-controller`, and as many `fray-node`s as asked for (some 50 MB each), first over
plain loopback, then over TLS. The controller is killed and started again on the same store; measured is the time from
its start until the last node has joined it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure import machine

STARTED_TOGETHER = 8
"""Nodes that start at a time: more would only wait for one another's imports."""
LIMIT_S = 300.0
JOINED = "joined the cluster"


def own_ip() -> str:
    """Return an address of this machine that is not loopback, at which connections have TLS; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


class Fleet:
    """One controller and its nodes, in a directory, on one address of this machine."""

    def __init__(self, directory: Path, host: str) -> None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.address = f"{host}:{probe.getsockname()[1]}"
        self.directory, self.log, self.nodes = directory, directory / "log", 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start_controller()
        self.wait_for("controller started", 1)

    def start(self, module: str, *arguments: str) -> None:
        environ = {key: value for key, value in os.environ.items() if key != "FRAY_TOKEN"}
        environ["FRAY_JOB_UIDS"] = "none"
        token = self.directory / "store/token"
        if token.exists() and module == "fray.node":
            environ["FRAY_TOKEN"] = token.read_text().strip()
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", module, *arguments]
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ))

    def start_controller(self) -> None:
        self.start("fray.controller.main", "--listen", self.address, "--store", str(self.directory / "store"))
        self.controller = self.processes[-1]

    def start_nodes(self, count: int) -> None:
        for first in range(0, count, STARTED_TOGETHER):
            for number in range(first, min(first + STARTED_TOGETHER, count)):
                name, state = f"n{number}", str(self.directory / f"n{number}")
                options = ("--name", name, "--state-dir", state, "--ports", "none", "--cache-dir", state)
                self.start("fray.node", "--controller", f"fray://{self.address}", *options)
                self.nodes += 1
            self.wait_for(JOINED, self.nodes)

    def restart_controller(self) -> float:
        """Kill the controller and start it again; return the seconds until all nodes have joined it."""
        before = self.count(JOINED)
        self.controller.kill()
        self.controller.wait()
        began = time.perf_counter()
        self.start_controller()
        self.wait_for(JOINED, before + self.nodes)
        return time.perf_counter() - began

    def count(self, text: str) -> int:
        return self.log.read_text().count(text) if self.log.exists() else 0

    def wait_for(self, text: str, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while self.count(text) < count:
            if time.monotonic() > until or self.processes[-1].poll() is not None:
                raise SystemExit(f"{self.count(text)} of {count} lines {text!r}: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        until = time.monotonic() + 60
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()


def measure(host: str, nodes: int, rounds: int) -> list[float]:
    """Return the seconds of each restart of a controller at this address."""
    with tempfile.TemporaryDirectory(prefix="fray-bench-") as directory:
        fleet = Fleet(Path(directory), host)
        try:
            fleet.start_nodes(nodes)
            print(f"{nodes} nodes have joined {fleet.address}", file=sys.stderr, flush=True)
            return [fleet.restart_controller() for _ in range(rounds)]
        finally:
            fleet.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reconnect", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=50, help="default: 50")
    parser.add_argument("--rounds", type=int, default=3, help="restarts of each controller (default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(argv)
    hosts = {"plain": "127.0.0.1", "tls": own_ip()}
    found = {name: measure(host, options.nodes, options.rounds) for name, host in hosts.items()}
    medians = {name: statistics.median(times) for name, times in found.items()}
    for name, times in found.items():
        print(
            f"{name:6} {medians[name]:6.2f} s ({min(times):.2f}-{max(times):.2f}) until {options.nodes} nodes are back"
        )
    print(f"TLS / plain: {medians['tls'] / medians['plain']:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "nodes": options.nodes, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
