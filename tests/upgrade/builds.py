"""Trees of Fray to be run beside one another: this one, those of two commits, and one of a release too far away."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import define, field

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
PREVIOUS, RECENT = "previous_build", "recent_build"
"""Files that name the commit of the previous release, and a recent one (when they move: CONTRIBUTING.md)."""
TOKEN = "a-token-hard-to-guess"
WITHIN_S = 60.0


def export_build(name: str, into: Path) -> Path:
    """Write the package of the commit that a file names into a new directory; skip the test if it is not known."""
    commit = (Path(__file__).parent / name).read_text().strip()
    git = ["git", "-C", str(ROOT)]
    try:
        subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"the history lacks commit {commit[:8]} of tests/upgrade/{name}: fetch it (git fetch --unshallow)")
    packed = subprocess.run([*git, "archive", commit, "fray"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(into, filter="data")
    return into


def export_distant(into: Path) -> Path:
    """Write this package into a new directory as a release with which this one has no version in common."""
    shutil.copytree(ROOT / "fray", into / "fray", ignore=shutil.ignore_patterns("__pycache__"))
    for module, pattern, text in (
        ("net/channel/versions.py", r"^WIRE_VERSIONS = .*$", "WIRE_VERSIONS = (90, 91)"),
        ("model/messages/session.py", r"^VERSION = .*$", 'VERSION = "9.0.0"'),
        ("__init__.py", r"^__version__ = .*$", '__version__ = "9.0.0"'),
    ):
        file = into / "fray" / module
        changed, count = re.subn(pattern, text, file.read_text(), flags=re.MULTILINE)
        assert count == 1, module
        file.write_text(changed)
    return into


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for something that other processes do.

    Raises:
        AssertionError: not within a minute.
    """
    give_up_at = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < give_up_at, f"not within {WITHIN_S:g} s: {what}"
        time.sleep(0.02)


@define
class Cluster:
    """Daemons and drivers of several builds, on one store and one port."""

    directory: Path
    store: Path
    host: str = "127.0.0.1"
    """Address of the controller; with one beyond loopback all connections have TLS."""
    port: int = field(factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(factory=dict)
    commands: list[subprocess.Popen[str]] = field(factory=list)
    """Commands that may wait for this cluster when it is gone."""

    @property
    def spec(self) -> str:
        return f"fray://{self.host}:{self.port}"

    def environ(self, tree: Path) -> dict[str, str]:
        environ = {**os.environ, "PYTHONPATH": str(tree), "FRAY_TOKEN": TOKEN, "FRAY_CLUSTER_SPEC": self.spec}
        environ["FRAY_JOB_UIDS"] = "none"
        # With TLS the controller makes the token, which says whose certificates are accepted.
        made = self.store / "token"
        if made.exists():
            environ["FRAY_TOKEN"] = made.read_text().strip()
        elif self.host != "127.0.0.1":
            del environ["FRAY_TOKEN"]
        return environ

    def start(self, name: str, tree: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a Python program of a build; its output goes to a log of its name."""
        with self.log_file(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                env=self.environ(tree),
                # The directory of `python -m` is the first in the path, so it must not be that of the project.
                cwd=self.directory,
                start_new_session=True,
            )
        return self.running[name]

    def start_controller(self, tree: Path, *, wait: bool = True) -> None:
        """Start a controller on the store, and wait until it listens."""
        listen = ("--listen", f"{self.host}:{self.port}", "--store", str(self.store), "--quarantine-share", "0")
        process = self.start("controller", tree, "-m", "fray.controller.main", *listen)
        if wait:
            wait_until(lambda: process.poll() is not None or self._is_listening(), "the controller listens")
            assert process.poll() is None, self.log("controller")

    def _is_listening(self) -> bool:
        try:
            socket.create_connection((self.host, self.port)).close()
        except OSError:
            return False
        return True

    def start_node(self, name: str, tree: Path) -> subprocess.Popen[bytes]:
        state = str(self.directory / name)
        return self.start(
            name, tree, "-m", "fray.node", "--controller", self.spec, "--name", name, "--state-dir", state
        )

    def stop(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=WITHIN_S)

    def close(self) -> None:
        for command in self.commands:
            command.kill()
            command.wait()
        for name in reversed(list(self.running)):
            process = self.running.pop(name)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def log_file(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text()

    def fray(self, tree: Path, *arguments: str) -> str:
        """Run the command line of a build and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "fray.cli", *arguments],
            env=self.environ(tree),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def nodes(self, tree: Path) -> dict[str, dict[str, object]]:
        """Return what `fray nodes` says, by name."""
        return {node["name"]: node for node in json.loads(self.fray(tree, "nodes", "--json"))}


@contextmanager
def open_cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster without processes yet; all that are started are ended."""
    cluster = Cluster(directory, directory / "store")
    try:
        yield cluster
    finally:
        cluster.close()
