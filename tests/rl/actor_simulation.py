"""Simulation of the actors of `fray.rl`: ``python -m tests.rl.actor_simulation --seed 7``.

One seed is a whole run (`fray.rl.Run`) on a simulated cluster: its controller in a driver, coordinator, rollout
processes, servers and trainer as processes of machines, over the simulated network, with faults of all of them; model
and policy are those of `tests.rl.simulated_model`, threads are tasks, and time is virtual. A driver that is lost is
started again, and continues. What must never happen is checked meanwhile and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import trio
from attrs import Factory, define, evolve, field, frozen

import fray.rl.inference.server
from fray import Cluster, ConnectionFailed
from fray.errors import ActorDied, SessionEnded
from fray.model.resources import Capacity
from fray.node.config import LEASE_MIN_S
from fray.rl.core.versions import VersionName
from fray.rl.inference.model_engine import ModelEngine
from fray.rl.processes.actor_tasks import ActorTask, ActorTasks
from fray.rl.records.console_lines import is_validation
from fray.rl.records.run_files import read_rows
from fray.rl.records.run_log import RunResult
from fray.rl.run import Run
from fray.rl.train.errors import EpisodesFailed
from fray.rl.train.settings import GRPO
from fray.rl.trainer_process import TrainerRank
from fray.runtime.runtime import current, current_or_none
from fray.scheduler.state.rows import SchedulerConfig
from fray.testing import faults, stuck_tasks
from fray.testing.fakes import SimNetwork
from fray.testing.faults import FaultHistory
from fray.testing.ground_truth import GroundTruth, Violation
from fray.testing.seed import Seed, Trace
from fray.testing.sim_cluster import DriverProcess, MachineSpec, SimCluster, open_sim_cluster
from tests.rl import simulated_model
from tests.rl.simulated_model import MODEL, DecodingTask, ModelTruth, SimEngine, SimPolicy, solve, solve_group
from tests.simulation.operations import leaves
from tests.simulation.run import run_in_virtual_time
from tests.simulation.scenario import carries_cancelled

RULES = SchedulerConfig(suspect_s=5.0, lease_s=LEASE_MIN_S)
OUTPUT = Path("out")
"""Output of the run. Relative, as it is in messages, which must not differ between two runs of a seed."""
GRACE_S = 3.0
FAULTS_S = (0.5, 35.0)
"""Time in which faults begin."""
SPANS_S = ((0.1, 3.0), (0.1, 3.0), (3.0, 12.0), (12.0, 50.0))
CUT_SHARE, CUT_S = 0.15, (LEASE_MIN_S, LEASE_MIN_S + 60.0)
"""Share of the runs with a machine that is cut off for longer than its lease, and for how long."""
ENDED_WITHIN_S = 900.0
"""Time after the last fault in which the run must have ended."""
GONE_WITHIN_S = LEASE_MIN_S + 60.0
RESTART_S = 1.0
"""Seconds after which a driver that was lost is started again."""
UPDATE_S, WORK_S = (0.3, 4.0), (0.001, 0.03)
"""Seconds of an update, and of any other work in a thread."""
ROLES = ("RolloutProcess", "InferenceServer", "TrainerProcess", "Coordinator")
FAULTS: Mapping[str, int] = {
    "kill role": 8, "kill machine": 2, "power cut": 1, "stop machine": 2, "stop driver": 1, "stop controller": 1,
    "partition": 3, "cut off": 3, "break connections": 2, "crash controller": 1, "crash at save": 1, "slow link": 1,
    "node leaves": 2, "driver vanishes": 2,
}  # fmt: skip
"""Weights of the kinds of faults."""


@frozen
class PlannedFault:
    """Fault of a seed.

    Attributes:
        kind: one of `FAULTS`, or ``kill`` and one of `ROLES`.
    """

    at_s: float
    kind: str
    span_s: float
    number: int


@frozen
class ActorPlan:
    """Machines, settings of the run, and faults, as a seed draws them."""

    machines: int
    options: dict[str, Any]
    groups: int
    group_size: int
    steps: int
    rows: int
    faults: tuple[PlannedFault, ...]

    @property
    def max_age(self) -> int | None:
        """Updates by which a token that is trained may be behind; None: any number."""
        if self.options["sync"] == "sync":
            return 0
        return None if self.options["stale"] == "keep" else int(self.options["staleness_threshold"])


def draw_plan(rng: random.Random) -> ActorPlan:
    """Draw a run and its faults."""
    sync = rng.choice(("sync", "batch-async", "fully-async"))
    servers, processes = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 3))
    is_group = rng.random() < 0.2
    validates = rng.random() < 0.4
    rows = rng.randrange(5, 12)
    options: dict[str, Any] = {
        "sync": sync,
        "staleness_threshold": rng.choice((0, 1, 1, 2)) if sync != "sync" else 1,
        "stale": rng.choice(("requeue", "drop", "keep")) if sync == "fully-async" else "requeue",
        "rollout": solve_group if is_group else solve,
        "episode": "group" if is_group else "sample",
        "rollout_workers": processes * rng.choice((1, 2, 4)),
        "rollout_processes": processes,
        "inference_servers": servers,
        "min_servers": rng.choice((1, 1, servers)),
        "weight_sync": rng.choice(("memory", "memory", "disk")),
        "interrupt": rng.choice(("keep", "keep", "wait", "abort")),
        "freeze_for_weight_sync": rng.random() < 0.2,
        "keep_batch_order": rng.random() < 0.3,
        "save_every": rng.randrange(1, 5),
        "validation_data": [{"number": number} for number in range(2)] if validates else None,
        "validate_freq": rng.choice((2, 3)) if validates else None,
        "liveness_s": rng.choice((4.0, 8.0)),
        "transfer_s": 4.0,
        # Leases that end by themselves must not hide those that are not given back: the run would end too late.
        "rollout_timeout_s": 5_000.0,
        "max_attempts": 8,
    }
    times = sorted(rng.uniform(*FAULTS_S) for _ in range(rng.randrange(4, 11)))
    kinds = rng.choices(list(FAULTS), list(FAULTS.values()), k=len(times))
    planned = [
        PlannedFault(round(at_s, 3), kind, round(rng.uniform(*rng.choice(SPANS_S)), 3), number)
        for number, (at_s, kind) in enumerate(zip(times, kinds, strict=True))
    ]
    groups, group_size, steps = rng.randrange(1, 4), rng.choice((2, 2, 4)), rng.randrange(8, 17)
    machines = rng.randrange(2, 5)
    if rng.random() < CUT_SHARE:
        kind = rng.choice(("cut off", "partition", "stop machine"))
        planned.append(
            PlannedFault(round(rng.uniform(*FAULTS_S), 3), kind, round(rng.uniform(*CUT_S), 3), len(planned))
        )
        planned.sort(key=lambda fault: fault.at_s)
    return ActorPlan(machines, options, groups, group_size, steps, rows, tuple(planned))


@frozen
class ActorResult:
    """Result of a seed."""

    seed: int
    digest: str
    faults: Counter[str]
    happened: Counter[str]
    lines: tuple[str, ...]
    virtual_s: float
    breaches: tuple[Violation, ...]


@define(eq=False)
class ActorScenario:
    """A run that is simulated; a `fray.testing.faults.FaultTarget`."""

    seed: Seed
    plan: ActorPlan
    trace: Trace
    ground: GroundTruth
    network: SimNetwork
    sim: SimCluster = field(init=False)
    model: ModelTruth = field(init=False)
    fault_history: FaultHistory = Factory(FaultHistory)
    happened: Counter[str] = Factory(Counter)
    lines: list[str] = Factory(list)
    result: RunResult | None = None
    _run: Run | None = None
    _driver: DriverProcess | None = None
    _ended: trio.Event = Factory(trio.Event)
    """Set when a driver has the result, or the run has failed."""
    _threads: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._threads = self.seed.stream("threads")
        rng, size = self.seed.stream("model"), self.plan.group_size
        self.model = ModelTruth(rng, self.plan.max_age, size, partial(self.ground.breach, "rl"), self._target)

    def say(self, who: str, text: str) -> None:
        line = f"{trio.current_time():9.3f}  {who:<12} {text}"
        self.lines.append(line)
        self.trace.note(f"line {line}")

    def _target(self) -> VersionName | None:
        servers = None if self._run is None else getattr(self._run._controller, "_servers", None)
        return None if servers is None else servers.fleet.target

    # What a fault may hit

    def drivers(self) -> list[DriverProcess]:
        driver = self._driver
        is_there = driver is not None and driver.session and not driver.killed and not driver.has_left
        return [driver] if driver is not None and is_there else []

    def ask_to_leave(self, driver: DriverProcess, how: str) -> None:
        raise AssertionError("no fault of this simulation asks a driver to leave")

    # The course of it

    async def run(self) -> None:
        """Run with faults, then without, to the end; then look for what is left."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drive)
            await self._run_faults()
            self.say("-", "calm")
            with trio.move_on_after(ENDED_WITHIN_S):
                await self._ended.wait()
            if not self._ended.is_set():
                await self._note_hanging()
            nursery.cancel_scope.cancel()
        if self.result is not None:
            self._check_result(self.result)
            await trio.sleep(GONE_WITHIN_S)
            for life in self.ground.living.values():
                self.ground.breach("rl", f"{life.attempt_id} ({life.spec.name}) is left on {life.machine}")

    async def _run_faults(self) -> None:
        """Run faults until all have ended, or the run has."""
        async with trio.open_nursery() as nursery:
            for fault in self.plan.faults:
                await self._wait(fault.at_s - trio.current_time())
                if self._ended.is_set():
                    return
                nursery.start_soon(self._fault, fault)

    async def _wait(self, span_s: float) -> None:
        with trio.move_on_after(span_s):
            await self._ended.wait()

    async def _fault(self, planned: PlannedFault) -> None:
        rng = self.seed.stream(f"fault/{planned.number}")
        self.say("FAULT", f"{planned.kind} for {planned.span_s:.1f} s")
        role = rng.choice(ROLES) if planned.kind == "kill role" else planned.kind.removeprefix("kill ")
        if role in ROLES:
            what = self._kill_role(rng, role)
        else:
            what = await faults.FAULTS[planned.kind](self, rng, planned.span_s, self._wait)
        self.happened[planned.kind] += bool(what)
        self.say("ended", f"{planned.kind}: {what or 'nothing to hit'}")

    def _kill_role(self, rng: random.Random, role: str) -> str:
        """Kill a process of the run."""
        found = [life for life in self.ground.living.values() if role in life.spec.name]
        if not found:
            return ""
        victim = rng.choice(found)
        launcher = self.sim.machines[victim.machine].launcher
        return f"{role} {victim.attempt_id}" if launcher is not None and launcher.crash(victim.attempt_id) else ""

    async def _note_hanging(self) -> None:
        status = None
        with trio.move_on_after(10.0):
            status = None if self._run is None else await self._run.status()
        text = "its driver does not start" if status is None else f"waits: {status.waits_for}"
        self.ground.breach("rl", f"the run has not ended {ENDED_WITHIN_S:g} s after the last fault; {text}")
        for name in (*(driver.name for driver in self.drivers()), *self.sim.machines):
            for line in stuck_tasks.where(name):
                if "rl/" in line or "tests/" in line:
                    self.say(name, f"waits in {line}")

    # The driver

    async def _drive(self) -> None:
        """Run drivers, one after the other, until one has the result."""
        number = 0
        while not self._ended.is_set():
            number += 1
            driver = self._driver = DriverProcess(self.sim, f"driver.{number}")
            try:
                await driver.run(self._run_on, namespace=None, grace_s=GRACE_S)
            except (Exception, BaseExceptionGroup) as error:
                if carries_cancelled(error):
                    raise
                self._note_failure(error)
            if driver.killed:
                self.say(driver.name, "was killed")
            if self.result is not None:
                self._ended.set()
            await trio.sleep(RESTART_S)

    def _note_failure(self, error: BaseException) -> None:
        """Note the failure of a driver; what is not expected is a breach."""
        found = list(leaves(error))
        self.say("driver", f"failed: {'; '.join(f'{type(one).__name__}: {one}' for one in found)[:400]}")
        self.happened["driver failed"] += 1
        # A batch may have two samples, whose episodes may both raise: the run says so and ends, as it should.
        expected: tuple[type[BaseException], ...] = (ConnectionFailed, SessionEnded, EpisodesFailed)
        # Its actors have ended with its session, and one of their machines may say so before the controller does.
        if any(isinstance(one, SessionEnded) or "ended: the driver was gone" in str(one) for one in found):
            expected += (ActorDied,)
        if not all(isinstance(one, expected) for one in found):
            self.ground.breach("rl", f"the run failed: {error!r}"[:600])
            self._ended.set()

    async def _run_on(self, cluster: Cluster) -> None:
        self.happened["start"] += 1
        run = self._run = self._make_run()
        self.result = await run.run_on(cluster)

    def _make_run(self) -> Run:
        plan = self.plan
        run = Run(
            model=MODEL,
            data=[{"number": number} for number in range(plan.rows)],
            trainer=GRPO(groups=plan.groups, group_size=plan.group_size, steps=plan.steps),
            output="out",
            name="simulated",
            progress=False,
            on_step=self._note_step,
            **plan.options,
        )
        run.parts = evolve(run.parts, output=OUTPUT, settings={**run.parts.settings, "output": "out"})
        return run

    def _note_step(self, metrics: dict[str, float]) -> None:
        shown = {name: value for name, value in metrics.items() if name not in ("elapsed_s", "servers_busy_share")}
        self.say("step", str(shown))
        self.happened["step"] += 1
        for age in (name for name in metrics if name.startswith("age/")):
            self.happened[age] += 1

    # What may take the place of a thread

    async def run_in_thread(self, work: Callable[..., Any], *arguments: Any, abandon_on_cancel: bool = False) -> Any:
        """Do work of a thread in the loop, after the time that it takes; not if its process was killed meanwhile."""
        await trio.lowlevel.checkpoint()
        is_update = getattr(work, "__name__", "") == "update"
        with trio.CancelScope(shield=not abandon_on_cancel):
            await trio.sleep(self._threads.uniform(*(UPDATE_S if is_update else WORK_S)))
        runtime = current_or_none()
        if runtime is not None and not self.ground.is_alive(runtime.session):
            await trio.sleep_forever()
        return work(*arguments)

    # The end

    def _check_result(self, result: RunResult) -> None:
        """Check what the run says of itself against what happened to the weights."""
        breach, status, plan = partial(self.ground.breach, "rl"), result.status, self.plan
        assert status is not None
        rows = list(read_rows(OUTPUT))
        done = [row for row in rows if "state" in row]
        numbers = [int(row["step"]) for row in done]
        if numbers != list(range(1, plan.steps + 1)):
            breach(f"metrics are of updates {numbers}, expected 1 to {plan.steps}")
        line = [int(row["state"]) for row in done]
        if not line or line != self.model.history(line[-1])[-2::-1]:
            breach(f"the updates of the metrics are {line}, and did not lead to the last one")
        trained = sum(len(self.model.states[state].samples) for state in line)
        if status.trained != trained:
            breach(f"{status.trained} samples are counted as trained, and {trained} were")
        missing = sum(self.model.states[state].missing for state in line)
        if missing > sum(status.dropped.values()):
            breach(f"groups lack {missing} samples, and {status.dropped} were dropped")
        found = status.trained + status.validated + sum(status.dropped.values()) + status.open
        if status.issued != found:
            breach(f"{status.issued} samples were issued, {found} are accounted for: {status}")
        validated = [int(row["step"]) for row in rows if is_validation(row)]
        if len(set(validated)) != len(validated):
            breach(f"validations are reported twice: {validated}")
        self.say("-", f"done: {len(done)} updates, {status.issued} samples, {len(validated)} validations")


async def _simulate(seed: Seed, plan: ActorPlan, trace: Trace) -> ActorResult:
    network = SimNetwork(seed.stream("network"), trace)
    ground = GroundTruth(trio.current_time)
    scenario = ActorScenario(seed, plan, trace, ground, network)
    capacity = Capacity(cpu_milli=8000, memory_bytes=16 << 30, disk_bytes=100 << 30)
    machines = [MachineSpec(f"m{number}", capacity) for number in range(plan.machines)]
    with simulated_model.recorded(scenario.model):
        async with open_sim_cluster(
            seed, network, ground, machines, rules=RULES, run_in_thread=scenario.run_in_thread
        ) as sim:
            scenario.sim = sim
            await scenario.run()
    happened = scenario.happened + scenario.model.happened
    fault_counts = Counter({kind: count for kind, count in happened.items() if kind in FAULTS})
    breaches = tuple(ground.breaches)
    return ActorResult(
        seed.number, trace.digest, fault_counts, happened, tuple(scenario.lines), trio.current_time(), breaches
    )


def _make_engine(maker: ModelEngine) -> SimEngine:
    return SimEngine()


def _make_policy(rank: TrainerRank, *settings: Any) -> SimPolicy:
    return SimPolicy()


def _start_in_process(tasks: ActorTasks, work: Callable[[], Awaitable[Any]]) -> ActorTask[Any]:
    """Begin a task that ends with its simulated process, as those of Trio's own would not."""
    task = ActorTask(work)
    tasks._tasks.append(task)
    nursery = tasks._context.run(current).nursery
    tasks._context.copy().run(nursery.start_soon, tasks._run, task)
    return task


@contextlib.contextmanager
def _simulated_parts(seed: Seed) -> Iterator[None]:
    """Put model, threads and random names of a run under the control of the simulation, in a directory of its own."""
    names = seed.stream("names")

    def token_hex(size: int = 32) -> str:
        return names.randbytes(size).hex()

    seeded = SimpleNamespace(token_hex=token_hex, randbits=names.getrandbits)
    # Not in all modules: those of shared memory are taken once in a process.
    modules = [each for name, each in sys.modules.items() if name.startswith("fray.rl.") and hasattr(each, "secrets")]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fray-rl-sim-"))
        for patch in (
            contextlib.chdir(directory),
            mock.patch.dict(os.environ, {"XDG_STATE_HOME": directory}),
            mock.patch.object(fray.rl.inference.server, "DecodingThread", DecodingTask),
            mock.patch.object(ActorTasks, "start", _start_in_process),
            mock.patch.object(ModelEngine, "__call__", _make_engine),
            mock.patch.object(TrainerRank, "_load", _make_policy),
            *(mock.patch.object(module, "secrets", seeded) for module in modules),
        ):
            stack.enter_context(patch)
        yield


def run_seed(number: int, *, plan: ActorPlan | None = None, trace: Trace | None = None) -> ActorResult:
    """Run the scenario of a seed: the same seed, the same messages.

    Args:
        plan: instead of the one that the seed draws.
        trace: to record what happened.

    Raises:
        VirtualTimeStuck: virtual time stood still.
    """
    seed, trace = Seed(number), trace or Trace()
    chosen = plan or draw_plan(seed.stream("plan"))
    with _simulated_parts(seed):
        result, texts = run_in_virtual_time(seed, partial(_simulate, seed, chosen, trace))
    logged = tuple(Violation("error", result.virtual_s, text) for text in texts)
    return evolve(result, breaches=(*result.breaches, *logged))


def summary(result: ActorResult) -> str:
    """Return what happened, and what was broken."""
    counts = ", ".join(f"{count} {what}" for what, count in sorted(result.happened.items()))
    lines = [f"seed {result.seed}: {result.virtual_s:.0f} virtual s: {counts}"]
    lines += [f"BROKEN {breach}" for breach in result.breaches]
    if result.breaches:
        lines.append(f"to run it again: python -m tests.rl.actor_simulation --seed {result.seed}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run seeds; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed and print its events")
    parser.add_argument("--seeds", default="0-19", help="run seeds FIRST-LAST (default 0-19)")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        result = run_seed(options.seed)
        print("\n".join([*result.lines, summary(result)]))
        print(f"digest {result.digest}")
        return int(bool(result.breaches))
    first, last = map(int, options.seeds.split("-"))
    broken, total, began = 0, Counter[str](), time.monotonic()
    for number in range(first, last + 1):
        result = run_seed(number)
        total += result.happened
        broken += bool(result.breaches)
        if result.breaches:
            print(summary(result), flush=True)
    took_s = time.monotonic() - began
    print(f"{last - first + 1} seeds in {took_s:.0f} s, {broken} of them with broken promises")
    print(", ".join(f"{count} {what}" for what, count in sorted(total.items())))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
