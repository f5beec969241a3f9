"""Random kills in runs of `fray.rl`: ``python -m bench.faults.rl_kills --kills 200 --seed 1``.

A controller and three nodes run as daemons of this machine, and a driver with a run of 60 updates, in one of the three
modes of synchronisation; with ``--varied``, also with validations, a trainer of two ranks, a reference in a process of
its own, weights that go as files or over HTTP, and requests in flight that begin again with new weights or finish
first. At random moments a rollout process, inference server, trainer, reference, the process of data and pool, the
driver, a node or the controller is killed (SIGKILL) or frozen (SIGSTOP); a node is frozen with all its processes, as
if its machine were cut off, and continues later. Daemons and drivers are started again, as by a service manager. With
``--jobs`` runs are jobs of their own, and the process of the job is a victim in place of the driver. After each run:
every step is there once, the sum of samples holds, no sample was trained twice, no token was too old or of weights of
a lost line, and no process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

import fray
from bench.faults.lab import TOKEN, Lab
from bench.faults.processes import Process, all_processes, below, marked
from bench.faults.rl_checks import broken_promises
from bench.faults.rl_driver import GROUP_SIZE, GROUPS, THRESHOLD

NODES = ("north", "east", "south")
ROLES = {
    "rollout": "fray:RolloutPro",
    "server": "fray:InferenceS",
    "trainer": "fray:TrainerPro",
    "reference": "fray:ReferenceP",
    "pool": "fray:Coordinato",
    "job": "fray:job-of-run",
}
"""Titles of the processes of a run, as the kernel cuts them."""
WEIGHTS = {"rollout": 20, "server": 20, "trainer": 12, "pool": 12, "node": 8, "driver": 6, "controller": 6}
OF_JOBS = {**WEIGHTS, "driver": 0, "job": 40}
OF_REFERENCES = {"reference": 24}
"""Weight in runs that have one: in such a run each fifth victim is the reference."""
JOB = "job-of-run"
FROZEN_SHARE = 0.35
"""Share of the victims that are frozen and not killed. To notice one and to end it takes 15 s."""
PAUSE_S = (0.2, 4.0)
"""Seconds between two kills."""
CUT_OFF_S = (1.0, 9.0)
"""Seconds for which a node is frozen."""
SUSPECT_S = 3.0
LIMIT_S = 240.0
"""Seconds in which a run must end, its kills included."""
MODES = ("sync", "batch-async", "fully-async")
VARIED: dict[str, tuple[Any, ...]] = {
    "trainer_ranks": (1, 1, 2),
    "weight_sync": ("memory", "disk", "network"),
    "validate_freq": (None, 7),
    "interrupt": ("keep", "wait", "abort"),
    "reference": (None, "server"),
}
"""Settings of runs of a varied campaign, one value of each; None leaves it out."""


@define
class RlLab(Lab):
    """Daemons of a campaign, and the driver of its run."""

    def open(self, nodes: list[str]) -> None:
        (self.directory / "node.toml").write_text("cpu = 16\nmemory = '16GB'\ndisk = '4GB'\n")
        for name in ("controller", *nodes):
            self.start(name)

    def start(self, name: str) -> None:
        if name == "controller":
            where = ["--listen", f"unix:{self.directory}/controller.sock", "--store", str(self.directory / "store")]
            self._run(name, "fray.controller.main", *where, "--suspect-s", f"{SUSPECT_S:g}")
        else:
            super().start(name)

    def start_run(self, output: Path, mode: str, steps: int, settings: dict[str, Any], job: str) -> None:
        """Start the driver of a run, or of a run as a job; its output is a file beside the directory of the run."""
        os.environ["FRAY_CLUSTER_SPEC"] = self.spec
        given = (str(output), mode, str(steps), json.dumps(settings), *([job] if job else []))
        self._run("driver", "bench.faults.rl_driver", *given)

    def has_missed_controller(self) -> bool:
        """Return whether the driver ended because it could not connect."""
        return "fray.errors.Unreachable" in (self.directory / "driver.log").read_text()[-2_000:]

    def status_of_run(self) -> dict[str, Any] | None:
        """Return the last status of the run; None if its driver ended without one."""
        lines = (self.directory / "driver.log").read_text().splitlines()
        try:
            found: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError):
            return None
        return found


@define
class RlCampaign:
    """Runs with kills.

    Args:
        lab: the cluster.
        rng: chooses victims and moments.
        steps: updates of a run.
        most: kills in one run.
        pause_s: least and most seconds between two kills.
        frozen_share: share of the victims that are frozen and not killed.
        varied: whether runs have other settings than their mode, too.
        jobs: whether runs are jobs, whose processes are killed in place of drivers.
    """

    lab: RlLab
    rng: random.Random
    steps: int = 60
    most: int = 10
    progress: bool = False
    pause_s: tuple[float, float] = PAUSE_S
    frozen_share: float = FROZEN_SHARE
    varied: bool = False
    jobs: bool = False
    kills: list[str] = field(factory=list)
    runs: list[dict[str, Any]] = field(factory=list)
    broken: list[str] = field(factory=list)

    async def run(self, count: int) -> dict[str, Any]:
        """Kill ``count`` times; return the report."""
        self.lab.open(list(NODES))
        await self.lab.wait_reachable()
        async with fray.open_cluster(self.lab.spec, token=TOKEN, logs=False, grace_s=600) as cluster:
            await cluster.wait_for_nodes(len(NODES))
        while len(self.kills) < count and not self.broken:
            await self.one_run(min(self.most, count - len(self.kills)))
        self.lab.close()
        left = [f"{one.comm} ({one.pid})" for one in marked(self.lab.tag, str(self.lab.directory))]
        if left:
            self.broken.append(f"left at the end: {left}")
        kinds = sorted(set(self.kills))
        return {
            "kills": len(self.kills),
            "by kind": {kind: self.kills.count(kind) for kind in kinds},
            "runs": self.runs,
            "broken": self.broken,
        }

    async def one_run(self, kills: int) -> None:
        number, mode, settings = len(self.runs), self.rng.choice(MODES), self.choose_settings()
        output = self.lab.directory / f"run-{number}"
        began, before = time.monotonic(), len(self.kills)
        self.start_run(output, mode, settings)
        with trio.move_on_after(LIMIT_S) as patience:
            async with trio.open_nursery() as nursery:
                weights = (OF_JOBS if self.jobs else WEIGHTS) | (OF_REFERENCES if "reference" in settings else {})
                nursery.start_soon(self.kill_at_random, weights, kills, before, output)
                await self.until_done(output, mode, settings)
                nursery.cancel_scope.cancel()
        took_s, done = time.monotonic() - began, self.kills[before:]
        self.runs.append({"mode": mode, **settings, "kills": len(done), "seconds": round(took_s, 1)})
        for name in NODES:
            if name not in self.lab.running:
                self.lab.start(name)
        where = f"run {number} ({', '.join([mode, *map(str, settings.values())])}; {', '.join(done)})"
        status = self.lab.status_of_run()
        if patience.cancelled_caught or status is None:
            self.broken.append(f"{where}: not done within {LIMIT_S:g} s; its log is driver.log")
            self.end_daemon("driver")
            return
        max_age = 0 if mode == "sync" else THRESHOLD
        found = broken_promises(output, status, self.steps, GROUPS * GROUP_SIZE, max_age, settings.get("validate_freq"))
        self.broken += [f"{where}: {what}" for what in found]
        if self.progress:
            print(f"{where}: {took_s:.1f} s, {self.broken or 'no promise broken'}", file=sys.stderr, flush=True)

    def start_run(self, output: Path, mode: str, settings: dict[str, Any]) -> None:
        self.lab.start_run(output, mode, self.steps, settings, JOB if self.jobs else "")

    def choose_settings(self) -> dict[str, Any]:
        """Return the settings of a run beside its mode."""
        if not self.varied:
            return {}
        chosen = {name: self.rng.choice(values) for name, values in VARIED.items()}
        return {name: value for name, value in chosen.items() if value is not None}

    async def until_done(self, output: Path, mode: str, settings: dict[str, Any]) -> None:
        """Wait until a driver has ended by itself; one that was killed is started again."""
        while True:
            driver = self.lab.running.get("driver")
            if driver is None:
                await self.lab.wait_reachable()
                self.start_run(output, mode, settings)
            elif (code := driver.poll()) is not None:
                self.lab.kill("driver")
                # It was started just when the controller was lost.
                if code and self.lab.has_missed_controller():
                    continue
                if code:
                    self.broken.append(f"run {len(self.runs)} ({mode}): its driver failed; its log is driver.log")
                return
            await trio.sleep(0.1)

    # Kills

    async def kill_at_random(self, weights: dict[str, int], most: int, before: int, output: Path) -> None:
        """Kill until the run is done or there were enough kills; a job when it has something that can be taken over."""
        while self.jobs and not (output / "metrics.jsonl").exists():  # noqa: ASYNC110 - another process writes it
            await trio.sleep(0.1)
        async with trio.open_nursery() as nursery:
            while len(self.kills) < before + most:
                await trio.sleep(self.rng.uniform(*self.pause_s))
                kind = self.rng.choices(list(weights), list(weights.values()))[0]
                is_frozen = self.rng.random() < self.frozen_share
                if kind in ("driver", "controller"):
                    self.end_daemon(kind)
                elif kind == "node":
                    await nursery.start(self.cut_off if is_frozen else self.lose_node)
                elif not self.end_process(kind, is_frozen):
                    continue
                has_two = kind not in ("driver", "controller")
                self.kills.append(f"{kind} frozen" if is_frozen and has_two else kind)
                if self.progress:
                    print(f"{len(self.kills):4} {self.kills[-1]}", file=sys.stderr, flush=True)
                if kind == "controller":
                    await trio.sleep(self.rng.uniform(0.0, 1.0))
                    self.lab.start("controller")
                    await self.lab.wait_reachable()

    def end_daemon(self, name: str) -> None:
        if name in self.lab.running:
            self.lab.kill(name)

    def end_process(self, role: str, is_frozen: bool) -> bool:
        """Kill or freeze a process of the run; return False if there is none."""
        found = [one for one in self.of_nodes(NODES) if one.comm == ROLES[role]]
        if not found:
            return False
        victim = self.rng.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGSTOP if is_frozen else signal.SIGKILL)
        return True

    def of_nodes(self, names: tuple[str, ...]) -> list[Process]:
        """Return the processes below nodes."""
        processes = all_processes()
        roots = [self.lab.running[name].pid for name in names if name in self.lab.running]
        return [one for root in roots for one in below(root, processes)]

    async def lose_node(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Kill a node, and start it again a moment later."""
        alive = [name for name in NODES if name in self.lab.running]
        name = self.rng.choice(alive)
        self.lab.kill(name)
        task_status.started()
        await trio.sleep(self.rng.uniform(0.0, 2.0))
        self.lab.start(name)

    async def cut_off(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Freeze a node with all of its processes, and let them continue later."""
        name = self.rng.choice([name for name in NODES if name in self.lab.running])
        pids = [self.lab.running[name].pid, *(one.pid for one in self.of_nodes((name,)))]
        send(pids, signal.SIGSTOP)
        task_status.started()
        try:
            await trio.sleep(self.rng.uniform(*CUT_OFF_S))
        finally:
            send(pids, signal.SIGCONT)


def send(pids: list[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def campaign(
    kills: int,
    seed: int,
    *,
    steps: int = 60,
    pause_s: tuple[float, float] = PAUSE_S,
    frozen_share: float = FROZEN_SHARE,
    varied: bool = False,
    jobs: bool = False,
    keep: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Run a campaign; return its report. Its directory is removed unless a promise was broken."""
    variables = dict(os.environ)
    directory = Path(tempfile.mkdtemp(prefix="fray-rl-kills-"))
    lab = RlLab(directory)
    report: dict[str, Any] = {"broken": ["the campaign failed"]}
    try:
        options: dict[str, Any] = {"progress": progress, "pause_s": pause_s}
        options |= {"frozen_share": frozen_share, "varied": varied, "jobs": jobs}
        report = trio.run(RlCampaign(lab, random.Random(seed), steps, **options).run, kills)
    finally:
        os.environ.clear()
        os.environ.update(variables)
        for process in lab.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        if report["broken"] or keep:
            print(f"logs: {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.faults.rl_kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (default 1)")
    parser.add_argument("--steps", type=int, default=60, help="updates of a run (default 60)")
    parser.add_argument("--varied", action="store_true", help="runs with other settings than their mode, too")
    parser.add_argument("--jobs", action="store_true", help="runs are jobs of their own, whose processes are killed")
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("steps", "varied", "jobs", "keep")}
    report = campaign(options.kills, options.seed, progress=True, **settings)
    print(json.dumps(report, indent=2))
    sys.exit(bool(report["broken"]))


if __name__ == "__main__":
    main()
