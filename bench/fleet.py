"""Loop delay of a controller with a large fleet: ``python -m bench.fleet``.

A controller runs as a daemon of its own; all nodes run in this process, each with its own connection and the code of a
real node, but its attempts are timers. Then:

- **join**: all nodes join an empty cluster at once;
- **storm**: the controller is killed and started again, and all nodes register with the new one;
- **jobs**: a driver launches short jobs, and all of them end.

For each of them: the time it took, and the passes of the controller's event loop meanwhile (`LoopDelay`), in wall time
and in CPU time. The wall time includes what other processes take of the cores: the fleet itself needs one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM

import trio
from attrs import define, evolve, field

import fray
from fray import Entrypoint, JobRequest, ResourceConfig
from fray.model.messages.usage import LoopDelay
from fray.model.resources import Capacity
from fray.model.specs import AttemptSpec, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.file_limits import raise_limit
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.config import NodeConfig
from fray.node.launcher import Launcher
from fray.node.logs.store import MemoryLogs
from fray.node.membership import ClusterMembership
from fray.node.run import run_node
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-for-a-fleet"
GB = 1 << 30
REQUEST, AT_ONCE = 100, 4
"""Jobs of one launch, and launches in progress at a time."""
LIMIT_S = 300.0


class TimerLauncher(Launcher):
    """Launcher whose attempts are timers."""

    def __init__(self, runs_s: float) -> None:
        super().__init__()
        self.logs = MemoryLogs(time.time)
        self._runs_s = runs_s
        self._nursery: trio.Nursery | None = None
        self._attempts: dict[str, trio.CancelScope] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def start(self, attempt_spec: AttemptSpec, payload: bytes | None) -> None:
        assert self._nursery is not None
        scope = self._attempts[attempt_spec.attempt_id] = trio.CancelScope()
        self._nursery.start_soon(self._run, attempt_spec.attempt_id, scope)

    async def _run(self, attempt_id: str, scope: trio.CancelScope) -> None:
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.RUNNING), None)
        with scope:
            await trio.sleep(self._runs_s)
        cause = EndReason.STOPPED if scope.cancelled_caught else EndReason.SUCCEEDED
        outcome = Outcome(cause=cause, exit_code=0, duration_s=self._runs_s)
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=outcome), None)

    def stop(self, attempt_id: str, notice_s: float | None = None) -> None:
        self.kill(attempt_id)

    def kill(self, attempt_id: str) -> None:
        if attempt_id in self._attempts:
            self._attempts[attempt_id].cancel()

    def forget(self, attempt_id: str) -> None:
        self._attempts.pop(attempt_id, None)


@define
class ControllerDaemon:
    """The controller, on one address and one store over all its processes."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    options: Sequence[str] = ()
    """More options of ``fray-controller``."""
    module: str = "fray.controller.main"
    """Module that is run as the daemon."""
    environ: Mapping[str, str] = {}
    """Further environment variables of it."""

    def start(self) -> None:
        store = str(self.directory / "store")
        listen = ("--listen", f"127.0.0.1:{self.port}", "--store", store, *self.options)
        environ = {**os.environ, "FRAY_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), **self.environ}
        with (self.directory / "controller.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *listen], stdout=log, stderr=log, env=environ
            )

    async def wait_listening(self) -> None:
        """Wait until it accepts connections."""
        with trio.fail_after(LIMIT_S):
            while True:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", self.port)
                except OSError:
                    await trio.sleep(0.05)
                else:
                    return await stream.aclose()

    def stop(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None


@define
class SimulatedFleet:
    """All nodes, in this process."""

    nodes: int
    port: int
    runs_s: float
    members: dict[str, ClusterMembership] = field(factory=dict)
    """Present membership of each node."""

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(self.nodes):
                name = f"n{number:05}"
                nursery.start_soon(self._run_node, name)

    async def _run_node(self, name: str) -> None:
        config = NodeConfig(
            name=name,
            controller=f"tcp:127.0.0.1:{self.port}",
            token=TOKEN,
            capacity=Capacity(32_000, 128 * GB, 1 << 40),
            state_dir="",
        )
        await run_node(
            config,
            WebSocketNetwork(),
            TimerLauncher(self.runs_s),
            rng=random.Random(name),
            on_member=partial(self.members.__setitem__, name),
        )

    def resets(self) -> int:
        """Return how many controllers the nodes have met, all together."""
        return sum(one.channel.stats.resets for one in self.members.values() if one.channel is not None)

    async def wait_joined(self, resets: int) -> None:
        """Wait until each node has met one controller more than before."""
        while not self._have_joined(resets + self.nodes):  # noqa: ASYNC110 - channels have no event for it
            await trio.sleep(0.05)

    def _have_joined(self, resets: int) -> bool:
        return self.resets() >= resets and all(map(_is_connected, self.members.values()))


def _is_connected(member: ClusterMembership) -> bool:
    return member.channel is not None and member.channel.connected


def _between(before: LoopDelay, after: LoopDelay) -> LoopDelay:
    """Return the passes since ``before``; the longest is that since the start of the controller."""

    def since(counts: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(now - before for now, before in zip(counts, then or (0,) * len(counts), strict=True))

    cpu_counts = since(after.cpu_counts, before.cpu_counts)
    return evolve(after, counts=since(after.counts, before.counts), cpu_counts=cpu_counts)


async def _measured_delay(cluster: fray.Cluster) -> LoopDelay:
    return (await cluster.usage()).loop_delay


def _figures(took_s: float, delay: LoopDelay) -> dict[str, float]:
    return {
        "took_s": took_s,
        "passes": sum(delay.counts),
        "p50_ms_up_to": 1e3 * delay.quantile_s(0.5),
        "p99_ms_up_to": 1e3 * delay.quantile_s(0.99),
        "longest_ms": 1e3 * delay.longest_s,
        "cpu_p99_ms_up_to": 1e3 * delay.cpu_quantile_s(0.99),
        "longest_cpu_ms": 1e3 * delay.longest_cpu_s,
    }


async def _run_jobs(cluster: fray.Cluster, jobs: int) -> None:
    """Launch so many jobs and wait until all have succeeded."""
    request = JobRequest(
        "short", ResourceConfig.with_cpu(cpu=1, memory="1GB"), Entrypoint.from_binary("true", []), detached=True
    )
    limiter = trio.CapacityLimiter(AT_ONCE)

    async def run_some(name: str, count: int) -> None:
        async with limiter:
            launched = await cluster.launch(request, count=count, name=name)
        for job in launched:
            info = await job.wait_ended()
            assert info.state == "succeeded", info

    async with trio.open_nursery() as nursery:
        for at in range(0, jobs, REQUEST):
            nursery.start_soon(run_some, f"short-{at}/{{index}}", min(REQUEST, jobs - at))


@asynccontextmanager
async def _open_cluster(port: int) -> AsyncIterator[fray.Cluster]:
    async with fray.open_cluster(f"fray://127.0.0.1:{port}", token=TOKEN, logs=False) as cluster:
        yield cluster


async def measure(nodes: int, jobs: int, runs_s: float, directory: Path) -> Mapping[str, Mapping[str, float]]:
    """Run all of it; return the figures by name."""
    port = free_port()
    daemon, fleet = ControllerDaemon(directory, port), SimulatedFleet(nodes, port, runs_s)
    found: dict[str, Mapping[str, float]] = {}
    try:
        async with trio.open_nursery() as nursery:
            daemon.start()
            await daemon.wait_listening()
            async with _open_cluster(port) as cluster:
                began = time.perf_counter()
                nursery.start_soon(fleet.run)
                await fleet.wait_joined(0)
                found["join"] = _figures(time.perf_counter() - began, await _measured_delay(cluster))
            resets = fleet.resets()
            daemon.stop(SIGKILL)
            began = time.perf_counter()
            daemon.start()
            await fleet.wait_joined(resets)
            took_s = time.perf_counter() - began
            async with _open_cluster(port) as cluster:
                before = await _measured_delay(cluster)
                found["storm"] = _figures(took_s, before)
                began = time.perf_counter()
                await _run_jobs(cluster, jobs)
                took_s = time.perf_counter() - began
                found["jobs"] = {
                    **_figures(took_s, _between(before, await _measured_delay(cluster))),
                    "jobs_per_s": jobs / took_s,
                }
            nursery.cancel_scope.cancel()
    finally:
        daemon.stop(SIGTERM)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--runs-s", type=float, default=0.1, help="run time of each job in seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    raise_limit()
    with tempfile.TemporaryDirectory() as directory:
        found = trio.run(measure, options.nodes, options.jobs, options.runs_s, Path(directory))
    for name, figures in found.items():
        print(f"{name:<6} " + "  ".join(f"{key} {value:,.3g}" for key, value in figures.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
