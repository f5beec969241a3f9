"""Scenario: a plan carried out on a simulated cluster, checked all the while and at the end."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import trio
from attrs import Factory, define, evolve, frozen

from fray import Cluster, ConnectionFailed, Job, JobInfo
from fray.controller.store import Store
from fray.errors import (
    ActorDied,
    DeadlineExceeded,
    FrayError,
    JobFailed,
    NoSuchActor,
    NoSuchReservation,
    ProtocolMismatch,
    SessionEnded,
    Unauthorized,
)
from fray.model.ids import AttemptId, JobId
from fray.model.policy.policy import Preemption
from fray.node.joining import find_credential
from fray.scheduler.effects import Effect, Event, EventRecorded, LaunchRequested
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State
from fray.testing import stuck_tasks
from fray.testing.fakes import SimNetwork
from fray.testing.faults import FAULTS, FaultHistory
from fray.testing.ground_truth import GroundTruth, Violation
from fray.testing.invariants.check import CommittedOutcomes
from fray.testing.rare_faults import RARE_FAULTS
from fray.testing.seed import Seed, Trace
from fray.testing.sim_cluster import (
    SHARED,
    TOKEN,
    DriverProcess,
    MachineSpec,
    SimCluster,
    joining_config,
    open_sim_cluster,
)
from tests.simulation import checks, coverage, workloads
from tests.simulation import operations as acts
from tests.simulation.operations import DriverState, leaves
from tests.simulation.scenario_plans import PlannedAct, PlannedFault, ScenarioPlan
from tests.simulation.workloads import Boom

ALL_FAULTS = {**FAULTS, **RARE_FAULTS}
RULES = SchedulerConfig(lease_s=300.0)
PREEMPTION = Preemption(shield_s=2.0, limit=2, period_s=120.0, patience_s=2.0)
GRACE_S = 10.0
LEAVE_S = 5.0
"""Time a driver that leaves waits for its acts before it cancels them."""
ENDED_WITHIN_S = 250.0
"""P3: every wait ends within this time after the last fault has ended, or later while queued jobs begin."""
LONGEST_JOB_S = 160.0
"""Time after the begin of a process within which its job or longest call (150 s) ends, and the next one begins."""
QUEUE_EMPTY_S = 1000.0
"""Time after the last fault within which all queued jobs have begun and ended."""
GONE_WITHIN_S = 100.0
"""P1: nothing lives longer than this after its owner's end, on machines that could be reached all the while."""
EXPLAINS_S = 150.0
"""Time after a fault within which it explains an error."""
WATCH_EVERY_S = 2.0

_EXPLAINED = (ConnectionFailed, ActorDied, JobFailed, DeadlineExceeded, NoSuchActor, NoSuchReservation)
_NEVER = (ProtocolMismatch, Unauthorized)


@frozen
class ScenarioResult:
    """Result of a scenario."""

    seed: int
    digest: str
    deliveries: int
    operations: Counter[str]
    acts: Counter[str]
    """Acts that ended by themselves, by name."""
    events: Counter[str]
    """Events of jobs and machines that the scheduler logged, by kind."""
    faults: Counter[str]
    outcomes: Counter[str]
    breaches: tuple[Violation, ...]
    lines: tuple[str, ...]
    virtual_s: float
    coverage: Counter[str]
    """Times that each row of `tests.simulation.coverage` occurred."""


@define
class _OperationContext:
    """`tests.simulation.operations.context.OperationContext` of one act."""

    scenario: Scenario
    cluster: Cluster
    desk: DriverState
    rng: random.Random
    token: str
    driver: DriverProcess

    def op(self, what: str) -> None:
        self.scenario.operations[what] += 1

    def check(self, promise: str, holds: bool, text: str) -> None:
        if not holds and not self.driver.killed:
            self.scenario.truth.breach(promise, text)

    def accepted(self, job: Job) -> None:
        if not self.driver.killed:
            self.scenario.accepted[job.id] = self.token

    def saw(self, info: JobInfo) -> None:
        if not self.driver.killed:
            self.scenario.seen.setdefault(info.job_id, []).append(info)

    def doomed(self, *names: str) -> None:
        for name in names:
            self.scenario.doomed.setdefault(name, (trio.current_time(), self.driver.name))

    def is_doomed(self, name: str) -> bool:
        return name in self.scenario.doomed

    def used(self, what: str) -> None:
        self.scenario.truth.uses[what] += 1

    def over_soon(self, token: str) -> None:
        if not self.driver.killed:
            self.scenario.cancelled[token] = trio.current_time()

    def repeatable(self, token: str) -> None:
        self.scenario.truth.repeatable.add(token)

    def continued_at(self) -> float:
        return self.scenario.truth.continued_at.get(self.driver.name, 0.0)

    def runs(self, token: str) -> int:
        return self.scenario.truth.times_run(token)

    async def join(self, token: str, name: str) -> str:
        network = self.scenario.sim.network.process(name, self.driver.name)
        return (await find_credential(joining_config(token, name), network, self.scenario.seed.stream(name))).key_id

    def printed(self, job_id: JobId) -> dict[AttemptId, int]:
        truth = self.scenario.truth
        over = (life.attempt_id for life in truth.of_job.get(job_id, ()) if life.attempt_id not in truth.living)
        return {attempt_id: truth.printed[attempt_id] for attempt_id in over}


@define(eq=False)
class Scenario:
    """State of a running scenario, made by `simulate`."""

    seed: Seed
    plan: ScenarioPlan
    trace: Trace
    truth: GroundTruth
    network: SimNetwork
    check_rng: random.Random = Factory(lambda self: self.seed.stream("checks"), takes_self=True)
    """Generator that chooses the steps after which everything is checked."""
    fault_history: FaultHistory = Factory(FaultHistory)
    operations: Counter[str] = Factory(Counter)
    acts: Counter[str] = Factory(Counter)
    events: Counter[str] = Factory(Counter)
    happened: Counter[str] = Factory(Counter)
    outcomes: Counter[str] = Factory(Counter)
    coverage: Counter[str] = Factory(Counter)
    lines: list[str] = Factory(list)
    named: dict[str, list[JobId]] = Factory(dict)
    accepted: dict[JobId, str] = Factory(dict)
    seen: dict[JobId, list[JobInfo]] = Factory(dict)
    doomed: dict[str, tuple[float, str]] = Factory(dict)
    """Job name to when it was ended, and by whom."""
    cancelled: dict[str, float] = Factory(dict)
    open_acts: dict[int, str] = Factory(dict)
    fault_log: list[tuple[float, float | None]] = Factory(list)
    sim: SimCluster = None  # type: ignore[assignment]
    gone_within_s: float = GONE_WITHIN_S
    decided: CommittedOutcomes = Factory(CommittedOutcomes)
    _restores: int = 0
    _cut_short: set[str] = Factory(set)
    """Tokens of acts that were cancelled because their driver leaves."""
    _driven: trio.Event = Factory(trio.Event)
    _drivers: dict[int, DriverProcess] = Factory(dict)
    _leaving: dict[str, str] = Factory(dict)
    _leave: dict[str, trio.Event] = Factory(dict)

    # Telling

    def say(self, who: str, text: str) -> None:
        line = f"{trio.current_time():9.3f}  {who:<12} {text}"
        self.lines.append(line)
        self.trace.note(f"line {line}")

    def watch(self, state: State, event: Event, effects: Sequence[Effect]) -> None:
        """Check the state after a step of the scheduler."""
        step = f"step {trio.current_time():.9f} {type(event).__name__} {len(effects)}"
        self.trace.note(step, detail=(event, effects))
        # At random, so that no rhythm of the scenario hides from it.
        checks.invariants(self.truth, state, self.check_rng.random())
        self._count(effects)
        coverage.count_step(self.coverage, state, event, effects)
        if isinstance(event, LaunchRequested):
            for spec in event.launch.jobs:
                if not spec.detached:
                    accepted = state.jobs.get(spec.job_id) if spec.owned_by_job else None
                    self.truth.owners.setdefault(spec.job_id, accepted.owner if accepted else event.session)
                self.named.setdefault(spec.name, []).append(spec.job_id)

    def _count(self, effects: Sequence[Effect]) -> None:
        """Count the scheduler's events. Users of what was preempted may meet an error."""
        happened = [effect.event.what for effect in effects if isinstance(effect, EventRecorded)]
        self.events.update(happened)
        if "preempted" in happened:
            now = trio.current_time()
            self.fault_log.append((now, now))

    def saved(self, saves: int, state: State) -> None:
        """Check a transaction of the controller."""
        if self.sim.controller.restores != self._restores:
            self._restores, self.decided = self.sim.controller.restores, CommittedOutcomes()
        if saves % checks.THOROUGH_EVERY_STEPS == 0:
            checks.saved(self.truth, state, self.decided)

    # The course of it

    async def run(self) -> None:
        """Run all acts and faults, then wait for calm, then check the end."""
        async with trio.open_nursery() as watching:
            watching.start_soon(self._watch_lives)
            async with trio.open_nursery() as driving:
                driving.start_soon(self._drive_all)
                await self._run_faults()
                self.say("-", "calm")
                driving.start_soon(self._judge_who_hangs, driving.cancel_scope)
            await trio.sleep(self.gone_within_s)
            watching.cancel_scope.cancel()
        checks.final(self)

    async def _drive_all(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(self.plan.drivers):
                nursery.start_soon(self._drive, number)
        self._driven.set()

    async def _run_faults(self) -> None:
        """Run until the last fault has ended and the last act has started."""
        async with trio.open_nursery() as nursery:
            # Each task begins with its fault: the plan without the last ones gives the same scenario until then.
            for fault in self.plan.faults:
                await trio.sleep_until(fault.at_s)
                nursery.start_soon(self._fault, fault)
        await trio.sleep_until(max((act.at_s for act in self.plan.acts), default=0.0))

    async def _judge_who_hangs(self, driving: trio.CancelScope) -> None:
        calm_at = trio.current_time()
        while (until := self._ended_by(calm_at)) > trio.current_time():
            with trio.move_on_at(until):
                await self._driven.wait()
                return
        waiting = self.drivers()
        checks.hanging(self, waiting)
        for name in (*(driver.name for driver in waiting), *self.sim.machines):
            for line in stuck_tasks.where(name):
                self.say(name, f"waits in {line}")
        driving.cancel()

    def _ended_by(self, calm_at: float) -> float:
        """Return when all waits have ended, as far as can be said now: jobs that waited for room begin late."""
        last_began = max((process.began for process in self.truth.processes.values()), default=0.0)
        return min(max(calm_at + ENDED_WITHIN_S, last_began + LONGEST_JOB_S), calm_at + QUEUE_EMPTY_S)

    async def _watch_lives(self) -> None:
        while True:
            await trio.sleep(WATCH_EVERY_S)
            checks.lives(self, self.gone_within_s)
            checks.nodes_follow(self)

    # Faults

    def drivers(self) -> list[DriverProcess]:
        started = [driver for driver in self._drivers.values() if driver.session]
        return [driver for driver in started if not driver.killed and not driver.has_left]

    def ask_to_leave(self, driver: DriverProcess, how: str) -> None:
        self._leaving[driver.name] = how
        self._leave[driver.name].set()

    async def _fault(self, planned: PlannedFault) -> None:
        rng = self.seed.stream(f"fault/{planned.number}")
        index = len(self.fault_log)
        self.fault_log.append((trio.current_time(), None))
        self.say("FAULT", f"{planned.kind} for {planned.span_s:.1f} s")
        what = await ALL_FAULTS[planned.kind](self, rng, planned.span_s, trio.sleep)
        self.fault_log[index] = (self.fault_log[index][0], trio.current_time())
        if what:
            self.happened[planned.kind] += 1
            self.coverage[f"fault: {planned.kind}"] += 1
        self.say("ended", f"{planned.kind}: {what or 'nothing to hit'}")

    def explained(self, since: float) -> bool:
        """Return whether a fault was near the time from ``since`` to now."""
        return any(ended is None or ended + EXPLAINS_S >= since for _, ended in self.fault_log)

    # Drivers

    async def _drive(self, number: int) -> None:
        """Run one driver after the other, until the acts of this place are used up."""
        waiting = [act for act in self.plan.acts if act.driver == number]
        lives = 0
        while waiting:
            lives += 1
            driver = DriverProcess(self.sim, f"driver{number}.{lives}")
            self._drivers[number] = driver
            self._leave[driver.name] = trio.Event()
            began = trio.current_time()
            async with trio.open_nursery() as process:
                process.start_soon(self._live, driver, waiting, began)
            if driver.killed:
                self.say(driver.name, "is dead")
            await trio.sleep(1)

    async def _live(self, driver: DriverProcess, waiting: list[PlannedAct], began: float) -> None:
        async def body(cluster: Cluster) -> None:
            self.say(driver.name, f"is {driver.session} in {cluster.namespace}")
            await self._act_all(driver, cluster, waiting)

        try:
            await driver.run(body, namespace=None, grace_s=GRACE_S)
            if not driver.killed:
                self.say(driver.name, "has left")
        except BaseException as error:  # sorted out there
            if carries_cancelled(error):
                raise
            self.say(driver.name, f"has failed: {self._classify_error(error, began, driver.name)}")

    async def _act_all(self, driver: DriverProcess, cluster: Cluster, waiting: list[PlannedAct]) -> None:
        leave, desk = self._leave[driver.name], DriverState()
        async with trio.open_nursery() as nursery:
            while waiting and not leave.is_set():
                with trio.move_on_at(waiting[0].at_s):
                    await leave.wait()
                if not leave.is_set():
                    nursery.start_soon(self._act, waiting.pop(0), driver, cluster, desk)
            if leave.is_set():
                nursery.cancel_scope.deadline = trio.current_time() + LEAVE_S
            if self._leaving.get(driver.name) == "fails":
                raise Boom(driver.name)
        await self._end_jobs_of_cut_acts(driver, cluster)

    async def _end_jobs_of_cut_acts(self, driver: DriverProcess, cluster: Cluster) -> None:
        """End what cancelled acts have launched: a driver that leaves in order waits for its jobs, and some run until
        they are ended."""
        cut = [job_id for job_id, token in self.accepted.items() if token in self._cut_short]
        for job_id in cut:
            if self.truth.owners.get(job_id) != driver.session:
                continue  # detached, or of another driver
            job = await cluster.get_job(job_id)
            await job.terminate()
            self.doomed.setdefault(job.name, (trio.current_time(), driver.name))

    async def _act(self, planned: PlannedAct, driver: DriverProcess, cluster: Cluster, desk: DriverState) -> None:
        token, began = f"a{planned.number}", trio.current_time()
        rng = self.seed.stream(f"act/{planned.number}")
        self.open_acts[planned.number] = f"{planned.kind} {token} of {driver.name}, begun at {began:.1f}"
        text = "ended with its driver"
        try:
            text = await acts.ACTS[planned.kind](_OperationContext(self, cluster, desk, rng, token, driver))
            self.acts[planned.kind] += 1
            self.coverage[f"act: {planned.kind}"] += 1
        except BaseException as error:  # sorted out there
            if carries_cancelled(error) or driver.killed:
                self._cut_short.add(token)
                raise
            text = self._classify_error(error, began, f"{planned.kind} {token}")
        finally:
            del self.open_acts[planned.number]
            took_s = trio.current_time() - began
            self.say(driver.name, f"{token} {planned.kind}: {text} ({took_s:.3f} s)")

    def _classify_error(self, error: BaseException, began: float, who: str) -> str:
        """Count an error that a fault explains; any other is a breach."""
        texts = []
        for leaf in leaves(error):
            texts.append(f"{type(leaf).__name__}: {leaf}"[:160])
            if isinstance(leaf, SessionEnded) and who.startswith("driver") and error is not leaf:
                self.truth.breach("P3", f"{who} got the end of its session as {error!r}, not as plain SessionEnded")
            self.outcomes[type(leaf).__name__] += 1
            own = isinstance(leaf, Boom) and leaf.token == who
            if not own and not (is_explicable(leaf) and self.explained(began)):
                self.truth.breach("error", f"{who} ended with {texts[-1]}")
        return "; ".join(texts)


def is_explicable(error: BaseException) -> bool:
    """Return whether faults of machines and networks can cause an error of this class."""
    if isinstance(error, _NEVER):
        return False
    over = type(error) is FrayError and ("has ended" in str(error) or "is ending" in str(error))
    return isinstance(error, _EXPLAINED) or over


def carries_cancelled(error: BaseException) -> bool:
    return any(isinstance(leaf, trio.Cancelled) for leaf in leaves(error))


# Telling one ---------------------------------------------------------------------------------------------------------


async def simulate(
    seed: Seed,
    plan: ScenarioPlan,
    trace: Trace,
    *,
    rules: SchedulerConfig = RULES,
    gone_within_s: float = GONE_WITHIN_S,
) -> ScenarioResult:
    """Carry the plan out. Must run under a clock that jumps and within `fray.testing.seed.steady`.

    Args:
        gone_within_s: how long anything may live after its owner (P1); without faults far less is enough.
    """
    network = SimNetwork(seed.stream("network"), trace)
    truth = GroundTruth(trio.current_time)
    scenario = Scenario(seed, plan, trace, truth, network, gone_within_s=gone_within_s)
    machines = [MachineSpec(f"m{number}", capacity) for number, capacity in enumerate(plan.machines)]
    with (
        workloads.book(truth),
        _store(plan) as open_store,
        _token_file(plan) as token_file,
        coverage.counting(scenario.coverage, truth),
    ):
        async with open_sim_cluster(
            seed,
            network,
            truth,
            machines,
            rules=rules,
            declares=plan.declares,
            open_store=open_store,
            watch=scenario.watch,
            token_file=token_file,
            cloud=plan.cloud,
            slices=plan.slices,
            policy=evolve(SHARED, preemption=PREEMPTION, users=SHARED.users | dict(plan.terms)),
        ) as sim:
            scenario.sim, sim.on_saved = sim, scenario.saved
            await scenario.run()
    return ScenarioResult(
        seed.number,
        trace.digest,
        trace.count,
        scenario.operations,
        scenario.acts,
        scenario.events,
        scenario.happened,
        scenario.outcomes,
        tuple(truth.breaches),
        tuple(scenario.lines),
        trio.current_time(),
        scenario.coverage,
    )


@contextmanager
def _store(plan: ScenarioPlan) -> Iterator[Callable[[], Store] | None]:
    """Return the function that opens the store: in memory, or now and then on disk."""
    if not plan.on_disk:
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="fray-sim-") as directory,
        # No power is cut: like SQLite (`_open_on_disk`), nothing waits for the disk.
        mock.patch.object(os, "fsync", return_value=None),
    ):
        yield partial(_open_on_disk, Path(directory) / "store")


@contextmanager
def _token_file(plan: ScenarioPlan) -> Iterator[Path | None]:
    """Return the file for the cluster's token, if the plan replaces it."""
    if all(fault.kind != "token replaced" for fault in plan.faults):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fray-sim-") as directory:
        file = Path(directory) / "token"
        file.write_text(f"{TOKEN}\n")
        yield file


def _open_on_disk(path: Path) -> Store:
    store = Store(path, synchronous="OFF")
    store.chunks.blocks = False  # a thread takes real time, and would be back sooner or later than in the last telling
    return store
