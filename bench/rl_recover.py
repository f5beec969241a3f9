"""Times in which a run of `fray.rl` recovers, for ``python -m bench.rl recover``.

A run on this machine with two servers and two rollout processes, of which parts are killed in turn; then the same run
as a job, whose process is killed. Episodes write when they begin and end, by a clock that all processes have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import trio
from attrs import define, field, frozen

import fray
from bench.faults.processes import all_processes, below
from bench.faults.rl_kills import ROLES
from fray import rl
from fray.rl.records.run_files import METRICS_FILE, read_status

FILE = "RL_BENCH_EPISODES"
SAVE_EVERY = 5
LIMIT_S = 300.0
SETTLED_STEPS = 3
"""Updates with all processes before the next kill."""
IN_FLIGHT_S = 0.2
"""Seconds after a kill in which answers may arrive that the killed server had sent; no process starts so fast."""
COUNTS = {"server": 2, "rollout": 2, "trainer": 1}
IMPORTS = {
    "a server or trainer": "fray.rl.inference.server, fray.rl.tensors.policy_trainer",
    "a rollout process": "fray.rl.rollout.process, bench.rl_recover",
}


async def noted(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    """Generate a few tokens, and note when the episode began and ended."""
    begun = time.monotonic()
    reply = await llm.completion(task["prompt"], max_tokens=4)
    with Path(os.environ[FILE]).open("a") as file:  # noqa: ASYNC230 - one line, for a measurement
        file.write(f"{os.getpid()} {begun} {time.monotonic()}\n")
    return rl.score(reply, reward=float(reply.text.startswith("1")))


@frozen
class Episode:
    """Episode that has ended: its process, and when it began and ended."""

    pid: int
    begun: float
    ended: float


def episodes(path: Path) -> list[Episode]:
    """Return the episodes that have ended so far."""
    rows = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [Episode(int(pid), float(begun), float(ended)) for pid, begun, ended in rows]


def import_s(modules: str) -> float:
    """Return the seconds in which a new interpreter imports modules."""
    code = f"import time; began = time.monotonic(); import {modules}; print(time.monotonic() - began)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def processes(role: str) -> list[int]:
    """Return the processes of this program's run that have a role."""
    return [one.pid for one in below(os.getpid(), all_processes()) if one.comm == ROLES[role]]


@define
class Recovery:
    """A run, what it has done, and the times that were measured."""

    path: Path
    updates: list[tuple[float, int, int]] = field(factory=list)
    """(time, number, incarnation of the trainer) of each update."""
    found: dict[str, list[float]] = field(factory=dict)

    def note_step(self, metrics: dict[str, float]) -> None:
        self.updates.append((time.monotonic(), int(metrics["step"]), int(metrics["line"])))

    def add(self, what: str, value: float) -> None:
        self.found.setdefault(what, []).append(value)

    async def settled(self) -> None:
        """Wait until all processes work again."""
        while any(len(processes(role)) < count for role, count in COUNTS.items()):  # noqa: ASYNC110
            await trio.sleep(0.1)
        pids, since = set(processes("rollout")), time.monotonic()
        while True:
            after = [one for one in episodes(self.path) if one.begun > since]
            steps = sum(at > since for at, _, _ in self.updates)
            if steps >= SETTLED_STEPS and {one.pid for one in after} >= pids:
                return
            await trio.sleep(0.1)

    async def until(self, find: Callable[[], list[float]]) -> float:
        """Return the first of the times that are found, as soon as there is one."""
        while not (times := find()):  # noqa: ASYNC110 - other processes write what is looked for
            await trio.sleep(0.02)
        return min(times)

    def kill(self, role: str, most: int = 1) -> tuple[float, list[int]]:
        """Kill processes of a role; return when, and which."""
        pids = processes(role)[:most]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return time.monotonic(), pids

    async def rollout(self) -> None:
        before = set(processes("rollout"))
        at, _ = self.kill("rollout")
        # Not those of a process that was killed in an earlier round.
        first = await self.until(
            lambda: [one.begun for one in episodes(self.path) if one.pid not in before and one.begun > at]
        )
        self.add("rollout process killed: s to the first episode of the next (promise: 2 + import)", first - at)

    async def one_server(self) -> None:
        at, _ = self.kill("server")
        # Those under way at the kill; without them the update, which needs them all, would not be done.
        await self.settled()
        under_way = [one for one in episodes(self.path) if one.begun < at < one.ended]
        last = max((one.ended for one in under_way), default=at)
        self.add("one of two servers killed: s until all open requests were answered (promise: 1)", last - at)

    async def all_servers(self) -> None:
        at, _ = self.kill("server", 2)
        first = await self.until(lambda: [e.ended for e in episodes(self.path) if e.ended > at + IN_FLIGHT_S])
        self.add("all servers killed: s to the first answer (promise: 8 + import)", first - at)

    async def trainer(self) -> None:
        _, last, line = self.updates[-1]
        at, _ = self.kill("trainer")
        first = await self.until(lambda: [when for when, _, later in self.updates if later > line])
        repeated = last + 1 - next(number for _, number, later in self.updates if later > line)
        self.add("trainer killed: s to the next update", first - at)
        self.add(f"trainer killed: updates repeated (promise: at most {SAVE_EVERY})", repeated)

    async def pool(self) -> None:
        at, _ = self.kill("pool")
        first = await self.until(lambda: [when for when, _, _ in self.updates if when > at + IN_FLIGHT_S])
        self.add("data and pool killed: s to the next update", first - at)


@define
class JobRecovery:
    """A run as a job, whose updates are seen in its output."""

    output: Path
    path: Path
    found: dict[str, list[float]] = field(factory=dict)

    def updates(self) -> int:
        try:
            return (self.output / METRICS_FILE).read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    async def until_updates(self, number: int) -> float:
        """Return the time at which there are so many updates."""
        while self.updates() < number:  # noqa: ASYNC110 - another process does them
            await trio.sleep(0.02)
        return time.monotonic()

    async def kill(self) -> None:
        await self.until_updates(self.updates() + SETTLED_STEPS)
        os.kill(read_status(self.output)["pid"], signal.SIGKILL)
        at = time.monotonic()
        first = await self.until_updates(self.updates() + 1)
        meanwhile = sum(at < one.begun and one.ended < first for one in episodes(self.path))
        self.found.setdefault("process of the run's job killed: s to the next update", []).append(first - at)
        self.found.setdefault("process of the run's job killed: episodes meanwhile", []).append(meanwhile)


def run_of(directory: Path, path: Path, **settings: Any) -> rl.Run:
    """Return the run; its output, and the file to which its episodes write, are in a directory."""
    # By its name, and not as part of this program: rollout processes import it.
    from bench.rl_recover import noted as episode

    path.touch()
    return rl.Run(
        model=rl.TinyLlama(layers=1, width=16, mlp=32),
        data=[{"prompt": f"{number}>"} for number in range(100)],
        rollout=episode,
        trainer=rl.GRPO(groups=4, group_size=4, lr=1e-2, steps=1_000_000),
        rollout_workers=16,
        rollout_processes=2,
        inference_servers=2,
        sync="fully-async",
        output=directory / "out",
        save_every=SAVE_EVERY,
        progress=False,
        # Each is restarted more often than in a run that is not killed on purpose.
        on_error="continue",
        env_vars={FILE: str(path)},
        **settings,
    )


async def recover(rounds: int) -> dict[str, Any]:
    """Kill each part so many times; return the median and the longest of the times, in seconds."""
    imports = {f"import of {what}: s": import_s(modules) for what, modules in IMPORTS.items()}
    found = {**await recover_parts(rounds), **await recover_job(rounds)}
    times: dict[str, float] = {}
    for what, values in found.items():
        times |= {what: median(values), f"{what}, longest": max(values)}
    return {**times, **imports}


async def recover_parts(rounds: int) -> dict[str, list[float]]:
    """Kill the parts of a run of this program; return what was measured."""
    with TemporaryDirectory() as directory:
        recovery = Recovery(Path(directory) / "episodes")
        run = run_of(Path(directory), recovery.path, on_step=recovery.note_step)
        async with fray.open_cluster("machine", logs=False) as cluster, trio.open_nursery() as nursery:
            nursery.start_soon(run.run_on, cluster)
            with trio.fail_after(LIMIT_S * rounds):
                kinds = (recovery.rollout, recovery.one_server, recovery.all_servers, recovery.trainer, recovery.pool)
                for kind in kinds * rounds:
                    await recovery.settled()
                    await kind()
            nursery.cancel_scope.cancel()
        return recovery.found


async def recover_job(rounds: int) -> dict[str, list[float]]:
    """Kill the process of a run that is a job; return what was measured."""
    with TemporaryDirectory() as directory:
        recovery = JobRecovery(Path(directory) / "out", Path(directory) / "episodes")
        async with fray.open_cluster("machine", logs=False) as cluster:
            job = await run_of(Path(directory), recovery.path, name="recovering").submit(cluster)
            with trio.fail_after(LIMIT_S * rounds):
                for _ in range(rounds):
                    await recovery.kill()
            await cluster.terminate(job.id)
        return recovery.found
