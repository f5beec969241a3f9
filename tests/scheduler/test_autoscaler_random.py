"""Random walks over all of the scheduler: reservations, quotas, policies that change, machines that come and go.

Everything of `test_invariants` happens too. Beside it there is a cloud that makes what is asked of it late, or never,
loses it, takes it back, and tells of it late; the operator writes another policy; users reserve machines, run jobs in
them, and let them go; people ask why, and what if. Asking changes nothing. In the end nothing is left of anything.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from attrs import evolve

from fray.model.messages.node import NodeHello
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)
from fray.model.policy.policy import (
    Amounts,
    Policy,
    Preemption,
    TenantPolicy,
)
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.model.specs import JobSpec
from fray.scheduler.autoscaler.view import list_fleet
from fray.scheduler.effects import (
    DesiredAttemptsChanged,
    GroupScaled,
    MachineAnswered,
    MachinesListed,
    PolicyChanged,
)
from fray.scheduler.explain.explain import explain
from fray.scheduler.explain.forecast import what_if
from fray.scheduler.explain.queue_view import queue_info, usage_info
from fray.scheduler.nodes.view import nodes_info
from fray.scheduler.state.rows import TABLES
from fray.scheduler.state.state import State
from fray.scheduler.state.unit_rows import UnitPhase
from tests.scheduler.test_invariants import Machine, World, walk_through
from tests.support.scheduler import GB, demand

WALKS, CHUNKS = 16, 4
SMALL = GroupConfig(
    "small", "tpu", cpu=4, memory=64 * GB, max=3, idle_s=20.0, boot_timeout_s=60.0, zones=("z1", "z2"), price_per_hour=1
)
SLICE = GroupConfig("slice", "tpu", tpu="v4-16", max=2, idle_s=20.0, boot_timeout_s=60.0, spot=True, price_per_hour=8)
PREEMPTIONS = (
    Preemption(shield_s=3.0, period_s=300.0, patience_s=0.0),
    Preemption(shield_s=0.0, period_s=300.0, patience_s=0.0, limit=5),
    Preemption(enabled=False),
)
QUOTAS = (
    {},
    {"ann": TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=False)},
    {"ann": TenantPolicy(quota=Amounts(cpu_milli=1000)), "bob": TenantPolicy(weight=2.0)},
    {
        "*": TenantPolicy(
            quota=Amounts(cpu_milli=3000, devices={"gpu": 1, "gpu:h100": 1}), borrow=Amounts(cpu_milli=1000)
        )
    },
)
TPU = Demand(1000, device_kind="tpu", device_variant="v4-16", device_count=4)


def rows_of(world: World) -> dict[tuple[str, str], Any]:
    state = world.scheduler.state
    return {(table, key): copy.deepcopy(row) for table in TABLES for key, row in state.rows(table).items()}


class FleetWorld(World):
    def __init__(self, seed: int) -> None:
        self.policy = Policy(preemption=PREEMPTIONS[0], groups=(SMALL, SLICE))
        self.cloud: dict[str, SeenMachine] = {}
        self.lists: list[tuple[float, tuple[SeenMachine, ...]]] = []
        self.reserved: list[str] = []
        super().__init__(seed)
        self.change(self.policy)
        self.tell(self.scheduler.tell(MachinesListed(provider="tpu", asked_at=self.scheduler.now)))

    def send_desired(self, effect: DesiredAttemptsChanged) -> None:
        if effect.node in self.machines:  # or it is off, and the scheduler has not heard of that
            super().send_desired(effect)

    # The operator

    def change(self, policy: Policy) -> None:
        self.scheduler.now += 0.01  # what was asked for until now was allowed
        self.policy = policy
        self.tell(self.scheduler.tell(PolicyChanged(policy=policy)))

    def do_policy(self) -> bool:
        rng = self.rng
        groups = rng.choice([(SMALL, SLICE), (SMALL, SLICE), (SMALL,), (), (evolve(SMALL, max=1, min=1), SLICE)])
        spend = rng.choice([None, None, 4.0, 12.0])
        terms = rng.choice(QUOTAS)
        spaces = rng.choice([{}, {}, {"ns": TenantPolicy(quota=Amounts(cpu_milli=6000), borrow=rng.random() < 0.5)}])
        half_life_s = rng.choice([86_400.0, 1.0, 1e9])
        self.change(
            Policy(
                preemption=rng.choice(PREEMPTIONS),
                groups=groups,
                spend_limit_per_hour=spend,
                users=terms,
                namespaces=spaces,
                half_life_s=half_life_s,
            )
        )
        return True

    def do_scale(self) -> bool:
        rng = self.rng
        least, most = rng.choice([(None, None), (0, 0), (1, 2), (None, 1)])
        session = rng.choice(list(self.scheduler.state.sessions) or ["d"])
        self.scheduler.now += 0.01
        scaled = GroupScaled(session=session, ref=self.scheduler.ref(), group="small", min=least, max=most)
        self.tell(self.scheduler.tell(scaled))
        return True

    def do_restart(self) -> bool:
        for machine in self.machines.values():
            if machine.connected:
                machine.connected, machine.heard_at = False, self.scheduler.now
                machine.up_link.clear()
                machine.down_link.clear()
        self.lists.clear()
        self.tell(self.scheduler.restart(policy=self.policy))
        return True

    def do_old_time(self) -> bool:
        """The clock is set back: the scheduler does not notice."""
        before = self.scheduler.now
        self.scheduler.now = before - self.rng.choice([0.5, 100.0])
        try:
            self.do_full_report()
            self.do_deliver()
        finally:
            self.scheduler.now = before
        return True

    def do_mark(self) -> bool:
        """Return the connected nodes: others are silent, and on record."""
        return all(name in self.machines for name in self.scheduler.state.nodes) and super().do_mark()

    # The cloud

    def do_order(self) -> bool:
        orders = list(self.scheduler.state.fleet.pending_orders)
        if not orders:
            return False
        unit = self.scheduler.state.fleet.units[self.rng.choice(orders)]
        deleted = unit.phase is UnitPhase.DELETING
        turn, error = self.rng.random(), None
        if turn < 0.25:
            error = self.rng.choice(list(ErrorKind))
        if error is None or (error is ErrorKind.TRANSIENT and turn < 0.1):
            if deleted:
                self.cloud.pop(unit.name, None)
                self.pull(unit.name)
            else:
                self.cloud[unit.name] = SeenMachine(unit.name, unit.group, unit.zone, MachineState.CREATING, unit.hosts)
        self.tell(
            self.scheduler.tell(MachineAnswered(name=unit.name, is_delete=deleted, error=error, message="so it is"))
        )
        return True

    def pull(self, unit: str) -> None:
        """Switch its machines off."""
        for name in [name for name in self.machines if name.rpartition("-")[0] == unit]:
            machine = self.machines.pop(name)
            machine.fall()
            self.cut(machine)

    def do_boot(self) -> bool:
        units = [u for u in self.cloud.values() if u.state is MachineState.CREATING]
        if not units:
            return False
        seen = self.rng.choice(units)
        config = {"small": SMALL, "slice": SLICE}.get(seen.group)
        assert config is not None
        coming = [f"{seen.name}-{w}" for w in range(seen.hosts) if f"{seen.name}-{w}" not in self.machines]
        if not coming or self.rng.random() < 0.1:
            state = self.rng.choice([MachineState.RUNNING, MachineState.RUNNING, MachineState.FAILED])
            self.cloud[seen.name] = evolve(seen, state=state)
            if state is MachineState.FAILED:
                self.pull(seen.name)
            return True
        name = coming[0]
        size = config.capacity(seen.zone, seen.name, int(name.rpartition("-")[2]))
        machine = Machine(name, NodeHello(node=name, incarnation="i0", boot_id="b", capacity=size))
        self.machines[name] = machine
        self.connect(machine)
        return True

    def do_reclaim(self) -> bool:
        """The cloud takes a machine back, or it is gone without a word."""
        if not self.cloud:
            return False
        seen = self.rng.choice(list(self.cloud.values()))
        if self.rng.random() < 0.5:
            self.cloud[seen.name] = evolve(seen, state=self.rng.choice([MachineState.PREEMPTED, MachineState.DELETING]))
        else:
            del self.cloud[seen.name]
        self.pull(seen.name)
        return True

    def do_list(self) -> bool:
        """Take a list now, and report it later."""
        if self.rng.random() < 0.5 or not self.lists:
            self.lists.append((self.scheduler.now, tuple(self.cloud.values())))
        if self.rng.random() < 0.7:
            begun, machines = self.lists.pop(0)
            error = "the cloud is out" if self.rng.random() < 0.1 else ""
            listed = MachinesListed(provider="tpu", machines=() if error else machines, asked_at=begun, error=error)
            self.tell(self.scheduler.tell(listed))
        return True

    def do_stranger(self) -> bool:
        name = f"small-x-{self.fresh()}"
        self.cloud[name] = SeenMachine(name, "small", "z1", self.rng.choice(list(MachineState)), 1)
        return True

    # Reservations

    def do_reserve(self) -> bool:
        rng = self.rng
        living = [name for name, known in self.scheduler.state.sessions.items() if not known.is_ending]
        if not living:
            return False
        name, least = f"r{self.fresh()}", rng.choice([0, 1, 1, 2])
        need = rng.choice([demand(1), demand(2), demand(1, gpu=1), TPU])
        self.reserved.append(name)
        self.tell(
            self.scheduler.ask_reservation(
                name,
                need,
                rng.choice(living),
                min_units=least,
                max_units=max(1, least + rng.choice([0, 1, 3])),
                hosts=2 if need is TPU else 1,
                ttl_s=rng.choice([5.0, 100.0, 3600.0]),
                notice_s=rng.choice([0.0, 5.0]),
                priority=rng.choice([0, 1]),
                band=rng.choice([None, Band.PRODUCTION, Band.BATCH]),
                preemptible=rng.random() < 0.7,
                detached=rng.random() < 0.2,
                user=rng.choice(["ann", "bob", ""]),
            )
        )
        return True

    def do_let_go(self) -> bool:
        if not self.reserved:
            return False
        name, session = self.rng.choice(self.reserved), self.rng.choice(list(self.scheduler.state.sessions) or ["d"])
        if self.rng.random() < 0.5:
            self.tell(self.scheduler.renew(name, self.rng.choice([None, 10.0]), session))
        else:
            self.tell(self.scheduler.release(name, session))
        return True

    def spec(self) -> JobSpec:
        rng = self.rng
        spec = evolve(super().spec(), user=rng.choice(["ann", "bob", ""]), wait_limit_s=rng.choice([None, None, 30.0]))
        turn = rng.random()
        if turn < 0.2 and self.reserved:
            spec = evolve(spec, reservation_id=rng.choice(self.reserved[-4:]))
        if turn > 0.92 and spec.entry is not None:
            spec = evolve(spec, demand=TPU, members=2, ports=())
        if rng.random() < 0.15:
            other = evolve(spec.demand, device_kind="gpu", device_variant="auto", device_count=1)
            spec = evolve(spec, alternatives=(other,))
        return evolve(spec, notice_s=rng.choice([0.0, 0.0, 4.0]))

    def do_job_group(self) -> bool:
        inside = self.rng.choice(self.reserved[-4:]) if self.reserved and self.rng.random() < 0.3 else ""
        band = self.rng.choice([None, Band.PRODUCTION])
        user = self.rng.choice(["ann", "bob"])
        made, self.spec = self.spec, lambda: evolve(made(), reservation_id=inside, band=band, user=user)  # type: ignore[method-assign]
        try:
            return super().do_job_group()
        finally:
            self.spec = made  # type: ignore[method-assign]

    # Questions

    def do_ask(self) -> bool:
        """Check that queries change nothing."""
        state = self.scheduler.state
        before, pool = rows_of(self), _pools(self)
        jobs = [job_id for job_id, job in state.jobs.items() if not job.ended]
        for job_id in self.rng.sample(jobs, min(3, len(jobs))):
            assert explain(state, job_id, self.scheduler.now)
        spec = self.spec()
        try:
            what_if(state, spec)
        finally:
            list_fleet(state)
            usage_info(state, self.scheduler.now)
            queue_info(state, 100, None, self.scheduler.now)
            nodes_info(state)
            assert rows_of(self) == before
            assert _pools(self) == pool
            assert state.take_dirty() == ([], [])
        return True

    # The end

    def heal(self) -> None:
        self.change(Policy(preemption=PREEMPTIONS[0]))
        for name in self.reserved:
            self.tell(self.scheduler.release(name, self.drivers[0]))
        super().heal()
        for _ in range(20):
            for name in list(self.scheduler.state.fleet.pending_orders):
                deleted = self.scheduler.state.fleet.units[name].phase is UnitPhase.DELETING
                self.cloud.pop(name, None)
                self.tell(self.scheduler.tell(MachineAnswered(name=name, is_delete=deleted)))
            self.wait(200.0)
            self.tell(
                self.scheduler.tell(
                    MachinesListed(provider="tpu", asked_at=self.scheduler.now, machines=tuple(self.cloud.values()))
                )
            )
        self.wait(2 * 86_400.0)

    def check_nothing_lives(self) -> None:
        state = self.scheduler.state
        assert [job_id for job_id, row in state.jobs.items() if not row.ended] == []
        assert [a.attempt_id for a in state.attempts.values() if a.living] == []
        assert [row.id for row in state.reservations.values() if row.phase.value != "ended"] == []
        assert self.cloud == {}
        units = [unit for unit in state.fleet.units.values() if unit.phase is not UnitPhase.GONE]
        assert units == [], units
        assert not left(state), left(state)


_W = FleetWorld
_W.CALM = [getattr(_W, what.__name__) for what in World.CALM]
_W.CALM += [_W.do_reserve, _W.do_let_go, _W.do_ask, *[_W.do_order, _W.do_boot, _W.do_list] * 3]
_W.ROUGH = [getattr(_W, what.__name__) for what in World.ROUGH]
_W.ROUGH += [_W.do_policy, _W.do_policy, _W.do_scale, _W.do_reclaim, _W.do_stranger, _W.do_old_time]


def _pools(world: World) -> Any:
    state = world.scheduler.state
    return {
        (name, machine.name): (
            machine.cpu_milli,
            machine.memory_bytes,
            copy.deepcopy(machine.devices),
            machine.ports.free,
        )
        for name, pool in [("", state.pool), *state.reservation_pools.items()]
        for machine in pool.machines.values()
    }


EMPTY_IN_THE_END = """
    held_jobs backoffs time_limits ending_jobs sibling_groups children jobs_by_root jobs_by_name jobs_inside
    reservations_on reservations_by_owner changed_pools registrations_by_key registrations_by_incarnation lost_drivers
    closing_sessions claims start_plans reservation_pools releasing with_surplus group_names not_alive
"""
QUEUE_EMPTY_IN_THE_END = "applicants waiting untried exempt in_reservations over_quota held_machines"


def left(state: State) -> list[str]:
    """Indexes that remember something although nothing lives."""
    found = [f"{name}: {index}" for name in EMPTY_IN_THE_END.split() if (index := getattr(state, name))]
    found += [
        f"queue.{name}: {index}" for name in QUEUE_EMPTY_IN_THE_END.split() if (index := getattr(state.queue, name))
    ]
    found += [f"timed: {timed}" for timed in state.timers.at]
    found += [f"members of {group}" for group in state.group_members if group not in state.job_groups]
    found += [f"attempts on {node}: {there}" for node, there in state.on_node.items() if there]
    found += [
        f"sessions of {one}" for one, names in state.sessions_of.items() if not set(names) <= set(state.ended_sessions)
    ]
    return found


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_whatever_happens_to_the_fleet_the_invariants_hold_and_nothing_is_left(chunk: int) -> None:
    for seed in range(chunk, WALKS, CHUNKS):
        walk_through(FleetWorld(seed), seed)
