"""A lab's cluster in small for the tests of a module: one fray-controller, one fray-node, each a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

from fray import ResourceConfig
from tests.support.ports import free_port

TOKEN = "a-token-hard-to-guess"
SMALL = ResourceConfig.with_cpu(cpu=0.5, memory="100MB")


class Lab:
    """The daemons, on a port of their own. ``spec`` leads a driver there, with `TOKEN`.

    Args:
        wrapper: beginning of the command lines of the daemons.
    """

    def __init__(self, directory: Path, wrapper: Sequence[str] = ()) -> None:
        self.directory, self.wrapper = directory, wrapper
        self.port = free_port()
        self.spec = f"fray://127.0.0.1:{self.port}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def environ(self, **more: str) -> dict[str, str]:
        """Environment of a driver's process."""
        return {**os.environ, "PYTHONPATH": os.getcwd(), "FRAY_TOKEN": TOKEN, "FRAY_CLUSTER_SPEC": self.spec, **more}

    def start(self, name: str, module: str, *arguments: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*self.wrapper, sys.executable, "-m", module, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "FRAY_TOKEN": TOKEN},
                start_new_session=True,
            )

    def start_controller(self, *arguments: str) -> None:
        """Start its controller without quarantine: tests kill what runs here, one after another."""
        store, listen = str(self.directory / "store"), f"127.0.0.1:{self.port}"
        usual = ("--listen", listen, "--store", store, "--quarantine-share", "0")
        self.start("controller", "fray.controller.main", *usual, *arguments)

    def start_node(self, name: str, *arguments: str, module: str = "fray.node") -> None:
        state = str(self.directory / name)
        self.start(name, module, "--controller", self.spec, "--name", name, "--state-dir", state, *arguments)

    def wait_serving(self) -> None:
        """Wait until the port answers."""
        give_up_at = time.monotonic() + 20
        while time.monotonic() < give_up_at:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError((self.directory / "controller.log").read_text())

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(timeout=15)

    def close(self) -> None:
        """End the nodes, all at once, and then the controller: without it, each would wait for it for five seconds."""
        for process in self.running.values():
            if process is not self.running.get("controller"):
                process.send_signal(signal.SIGTERM)
        for name in sorted(self.running, key="controller".__eq__):
            self.kill(name, signal.SIGTERM)


@contextmanager
def open_lab(directory: Path, *nodes: str) -> Iterator[Lab]:
    """A controller and its nodes, all ended at the end."""
    lab = Lab(directory)
    try:
        lab.start_controller()
        for name in nodes:
            lab.start_node(name)
        lab.wait_serving()
        yield lab
    finally:
        lab.close()


async def connected(lab: Lab) -> None:
    """Wait until the port answers, as a person would who has just typed the command."""
    with trio.fail_after(20):
        while True:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", lab.port)
            except OSError:
                await trio.sleep(0.05)
            else:
                await stream.aclose()
                return


def start_script(script: str) -> subprocess.Popen[bytes]:
    """A driver of its own process, with the token."""
    environ = {**os.environ, "FRAY_TOKEN": TOKEN, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
