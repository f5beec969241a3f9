"""The campaign: kill, check what must end with it, mend, and now and then let all be quiet and count what is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import sys
import time
from typing import Any

import trio
from attrs import define, field, frozen

import fray
from bench import census
from bench.faults import accounts
from bench.faults.lab import TOKEN, Lab, told
from bench.faults.processes import Process, below, everybody, kind_of, look_at, marked

NODES = ("north", "south")
DRIVERS = 2
WEIGHTS = {"job": 30, "child": 10, "keeper": 15, "zygote": 5, "node": 12, "controller": 12, "driver": 10}
SEVERAL = 0.25
"""How likely it is that one more dies in the same instant."""
GONE_WITHIN_S = 10.0
"""After a kill, everything that must end with it has ended within this time."""
QUIET_WITHIN_S = 90.0
QUIET_EVERY = 25
"""Kills between two quiet moments."""


@frozen
class Kill:
    """One kill, and how long it took until all that had to go was gone."""

    number: int
    kind: str
    gone_s: float
    left: tuple[str, ...] = ()


@define
class Campaign:
    lab: Lab
    rng: random.Random
    progress: bool = False
    kills: list[Kill] = field(factory=list)
    residues: list[dict[str, Any]] = field(factory=list)
    first_quiet: dict[str, int] = field(factory=dict)
    drivers: list[str] = field(factory=list)
    lost_drivers: set[str] = field(factory=set)

    async def run(self, count: int) -> dict[str, Any]:
        self.lab.open(list(NODES))
        await self.lab.wait_reachable()
        async with fray.open_cluster(self.lab.spec, token=TOKEN, logs=False) as cluster:
            await cluster.wait_for_nodes(len(NODES))
            for _ in range(DRIVERS):
                await self.start_driver()
            await self.some_work()
            await self.be_quiet(cluster)
            while len(self.kills) < count:
                if await self.one_kill() and len(self.kills) % QUIET_EVERY == 0 and len(self.kills) < count:
                    await self.be_quiet(cluster)
            await self.be_quiet(cluster, go_on=False)
            books = await accounts.settle(cluster, self.lab, self.drivers, self.lost_drivers)
        self.lab.close()
        left = [f"{process.comm} ({process.pid})" for process in marked(self.lab.tag, str(self.lab.directory))]
        return self.report(books, left)

    async def start_driver(self) -> None:
        """One that is there: to open a cluster without a controller is an error, and rightly so."""
        await self.lab.wait_reachable()
        self.drivers.append(self.lab.start_driver(self.rng.randrange(1 << 30)))
        with trio.fail_after(QUIET_WITHIN_S):
            while not told(self.lab.ledger / f"{self.drivers[-1]}.jsonl"):  # noqa: ASYNC110
                await trio.sleep(0.02)

    async def some_work(self) -> None:
        """The load has been there for a moment that differs each time."""
        await trio.sleep(self.rng.uniform(0.1, 1.2))

    # Killing ---------------------------------------------------------------------------------------------------------

    async def one_kill(self) -> bool:
        """Of one process, or of several at once: then what nobody was left to end is ended by who comes next. False:
        nobody was there to kill."""
        victims = self.choose()
        doomed = [one for kind, process in victims for one in self.doomed(kind, process)]
        began = time.monotonic()
        for kind, process in victims:
            self.strike(kind, process)
        if len(victims) > 1:
            await self.mend()
        left = await gone(doomed, GONE_WITHIN_S)
        if victims:
            name, took_s = "+".join(kind for kind, _ in victims), time.monotonic() - began
            self.kills.append(Kill(len(self.kills) + 1, name, took_s, tuple(f"{one.comm} ({one.pid})" for one in left)))
            self.tell(self.kills[-1])
        await self.mend()
        await self.some_work()
        return bool(victims)

    def choose(self) -> list[tuple[str, Process]]:
        """Mostly one; each other of the same moment is a quarter as likely as the one before."""
        found: dict[int, tuple[str, Process]] = {}
        while not found or self.rng.random() < SEVERAL:
            kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            candidates = self.candidates(kind)
            if not candidates:
                break
            process = self.rng.choice(candidates)
            found.setdefault(process.pid, (kind, process))
        return list(found.values())

    def candidates(self, kind: str) -> list[Process]:
        people, running = everybody(), self.lab.running
        if kind in ("node", "controller", "driver"):
            prefixes = {"node": NODES, "controller": ("controller",), "driver": ("driver",)}[kind]
            pids = [process.pid for name, process in running.items() if name.startswith(prefixes)]
            return [people[pid] for pid in pids if pid in people]
        nodes = [running[name].pid for name in NODES if name in running]
        inhabitants = [process for node in nodes for process in below(node, people)]
        return [process for process in inhabitants if kind_of(process, people, nodes) == kind]

    def doomed(self, kind: str, process: Process) -> list[Process]:
        """What must not outlive it. A zygote's keepers live on, and a driver's jobs end in their own time."""
        people = everybody()
        if kind in ("job", "keeper", "node"):
            return [process, *below(process.pid, people)]
        return [process]

    def strike(self, kind: str, process: Process) -> None:
        name = next((name for name, running in self.lab.running.items() if running.pid == process.pid), None)
        if name is not None:
            self.lab.kill(name)
            if kind == "driver":
                self.lost_drivers.add(name)
        elif process.lives:
            with contextlib.suppress(ProcessLookupError):  # another victim of the same moment took it along
                os.kill(process.pid, signal.SIGKILL)

    async def mend(self) -> None:
        """Start again what only people start."""
        for name in ("controller", *NODES):
            if name not in self.lab.running:
                await trio.sleep(self.rng.uniform(0.0, 0.5))
                self.lab.start(name)
        for _ in range(DRIVERS - sum(name.startswith("driver") for name in self.lab.running)):
            await self.start_driver()

    # Quiet -----------------------------------------------------------------------------------------------------------

    async def be_quiet(self, cluster: fray.Cluster, *, go_on: bool = True) -> None:
        """Let all work end; then nothing but the daemons and the drivers may be there."""
        living = [name for name in self.drivers if name in self.lab.running]
        gave_up = [name for name in living if self.lab.running[name].poll() is not None]
        if gave_up:
            raise RuntimeError(
                f"{', '.join(gave_up)} ended without being asked to: see its log in {self.lab.directory}"
            )
        for name in living:
            self.lab.tell(name, "drain")
        with trio.move_on_after(QUIET_WITHIN_S) as patience:
            while not all(map(self.is_quiet, living)):  # noqa: ASYNC110
                await trio.sleep(0.2)
        residue = await self.residue(cluster)
        with trio.move_on_after(GONE_WITHIN_S):
            while residue:
                await trio.sleep(0.5)
                residue = await self.residue(cluster)
        if patience.cancelled_caught:
            residue["drivers that did not come to an end"] = living
        if residue:
            self.residues.append({"after_kills": len(self.kills), **residue})
        if self.progress:
            print(f"quiet after {len(self.kills)} kills: {residue or 'nothing is left'}", file=sys.stderr, flush=True)
        for name in living if go_on else ():
            self.lab.tell(name, "go on")

    def is_quiet(self, driver: str) -> bool:
        """It has said so, and nothing since."""
        return "quiet" in (told(self.lab.ledger / f"{driver}.jsonl") or [{}])[-1]

    async def residue(self, cluster: fray.Cluster) -> dict[str, Any]:
        """What is there at a quiet moment and should not be."""
        return {
            what: found
            for what, found in {
                "processes": self.strangers(),
                "jobs": [job.job_id for job in await cluster.list_jobs("*") if not job.state.finished],
                "names": [actor.name for actor in await cluster.list_actors(namespace="*")],
                "held by nodes": await committed(cluster),
                "segments": self.segments(),
                "locks of environments": self.locks(),
                "attempt directories": self.directories(),
                "more than at first": self.grown(),
            }.items()
            if found
        }

    def strangers(self) -> list[str]:
        """Marked processes below nodes that are no zygote, and those below nobody."""
        known = {process.pid for process in self.lab.running.values()} | {os.getpid()}
        people = everybody()
        nodes = [self.lab.running[name].pid for name in NODES if name in self.lab.running]
        found = [one for one in marked(self.lab.tag, str(self.lab.directory)) if one.pid not in known]
        return [f"{one.comm} ({one.pid})" for one in found if kind_of(one, people, nodes) != "zygote"]

    def segments(self) -> list[str]:
        """Directories of shared memory whose process is gone."""
        now = census.count_orphans()
        return ["one"] * (now - self.first_quiet.setdefault("segments", now))

    def locks(self) -> list[str]:
        """Environments that somebody holds for himself: to make them, or to remove them."""
        found = []
        for path in (self.lab.directory / "cache").glob("**/*.lock"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(path.name)
        return found

    def directories(self) -> list[str]:
        return [str(path.name) for name in NODES for path in (self.lab.directory / name / "attempts").glob("*")]

    def grown(self) -> dict[str, tuple[int, int]]:
        """Descriptors of the daemons, beside those they had at the first quiet moment of their life."""
        found = {}
        for name in ("controller", *NODES):
            process = look_at(self.lab.running[name].pid) if name in self.lab.running else None
            if process is None:
                continue
            now = census.descriptors(process.pid)
            first = self.first_quiet.setdefault(f"{name} {process.pid}", now)
            if now > first + 8 + 2 * DRIVERS:
                found[name] = (first, now)
        return found

    # Telling ---------------------------------------------------------------------------------------------------------

    def tell(self, kill: Kill) -> None:
        if self.progress:
            left = f", LEFT {', '.join(kill.left)}" if kill.left else ""
            print(f"{kill.number:4} {kill.kind:10} {1e3 * kill.gone_s:7.0f} ms{left}", file=sys.stderr, flush=True)

    def report(self, books: dict[str, Any], left_at_end: list[str]) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        for kill in self.kills:
            times.setdefault("several" if "+" in kill.kind else kill.kind, []).append(kill.gone_s)
        return {
            "kills": {kind: len(all_s) for kind, all_s in times.items()},
            "gone_ms": {
                kind: {"median": 1e3 * sorted(all_s)[len(all_s) // 2], "max": 1e3 * max(all_s)}
                for kind, all_s in times.items()
            },
            "jobs": books["counts"],
            "broken": {
                name: found
                for name, found in {
                    "left after a kill": [(kill.number, kill.kind, kill.left) for kill in self.kills if kill.left],
                    "left at a quiet moment": self.residues,
                    "left at the end": left_at_end,
                    **books["broken"],
                }.items()
                if found
            },
        }


async def gone(doomed: list[Process], within_s: float) -> list[Process]:
    """Those that still live after so long."""
    with trio.move_on_after(within_s):
        while any(process.lives for process in doomed):  # noqa: ASYNC110
            await trio.sleep(0.002)
    return [process for process in doomed if process.lives]


async def committed(cluster: fray.Cluster) -> list[str]:
    """Nodes that hold something, by the controller's word."""
    nodes = await cluster.nodes()
    held = [node for node in nodes if node.alive and (node.attempts or node.cpu_milli_free != node.cpu_milli)]
    return [f"{node.name}: {node.attempts} attempts, {node.cpu_milli - node.cpu_milli_free} mCPU" for node in held]
