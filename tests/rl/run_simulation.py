"""Simulation of the core of `fray.rl`: one seed is one run with workers, servers, a trainer and faults of all of them.

Every step is one event, chosen by the seed; the invariants are checked after each. After a number of steps the faults
stop, and the run must end. What the parts know of each other is late: the controller of the target version, each worker
of the routes, by which it chooses servers that may have died since.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NoReturn

from attrs import define, evolve, field

from fray.rl.core.journal import BatchLoaded, BatchTaken, Entry
from fray.rl.core.leases import Lease
from fray.rl.core.run_record import RunPlan, RunRecord, StalePolicy
from fray.rl.core.run_state import NoTask, PutAnswer, RunState
from fray.rl.core.server_fleet import RequestRoute, RouteTable, ServerFleet
from fray.rl.core.server_states import ServerEvent, ServerRecord, ServerState
from fray.rl.core.tasks import RolloutTask, TaskOrder
from fray.rl.core.trajectory_store import ReadyRule, Sample
from fray.rl.core.validation import VALIDATION, ValidationPlan
from fray.rl.core.versions import Segment, SyncMode, VersionName

CALM_STEPS = 250_000
"""Steps without faults in which a run must end. Seed 1007609 takes 23,000: its threshold is 0, and each update waits
for a whole loaded batch, of which all but one group are stale then; seed 306729 takes 78,000, as most of its episodes
are of workers that were cut off, whose answers come too late."""
TOKENS = 8
SUSPECT_S, STALE_S = 2.0, 4.0
"""Patience with silent servers, and with those that load no weights."""


class InvariantViolated(AssertionError):
    """A run did what it must never do; names the seed and the step."""


def random_plan(rng: random.Random) -> RunPlan:
    """Return a plan with which a run can end."""
    mode = rng.choice(list(SyncMode))
    repeats, groups = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    rule = rng.choice(list(ReadyRule))
    keeps_order = rng.random() < 0.5
    batch_rows = (
        groups * rng.choice([1, 2]) if keeps_order or rule is not ReadyRule.BATCH_SIZE else rng.choice([1, 2, 3, 5])
    )
    stale = (
        rng.choice(list(StalePolicy))
        if mode is SyncMode.FULLY_ASYNC
        else rng.choice([StalePolicy.REQUEUE, StalePolicy.DROP])
    )
    order = TaskOrder(
        rows=rng.randrange(6, 14),
        batch_rows=batch_rows,
        repeats=repeats,
        epochs=rng.choice([1, 2, 3]),
        seed=rng.choice([None, 1]),
        whole_groups=rng.random() < 0.3,
    )
    return RunPlan(
        order,
        batch_size=repeats * groups,
        rule=rule,
        mode=mode,
        threshold=rng.choice([0, 1, 2, 4]),
        keep_batch_order=keeps_order,
        stale=stale,
        lease_s=50.0,
        steps=rng.choice([None, 10, 20]),
        drop_equal_rewards=rng.random() < 0.3,
        max_replaced_groups=2,
        validation=random_validation(rng),
    )


def random_validation(rng: random.Random) -> ValidationPlan | None:
    """Return the validations of a run; half of the runs have none."""
    every, before = rng.choice([None, None, 1, 2, 3]), rng.random() < 0.5
    samples, whole = rng.choice([1, 2]), rng.random() < 0.3
    if every is None and not before:
        return None
    return ValidationPlan(rng.randrange(1, 5), every, before, samples, whole)


@define
class Episode:
    """Work of a worker: it holds a lease, and its tokens have been made by these versions until now."""

    lease: Lease
    worker: str
    segments: list[Segment] = field(factory=list)
    asked: RequestRoute | None = None
    """Server that has its request."""
    asked_life: int = 0
    """The life of the process that has it."""


@define
class ServerTruth:
    """Facts about the process of a server, from the events alone: a second, simple opinion about who may answer."""

    lives: int = 1
    is_alive: bool = True
    is_ready: bool = False
    has_loaded: bool = False
    is_silent: bool = False
    is_wanted: bool = True
    version: VersionName | None = None
    late_since: float | None = None

    @property
    def may_answer(self) -> bool:
        return self.is_alive and self.has_loaded and not self.is_silent and self.is_wanted

    def note(self, event: ServerEvent, now: float) -> None:
        match event:
            case ServerEvent.ENDED:
                self.is_alive = False
            case ServerEvent.LEAVE:
                self.is_wanted = False
            case ServerEvent.READY if self.is_alive:
                self.is_ready = True
            case ServerEvent.RESTARTED if not self.is_alive:
                self.begin()
            case ServerEvent.TRANSFER_MISSED if self.is_ready and self.is_alive:
                self.is_alive = not self.is_late(now, STALE_S if not self.has_loaded else SUSPECT_S)
                self.has_loaded = False
            case ServerEvent.LINE_LOST:
                self.has_loaded = False
            case ServerEvent.ANSWERED if self.has_loaded:
                self.is_silent, self.late_since = False, None
            case ServerEvent.DEADLINE_MISSED if self.has_loaded and self.is_alive:
                self.is_silent = True
                self.is_alive = not self.is_late(now, SUSPECT_S)

    def load(self, version: VersionName, is_current: bool) -> None:
        """Note that it has loaded a version."""
        self.version = version
        if is_current and not self.has_loaded:
            self.has_loaded, self.is_silent, self.late_since = True, False, None

    def begin(self) -> None:
        """Note that another process has taken its place."""
        self.lives += 1
        self.is_alive, self.is_ready, self.has_loaded, self.is_silent = True, False, False, False
        self.version = self.late_since = None

    def is_late(self, now: float, patience_s: float) -> bool:
        if self.late_since is None:
            self.late_since = now
        return now - self.late_since >= patience_s


@define
class SimulatedRun:
    """A run, its storage, and those who act in it."""

    seed: int
    steps: int = 1_000
    is_keyed: bool = False
    """True if groups have samples of several rows."""
    rng: random.Random = field(init=False)
    plan: RunPlan = field(init=False)
    state: RunState = field(init=False)
    journal: list[Entry] = field(init=False, factory=list)
    checkpoint: RunRecord = field(init=False)
    fleet: ServerFleet = field(init=False)
    tables: dict[str, RouteTable[RequestRoute]] = field(init=False, factory=dict)
    """Servers as each rollout process knows them, and workers that were cut off."""
    reported: VersionName | None = field(init=False, default=None)
    """Version of which the pool has heard last that servers have it."""
    truth: dict[str, ServerTruth] = field(init=False, factory=dict)
    episodes: list[Episode] = field(init=False, factory=list)
    """Episodes of living workers, and of those that are taken for dead and deliver all the same."""
    updates: list[list[Sample]] = field(init=False, factory=list)
    """Samples of each update of the current line."""
    validated: list[VersionName] = field(init=False, factory=list)
    """Versions whose validation has ended, in order."""
    now: float = field(init=False, default=0.0)
    """The time by the clock of the pool."""
    clock_speed: float = field(init=False, default=1.0)
    workers: int = field(init=False, default=4)
    incarnation: int = field(init=False, default=0)
    loads: int = field(init=False, default=0)
    """Batches loaded since the last one was taken."""
    has_faults: bool = field(init=False, default=True)
    done: int = field(init=False, default=0)
    happened: Counter[str] = field(init=False, factory=Counter)

    def __attrs_post_init__(self) -> None:
        self.rng = random.Random(f"rl-{self.seed}")
        self.plan = random_plan(self.rng)
        if self.is_keyed:
            order = evolve(self.plan.order, whole_groups=False)
            self.plan = evolve(self.plan, order=order, keyed_group_size=order.repeats)
        self.state = RunState.new(self.plan)
        self.write()
        self.checkpoint, self.journal = self.state.snapshot(), []
        freezes = self.rng.random() < 0.3
        self.clock_speed = self.rng.choice([0.5, 1.0, 2.0])
        self.fleet = ServerFleet(freezes=freezes, is_endless=True, suspect_s=SUSPECT_S, stale_s=STALE_S)
        self.truth = {name: ServerTruth() for name in self.fleet.add(2)}

    # The run

    def run(self) -> Counter[str]:
        """Run to the end; return how often each event occurred. Raises InvariantViolated."""
        normal = {
            self.worker_takes: 6, self.worker_asks: 6, self.server_answers: 6, self.worker_delivers: 6,
            self.server_acts: 4, self.trainer_acts: 4, self.time_passes: 1, self.validation_acts: 1,
            self.worker_learns_routes: 2, self.controller_learns_target: 1,
        }  # fmt: skip
        faults = {
            self.worker_fails: 1, self.worker_dies: 1, self.server_fails: 2, self.pool_dies: 0.3,
            self.trainer_dies: 0.1, self.row_is_added: 0.5, self.long_time_passes: 0.2,
            self.fleet_is_scaled: 0.5, self.server_is_silent: 2,
        }  # fmt: skip
        for number in range(self.steps + CALM_STEPS):
            self.done, self.has_faults = number, number < self.steps
            events: dict[Callable[[], None], float] = {**normal, **(faults if self.has_faults else {})}
            event = self.rng.choices(list(events), list(events.values()))[0]
            event()
            self.happened[event.__name__] += 1
            self.write()
            self.check()
            if self.state.is_finished and not self.has_faults:
                self.check_end()
                return self.happened
        self.violated(f"the run does not end: {self.state.wait_reason()}, {self.state.record}")

    def write(self) -> None:
        for entry in self.state.entries:
            if isinstance(entry, BatchTaken):
                self.loads = 0
            if isinstance(entry, BatchLoaded):
                self.loads += 1
                if self.loads > 1 and self.plan.holds_batches:
                    self.violated("two batches were loaded for one update")
        self.journal += self.state.entries
        self.state.entries.clear()

    def violated(self, what: str) -> NoReturn:
        raise InvariantViolated(f"seed {self.seed}, step {self.done}: {what} ({self.plan})")

    # Workers

    def worker_takes(self) -> None:
        busy = {episode.worker for episode in self.episodes}
        idle = [f"w{number}" for number in range(self.workers) if f"w{number}" not in busy]
        if not idle:
            return
        lease = self.state.take_task(idle[0], self.now)
        if isinstance(lease, NoTask):
            return
        self.episodes.append(Episode(lease, idle[0]))

    def table(self, episode: Episode) -> RouteTable[RequestRoute]:
        return self.tables.setdefault(self.process_of(episode.worker), RouteTable())

    def process_of(self, worker: str) -> str:
        """Return the process of a worker: there are two, and workers that are taken for dead are in others."""
        return f"p{int(worker[1:]) % 2}" if worker[1:].isdigit() else worker

    def worker_learns_routes(self) -> None:
        process = f"p{self.rng.randrange(2)}"
        table = self.tables.setdefault(process, RouteTable())
        given_up = {route.name for route in table.replace(self.fleet.routes(is_published=True))}
        asking = [one for one in self.episodes if one.asked is not None and self.process_of(one.worker) == process]
        for episode in asking:
            if episode.asked is not None and episode.asked.name in given_up:
                self.happened["request given up"] += 1
                self.forget_request(episode)
        silent = {name for name, server in self.fleet.servers.items() if server.state is ServerState.SUSPECT}
        if table.choose() is not None and any(one.asked is not None and one.asked.name in silent for one in asking):
            self.violated(f"requests wait for {silent}, while others accept them")

    def worker_asks(self) -> None:
        """An episode sends its next request."""
        idle = [one for one in self.episodes if one.asked is None and not self.is_full(one)]
        if not idle:
            return
        episode = self.rng.choice(idle)
        table = self.table(episode)
        if (route := table.choose()) is None:
            return
        others = [other for other in table.routes if other.accepts]
        if any(table.in_flight[other.name] < table.in_flight[route.name] for other in others):
            self.violated(f"{route} gets a request, with {table.in_flight}")
        table.in_flight[route.name] += 1
        episode.asked = route
        truth = self.truth.get(route.name)
        episode.asked_life = truth.lives if truth is not None and truth.is_alive else -1

    def forget_request(self, episode: Episode) -> None:
        if episode.asked is not None:
            self.table(episode).in_flight[episode.asked.name] -= 1
            episode.asked = None

    def server_answers(self) -> None:
        """A server makes tokens for an episode, or the request is lost with it."""
        asking = [episode for episode in self.episodes if episode.asked is not None]
        if not asking:
            return
        episode = self.rng.choice(asking)
        assert episode.asked is not None
        truth = self.truth.get(episode.asked.name)
        if truth is None or not truth.is_alive or truth.lives != episode.asked_life:
            self.table(episode).lose(episode.asked)
            self.forget_request(episode)
        elif not truth.is_silent and truth.version is not None:
            episode.segments.append((truth.version, TOKENS // 2))
            self.forget_request(episode)

    def is_full(self, episode: Episode) -> bool:
        return sum(tokens for _, tokens in episode.segments) >= TOKENS

    def worker_delivers(self) -> None:
        full = [one for one in self.episodes if self.is_full(one)]
        if not full:
            return
        episode = self.rng.choice(full)
        self.episodes.remove(episode)
        task = episode.lease.task
        score = (("lease", float(hash(episode.lease.number))),)
        samples = [
            Sample(task, run, tuple(episode.segments), (float(self.rng.random() < 0.5),), score=score)
            for run in range(task.samples)
        ]
        is_validation = task.epoch == VALIDATION
        if is_validation and self.is_open(episode):
            self.happened["validated"] += 1
        answer = self.state.put(episode.lease.number, samples, [self.key_of(task)] * task.samples)
        self.happened[f"put {answer.value}"] += 1
        if is_validation:
            return
        if answer is PutAnswer.SUCCESS and self.plan.mode is SyncMode.SYNC and self.plan.stale is not StalePolicy.DROP:
            names = {name for name, _ in episode.segments}
            # By number: a trainer that was lost without an update has left the weights as they were.
            if {name.number for name in names} != {self.state.record.weights.rollout.number}:
                self.violated(f"a sample of {names} is accepted for a batch of {self.state.record.weights.rollout}")

    def key_of(self, task: RolloutTask) -> tuple[Hashable, ...]:
        return ((task.row + task.repeat) % 3,) if self.is_keyed else (task.group_id,)

    def worker_fails(self) -> None:
        if self.episodes:
            episode = self.episodes.pop(self.rng.randrange(len(self.episodes)))
            self.forget_request(episode)
            self.state.fail(episode.lease.number, "error")

    def worker_dies(self) -> None:
        """A worker is taken for dead. Half of them are alive behind a cut, and deliver later under another name."""
        if not self.episodes:
            return
        episode = self.rng.choice(self.episodes)
        self.state.lose_worker(episode.worker)
        self.forget_request(episode)
        if self.rng.random() < 0.5:
            self.episodes.remove(episode)
        else:
            episode.worker = "cut off"

    def time_passes(self) -> None:
        self.now += self.rng.random()
        self.state.expire(self.now)

    def long_time_passes(self) -> None:
        self.now += 60.0
        self.state.expire(self.now)
        # A slow worker delivers too late.
        for episode in self.episodes:
            self.forget_request(episode)
            episode.worker = "too late"

    # Servers

    @property
    def controller_now(self) -> float:
        """The time by the clock of the controller, which differs from that of the pool in beginning and speed."""
        return self.now * self.clock_speed + 1_000.0

    def controller_learns_target(self) -> None:
        target, before = self.state.record.weights.target, self.fleet.target
        self.fleet.aim(target)
        if before is not None and before.incarnation < target.incarnation:
            for truth in self.truth.values():
                if truth.version is not None and truth.version.incarnation < target.incarnation:
                    truth.note(ServerEvent.LINE_LOST, self.controller_now)

    def server_acts(self) -> None:
        server = self.rng.choice(list(self.fleet.servers.values()))
        match server.state:
            case ServerState.RESTARTING:
                self.observe(server, ServerEvent.READY)
            case ServerState.DEAD if server.is_overdue:
                self.observe(server, ServerEvent.BUDGET_SPENT)
            case ServerState.DEAD if self.rng.random() < 0.3:
                self.observe(server, ServerEvent.RESTARTED)
            case ServerState.SUSPECT if self.rng.random() < 0.15:
                self.observe(server, ServerEvent.ANSWERED)
            case ServerState.LEAVING if self.rng.random() < 0.3:
                self.fleet.remove(server.name)
                del self.truth[server.name]
                return
            case ServerState.RETIRED:
                self.happened["server replaced"] += 1
                replacement = self.fleet.replace(server.name, self.controller_now)
                server = replacement or self.violated(f"{server} is not replaced")
                self.truth[server.name].begin()
        target = self.fleet.target
        if (
            target is not None
            and server in self.fleet.to_load(target)
            and self.rng.random() < self.transfer_chance(server)
        ):
            # A transfer that began before the target changed ends after it.
            late = self.rng.random() < 0.1 and self.has_faults
            version = self.reported if late and self.reported is not None else target
            if server.version is None or server.version <= version:
                self.fleet.note_loaded(server, server.incarnation, version)
                self.truth[server.name].load(version, version == target)
        if target is not None and target != self.reported and self.fleet.has_loaded(target):
            self.state.sync(target)
            self.reported = target
            for other in self.fleet.servers.values():
                if other.version != target and self.truth[other.name].has_loaded:
                    self.truth[other.name].note(ServerEvent.TRANSFER_MISSED, self.controller_now)
            self.fleet.end_transfer(target, self.controller_now)
            answering = (ServerState.HEALTHY, ServerState.SUSPECT)
            if any(one.state in answering and one.version != target for one in self.fleet.servers.values()):
                self.violated(f"servers have {target}, but {self.fleet.servers}")

    def transfer_chance(self, server: ServerRecord) -> float:
        """Return the probability that a transfer to a server ends now: a silent one seldom takes weights."""
        return 0.1 if server.state is ServerState.SUSPECT else 0.5

    def fleet_is_scaled(self) -> None:
        """A server joins, or one of several leaves: it gets no more requests, and is removed later."""
        staying = self.fleet.staying
        if self.rng.random() < 0.5 and len(staying) < 5:
            for name in self.fleet.add(1):
                self.truth[name] = ServerTruth()
        elif len(staying) > 1:
            for server in self.fleet.let_leave(1):
                self.truth[server.name].note(ServerEvent.LEAVE, self.controller_now)
                if server.state is not ServerState.LEAVING:
                    self.violated(f"{server} stays")

    def server_is_silent(self) -> None:
        self.observe(self.rng.choice(list(self.fleet.servers.values())), ServerEvent.DEADLINE_MISSED)

    def server_fails(self) -> None:
        server = self.rng.choice(list(self.fleet.servers.values()))
        before = server.state
        event = self.rng.choice(
            [
                ServerEvent.ENDED, ServerEvent.DEADLINE_MISSED, ServerEvent.TRANSFER_MISSED, ServerEvent.ANSWERED,
                ServerEvent.RESTARTED, ServerEvent.READY, ServerEvent.BUDGET_SPENT,
            ]
        )  # fmt: skip
        if event is ServerEvent.BUDGET_SPENT and not server.starts:
            return  # such an end is that of the run
        # Also of an incarnation that has ended.
        late = self.rng.random() < 0.3
        changed = server.observe(event, server.incarnation - late, now=self.controller_now)
        if not late:
            self.truth[server.name].note(event, self.controller_now)
        has_spent = event is ServerEvent.BUDGET_SPENT and not late and before is ServerState.DEAD
        if has_spent and server.state is not ServerState.RETIRED:
            self.violated(f"{server} has spent its restarts")
        if (changed and late) or (before is ServerState.DEAD and server.state is ServerState.HEALTHY):
            self.violated(f"{event} of a server that was {before}: {server}")
        if server.state in (ServerState.DEAD, ServerState.RESTARTING) and server.version is not None:
            self.violated(f"{server} has weights after its end")

    def observe(self, server: ServerRecord, event: ServerEvent) -> None:
        server.observe(event, server.incarnation, now=self.controller_now)
        self.truth[server.name].note(event, self.controller_now)

    def check_servers(self) -> None:
        """Check that requests go to those servers that may answer them, and that those that are dead are ended."""
        for route in self.fleet.routes(is_published=True):
            truth = self.truth[route.name]
            if route.accepts and (not truth.may_answer or truth.version != route.version):
                self.violated(f"requests go to {route}, which is {truth}")
        for name, server in self.fleet.servers.items():
            truth = self.truth[name]
            is_gone = server.state in (ServerState.DEAD, ServerState.RETIRED, ServerState.LEAVING)
            if not truth.is_alive and not is_gone:
                self.violated(f"{server} is not taken for dead, but is {truth}")

    # Trainer

    def trainer_acts(self) -> None:
        state = self.state
        if state.record.training is None:
            if groups := state.next_batch():
                self.check_batch([sample for group in groups for sample in group.samples])
            return
        samples = state.record.batch_samples
        if self.rng.random() < 0.1:
            state.skip_update("all_advantages_zero")
            return
        before = state.record.weights.line.number
        name = state.finish_update()
        self.updates.append(samples)
        if name.number != before + 1 or len(self.updates) != name.number:
            self.violated(f"update {name} after {before}, {len(self.updates)} done")
        if name.number % 2 == 0:
            self.write()
            self.checkpoint, self.journal = state.snapshot(), []

    def trainer_dies(self) -> None:
        """The trainer resumes from the last checkpoint; whatever came after is lost."""
        self.incarnation += 1
        self.state = RunState.rewind(self.checkpoint, self.incarnation)
        self.loads = 0
        self.checkpoint, self.journal = self.state.snapshot(), []
        number = self.state.record.weights.line.number
        del self.updates[number:]
        self.validated = [name for name in self.validated if name.number <= number]

    def pool_dies(self) -> None:
        """The process with this state is lost, and rebuilt from the checkpoint and the journal."""
        before = self.state
        self.incarnation += 1
        self.state = RunState.recover(self.checkpoint, self.journal, self.incarnation)
        self.compare(before, self.state)

    def row_is_added(self) -> None:
        self.state.add_row(self.plan.order.rows + self.state.record.added, in_front=self.rng.random() < 0.5)

    # Validation

    def validation_acts(self) -> None:
        """The controller reports a complete validation, sometimes twice: its answer was lost."""
        round_ = self.state.complete_validation
        if round_ is None:
            return
        results = [sample for samples in round_.delivered.values() for sample in samples]
        if any(name != round_.version for sample in results for name, _ in sample.segments):
            self.violated(f"the validation of {round_.version} has tokens of another version: {results}")
        found = sorted([*round_.delivered, *round_.dropped])
        if found != round_.plan.tasks():
            self.violated(f"the validation of {round_.version} has {found}, not each of its tasks once")
        if results and not 0 <= round_.metrics()["val/reward"] <= 1:
            self.violated(f"{round_.metrics()}")
        self.validated.append(round_.version)
        self.state.end_validation(round_.version)
        if self.rng.random() < 0.2:
            self.state.end_validation(round_.version)

    # Invariants

    def check(self) -> None:
        state, record = self.state, self.state.record
        self.check_servers()
        try:
            record.counts.check(state.open_samples)
        except AssertionError as error:
            self.violated(str(error))
        if not state.wait_reason():
            self.violated("no reason to wait")
        if record.validation is not None and record.weights.rollout != record.validation.version:
            self.violated(f"servers take {record.weights.rollout} in the validation of {record.validation.version}")
        if any(sample.task.epoch == VALIDATION for sample in (*record.store.samples, *record.batch_samples)):
            self.violated("a sample of a validation is to be trained")
        if max(record.attempts.values(), default=0) >= self.plan.max_attempts:
            self.violated(f"a task has more attempts than {self.plan.max_attempts}")
        if max(record.losses.values(), default=0) >= self.plan.max_losses:
            self.violated(f"a task has lost more workers than {self.plan.max_losses}")
        if self.is_keyed:
            return  # the rest of a group may never come, and while it may, others are rolled out
        if record.counts.dropped["group_incomplete"]:
            self.violated("a group lacked samples that were accounted for")
        untrained = len(record.open_groups) * self.plan.group_size
        if not self.plan.holds_batches and untrained > self.plan.most_untrained + record.added * self.plan.group_size:
            self.violated(f"{untrained} samples are not trained yet")

    def check_batch(self, samples: list[Sample]) -> None:
        weights = self.state.record.weights
        groups: dict[str, Counter[int]] = {}
        for sample in samples:
            groups.setdefault(sample.task.group_id, Counter())[sample.task.repeat * 100 + sample.run] += 1
            for name, _ in sample.segments:
                self.check_version(name)
        for group_id, members in groups.items():
            if max(members.values()) > 1:
                self.violated(f"group {group_id} has a sample twice")
            left = [task for _, task in self.state.record.waiting if task.group_id == group_id]
            leased = [
                one.lease.task for one in self.episodes if self.is_open(one) and one.lease.task.group_id == group_id
            ]
            if (left or leased) and not self.is_keyed:
                self.violated(f"group {group_id} is split: {left} wait, {leased} are rolled out")
        trained = {sample.sample_id for update in self.updates for sample in update}
        if twice := trained & {sample.sample_id for sample in samples}:
            self.violated(f"{twice} is trained a second time")
        if weights.mode is SyncMode.SYNC and len({name.number for one in samples for name, _ in one.segments}) > 1:
            self.violated("a batch of several versions")

    def check_version(self, name: VersionName) -> None:
        weights = self.state.record.weights
        if (
            name.incarnation < weights.line.current.incarnation
            and name.number > weights.line.forks[name.incarnation + 1]
        ):
            self.violated(f"tokens of {name}, which was lost, are trained at {weights.line.current}")
        if self.plan.stale is not StalePolicy.KEEP and weights.line.number - name.number > weights.max_age:
            self.violated(f"tokens of {name} are trained at {weights.line.current}: older than {weights.max_age}")

    def is_open(self, episode: Episode) -> bool:
        return self.state.has_lease(episode.lease.number)

    def compare(self, before: RunState, after: RunState) -> None:
        def facts(state: RunState) -> list[object]:
            record = state.record
            waiting = sorted([task for _, task in record.waiting] + [lease.task for lease in state.leases])
            ids = [sample.sample_id for sample in record.store.samples]
            batch = [sample.sample_id for sample in record.batch_samples]
            return [
                waiting,
                ids,
                batch,
                record.counts,
                record.weights,
                record.open_groups,
                record.is_held,
                record.loaded,
                record.validation,
            ]

        for one, other in zip(facts(before), facts(after), strict=True):
            if one != other:
                self.violated(f"recovered {other}, was {one}")

    def check_end(self) -> None:
        counts = self.state.record.counts
        self.check_validated()
        if self.plan.steps is None and self.state.open_samples:
            self.violated(f"the run is done with {self.state.open_samples} samples open: {counts}")
        if sum(len(update) for update in self.updates) != counts.trained:
            self.violated(f"{counts.trained} samples counted as trained, {len(self.updates)} updates")

    def check_validated(self) -> None:
        """Check that each multiple of ``every`` was validated, or another version soon after it."""
        plan, line = self.plan.validation, self.state.record.weights.line
        numbers = [name.number for name in self.validated]
        if self.validated and (plan is None or not all(line.has(name) for name in self.validated)):
            self.violated(f"versions {self.validated} were validated, but {line} is what was trained")
        if plan is None:
            return
        # A trainer that continues from version 3 while version 2 was validated has no weights of that one any more: the
        # validation begins again with version 3 (seeds 858069 and, for the first version, 101673).
        kept_weights = not self.happened["trainer_dies"]
        if plan.before and not (0 in numbers if kept_weights else numbers):
            self.violated(f"the first version was not validated, but {numbers}")
        for multiple in range(plan.every, line.number + 1, plan.every) if plan.every else ():
            if not any(number >= multiple for number in numbers):
                self.violated(f"version {multiple} was not validated, but {numbers}")
        if self.plan.mode is SyncMode.SYNC and plan.every and kept_weights:
            expected = set(range(plan.every, line.number + 1, plan.every))
            if not expected <= set(numbers):
                self.violated(f"versions {expected} are to be validated, but {numbers} were")
