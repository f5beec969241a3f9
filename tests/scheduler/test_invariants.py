"""Random walks: nodes obey with delays, lose state, die and come back; drivers leave; the controller restarts.

The invariants of the scheduler are checked after every step (by `Cluster`). The truth on the machines, which the
scheduler does not see, is checked after every action: no two generations of a job are alive at once, and no device
serves two processes. When every machine is healthy again and every owner has left, no process is left.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from attrs import Factory, define, evolve

from fray.errors import FrayError
from fray.model.ids import split_attempt
from fray.model.job_groups import JobRole
from fray.model.messages.client import Role
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.policy.policy import (
    Amounts,
    Policy,
    Preemption,
    TenantPolicy,
)
from fray.model.policy.priority import Band
from fray.model.specs import (
    ActorConfig,
    DesiredAttempt,
    EndReason,
    EntryKind,
    ExitRule,
    JobSpec,
    ObservedAttempt,
    Outcome,
    Phase,
    SupervisedGroup,
    SupervisionStrategy,
)
from fray.scheduler.effects import (
    DeleteBlobs,
    DesiredAttemptsChanged,
    Effect,
    EventRecorded,
    JobInfoChanged,
    NodeDied,
    NodeJoined,
    NodeReported,
    NodeSilent,
    TerminateRequested,
)
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.scheduler import Cluster, capacity, demand, job

WALKS, EVENTS, CHUNKS = 144, 200, 12
POLICY = Policy(
    preemption=Preemption(shield_s=3.0, period_s=300.0, patience_s=0.0),
    half_life_s=100.0,
    users={
        "u1": TenantPolicy(weight=2, quota=Amounts(cpu_milli=1000)),
        "u2": TenantPolicy(quota=Amounts(cpu_milli=2000, devices={"gpu:a100": 1}), borrow=Amounts(cpu_milli=2000)),
    },
)
RULES = SchedulerConfig(finished_limit=12, records_limit=3, history_limit=5)
MARGIN_S = 60.0
LIVING = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
OUTCOMES = [
    Outcome(cause=EndReason.SUCCEEDED, value="v1"),
    Outcome(cause=EndReason.SUCCEEDED),
    Outcome(cause=EndReason.FAILURE, value="v2", message="boom"),
    Outcome(cause=EndReason.FAILURE, exit_code=3, value="v3"),
    Outcome(cause=EndReason.FAILURE, exit_code=4),
    Outcome(cause=EndReason.FAILURE, exit_code=1, constructing=True, message="OSError"),
    Outcome(cause=EndReason.KILLED, signal=9),
    Outcome(cause=EndReason.OUT_OF_MEMORY),
    Outcome(cause=EndReason.ENVIRONMENT),
    Outcome(cause=EndReason.PREEMPTED),
    Outcome(cause=EndReason.PORT_TAKEN),
]


@define
class Machine:
    """A node as it is, not as the scheduler knows it."""

    name: str
    hello: NodeHello
    up: bool = True
    connected: bool = False
    heard_at: float = 0.0
    held: dict[str, ObservedAttempt] = Factory(dict)
    desired: dict[str, DesiredAttempt] = Factory(dict)
    down_link: deque[tuple[bool, tuple[DesiredAttempt, ...], tuple[str, ...]]] = Factory(deque)
    up_link: deque[ObservedState] = Factory(deque)

    def living(self) -> list[str]:
        return [attempt for attempt, seen in self.held.items() if seen.phase in LIVING]

    def say(self, *observed: ObservedAttempt, full: bool = False, gone: tuple[str, ...] = ()) -> None:
        if self.connected:
            self.up_link.append(ObservedState(full=full, observed=observed, removed=gone))

    def obey(self) -> None:
        """Take one message of the controller."""
        full, desired_attempts, gone = self.down_link.popleft()
        for attempt in [
            a for a in self.held if a in gone or (full and a not in {w.attempt_id for w in desired_attempts})
        ]:
            del self.held[attempt]
            self.say(gone=(attempt,))
        for desired in desired_attempts:
            self.obey_desired(desired)

    def obey_desired(self, desired: DesiredAttempt) -> None:
        self.desired[desired.attempt_id] = desired
        seen = self.held.get(desired.attempt_id)
        if seen is None and desired.stop:
            self.see(desired.attempt_id, Phase.ENDED, Outcome(cause=desired.stop_cause))
        elif seen is None:
            self.see(desired.attempt_id, Phase.STARTING)
        elif desired.stop and seen.phase in (Phase.STARTING, Phase.RUNNING):
            self.see(desired.attempt_id, Phase.STOPPING)

    def see(self, attempt: str, phase: Phase, outcome: Outcome | None = None) -> None:
        self.held[attempt] = ObservedAttempt(attempt_id=attempt, phase=phase, outcome=outcome)
        self.say(self.held[attempt])

    def advance(self, rng: random.Random) -> None:
        """One of its processes does something."""
        attempt = rng.choice(self.living())
        phase, desired = self.held[attempt].phase, self.desired[attempt]
        if phase is Phase.STOPPING:
            stopped = Outcome(cause=desired.stop_cause)
            self.see(attempt, Phase.ENDED, rng.choice([stopped, stopped, stopped, OUTCOMES[0], OUTCOMES[2]]))
        elif phase is Phase.STARTING and rng.random() < 0.8:
            self.see(attempt, Phase.RUNNING)
        elif rng.random() < 0.5:
            self.see(attempt, Phase.ENDED, rng.choice(OUTCOMES))

    def fall(self) -> None:
        self.up = False
        self.held.clear()


class World:
    """Machines, drivers and the scheduler, at the mercy of one generator."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Cluster(RULES, policy=POLICY)
        self.count = 0
        self.machines: dict[str, Machine] = {}
        self.drivers: list[str] = []
        self.specs: list[JobSpec] = []
        self.asked: list[tuple[str, tuple[JobSpec, ...], dict[str, Any]]] = []
        """Job groups: name, members, configuration."""
        for name, more in (
            ("n1", {"region": "eu"}),
            ("n2", {"gpu": "h100*2"}),
            ("n3", {"gpu": "h100*1,a100*2", "cpu": 2}),
        ):
            hello = NodeHello(node=name, incarnation="i0", boot_id="b", capacity=capacity(ports=5, **more))  # type: ignore[arg-type]
            self.machines[name] = Machine(name, hello)
            self.connect(self.machines[name])
        self.open_driver()

    # The controller's hands

    def tell(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DesiredAttemptsChanged):
                self.send_desired(effect)
            elif isinstance(effect, JobInfoChanged):
                self.scheduler.info(effect.job_id)
            elif isinstance(effect, EventRecorded) and "no longer has it" in effect.event.text:
                attempt, _, rest = effect.event.text.partition(" on ")
                assert attempt not in self.machines[rest.partition(":")[0]].living(), effect
            elif isinstance(effect, DeleteBlobs):
                assert not any(map(self.scheduler.state.is_blob_used, effect.blobs))

    def send_desired(self, effect: DesiredAttemptsChanged) -> None:
        machine = self.machines.get(effect.node)  # None: the cloud took it
        desired_attempts = [self.scheduler.state.desired_attempt(attempt) for attempt in effect.changed]
        if machine is not None and machine.connected:
            machine.down_link.append((False, tuple(desired for desired in desired_attempts if desired), effect.gone))

    def connect(self, machine: Machine) -> None:
        if not machine.up:
            token = f"i{self.fresh()}"
            machine.hello = evolve(machine.hello, incarnation=token)
            machine.up = True
        machine.connected = True
        machine.down_link.clear()
        machine.up_link.clear()
        self.scheduler.incarnations[machine.name] = machine.hello.incarnation
        effects = self.scheduler.tell(NodeJoined(hello=evolve(machine.hello, known_payloads=tuple(machine.held))))
        machine.down_link.append((True, self.scheduler.state.desired_attempts(machine.name), ()))
        self.tell(effects)
        machine.say(*machine.held.values(), full=True)

    def cut(self, machine: Machine) -> None:
        """The connection breaks; what was under way is lost."""
        if machine.connected:
            machine.connected = False
            machine.heard_at = self.scheduler.now
            machine.up_link.clear()
            machine.down_link.clear()
            self.tell(self.scheduler.tell(NodeSilent(node=machine.name, incarnation=machine.hello.incarnation)))

    def deliver(self, machine: Machine) -> None:
        report = machine.up_link.popleft()
        self.report(machine, report)
        if self.rng.random() < 0.1:
            self.report(machine, report)

    def report(self, machine: Machine, report: ObservedState) -> None:
        incarnation = machine.hello.incarnation
        self.tell(self.scheduler.tell(NodeReported(node=machine.name, incarnation=incarnation, report=report)))

    def fresh(self) -> int:
        self.count += 1
        return self.count

    # What happens. Each says whether there was anything to do.

    def any_machine(self, good: Callable[[Machine], object]) -> Machine | None:
        found = [machine for machine in self.machines.values() if good(machine)]
        return self.rng.choice(found) if found else None

    def do_obey(self) -> bool:
        machine = self.any_machine(lambda m: m.up and m.connected and m.down_link)
        if machine:
            machine.obey()
        return machine is not None

    def do_deliver(self) -> bool:
        machine = self.any_machine(lambda m: m.connected and m.up_link)
        if machine:
            self.deliver(machine)
        return machine is not None

    def do_advance(self) -> bool:
        machine = self.any_machine(lambda m: m.up and m.living())
        if machine:
            machine.advance(self.rng)
        return machine is not None

    def do_full_report(self) -> bool:
        machine = self.any_machine(lambda m: m.up and m.connected)
        if machine:
            machine.say(*machine.held.values(), full=True)
        return machine is not None

    def do_cut(self) -> bool:
        machine = self.any_machine(lambda m: m.connected)
        if machine:
            self.cut(machine)
        return machine is not None

    def do_connect(self) -> bool:
        machine = self.any_machine(lambda m: not m.connected or self.rng.random() < 0.02)
        if machine:
            self.connect(machine)
        return machine is not None

    def do_fall(self) -> bool:
        machine = self.any_machine(lambda m: m.up)
        if machine:
            machine.fall()
            self.cut(machine)
            if self.rng.random() < 0.4:
                died = NodeDied(node=machine.name, incarnation=machine.hello.incarnation, reason="gone")
                self.tell(self.scheduler.tell(died))
        return machine is not None

    def do_restart(self) -> bool:
        for machine in self.machines.values():
            if machine.connected:
                machine.connected, machine.heard_at = False, self.scheduler.now
                machine.up_link.clear()
                machine.down_link.clear()
        self.tell(self.scheduler.restart(policy=POLICY))
        return True

    def do_wait(self) -> bool:
        self.wait(self.rng.choice([0.1, 1.0, 5.0, 20.0, 20.0]))
        return True

    def do_wait_long(self) -> bool:
        self.wait(self.rng.choice([40.0, 100.0, 700.0]))
        return True

    def wait(self, seconds: float) -> None:
        """Time passes; a node that hears nothing ends what it holds before the scheduler gives it up."""
        until = self.scheduler.now + seconds
        while self.scheduler.now < until:
            deadline = self.scheduler.state.next_deadline()
            at = until if deadline is None else min(until, max(deadline, self.scheduler.now))
            for machine in self.machines.values():
                if machine.up and not machine.connected and at - machine.heard_at >= RULES.lease_s - MARGIN_S:
                    for attempt in machine.living():
                        machine.see(
                            attempt, Phase.ENDED, Outcome(cause=EndReason.MACHINE_LOST, message="heard nothing")
                        )
            self.tell(self.scheduler.tick(at))
            self.scheduler.now = max(self.scheduler.now, at)

    def open_driver(self) -> None:
        self.drivers.append(f"d{self.fresh()}")
        self.tell(self.scheduler.driver(self.drivers[-1], grace_s=self.rng.choice([0.0, 30.0])))

    def do_driver(self) -> bool:
        session = self.rng.choice(self.drivers)
        turn = self.rng.random()
        if turn < 0.3:
            self.open_driver()
        elif turn < 0.6:
            self.tell(self.scheduler.driver(session))
        elif turn < 0.9:
            self.tell(self.scheduler.lose(session))
        else:
            self.tell(self.scheduler.close(session, ref=self.scheduler.ref()))
        return True

    def do_launch(self) -> bool:
        rng = self.rng
        living = [name for name, known in self.scheduler.state.sessions.items() if not known.is_ending]
        if not living:
            self.open_driver()
            return True
        session = rng.choice(living if rng.random() < 0.95 else self.drivers)
        specs = tuple(self.spec() for _ in range(rng.choice([1, 1, 1, 2])))
        if rng.random() < 0.2:
            specs = self.group()
        if self.specs and rng.random() < 0.15:
            specs = (rng.choice(self.specs),)
        self.specs += specs
        self.tell(self.scheduler.ask_launch(*specs, session=session))
        return True

    def do_job_group(self) -> bool:
        """Jobs that are placed together; or a launch of such that is repeated."""
        rng = self.rng
        living = [
            name
            for name, known in self.scheduler.state.sessions.items()
            if not known.is_ending and known.role is Role.DRIVER
        ]
        if not living:
            return False
        if self.asked and rng.random() < 0.15:
            name, specs, config = rng.choice(self.asked)
        else:
            name, stages = f"jg{self.fresh()}", rng.choice([(0, 0, 0, 0), (0, 1, 2, 1)])
            detached = rng.random() < 0.1
            specs = tuple(
                evolve(
                    self.spec(),
                    name=f"{name}.{index}",
                    actor=None,
                    entry=EntryKind.CALLABLE,
                    adopt_existing=False,
                    get_if_exists=False,
                    detached=detached,
                    role=JobRole(f"r{stages[index]}", stages[index], bool(stages[index]) and auxiliary),
                )
                for auxiliary in [rng.random() < 0.5]
                for index in range(rng.choice([1, 2, 3, 4]))
            )
            config = {
                "same_region": rng.random() < 0.5,
                "same_zone": rng.random() < 0.2,
                "restart": rng.choice(["member", "member", "group"]),
                **rng.choice([{}, {}, {"success": "any"}, {"success": "all"}, {"auxiliary_failure": "absorb"}]),
            }
            self.asked.append((name, specs, config))
        self.tell(self.scheduler.ask_group(name, *specs, session=rng.choice(living), **config))
        return True

    def spec(self) -> JobSpec:
        rng = self.rng
        need = rng.choice(
            [demand(0), demand(1), demand(1), demand(2), demand(4), demand(1, gpu=1), demand(0, gpu=2, variant="a100")]
        )
        members, ports = rng.choice([1, 1, 1, 2, 3]), rng.choice([(), (), ("http",), ("http", "grpc")])
        need = evolve(need, ports=len(ports) + (members > 1), preemptible=rng.random() < 0.9)
        return job(
            rng.choice("abcde") + ("" if rng.random() < 0.3 else f".{self.fresh()}"),
            need,
            ports=ports,
            job_id=f"j{self.fresh()}",
            payload=rng.choice([None, "p1", "p2"]),
            members=members,
            actor=rng.choice([None, self.config()]),
            max_retries_failure=rng.choice([0, 0, 1, 2]),
            max_retries_preemption=rng.choice([0, 1, 100]),
            max_retries_machine_loss=rng.choice([None, None, 0, 1]),
            max_retries_out_of_memory=rng.choice([None, None, 0, 2]),
            exit_codes=rng.choice([{}, {}, {3: ExitRule.IGNORE, 4: ExitRule.FAIL, 137: ExitRule.RETRY}]),
            backoff_s=rng.choice([0.0, 0.0, 0.0, 2.0]),
            adopt_existing=rng.random() < 0.1,
            user=rng.choice(["", "u1", "u2"]),
            band=rng.choice([None, None, Band.PRODUCTION, Band.INTERACTIVE, Band.BATCH, Band.BATCH]),
            time_limit_s=rng.choice([None, None, None, 2.0, 10.0, 60.0, 500.0]),
            get_if_exists=rng.random() < 0.05,
            detached=rng.random() < 0.1,
            entry=rng.choice([EntryKind.CALLABLE, EntryKind.ACTOR]),
        )

    def group(self) -> tuple[JobSpec, ...]:
        """A supervised group of two to four actors."""
        rng = self.rng
        config = self.config()
        name, strategy = f"g{self.fresh()}", rng.choice(list(SupervisionStrategy))
        return tuple(
            job(
                f"{name}.{index}",
                rng.choice([demand(0), demand(1)]),
                job_id=f"j{self.fresh()}",
                entry=EntryKind.ACTOR,
                actor=config,
                siblings=SupervisedGroup(group_id=name, strategy=strategy, index=index),
            )
            for index in range(rng.choice([2, 2, 3, 4]))
        )

    def config(self) -> ActorConfig:
        rng = self.rng
        return ActorConfig(
            max_restarts=rng.choice([0, 1, 2, 5, -1]),
            restart_period_s=rng.choice([None, 5.0, 60.0]),
            backoff_s=rng.choice([0.0, 0.0, 1.0, 15.0]),
            may_overlap=rng.random() < 0.2,
            must_start=rng.random() < 0.2,
        )

    def do_process(self) -> bool:
        """An attempt's process speaks to the controller."""
        state = self.scheduler.state
        known = [a.attempt_id for a in state.attempts.values() if a.ran and (a.living or self.rng.random() < 0.1)]
        if not known:
            return False
        attempt = self.rng.choice(known)
        session = f"s-{attempt}"
        self.tell(self.scheduler.process(attempt))
        turn = self.rng.random()
        try:
            if turn < 0.6:
                actor = self.rng.choice([split_attempt(attempt)[0], f"actor{self.rng.randrange(9)}"])
                self.tell(self.scheduler.register(self.rng.choice("xy"), actor, session, self.rng.random() < 0.3))
            elif turn < 0.7:
                self.tell(self.scheduler.unregister(f"actor{self.rng.randrange(9)}", session))
            elif turn < 0.72:
                self.tell(self.scheduler.close(session, ref=self.scheduler.ref()))
            elif turn < 0.9:
                kept = self.rng.choice(["c1", "c2", "c3"])
                self.tell(self.scheduler.checkpoint(session, self.rng.randrange(5), kept))
        except FrayError:
            pass
        return True

    def do_terminate(self) -> bool:
        living = [job_id for job_id, row in self.scheduler.state.jobs.items() if not row.ended]
        if living:
            which = self.rng.choice(living)
            what = self.rng.choice(
                [{}, {}, {"tree": True}, {"name": "a"}, {"prefix": "g"}, {"own": True}, {"group": "jg1"}]
            )
            session = self.rng.choice(list(self.scheduler.state.sessions) or ["d"])
            asked = TerminateRequested(
                session=session, ref=self.scheduler.ref(), jobs=(which,), reason="enough", **what
            )
            self.tell(self.scheduler.tell(asked))
        return bool(living)

    def do_mark(self) -> bool:
        """Cordon or drain machines, put them back into service, or announce the end of one."""
        names = self.rng.sample(list(self.scheduler.state.nodes), min(2, len(self.scheduler.state.nodes)))
        session = self.rng.choice(list(self.scheduler.state.sessions) or ["d"])
        turn = self.rng.random()
        if turn < 0.2:
            self.tell(self.scheduler.cordon(*names, session=session))
        elif turn < 0.5:
            finish_s = self.rng.choice([0.0, 0.0, 10.0, 100.0])
            self.tell(self.scheduler.cordon(*names, session=session, drain=True, finish_s=finish_s))
        elif turn < 0.6 and names and self.machines[names[0]].connected:
            self.tell(self.scheduler.leave(names[0], self.rng.choice([0.0, 20.0])))
        else:
            self.tell(self.scheduler.uncordon(*self.scheduler.state.nodes, session=session))
        return True

    def do_probe(self) -> bool:
        """Answer a probe, of a machine in quarantine or without a request."""
        machine = self.any_machine(lambda m: m.connected and m.name in self.scheduler.state.nodes)
        if machine:
            self.tell(self.scheduler.probed(machine.name, self.rng.choice(["", "a fan is loud"])))
        return machine is not None

    CALM = (
        [do_obey] * 12
        + [do_deliver] * 14
        + [do_advance] * 10
        + [do_launch] * 4
        + [do_job_group]
        + [do_wait] * 3
        + [do_process] * 4
    )
    ROUGH = [do_connect] * 4 + [do_cut] * 2 + [do_fall, do_wait_long, do_terminate, do_driver, do_mark, do_probe]
    ROUGH += [do_full_report] * 2 + [do_restart]

    def walk(self) -> None:
        """``EVENTS`` things happen; some worlds are calmer than others."""
        roughness = self.rng.choice([0.05, 0.15, 0.4])
        happened = 0
        while happened < EVENTS:
            dice = self.ROUGH if self.rng.random() < roughness else self.CALM
            happened += self.rng.choice(dice)(self)
            self.check_truth()

    def check_truth(self) -> None:
        generations: dict[str, int] = {}
        for machine in self.machines.values():
            devices: list[str] = []
            for attempt in machine.living():
                name, generation, _ = split_attempt(attempt)
                config = machine.desired[attempt].spec.actor
                if config is None or not config.may_overlap:
                    assert generations.setdefault(name, generation) == generation, f"two generations of {name} live"
                devices += machine.desired[attempt].devices
            assert len(devices) == len(set(devices)), f"a device of {machine.name} serves twice: {devices}"

    # The end

    def heal(self) -> None:
        """Every machine comes back, every owner leaves, every message arrives."""
        for machine in self.machines.values():
            self.connect(machine)
        for session in self.drivers:
            self.tell(self.scheduler.close(session))
        self.tell(self.scheduler.terminate(*(j for j, row in self.scheduler.state.jobs.items() if not row.owner)))
        self.settle()
        self.tell(self.scheduler.uncordon(*self.scheduler.state.nodes))
        self.settle()
        self.wait(RULES.lease_s)

    def settle(self) -> None:
        for _ in range(10_000):
            self.check_truth()
            busy = False
            for machine in self.machines.values():
                if machine.down_link:
                    machine.obey()
                    busy = True
                if machine.up_link:
                    self.deliver(machine)
                    busy = True
                for attempt in machine.living():
                    if machine.held[attempt].phase is Phase.STOPPING:
                        machine.see(attempt, Phase.ENDED, Outcome(cause=machine.desired[attempt].stop_cause))
                        busy = True
            if not busy:
                return
        raise AssertionError("the world does not come to rest")

    def check_nothing_lives(self) -> None:
        state = self.scheduler.state
        assert [job_id for job_id, row in state.jobs.items() if row.phase is not JobPhase.ENDED] == []
        assert [a.attempt_id for a in state.attempts.values() if a.living] == []
        assert [m.living() for m in self.machines.values()] == [[], [], []]
        assert [state.desired_attempts(name) for name in self.machines] == [(), (), ()]
        assert state.registrations == {}
        assert [state.owned_jobs(session) for session in self.drivers] == [()] * len(self.drivers)
        assert state.next_deadline() is None
        assert set(state.blob_refs) == {row.outcome.value for row in state.jobs.values() if row.outcome} - {None}
        assert all(not node.stray_attempts and node.has_reported for node in state.nodes.values())
        assert set(self.scheduler.store) == {(table, key) for table in TABLES_HELD for key in state.rows(table)}


TABLES_HELD = (
    "meta",
    "node",
    "session",
    "job",
    "job_group",
    "attempt",
    "registration",
    "actor_tombstone",
    "job_tombstone",
    "usage",
)


def walk_through(world: World, seed: int) -> None:
    """All of one walk, to its quiet end; what goes wrong names its seed."""
    try:
        world.walk()
        world.heal()
        world.check_nothing_lives()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_whatever_happens_the_invariants_hold_and_nothing_outlives_its_owner(chunk: int) -> None:
    for seed in range(chunk, WALKS, CHUNKS):
        walk_through(World(seed), seed)
