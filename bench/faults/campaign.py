"""Campaign of random kills: it checks what must end with each victim, restarts daemons, and counts what is left."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import signal
import sys
import time
from typing import Any

import trio
from attrs import define, field, frozen

import fray
from bench import resource_count
from bench.faults import outcomes
from bench.faults.lab import TOKEN, Lab, read_lines
from bench.faults.processes import Process, all_processes, below, kind_of, look_at, marked
from bench.histories.checks import violations
from bench.histories.files import read_history
from bench.histories.records import Kind, Operation, Outcome, table

NODES = ("north", "south")
DRIVERS = 2
WEIGHTS = {"job": 30, "child": 10, "shim": 15, "zygote": 5, "builder": 3, "node": 12, "controller": 12, "driver": 10}
SEVERAL = 0.25
"""Probability that one more process is killed in the same instant."""
GONE_WITHIN_S = 10.0
"""Seconds within which everything that must end with a victim has to end."""
AFTER_RESTART_S = 60.0
"""Seconds after a start of the controller within which a lost driver's jobs have to end: 1¾ of the grace period, and 5
s, as promised, and 2.5 s for a busy machine."""
QUIET_WITHIN_S = 90.0
QUIET_EVERY = 25
"""Kills between two quiet moments."""


@frozen
class Kill:
    """Kill, and the seconds until everything that had to end with it had ended."""

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
    lost: list[tuple[str, float]] = field(factory=list)
    """Daemons and drivers that were killed, and when."""

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
            await self.be_quiet(cluster, resume=False)
            books = await outcomes.check_outcomes(
                cluster, self.lab, self.drivers, self.lost_drivers, sum("builder" in one.kind for one in self.kills)
            )
            history = [*read_history(self.lab.ledger), *self.losses()]
        self.lab.close()
        left = [f"{process.comm} ({process.pid})" for process in marked(self.lab.tag, str(self.lab.directory))]
        return self.report(books, history, left)

    async def start_driver(self) -> None:
        """Start a driver once the controller can be reached, without which opening a cluster fails."""
        await self.lab.wait_reachable()
        self.drivers.append(self.lab.start_driver(self.rng.randrange(1 << 30)))
        with trio.fail_after(QUIET_WITHIN_S):
            while not read_lines(self.lab.ledger / f"{self.drivers[-1]}.jsonl"):  # noqa: ASYNC110
                await trio.sleep(0.02)

    async def some_work(self) -> None:
        """Let the load run for a random moment."""
        await trio.sleep(self.rng.uniform(0.1, 1.2))

    # Killing ---------------------------------------------------------------------------------------------------------

    async def one_kill(self) -> bool:
        """Kill a process, or several at once; return False if there was none.

        After several kills, the restarted daemons end the processes that lost their parents.
        """
        victims = self.choose()
        doomed = [one for kind, process in victims for one in self.doomed(kind, process)]
        began = time.monotonic()
        for kind, process in victims:
            self.kill(kind, process)
        if len(victims) > 1:
            await self.restart_daemons()
        left = await gone(doomed, GONE_WITHIN_S)
        if victims:
            name, took_s = "+".join(kind for kind, _ in victims), time.monotonic() - began
            self.kills.append(Kill(len(self.kills) + 1, name, took_s, tuple(f"{one.comm} ({one.pid})" for one in left)))
            self.print_kill(self.kills[-1])
        await self.restart_daemons()
        await self.some_work()
        return bool(victims)

    def choose(self) -> list[tuple[str, Process]]:
        """Choose victims: mostly one; each further one has the probability `SEVERAL`."""
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
        processes, running = all_processes(), self.lab.running
        if kind in ("node", "controller", "driver"):
            prefixes = {"node": NODES, "controller": ("controller",), "driver": ("driver",)}[kind]
            pids = [process.pid for name, process in running.items() if name.startswith(prefixes)]
            return [processes[pid] for pid in pids if pid in processes]
        nodes = [running[name].pid for name in NODES if name in running]
        inhabitants = [process for node in nodes for process in below(node, processes)]
        return [process for process in inhabitants if kind_of(process, processes, nodes) == kind]

    def doomed(self, kind: str, process: Process) -> list[Process]:
        """Return what must not outlive a process. The shims of a zygote continue, and the jobs of a driver end
        later."""
        processes = all_processes()
        if kind in ("job", "shim", "node"):
            return [process, *below(process.pid, processes)]
        return [process]

    def kill(self, kind: str, process: Process) -> None:
        name = next((name for name, running in self.lab.running.items() if running.pid == process.pid), None)
        if name is not None:
            self.lost.append((name, time.monotonic()))
            self.lab.kill(name)
            if kind == "driver":
                self.lost_drivers.add(name)
        elif process.lives:
            with contextlib.suppress(ProcessLookupError):  # it ended with another victim of the same moment
                os.kill(process.pid, signal.SIGKILL)

    async def restart_daemons(self) -> None:
        """Restart daemons and drivers, as a service manager would."""
        for name in ("controller", *NODES):
            if name not in self.lab.running:
                await trio.sleep(self.rng.uniform(0.0, 0.5))
                self.lab.start(name)
        for _ in range(DRIVERS - sum(name.startswith("driver") for name in self.lab.running)):
            await self.start_driver()

    def losses(self) -> list[Operation]:
        """Return the loss of each node and driver, with the time at which nothing of it may be left."""
        found = []
        for name, at in self.lost:
            if name == "controller":
                continue
            kind, end = Kind.LOST_MACHINE if name in NODES else Kind.LOST_OWNER, at + GONE_WITHIN_S
            for killed_at, serves_at in self.outages() if kind is Kind.LOST_OWNER else ():
                # A controller that has restarted grants all drivers their grace period again.
                if killed_at <= end and serves_at >= at:
                    end = max(end, serves_at + AFTER_RESTART_S)
            found.append(Operation(name, kind, "", at, end, Outcome.VALUE, round(end - at, 1)))
        return found

    def outages(self) -> list[tuple[float, float]]:
        """Return when the controller was killed, and when it served again, in order."""
        offset_s = time.monotonic() - time.time()
        lines = read_lines(self.lab.directory / "controller.log")
        starts = [float(str(line["time"])) + offset_s for line in lines if line.get("text") == "controller started"]
        kills = [at for name, at in self.lost if name == "controller"]
        return [(at, min((start for start in starts if start > at), default=math.inf)) for at in kills]

    # Quiet -----------------------------------------------------------------------------------------------------------

    async def be_quiet(self, cluster: fray.Cluster, *, resume: bool = True) -> None:
        """Let all work end; then only the daemons and the drivers may be left."""
        living = [name for name in self.drivers if name in self.lab.running]
        gave_up = [name for name in living if self.lab.running[name].poll() is not None]
        if gave_up:
            raise RuntimeError(f"{', '.join(gave_up)} ended unexpectedly: see its log in {self.lab.directory}")
        for name in living:
            self.lab.send(name, "drain")
        with trio.move_on_after(QUIET_WITHIN_S) as patience:
            while not all(map(self.is_quiet, living)):  # noqa: ASYNC110
                await trio.sleep(0.2)
        residue = await self.residue(cluster)
        with trio.move_on_after(GONE_WITHIN_S):
            while residue:
                await trio.sleep(0.5)
                residue = await self.residue(cluster)
        if patience.cancelled_caught:
            residue["drivers that did not drain"] = living
        if residue:
            self.residues.append({"after_kills": len(self.kills), **residue})
        if self.progress:
            print(f"quiet after {len(self.kills)} kills: {residue or 'nothing is left'}", file=sys.stderr, flush=True)
        for name in living if resume else ():
            self.lab.send(name, "resume")

    def is_quiet(self, driver: str) -> bool:
        """Return whether the last line of a driver says that it is quiet."""
        return "quiet" in (read_lines(self.lab.ledger / f"{driver}.jsonl") or [{}])[-1]

    async def residue(self, cluster: fray.Cluster) -> dict[str, Any]:
        """Return everything that should not be left at a quiet moment."""
        return {
            what: found
            for what, found in {
                "processes": self.unexpected_processes(),
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

    def unexpected_processes(self) -> list[str]:
        """Return marked processes other than daemons, drivers and zygotes."""
        known = {process.pid for process in self.lab.running.values()} | {os.getpid()}
        processes = all_processes()
        nodes = [self.lab.running[name].pid for name in NODES if name in self.lab.running]
        found = [one for one in marked(self.lab.tag, str(self.lab.directory)) if one.pid not in known]
        return [f"{one.comm} ({one.pid})" for one in found if kind_of(one, processes, nodes) != "zygote"]

    def segments(self) -> list[str]:
        """Return an entry for each new directory of shared memory whose process has ended."""
        now = resource_count.count_orphans()
        return ["one"] * (now - self.first_quiet.setdefault("segments", now))

    def locks(self) -> list[str]:
        """Return environments that are locked exclusively: being made, or being removed."""
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
        """Return daemons with more descriptors than at their first quiet moment, and both numbers."""
        found = {}
        for name in ("controller", *NODES):
            process = look_at(self.lab.running[name].pid) if name in self.lab.running else None
            if process is None:
                continue
            now = resource_count.descriptors(process.pid)
            first = self.first_quiet.setdefault(f"{name} {process.pid}", now)
            if now > first + 8 + 2 * DRIVERS:
                found[name] = (first, now)
        return found

    # Reporting -------------------------------------------------------------------------------------------------------

    def print_kill(self, kill: Kill) -> None:
        if self.progress:
            left = f", LEFT {', '.join(kill.left)}" if kill.left else ""
            print(f"{kill.number:4} {kill.kind:10} {1e3 * kill.gone_s:7.0f} ms{left}", file=sys.stderr, flush=True)

    def report(self, books: dict[str, Any], history: list[Operation], left_at_end: list[str]) -> dict[str, Any]:
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
            "history": table(history),
            "broken": {
                name: found
                for name, found in {
                    "left after a kill": [(kill.number, kill.kind, kill.left) for kill in self.kills if kill.left],
                    "left at a quiet moment": self.residues,
                    "left at the end": left_at_end,
                    "history": violations(history),
                    **books["broken"],
                }.items()
                if found
            },
        }


async def gone(doomed: list[Process], within_s: float) -> list[Process]:
    """Wait for processes to end; return those still alive after so long."""
    with trio.move_on_after(within_s):
        while any(process.lives for process in doomed):  # noqa: ASYNC110
            await trio.sleep(0.002)
    return [process for process in doomed if process.lives]


async def committed(cluster: fray.Cluster) -> list[str]:
    """Return nodes with allocated resources, according to the controller."""
    nodes = await cluster.nodes()
    held = [node for node in nodes if node.alive and (node.attempts or node.cpu_milli_free != node.cpu_milli)]
    return [f"{node.name}: {node.attempts} attempts, {node.cpu_milli - node.cpu_milli_free} mCPU" for node in held]
