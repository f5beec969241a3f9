"""``fray up``, ``fray status`` and ``fray down``, as a person runs them: daemons that live on without the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fray.deploy.daemons import CONTROLLER, NODE, MachineCluster, read_cluster
from tests.support.ports import free_port

Command = Callable[..., subprocess.CompletedProcess[str]]
DRIVER = """
import fray, trio

async def main():
    async with fray.open_cluster() as cluster, cluster.open_scope("sums") as scope:
        print(await scope.run(pow, 2, 10, resources=fray.ResourceConfig.with_cpu(cpu=0.1, memory="64MB")))

trio.run(main)
"""


@pytest.fixture
def fray(tmp_path: Path) -> Iterator[Command]:
    """Runs ``fray`` with a state of its own, and no cluster in its environment; ends what it has started."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FRAY_")}
    environ |= {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fray.cli", *arguments]
        return subprocess.run(command, env={**environ, **more}, capture_output=True, text=True, timeout=100)

    yield run
    assert run("down", "--yes").returncode == 0


def cluster_in(tmp_path: Path) -> MachineCluster:
    found = read_cluster(tmp_path / "fray" / "up")
    assert found is not None
    return found


def exported(line: str) -> dict[str, str]:
    assert line.startswith("export ")
    return dict(part.split("=", 1) for part in line.removeprefix("export ").split())


def test_a_cluster_of_this_machine_is_up_in_one_word_and_down_in_another(fray: Command, tmp_path: Path) -> None:
    began = fray("up", "--port", str(port := free_port()), "--cpu", "2", "--memory", "1GB")
    assert began.returncode == 0, began.stderr
    variables = exported(began.stdout.strip())
    assert variables["FRAY_CLUSTER_SPEC"] == f"fray://127.0.0.1:{port}"

    # Commands find it by themselves; drivers by the variables that were printed.
    ran = fray("run", "--name", "hello", "--memory", "64MB", "--", sys.executable, "-c", "print('hello')")
    assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr
    assert fray("completion", "bash", "--words", "logs", "he").stdout == "hello\n"
    status = json.loads(fray("status", "--json").stdout)
    assert (status["cluster"], status["nodes"]) == (variables["FRAY_CLUSTER_SPEC"], {"alive": 1})
    assert status["usage"]["capacity"]["cpu"] == 2
    checks = json.loads(fray("doctor", "--json").stdout)
    assert ("nodes", "ok") in [(each["check"], each["result"]) for each in checks], checks
    shown = fray("status").stdout
    assert "1 alive" in shown
    assert "0 running, 0 waiting" in shown
    environ = {**os.environ, **variables, "PYTHONPATH": os.getcwd()}
    driver = subprocess.run([sys.executable, "-c", DRIVER], env=environ, capture_output=True, text=True, timeout=60)
    assert driver.stdout == "1024\n", driver.stderr

    before = cluster_in(tmp_path).daemons
    again = fray("up")
    assert (again.returncode, again.stdout) == (0, began.stdout)
    assert "was up already" in again.stderr
    assert cluster_in(tmp_path).daemons == before

    ended = fray("down")
    assert "ended the node and the controller" in ended.stderr
    assert not any(one.is_alive for one in before)
    assert fray("status").returncode == 2
    assert "`fray up`" in fray("jobs").stderr


def test_what_was_killed_is_started_again_and_what_it_kept_is_there(fray: Command, tmp_path: Path) -> None:
    port = str(free_port())
    assert fray("up", "--port", port, "--memory", "1GB").returncode == 0
    assert fray("run", "--name", "kept", "--memory", "64MB", "--", sys.executable, "-c", "print('x')").returncode == 0
    controller, node = cluster_in(tmp_path).daemons
    os.kill(node.mark.pid, signal.SIGKILL)
    assert fray("up").returncode == 0
    assert [one.name for one in cluster_in(tmp_path).daemons] == [CONTROLLER, NODE]
    assert cluster_in(tmp_path).daemons[0] == controller
    assert fray("down").returncode == 0
    assert fray("up", "--port", port, "--memory", "1GB").returncode == 0
    assert "kept" in fray("jobs").stdout
    removed = fray("down", "--remove")
    assert "removed" in removed.stderr
    assert list((tmp_path / "fray").iterdir()) == []


def test_a_daemon_that_does_not_start_is_reported_with_its_log_and_leaves_nothing(
    fray: Command, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        failed = fray("up", "--port", str(port))
    assert failed.returncode == 1
    assert "the controller has ended; the end of its log" in failed.stderr
    assert f"{port}" in failed.stderr
    assert "Traceback" not in failed.stderr
    failed = fray("up", "--port", str(free_port()), "--memory", "much")
    assert failed.returncode == 1
    assert "the node has ended" in failed.stderr
    assert "much" in failed.stderr
    assert not any(one.is_alive for one in cluster_in(tmp_path).daemons)


def test_a_directory_that_cannot_be_made_and_a_broken_record_are_refused(fray: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = fray("up", "--directory", str(tmp_path / "file" / "below"))
    assert refused.returncode == 2
    assert "cannot be used" in refused.stderr
    record = tmp_path / "other" / "cluster.json"
    record.parent.mkdir()
    record.write_text('{"spec": "fray://127.0.0.1:1"}')
    refused = fray("down", "--directory", str(record.parent))
    assert refused.returncode == 2
    assert "cluster.json cannot be read" in refused.stderr
