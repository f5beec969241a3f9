"""Daemons under a service manager: when they say that they serve, and that their loops are alive."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.lab import Lab


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        yield receiver


def wait_for(received: socket.socket, text: str) -> None:
    while text not in received.recv(1_000).decode():
        pass


def test_daemons_are_ready_and_alive_for_their_manager_and_their_jobs_do_not_know_it(
    received: socket.socket, tmp_path: Path
) -> None:
    lab = Lab(tmp_path)
    try:
        lab.start_controller()
        wait_for(received, "READY=1")
        socket.create_connection(("127.0.0.1", lab.port)).close()
        wait_for(received, "WATCHDOG=1")
        # A node is ready before it has joined: it waits for a controller that is away.
        lab.kill("controller")
        lab.start_node("alpha")
        wait_for(received, "STATUS=waiting for the controller")
        lab.start_controller()
        wait_for(received, "STATUS=has joined the cluster")
        script = "import os; print([name for name in os.environ if name.startswith(('NOTIFY', 'WATCHDOG'))])"
        command = ["run", "--memory", "64MB", "--cpu", "0.1", "--", sys.executable, "-c", script]
        environ = {key: value for key, value in lab.environ().items() if key != "NOTIFY_SOCKET"}
        done = subprocess.run(
            [sys.executable, "-m", "fray.cli", *command], env=environ, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "[]\n", done.stderr
    finally:
        lab.close()
