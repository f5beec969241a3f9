"""Scheduling of machines that can be had: when they are asked for, where, and when they are given back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve

from fray.cli.machines import described
from fray.errors import InvalidRequest, NeverSchedulable
from fray.model.messages.maintenance import ForecastVerdict
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)
from fray.model.policy.policy import Amounts, Policy, TenantPolicy
from fray.model.resources import Demand
from fray.model.specs import JobState
from fray.model.topology import tpu_topology
from fray.scheduler.autoscaler.provider_events import (
    REAPPEARED_S,
    REMEMBERED_S,
    UNSEEN_S,
    VANISHED_S,
)
from fray.scheduler.autoscaler.view import list_fleet
from fray.scheduler.effects import (
    FleetChanged,
    GroupScaled,
    MachineAnswered,
    MachinesListed,
    PolicyChanged,
    Refusal,
    ReservationReleased,
)
from fray.scheduler.explain.forecast import what_if
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.unit_rows import CloudUnit, UnitPhase, next_backoff
from fray.testing.invariants.check import check
from tests.support.scheduler import GB, Cluster, demand, ended, job, member


def group(name: str = "g", **more: Any) -> GroupConfig:
    """Machines of 4 CPUs, at most 4."""
    usual = {"provider": "tpu", "cpu": 4, "memory": 64 * GB, "max": 4, "idle_s": 60, "boot_timeout_s": 100}
    return GroupConfig(name=name, **(usual | more))


class Fleet(Cluster):
    """A scheduler with groups, and a provider that does what the test says."""

    def __init__(self, *groups: GroupConfig, spend: float | None = None, listed: bool = True, **more: Any) -> None:
        self.policy = Policy(groups=groups, spend_limit_per_hour=spend)
        super().__init__(policy=self.policy, cluster="c", **more)
        self.driver()
        if listed:
            self.list()

    def restart(self, **restarted: Any) -> list[Any]:
        return super().restart(**({"policy": self.policy, "cluster": "c"} | restarted))

    def units(self, *phases: UnitPhase) -> list[CloudUnit]:
        return [unit for unit in self.state.fleet.units.values() if not phases or unit.phase in phases]

    def live(self) -> list[str]:
        return [unit.name for unit in self.units() if unit.is_live]

    def zones(self) -> list[str]:
        return [unit.zone for unit in self.units() if unit.is_live]

    def list(self, *machines: SeenMachine, begun: float | None = None, provider: str = "tpu") -> list[Any]:
        at = self.now if begun is None else begun
        return self.tell(MachinesListed(provider=provider, machines=machines, asked_at=at))

    def seen(self, unit: str, state: MachineState = MachineState.RUNNING, **more: Any) -> SeenMachine:
        row = self.state.fleet.units[unit]
        usual = {"hosts": row.hosts}
        return SeenMachine(unit, row.group, row.zone, state, **(usual | more))

    def list_all(self, *but: str) -> None:
        here = (UnitPhase.ASKED, UnitPhase.SEEN, UnitPhase.JOINED, UnitPhase.DRAINING)
        self.list(*(self.seen(unit.name) for unit in self.units(*here) if unit.name not in but))

    def answer(self, name: str, error: ErrorKind | None = None, message: str = "", deleted: bool = False) -> None:
        self.tell(MachineAnswered(name=name, error=error, message=message, is_delete=deleted))

    def take_orders(self) -> None:
        """Every order is taken."""
        for name in list(self.state.fleet.pending_orders):
            self.answer(name, deleted=self.state.fleet.units[name].phase is UnitPhase.DELETING)

    def join(self, unit: str, worker: int = 0, **more: Any) -> None:
        row = self.state.fleet.units[unit]
        config = self.state.fleet.group(row.group)
        assert config is not None
        size = config.capacity(row.zone, unit, worker)
        usual: dict[str, Any] = {"cpu": size.cpu_milli / 1000, "memory": size.memory_bytes, **size.attributes}
        tpus = [device.variant for device in size.devices]
        if tpus:
            usual["tpu"] = ",".join(tpus)
        self.node(f"{unit}-{worker}", **(usual | more))

    def come(self) -> list[str]:
        """All that was asked for is made, joins, and is listed; their names."""
        self.take_orders()
        names = [unit.name for unit in self.units(UnitPhase.ASKED, UnitPhase.SEEN)]
        for name in names:
            for worker in range(self.state.fleet.units[name].hosts):
                self.join(name, worker)
        self.list_all()
        self.tick()
        return names

    def until(self, at: float) -> None:
        """Time passes, with a list now and then."""
        while self.now < at:
            self.tick(min(at, self.now + 5))
            self.take_orders()
            self.list_all()

    def finish(self, *attempts: str) -> None:
        for attempt in attempts:
            self.see(attempt, ended())


# Up -------------------------------------------------------------------------------------------------------------------


def test_what_fits_nowhere_is_asked_for_and_begins_when_it_is_there() -> None:
    scheduler = Fleet(group())
    scheduler.launch(job("a"))
    assert scheduler.info("a").state is JobState.PENDING
    assert scheduler.live() == ["g-c-2"]
    assert scheduler.come() == ["g-c-2"]
    assert [attempt.node for attempt in scheduler.info("a").attempts] == ["g-c-2-0"]


def test_nothing_is_asked_for_before_the_provider_has_said_what_it_has() -> None:
    scheduler = Fleet(group(), listed=False)
    scheduler.launch(job("a"))
    scheduler.tick()
    assert not scheduler.live()
    scheduler.list()
    scheduler.tick()
    assert len(scheduler.live()) == 1


def test_as_many_as_hold_what_waits_and_never_more_than_max() -> None:
    scheduler = Fleet(group(max=3))
    scheduler.launch(*(job(f"j{n}") for n in range(8)))
    scheduler.tick()
    assert len(scheduler.live()) == 2
    scheduler.launch(*(job(f"k{n}") for n in range(20)))
    scheduler.tick()
    assert len(scheduler.live()) == 3


def test_what_is_on_its_way_is_not_asked_for_again() -> None:
    scheduler = Fleet(group())
    scheduler.launch(job("a"))
    for _ in range(5):
        scheduler.tick()
        scheduler.take_orders()
    assert len(scheduler.live()) == 1


def test_a_gang_is_asked_for_whole_or_not_at_all() -> None:
    scheduler = Fleet(group(max=2), group("more", max=2, provider="tpu"))
    scheduler.launch(job("wide", demand(4), members=4))
    assert len(scheduler.live()) == 4
    narrow = Fleet(group(max=2))
    with pytest.raises(NeverSchedulable):
        narrow.launch(job("wide", demand(4), members=3))
    narrow.launch(job("holder", demand(4), members=1))
    narrow.come()
    narrow.launch(job("wide", demand(4), members=2))
    narrow.tick()
    assert len(narrow.live()) == 1, "one more would not help while the other is in use"


def test_a_gang_counts_on_what_is_free() -> None:
    scheduler = Fleet(group())
    scheduler.node("own", cpu=8)
    scheduler.launch(job("wide", demand(4), members=3))
    scheduler.tick()
    assert len(scheduler.live()) == 1


def test_the_cheapest_group_that_can_hold_it_is_taken() -> None:
    scheduler = Fleet(
        group("dear", price_per_hour=9), group("cheap", price_per_hour=2), group("tiny", cpu=1, price_per_hour=1)
    )
    scheduler.launch(job("a", demand(3)))
    assert [unit.group for unit in scheduler.units()] == ["cheap"]


def test_spot_machines_are_for_what_may_be_preempted() -> None:
    scheduler = Fleet(group("spot", spot=True, price_per_hour=1), group("sure", price_per_hour=9))
    scheduler.launch(job("a", demand(4, preemptible=False)))
    assert [unit.group for unit in scheduler.units()] == ["sure"]
    scheduler.launch(job("b", demand(4)))
    scheduler.tick()
    assert [unit.group for unit in scheduler.units()] == ["sure", "spot"]


def test_a_whole_slice_is_one_unit_and_is_there_when_all_its_hosts_are() -> None:
    scheduler = Fleet(group(tpu="v5litepod-16"))
    need = Demand(1000, device_kind="tpu", device_variant="v5litepod-16", device_count=4)
    hosts = tpu_topology("v5litepod-16").hosts
    scheduler.launch(job("train", need, members=hosts))
    (unit,) = scheduler.live()
    scheduler.take_orders()
    for worker in range(hosts - 1):
        scheduler.join(unit, worker)
    scheduler.list(scheduler.seen(unit))
    scheduler.tick()
    assert scheduler.state.fleet.units[unit].phase is UnitPhase.SEEN
    scheduler.join(unit, hosts - 1)
    scheduler.tick()
    assert scheduler.state.fleet.units[unit].phase is UnitPhase.JOINED
    assert len({attempt.node for attempt in scheduler.info("train").attempts}) == hosts


def test_min_and_buffer_are_kept() -> None:
    scheduler = Fleet(group(min=1, buffer=1))
    scheduler.tick()
    assert len(scheduler.live()) == 2
    scheduler.come()
    scheduler.launch(job("a", demand(4)), job("b", demand(4)))
    scheduler.tick()
    assert len(scheduler.live()) == 3, "two are in use, one is kept ready"


def test_the_spend_limit_binds_and_says_so() -> None:
    scheduler = Fleet(group(price_per_hour=4), spend=10)
    scheduler.launch(*(job(f"j{n}", demand(4)) for n in range(4)))
    assert len(scheduler.live()) == 2
    assert "the spend limit is reached: a unit of g costs 4 an hour, 2 is left" in scheduler.info("j0").reason


def test_a_machine_that_offers_less_than_declared_is_not_asked_for_again_and_again() -> None:
    scheduler = Fleet(group())
    scheduler.launch(job("a", demand(4)))
    (unit,) = scheduler.live()
    scheduler.take_orders()
    scheduler.join(unit, cpu=3.5)
    scheduler.list_all()
    for _ in range(5):
        scheduler.tick()
    assert scheduler.live() == [unit]
    assert scheduler.info("a").state is JobState.PENDING


def test_never_is_judged_by_what_could_be_had() -> None:
    scheduler = Fleet(group(max=2))
    with pytest.raises(NeverSchedulable):
        scheduler.launch(job("big", demand(5)))
    with pytest.raises(NeverSchedulable):
        scheduler.launch(job("many", demand(4), members=3))
    scheduler.launch(job("fits", demand(4), members=2))


# Down -----------------------------------------------------------------------------------------------------------------


def used(scheduler: Fleet, *names: str) -> None:
    scheduler.launch(*(job(name, demand(4)) for name in names))
    scheduler.tick()
    scheduler.come()
    scheduler.run(*(f"{name}:0:0" for name in names))


def test_an_idle_unit_is_given_back_after_a_while() -> None:
    scheduler = Fleet(group())
    used(scheduler, "a")
    scheduler.until(200)
    assert len(scheduler.live()) == 1
    scheduler.finish("a:0:0")
    scheduler.until(250)
    assert len(scheduler.live()) == 1
    scheduler.until(270)
    assert not scheduler.live()
    scheduler.until(280)
    assert [unit.phase for unit in scheduler.units()] == [UnitPhase.GONE]
    assert not scheduler.state.nodes


def test_a_short_job_between_two_looks_keeps_it() -> None:
    scheduler = Fleet(group())
    used(scheduler, "a")
    scheduler.finish("a:0:0")
    scheduler.until(50)
    scheduler.launch(job("b", demand(4)))
    scheduler.finish("b:0:0")
    scheduler.until(100)
    assert len(scheduler.live()) == 1
    scheduler.until(120)
    assert not scheduler.live()


def test_never_below_min_and_buffer() -> None:
    scheduler = Fleet(group(min=1, buffer=1))
    used(scheduler, "a", "b", "c")
    scheduler.finish("a:0:0", "b:0:0", "c:0:0")
    scheduler.until(300)
    assert len(scheduler.live()) == 2


def test_idle_machines_are_kept_for_a_gang_whose_others_are_to_come() -> None:
    scheduler = Fleet(group(max=2, idle_s=10))
    used(scheduler, "a")
    scheduler.finish("a:0:0")
    scheduler.launch(job("wide", demand(4), members=2))
    scheduler.tick()
    (late,) = list(scheduler.units(UnitPhase.WANTED))
    for at in range(10, 60, 5):
        scheduler.tick(at)
    assert late.is_live
    assert len(scheduler.live()) == 2


def test_above_max_units_close_and_go_when_they_are_empty() -> None:
    scheduler = Fleet(group(max=2))
    used(scheduler, "a", "b")
    scheduler.tell(GroupScaled(session="d", ref=1, group="g", max=1))
    scheduler.tick()
    (closed,) = scheduler.units(UnitPhase.DRAINING)
    assert len(scheduler.live()) == 1
    scheduler.launch(job("c", demand(4)))
    holder = next(name for name in ("a", "b") if scheduler.info(name).attempts[0].node.startswith(closed.name))
    scheduler.finish(f"{holder}:0:0")
    scheduler.until(scheduler.now + 20)
    assert closed.phase is UnitPhase.GONE
    assert scheduler.info("c").state is JobState.PENDING


def idle_beside_a_used_one() -> Fleet:
    """A fleet that next plans at the end of the idle time, if nothing changes."""
    scheduler = Fleet(group(max=3))
    used(scheduler, "a", "b")
    scheduler.finish("b:0:0")
    scheduler.until(scheduler.now + 10)
    assert len(scheduler.live()) == 2
    return scheduler


def test_a_new_policy_does_not_wait_for_the_end_of_an_idle_time() -> None:
    # Seed 41065: units of a group that had left the policy stayed in service.
    scheduler = idle_beside_a_used_one()
    scheduler.tell(PolicyChanged(policy=Policy()))
    scheduler.tick(scheduler.now + 3)
    assert not scheduler.live(), "one is deleted, and one is closed"


def test_a_maximum_that_is_lowered_in_the_moment_of_a_request_closes_what_is_too_many() -> None:
    # Seed 33333: the invariants, which `tell` checks, took the units for requested beyond the new maximum.
    scheduler = Fleet(group(max=3))
    scheduler.launch(job("a", demand(4)), job("b", demand(4)))
    assert len(scheduler.live()) == 2, "requested in the step of the launch"
    scheduler.tell(PolicyChanged(policy=evolve(scheduler.policy, groups=(group(max=1),))))
    scheduler.until(scheduler.now + 10)
    assert len(scheduler.live()) == 1


def test_a_job_does_not_wait_for_the_end_of_an_idle_time() -> None:
    scheduler = idle_beside_a_used_one()
    scheduler.launch(job("c", demand(4)))
    scheduler.launch(job("d", demand(4)))
    scheduler.tick(scheduler.now + 3)
    assert len(scheduler.live()) == 3, "one more, for the job that does not fit on the idle machine"


def test_a_group_that_left_the_policy_is_drained() -> None:
    scheduler = Fleet(group())
    used(scheduler, "a")
    scheduler.tell(PolicyChanged(policy=Policy()))
    scheduler.tick()
    assert [unit.phase for unit in scheduler.units()] == [UnitPhase.DRAINING]
    scheduler.finish("a:0:0")
    scheduler.until(scheduler.now + 10)
    assert [unit.phase for unit in scheduler.units()] == [UnitPhase.GONE]


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_zone_that_has_none_rests_and_the_next_is_asked() -> None:
    scheduler = Fleet(group(zones=("z1", "z2")))
    scheduler.launch(job("a"))
    assert scheduler.zones() == ["z1"]
    scheduler.answer(scheduler.live()[0], ErrorKind.STOCKOUT, "none left")
    scheduler.tick()
    assert scheduler.zones() == ["z2"]
    scheduler.answer(scheduler.live()[0], ErrorKind.QUOTA, "quota of 8")
    scheduler.tick()
    assert not scheduler.zones()
    assert "is in back-off for" in scheduler.info("a").reason
    scheduler.tick(70)
    assert scheduler.zones() == ["z1"]


def test_zones_by_price() -> None:
    scheduler = Fleet(group(zones=("z1", "z2"), prices={"z1": 5.0, "z2": 3.0}, zone_order="price"))
    scheduler.launch(job("a"))
    assert scheduler.zones() == ["z2"]


def test_a_zone_rests_longer_after_each_failure() -> None:
    scheduler = Fleet(group())
    scheduler.launch(job("a"))
    rests = []
    for _ in range(3):
        scheduler.answer(scheduler.live()[0], ErrorKind.STOCKOUT, "none left")
        until = scheduler.state.fleet.groups["g"].backoffs[""].until
        rests.append(until - scheduler.now)
        scheduler.tick(until + 2)
    assert rests == [60, 120, 240]
    scheduler.come()
    assert not scheduler.state.fleet.groups["g"].backoffs


@pytest.mark.parametrize(
    ("kind", "rests"),
    [
        ("stockout", [60, 120, 240, 480, 960, 1800, 1800]),
        ("quota", [60, 120, 240, 480, 960, 1920, 3600]),
        ("transient", [5, 10, 20, 40, 80, 160, 300]),
        ("boot", [30, 60, 120, 240, 480, 960, 1800]),
    ],
)
def test_rests_double_and_have_a_bound(kind: str, rests: list[float]) -> None:
    now, found, backoff = 0.0, [], None
    for _ in rests:
        backoff = next_backoff(backoff, kind, "none left", now)
        assert next_backoff(backoff, kind, "none left", now) == backoff, "of orders given before it counts once"
        found.append(backoff.until - now)
        now = backoff.until
    assert found == rests


@pytest.mark.parametrize("kind", [ErrorKind.INVALID, ErrorKind.PERMISSION])
def test_what_will_never_work_stops_the_group_until_the_policy_is_read_again(kind: ErrorKind) -> None:
    scheduler = Fleet(group())
    scheduler.launch(job("a"))
    scheduler.answer(scheduler.live()[0], kind, "no such type")
    scheduler.tick(500)
    assert not scheduler.live()
    assert "is stopped until the policy is reloaded" in scheduler.info("a").reason
    scheduler.tell(PolicyChanged(policy=scheduler.policy))
    scheduler.tick()
    assert len(scheduler.live()) == 1


def test_a_unit_that_does_not_come_in_time_is_deleted_and_its_zone_rests() -> None:
    scheduler = Fleet(group(tpu="v5litepod-16", zones=("z1", "z2"), min=1))
    scheduler.tick()
    scheduler.take_orders()
    (unit,) = scheduler.live()
    scheduler.join(unit)  # half a slice
    scheduler.until(95)
    assert scheduler.live() == [unit]
    scheduler.until(110)
    assert unit not in scheduler.live()
    assert scheduler.zones() == ["z2"]
    assert "1 of its 4 nodes" in scheduler.state.fleet.groups["g"].backoffs["z1"].message


def test_an_order_that_is_taken_and_fails_later_counts_as_refused() -> None:
    scheduler = Fleet(group(zones=("z1", "z2")))
    scheduler.launch(job("a"))
    scheduler.take_orders()
    (unit,) = scheduler.live()
    scheduler.list(scheduler.seen(unit, MachineState.FAILED, error=ErrorKind.STOCKOUT, message="none left", hosts=0))
    resting = scheduler.state.fleet.groups["g"].backoffs["z1"]
    assert (resting.kind, resting.message) == ("stockout", "none left")
    scheduler.tick()
    assert scheduler.zones() == ["z2"]


def test_an_order_that_is_taken_and_can_never_be_stops_the_group() -> None:
    scheduler = Fleet(group())
    scheduler.launch(job("a"))
    scheduler.take_orders()
    (unit,) = scheduler.live()
    scheduler.list(
        scheduler.seen(unit, MachineState.FAILED, error=ErrorKind.PERMISSION, message="you may not", hosts=0)
    )
    assert scheduler.state.fleet.groups["g"].stop_reason == "permission: you may not"
    scheduler.tick(scheduler.now + 1000)
    assert not scheduler.live()


def test_a_preempted_machine_is_proof_of_death_and_its_job_begins_elsewhere() -> None:
    scheduler = Fleet(group(spot=True))
    scheduler.launch(job("a", demand(4), max_retries_preemption=3))
    scheduler.come()
    scheduler.run("a:0:0")
    (unit,) = scheduler.live()
    scheduler.list(scheduler.seen(unit, MachineState.PREEMPTED))
    assert scheduler.info("a").state is JobState.PENDING
    assert not scheduler.state.nodes
    assert scheduler.units(UnitPhase.DELETING)
    scheduler.tick()
    scheduler.take_orders()
    scheduler.come()
    assert scheduler.info("a").attempts[-1].node.startswith(scheduler.live()[0])


def test_a_machine_that_is_listed_no_more_is_gone_after_a_while() -> None:
    scheduler = Fleet(group())
    used(scheduler, "a")
    (unit,) = scheduler.live()
    scheduler.list()
    assert scheduler.live() == [unit], "once is nothing: lists may be old"
    scheduler.tick(scheduler.now + VANISHED_S)
    scheduler.list()
    assert unit not in scheduler.live()
    assert scheduler.info("a").state is JobState.FAILED


def test_what_was_just_asked_for_may_be_missing_from_a_list() -> None:
    scheduler = Fleet(group(boot_timeout_s=1000))
    scheduler.launch(job("a"))
    scheduler.take_orders()
    for _ in range(20):
        scheduler.tick(scheduler.now + 5)
        scheduler.list()
        assert len(scheduler.live()) == 1
    scheduler.tick(UNSEEN_S + 10)
    scheduler.list()
    assert not scheduler.live() or scheduler.live() != ["g-c-2"]


def test_what_was_deleted_may_still_be_listed_and_is_neither_adopted_nor_forgotten() -> None:
    scheduler = Fleet(group(idle_s=0))
    used(scheduler, "a")
    (unit,) = scheduler.live()
    ghost = scheduler.seen(unit)
    scheduler.finish("a:0:0")
    scheduler.tick(scheduler.now + 5)
    scheduler.take_orders()
    scheduler.tick(scheduler.now + 1)
    scheduler.list()
    assert scheduler.state.fleet.units[unit].phase is UnitPhase.GONE
    scheduler.tick(scheduler.now + 10)
    scheduler.list(ghost)
    assert scheduler.state.fleet.units[unit].phase is UnitPhase.GONE
    scheduler.now += REAPPEARED_S
    scheduler.list(ghost)
    assert scheduler.state.fleet.units[unit].phase is UnitPhase.DELETING
    scheduler.take_orders()
    scheduler.now += 1
    scheduler.list()
    scheduler.now += REMEMBERED_S
    scheduler.list()
    assert not scheduler.units()


def test_a_failed_delete_is_tried_again() -> None:
    scheduler = Fleet(group(idle_s=0))
    used(scheduler, "a")
    scheduler.finish("a:0:0")
    scheduler.tick(scheduler.now + 5)
    (unit,) = scheduler.units(UnitPhase.DELETING)
    scheduler.answer(unit.name, ErrorKind.TRANSIENT, "timed out", deleted=True)
    assert unit.name in scheduler.state.fleet.pending_orders
    assert unit.order_not_before == scheduler.now + 5


# Restarts -------------------------------------------------------------------------------------------------------------


def test_a_restart_in_the_middle_of_an_order_asks_again_under_the_same_name() -> None:
    scheduler = Fleet(group())
    scheduler.launch(job("a"))
    (unit,) = scheduler.live()
    effects = scheduler.restart()
    assert any(isinstance(effect, FleetChanged) for effect in effects)
    scheduler.list()
    scheduler.tick()
    assert scheduler.live() == [unit]
    assert list(scheduler.state.fleet.pending_orders) == [unit]


def test_unknown_machines_are_adopted_within_max_and_given_back_beyond() -> None:
    scheduler = Fleet(group(max=1, min=1), listed=False)
    scheduler.list(SeenMachine("g-1", "g"), SeenMachine("g-2", "g"), SeenMachine("other-1", "other"))
    assert scheduler.live() == ["g-1"]
    scheduler.tick()
    assert {unit.name for unit in scheduler.units(UnitPhase.DELETING)} == {"g-2", "other-1"}


def test_nodes_of_adopted_machines_are_theirs() -> None:
    scheduler = Fleet(group(max=1, min=1), listed=False)
    scheduler.node("n", cpu=4, group="g", machine="g-1")
    scheduler.launch(job("a", demand(4)))
    scheduler.list(SeenMachine("g-1", "g"))
    scheduler.tick()
    assert [unit.phase for unit in scheduler.units()] == [UnitPhase.JOINED]


# With the rest of the scheduler ---------------------------------------------------------------------------------------


def test_what_is_over_a_quota_gets_no_machines() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=8000), borrow=False)
    scheduler = Fleet(group(max=9))
    scheduler.tell(PolicyChanged(policy=evolve(scheduler.policy, users={"alice": terms})))
    scheduler.launch(*(job(f"a{n}", demand(4), user="alice") for n in range(5)))
    scheduler.tick()
    assert len(scheduler.live()) == 2
    scheduler.launch(*(job(f"b{n}", demand(2), user="alice") for n in range(5)), job("c", demand(4), user="bob"))
    scheduler.tick()
    assert len(scheduler.live()) == 3


def test_a_reservation_gets_its_machines_and_keeps_them_while_they_idle() -> None:
    scheduler = Fleet(group(max=3))
    scheduler.reserve(need=demand(4), min_units=2, max_units=2)
    scheduler.tick()
    assert len(scheduler.live()) == 2
    scheduler.come()
    assert reservation_info(scheduler.state, "r").held_units == 2
    scheduler.launch(job("a", demand(4), reservation_id="r"))
    scheduler.run("a:0:0")
    scheduler.finish("a:0:0")
    scheduler.until(500)
    assert len(scheduler.live()) == 2, "reserved is not idle"
    scheduler.launch(job("b", demand(4), reservation_id="r"), job("c", demand(4), reservation_id="r"))
    scheduler.launch(job("d", demand(4), reservation_id="r"))
    scheduler.until(520)
    assert len(scheduler.live()) == 2, "what waits inside a reservation waits for its machines"


def test_a_machine_that_a_reservation_gives_back_is_deleted_though_nothing_else_happens() -> None:
    # Seed 31245: the end of its last attempt made a plan, in the same step before the machine was given back.
    scheduler = Fleet(group())
    scheduler.reserve(need=demand(4), min_units=1, max_units=1)
    scheduler.tick()
    scheduler.come()
    scheduler.launch(job("a", demand(4), reservation_id="r"))
    scheduler.run("a:0:0")
    scheduler.until(100)
    scheduler.tell(ReservationReleased(session="d", ref=1, reservation_id="r"))
    scheduler.finish("a:0:0")
    for _ in range(20):
        at = scheduler.state.next_deadline()
        if at is None or not scheduler.live():
            break
        scheduler.tick(at)
    assert not scheduler.live()


def test_a_reservation_grows_onto_new_machines() -> None:
    scheduler = Fleet(group(max=3))
    scheduler.reserve(need=demand(4), min_units=1, max_units=2)
    scheduler.tick()
    scheduler.come()
    scheduler.until(30)
    scheduler.come()
    scheduler.until(60)
    assert reservation_info(scheduler.state, "r").held_units == 2
    scheduler.until(70)
    assert len(scheduler.live()) == 2


def test_a_job_group_is_asked_for_in_one_decision_and_within_one_region() -> None:
    gpus = group("gpus", gpus=4, gpu="h100", zones=("r2-a",), regions={"r2-a": "r2"}, max=1)
    scheduler = Fleet(group(zones=("r1-a", "r2-b"), regions={"r1-a": "r1", "r2-b": "r2"}), gpus)
    scheduler.launch_group("g", member("learn", need=demand(1, gpu=4)), member("act", need=demand(4)), same_region=True)
    scheduler.tick()
    assert sorted(scheduler.zones()) == ["r2-a", "r2-b"]
    scheduler.come()
    assert all(attempt for name in ("learn", "act") for attempt in scheduler.info(name).attempts)


# Operators ------------------------------------------------------------------------------------------------------------


def test_a_group_is_scaled_at_run_time_and_that_survives_a_restart() -> None:
    scheduler = Fleet(group())
    scheduler.tell(GroupScaled(session="d", ref=1, group="g", min=2))
    scheduler.tick()
    assert len(scheduler.live()) == 2
    scheduler.restart()
    config = scheduler.state.fleet.group("g")
    assert config is not None
    assert (config.min, config.max) == (2, 4)


@pytest.mark.parametrize(
    ("what", "words"), [({"group": "h"}, "no group 'h'"), ({"group": "g", "min": 5}, "min=5 and max=4")]
)
def test_what_cannot_be_is_refused(what: dict[str, Any], words: str) -> None:
    scheduler = Fleet(group())
    (refusal,) = [e for e in scheduler.tell(GroupScaled(session="d", ref=1, **what)) if isinstance(e, Refusal)]
    assert isinstance(refusal.error, InvalidRequest)
    assert words in str(refusal.error)


def test_a_forecast_names_groups_from_which_machines_would_really_be_requested() -> None:
    scheduler = Fleet(
        group("dear", price_per_hour=20), group("scaled"), group("two", zones=("z1", "z2"), max=2), spend=10
    )
    scheduler.tell(GroupScaled(session="d", ref=1, group="scaled", max=0))
    assert what_if(scheduler.state, job("gang", demand(4), members=2)).groups == ("two",)
    assert what_if(scheduler.state, job("large", demand(4), members=3)).verdict is ForecastVerdict.WAIT


def test_fixed_machines_are_declared_and_never_made() -> None:
    fixed = group(provider="fixed", max=2, options={"machines": ["h1", "h2"]})
    scheduler = Fleet(fixed, listed=False)
    scheduler.list(SeenMachine("h1", "g"), SeenMachine("h2", "g"), provider="fixed")
    scheduler.launch(job("wide", demand(4), members=2))
    scheduler.tick()
    assert not scheduler.state.fleet.pending_orders
    scheduler.node("h1", cpu=4)
    scheduler.node("h2", cpu=4)
    scheduler.run("wide:0:0", "wide:0:1")
    scheduler.tick()
    assert [unit.phase for unit in scheduler.units()] == [UnitPhase.JOINED] * 2
    scheduler.finish("wide:0:0", "wide:0:1")
    scheduler.tick(10_000)
    assert len(scheduler.live()) == 2


# What must be true ----------------------------------------------------------------------------------------------------


def test_broken_books_are_noticed() -> None:
    scheduler = Fleet(group(max=1))
    used(scheduler, "a")
    (unit,) = scheduler.units()
    unit.phase = UnitPhase.DELETING
    assert any("is being deleted, and holds" in line for line in check(scheduler.state))
    assert any("open for jobs" in line for line in check(scheduler.state))
    assert any("the orders are" in line for line in check(scheduler.state))
    unit.phase = UnitPhase.JOINED
    more = evolve(unit, name="more", phase=UnitPhase.WANTED, requested_at=scheduler.now, price_per_hour=3.0)
    scheduler.state.fleet.put_unit(more)
    scheduler.state.fleet.policy = evolve(scheduler.policy, spend_limit_per_hour=1.0)
    assert any("1 units at most" in line for line in check(scheduler.state))
    assert any("over the limit of 1" in line for line in check(scheduler.state))


def test_the_command_line_tells_all_of_it_in_lines() -> None:
    scheduler = Fleet(group(zones=("z1", "z2"), price_per_hour=2, tpu="v5litepod-16"), spend=9)
    scheduler.tell(GroupScaled(session="d", ref=1, group="g", min=1))
    scheduler.tick()
    scheduler.answer(scheduler.live()[0], ErrorKind.STOCKOUT, "none left")
    scheduler.tick()
    lines = "\n".join(described(list_fleet(scheduler.state), None))
    assert "v5litepod-16 (4 hosts)" in lines
    assert re.search(r"g in z1 is in back-off for \S+ after stockout, 1 in a row: none left", lines)
    assert re.search(r"g-c-\d+ +z2 +wanted .* 0 of 4 .*to keep min and buffer", lines)
    assert "total cost 2 per hour, limit 9" in lines
    with pytest.raises(InvalidRequest, match="no group 'h'; groups of the policy: g"):
        list_fleet(scheduler.state, "h")
    assert described(list_fleet(Fleet().state), None) == ["no machine groups in the policy (see docs/autoscaling.md)"]
