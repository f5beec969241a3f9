"""Cluster of a campaign: a controller and nodes as daemons, and drivers that submit work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import trio
from attrs import define, field

from bench.histories import files
from fray.testing.wheels import make_wheel, offline

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-for-faults"
TAG = "FRAY_BENCH_FAULTS"
"""Variable that marks every process of a campaign, unless it has cleared its environment."""
STOP_WITHIN_S = 20.0
PACKAGE, VERSIONS = "faults_package", 40
"""Package and number of its versions; each makes a separate environment at its first use."""
NODE_CONFIG = "cpu = 12\nmemory = '4GB'\ndisk = '4GB'\n"


@define
class Lab:
    """Daemons and drivers by name; each writes a log beside its state."""

    directory: Path
    running: dict[str, subprocess.Popen[bytes]] = field(factory=dict)
    drivers: int = 0

    @property
    def tag(self) -> str:
        return self.directory.name

    @property
    def spec(self) -> str:
        return f"fray+unix://{self.directory}/controller.sock"

    @property
    def ledger(self) -> Path:
        return self.directory / "ledger"

    def open(self, nodes: list[str]) -> None:
        self.ledger.mkdir()
        (self.directory / "node.toml").write_text(NODE_CONFIG)
        for version in range(VERSIONS):
            make_wheel(self.directory / "wheels", PACKAGE, str(version))
        self.start("controller")
        for name in nodes:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a daemon that is not running."""
        if name == "controller":
            listen = f"unix:{self.directory}/controller.sock"
            self._run(name, "fray.controller.main", "--listen", listen, "--store", str(self.directory / "store"))
        else:
            state, config = str(self.directory / name), str(self.directory / "node.toml")
            cache = str(self.directory / "cache")
            where = ("--name", name, "--state-dir", state, "--config", config, "--cache-dir", cache)
            self._run(name, "fray.node", "--controller", self.spec, *where)

    async def wait_reachable(self) -> None:
        """Wait until the controller listens at its address."""
        with trio.fail_after(STOP_WITHIN_S):
            while True:
                try:
                    stream = await trio.open_unix_socket(f"{self.directory}/controller.sock")
                except OSError:
                    await trio.sleep(0.05)
                else:
                    return await stream.aclose()

    def start_driver(self, seed: int) -> str:
        self.drivers += 1
        name = f"driver-{self.drivers}"
        self._run(name, "bench.faults.driver", self.spec, str(self.ledger), name, str(seed))
        return name

    def _run(self, name: str, module: str, *arguments: str) -> None:
        ours = {"FRAY_TOKEN": TOKEN, TAG: self.tag, "PYTHONPATH": str(ROOT)}
        environ = {**os.environ, **ours, **offline(self.directory / "wheels", self.directory / "uv")}
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def send(self, name: str, word: str) -> None:
        """Write a line to a driver's standard input."""
        stdin = self.running[name].stdin
        assert stdin is not None
        stdin.write(word.encode() + b"\n")
        stdin.flush()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self.running.pop(name)
        process.send_signal(number)
        process.wait(STOP_WITHIN_S)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def close(self) -> None:
        """Stop everything: drivers first, the controller last."""
        for name in sorted(self.running, key=lambda name: (name == "controller", not name.startswith("driver"))):
            self.kill(name, signal.SIGTERM)


def read_lines(path: Path) -> list[dict[str, object]]:
    """Return the JSON lines of a driver or a job; the last one may be cut off by a kill."""
    return list(files.read_lines(path)) if path.exists() else []
