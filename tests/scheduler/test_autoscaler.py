"""The law of machines that can be had: when they are asked for, where, and when they are given back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve

from fray.cli.machines import described
from fray.errors import InvalidRequest, NeverSchedulable
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
from fray.scheduler.effects import FleetChanged, GroupScaled, MachineAnswered, MachinesListed, PolicyChanged, Refusal
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.unit_rows import CloudUnit, UnitPhase, next_backoff
from fray.testing.invariants.check import check
from tests.support.scheduler import GB, Cluster, demand, ended, job, member


def group(name: str = "g", **more: Any) -> GroupConfig:
    """Machines of 4 CPUs, at most 4."""
    usual = {"provider": "tpu", "cpu": 4, "memory": 64 * GB, "max": 4, "idle_s": 60, "boot_timeout_s": 100}
    return GroupConfig(name=name, **(usual | more))


class Fleet(Cluster):
    """A law with groups, and a provider that does what the test says."""

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
    law = Fleet(group())
    law.launch(job("a"))
    assert law.info("a").state is JobState.PENDING
    assert law.live() == ["g-c-2"]
    assert law.come() == ["g-c-2"]
    assert [attempt.node for attempt in law.info("a").attempts] == ["g-c-2-0"]


def test_nothing_is_asked_for_before_the_provider_has_said_what_it_has() -> None:
    law = Fleet(group(), listed=False)
    law.launch(job("a"))
    law.tick()
    assert not law.live()
    law.list()
    law.tick()
    assert len(law.live()) == 1


def test_as_many_as_hold_what_waits_and_never_more_than_max() -> None:
    law = Fleet(group(max=3))
    law.launch(*(job(f"j{n}") for n in range(8)))
    law.tick()
    assert len(law.live()) == 2
    law.launch(*(job(f"k{n}") for n in range(20)))
    law.tick()
    assert len(law.live()) == 3


def test_what_is_on_its_way_is_not_asked_for_again() -> None:
    law = Fleet(group())
    law.launch(job("a"))
    for _ in range(5):
        law.tick()
        law.take_orders()
    assert len(law.live()) == 1


def test_a_gang_is_asked_for_whole_or_not_at_all() -> None:
    law = Fleet(group(max=2), group("more", max=2, provider="tpu"))
    law.launch(job("wide", demand(4), members=4))
    assert len(law.live()) == 4
    narrow = Fleet(group(max=2))
    with pytest.raises(NeverSchedulable):
        narrow.launch(job("wide", demand(4), members=3))
    narrow.launch(job("holder", demand(4), members=1))
    narrow.come()
    narrow.launch(job("wide", demand(4), members=2))
    narrow.tick()
    assert len(narrow.live()) == 1, "one more would help nobody while the other is in use"


def test_a_gang_counts_on_what_is_free() -> None:
    law = Fleet(group())
    law.node("own", cpu=8)
    law.launch(job("wide", demand(4), members=3))
    law.tick()
    assert len(law.live()) == 1


def test_the_cheapest_group_that_can_hold_it_is_taken() -> None:
    law = Fleet(
        group("dear", price_per_hour=9), group("cheap", price_per_hour=2), group("tiny", cpu=1, price_per_hour=1)
    )
    law.launch(job("a", demand(3)))
    assert [unit.group for unit in law.units()] == ["cheap"]


def test_spot_machines_are_for_what_may_be_preempted() -> None:
    law = Fleet(group("spot", spot=True, price_per_hour=1), group("sure", price_per_hour=9))
    law.launch(job("a", demand(4, preemptible=False)))
    assert [unit.group for unit in law.units()] == ["sure"]
    law.launch(job("b", demand(4)))
    law.tick()
    assert [unit.group for unit in law.units()] == ["sure", "spot"]


def test_a_whole_slice_is_one_unit_and_is_there_when_all_its_hosts_are() -> None:
    law = Fleet(group(tpu="v5litepod-16"))
    need = Demand(1000, device_kind="tpu", device_variant="v5litepod-16", device_count=4)
    hosts = tpu_topology("v5litepod-16").hosts
    law.launch(job("train", need, members=hosts))
    (unit,) = law.live()
    law.take_orders()
    for worker in range(hosts - 1):
        law.join(unit, worker)
    law.list(law.seen(unit))
    law.tick()
    assert law.state.fleet.units[unit].phase is UnitPhase.SEEN
    law.join(unit, hosts - 1)
    law.tick()
    assert law.state.fleet.units[unit].phase is UnitPhase.JOINED
    assert len({attempt.node for attempt in law.info("train").attempts}) == hosts


def test_min_and_buffer_are_kept() -> None:
    law = Fleet(group(min=1, buffer=1))
    law.tick()
    assert len(law.live()) == 2
    law.come()
    law.launch(job("a", demand(4)), job("b", demand(4)))
    law.tick()
    assert len(law.live()) == 3, "two are in use, one is kept ready"


def test_the_spend_limit_binds_and_says_so() -> None:
    law = Fleet(group(price_per_hour=4), spend=10)
    law.launch(*(job(f"j{n}", demand(4)) for n in range(4)))
    assert len(law.live()) == 2
    assert "the spend limit binds: a unit of g costs 4 an hour, and 2 is left" in law.info("j0").reason


def test_a_machine_that_offers_less_than_declared_is_not_asked_for_again_and_again() -> None:
    law = Fleet(group())
    law.launch(job("a", demand(4)))
    (unit,) = law.live()
    law.take_orders()
    law.join(unit, cpu=3.5)
    law.list_all()
    for _ in range(5):
        law.tick()
    assert law.live() == [unit]
    assert law.info("a").state is JobState.PENDING


def test_never_is_judged_by_what_could_be_had() -> None:
    law = Fleet(group(max=2))
    with pytest.raises(NeverSchedulable):
        law.launch(job("big", demand(5)))
    with pytest.raises(NeverSchedulable):
        law.launch(job("many", demand(4), members=3))
    law.launch(job("fits", demand(4), members=2))


# Down -----------------------------------------------------------------------------------------------------------------


def used(law: Fleet, *names: str) -> None:
    law.launch(*(job(name, demand(4)) for name in names))
    law.tick()
    law.come()
    law.run(*(f"{name}:0:0" for name in names))


def test_an_idle_unit_is_given_back_after_a_while() -> None:
    law = Fleet(group())
    used(law, "a")
    law.until(200)
    assert len(law.live()) == 1
    law.finish("a:0:0")
    law.until(250)
    assert len(law.live()) == 1
    law.until(270)
    assert not law.live()
    law.until(280)
    assert [unit.phase for unit in law.units()] == [UnitPhase.GONE]
    assert not law.state.nodes


def test_a_short_job_between_two_looks_keeps_it() -> None:
    law = Fleet(group())
    used(law, "a")
    law.finish("a:0:0")
    law.until(50)
    law.launch(job("b", demand(4)))
    law.finish("b:0:0")
    law.until(100)
    assert len(law.live()) == 1
    law.until(120)
    assert not law.live()


def test_never_below_min_and_buffer() -> None:
    law = Fleet(group(min=1, buffer=1))
    used(law, "a", "b", "c")
    law.finish("a:0:0", "b:0:0", "c:0:0")
    law.until(300)
    assert len(law.live()) == 2


def test_idle_machines_are_kept_for_a_gang_whose_others_are_to_come() -> None:
    law = Fleet(group(max=2, idle_s=10))
    used(law, "a")
    law.finish("a:0:0")
    law.launch(job("wide", demand(4), members=2))
    law.tick()
    (late,) = list(law.units(UnitPhase.WANTED))
    for at in range(10, 60, 5):
        law.tick(at)
    assert late.is_live
    assert len(law.live()) == 2


def test_above_max_units_close_and_go_when_they_are_empty() -> None:
    law = Fleet(group(max=2))
    used(law, "a", "b")
    law.tell(GroupScaled(session="d", ref=1, group="g", max=1))
    law.tick()
    (closed,) = law.units(UnitPhase.DRAINING)
    assert len(law.live()) == 1
    law.launch(job("c", demand(4)))
    holder = next(name for name in ("a", "b") if law.info(name).attempts[0].node.startswith(closed.name))
    law.finish(f"{holder}:0:0")
    law.until(law.now + 20)
    assert closed.phase is UnitPhase.GONE
    assert law.info("c").state is JobState.PENDING


def test_a_group_that_left_the_policy_is_drained() -> None:
    law = Fleet(group())
    used(law, "a")
    law.tell(PolicyChanged(policy=Policy()))
    law.tick()
    assert [unit.phase for unit in law.units()] == [UnitPhase.DRAINING]
    law.finish("a:0:0")
    law.until(law.now + 10)
    assert [unit.phase for unit in law.units()] == [UnitPhase.GONE]


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_zone_that_has_none_rests_and_the_next_is_asked() -> None:
    law = Fleet(group(zones=("z1", "z2")))
    law.launch(job("a"))
    assert law.zones() == ["z1"]
    law.answer(law.live()[0], ErrorKind.STOCKOUT, "none left")
    law.tick()
    assert law.zones() == ["z2"]
    law.answer(law.live()[0], ErrorKind.QUOTA, "quota of 8")
    law.tick()
    assert not law.zones()
    assert "rests for" in law.info("a").reason
    law.tick(70)
    assert law.zones() == ["z1"]


def test_zones_by_price() -> None:
    law = Fleet(group(zones=("z1", "z2"), prices={"z1": 5.0, "z2": 3.0}, zone_order="price"))
    law.launch(job("a"))
    assert law.zones() == ["z2"]


def test_a_zone_rests_longer_after_each_failure() -> None:
    law = Fleet(group())
    law.launch(job("a"))
    rests = []
    for _ in range(3):
        law.answer(law.live()[0], ErrorKind.STOCKOUT, "none left")
        until = law.state.fleet.groups["g"].backoffs[""].until
        rests.append(until - law.now)
        law.tick(until + 2)
    assert rests == [60, 120, 240]
    law.come()
    assert not law.state.fleet.groups["g"].backoffs


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
    law = Fleet(group())
    law.launch(job("a"))
    law.answer(law.live()[0], kind, "no such type")
    law.tick(500)
    assert not law.live()
    assert "is stopped until the policy is read again" in law.info("a").reason
    law.tell(PolicyChanged(policy=law.policy))
    law.tick()
    assert len(law.live()) == 1


def test_a_unit_that_does_not_come_in_time_is_deleted_and_its_zone_rests() -> None:
    law = Fleet(group(tpu="v5litepod-16", zones=("z1", "z2"), min=1))
    law.tick()
    law.take_orders()
    (unit,) = law.live()
    law.join(unit)  # half a slice
    law.until(95)
    assert law.live() == [unit]
    law.until(110)
    assert unit not in law.live()
    assert law.zones() == ["z2"]
    assert "1 of its 4 nodes" in law.state.fleet.groups["g"].backoffs["z1"].message


def test_an_order_that_is_taken_and_fails_later_counts_as_refused() -> None:
    law = Fleet(group(zones=("z1", "z2")))
    law.launch(job("a"))
    law.take_orders()
    (unit,) = law.live()
    law.list(law.seen(unit, MachineState.FAILED, error=ErrorKind.STOCKOUT, message="none left", hosts=0))
    resting = law.state.fleet.groups["g"].backoffs["z1"]
    assert (resting.kind, resting.message) == ("stockout", "none left")
    law.tick()
    assert law.zones() == ["z2"]


def test_an_order_that_is_taken_and_can_never_be_stops_the_group() -> None:
    law = Fleet(group())
    law.launch(job("a"))
    law.take_orders()
    (unit,) = law.live()
    law.list(law.seen(unit, MachineState.FAILED, error=ErrorKind.PERMISSION, message="you may not", hosts=0))
    assert law.state.fleet.groups["g"].stop_reason == "permission: you may not"
    law.tick(law.now + 1000)
    assert not law.live()


def test_a_preempted_machine_is_proof_of_death_and_its_job_begins_elsewhere() -> None:
    law = Fleet(group(spot=True))
    law.launch(job("a", demand(4), max_retries_preemption=3))
    law.come()
    law.run("a:0:0")
    (unit,) = law.live()
    law.list(law.seen(unit, MachineState.PREEMPTED))
    assert law.info("a").state is JobState.PENDING
    assert not law.state.nodes
    assert law.units(UnitPhase.DELETING)
    law.tick()
    law.take_orders()
    law.come()
    assert law.info("a").attempts[-1].node.startswith(law.live()[0])


def test_a_machine_that_is_listed_no_more_is_gone_after_a_while() -> None:
    law = Fleet(group())
    used(law, "a")
    (unit,) = law.live()
    law.list()
    assert law.live() == [unit], "once is nothing: lists may be old"
    law.tick(law.now + VANISHED_S)
    law.list()
    assert unit not in law.live()
    assert law.info("a").state is JobState.FAILED


def test_what_was_just_asked_for_may_be_missing_from_a_list() -> None:
    law = Fleet(group(boot_timeout_s=1000))
    law.launch(job("a"))
    law.take_orders()
    for _ in range(20):
        law.tick(law.now + 5)
        law.list()
        assert len(law.live()) == 1
    law.tick(UNSEEN_S + 10)
    law.list()
    assert not law.live() or law.live() != ["g-c-2"]


def test_what_was_deleted_may_still_be_listed_and_is_neither_adopted_nor_forgotten() -> None:
    law = Fleet(group(idle_s=0))
    used(law, "a")
    (unit,) = law.live()
    ghost = law.seen(unit)
    law.finish("a:0:0")
    law.tick(law.now + 5)
    law.take_orders()
    law.tick(law.now + 1)
    law.list()
    assert law.state.fleet.units[unit].phase is UnitPhase.GONE
    law.tick(law.now + 10)
    law.list(ghost)
    assert law.state.fleet.units[unit].phase is UnitPhase.GONE
    law.now += REAPPEARED_S
    law.list(ghost)
    assert law.state.fleet.units[unit].phase is UnitPhase.DELETING
    law.take_orders()
    law.now += 1
    law.list()
    law.now += REMEMBERED_S
    law.list()
    assert not law.units()


def test_a_failed_delete_is_tried_again() -> None:
    law = Fleet(group(idle_s=0))
    used(law, "a")
    law.finish("a:0:0")
    law.tick(law.now + 5)
    (unit,) = law.units(UnitPhase.DELETING)
    law.answer(unit.name, ErrorKind.TRANSIENT, "timed out", deleted=True)
    assert unit.name in law.state.fleet.pending_orders
    assert unit.order_not_before == law.now + 5


# Restarts -------------------------------------------------------------------------------------------------------------


def test_a_restart_in_the_middle_of_an_order_asks_again_under_the_same_name() -> None:
    law = Fleet(group())
    law.launch(job("a"))
    (unit,) = law.live()
    effects = law.restart()
    assert any(isinstance(effect, FleetChanged) for effect in effects)
    law.list()
    law.tick()
    assert law.live() == [unit]
    assert list(law.state.fleet.pending_orders) == [unit]


def test_unknown_machines_are_adopted_within_max_and_given_back_beyond() -> None:
    law = Fleet(group(max=1, min=1), listed=False)
    law.list(SeenMachine("g-1", "g"), SeenMachine("g-2", "g"), SeenMachine("other-1", "other"))
    assert law.live() == ["g-1"]
    law.tick()
    assert {unit.name for unit in law.units(UnitPhase.DELETING)} == {"g-2", "other-1"}


def test_nodes_of_adopted_machines_are_theirs() -> None:
    law = Fleet(group(max=1, min=1), listed=False)
    law.node("n", cpu=4, group="g", machine="g-1")
    law.launch(job("a", demand(4)))
    law.list(SeenMachine("g-1", "g"))
    law.tick()
    assert [unit.phase for unit in law.units()] == [UnitPhase.JOINED]


# With the rest of the law ---------------------------------------------------------------------------------------------


def test_what_is_over_a_quota_gets_no_machines() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=8000), borrow=False)
    law = Fleet(group(max=9))
    law.tell(PolicyChanged(policy=evolve(law.policy, users={"alice": terms})))
    law.launch(*(job(f"a{n}", demand(4), user="alice") for n in range(5)))
    law.tick()
    assert len(law.live()) == 2
    law.launch(*(job(f"b{n}", demand(2), user="alice") for n in range(5)), job("c", demand(4), user="bob"))
    law.tick()
    assert len(law.live()) == 3


def test_a_reservation_gets_its_machines_and_keeps_them_while_they_idle() -> None:
    law = Fleet(group(max=3))
    law.reserve(need=demand(4), min_units=2, max_units=2)
    law.tick()
    assert len(law.live()) == 2
    law.come()
    assert reservation_info(law.state, "r").held_units == 2
    law.launch(job("a", demand(4), reservation_id="r"))
    law.run("a:0:0")
    law.finish("a:0:0")
    law.until(500)
    assert len(law.live()) == 2, "reserved is not idle"
    law.launch(job("b", demand(4), reservation_id="r"), job("c", demand(4), reservation_id="r"))
    law.launch(job("d", demand(4), reservation_id="r"))
    law.until(520)
    assert len(law.live()) == 2, "what waits inside a reservation waits for its machines"


def test_a_reservation_grows_onto_new_machines() -> None:
    law = Fleet(group(max=3))
    law.reserve(need=demand(4), min_units=1, max_units=2)
    law.tick()
    law.come()
    law.until(30)
    law.come()
    law.until(60)
    assert reservation_info(law.state, "r").held_units == 2
    law.until(70)
    assert len(law.live()) == 2


def test_a_job_group_is_asked_for_in_one_decision_and_within_one_region() -> None:
    gpus = group("gpus", gpus=4, gpu="h100", zones=("r2-a",), regions={"r2-a": "r2"}, max=1)
    law = Fleet(group(zones=("r1-a", "r2-b"), regions={"r1-a": "r1", "r2-b": "r2"}), gpus)
    law.launch_group("g", member("learn", need=demand(1, gpu=4)), member("act", need=demand(4)), same_region=True)
    law.tick()
    assert sorted(law.zones()) == ["r2-a", "r2-b"]
    law.come()
    assert all(attempt for name in ("learn", "act") for attempt in law.info(name).attempts)


# Operators ------------------------------------------------------------------------------------------------------------


def test_a_group_is_scaled_at_run_time_and_that_survives_a_restart() -> None:
    law = Fleet(group())
    law.tell(GroupScaled(session="d", ref=1, group="g", min=2))
    law.tick()
    assert len(law.live()) == 2
    law.restart()
    config = law.state.fleet.group("g")
    assert config is not None
    assert (config.min, config.max) == (2, 4)


@pytest.mark.parametrize(
    ("what", "words"), [({"group": "h"}, "no group 'h'"), ({"group": "g", "min": 5}, "min=5 and max=4")]
)
def test_what_cannot_be_is_refused(what: dict[str, Any], words: str) -> None:
    law = Fleet(group())
    (refusal,) = [e for e in law.tell(GroupScaled(session="d", ref=1, **what)) if isinstance(e, Refusal)]
    assert isinstance(refusal.error, InvalidRequest)
    assert words in str(refusal.error)


def test_fixed_machines_are_declared_and_never_made() -> None:
    fixed = group(provider="fixed", max=2, options={"machines": ["h1", "h2"]})
    law = Fleet(fixed, listed=False)
    law.list(SeenMachine("h1", "g"), SeenMachine("h2", "g"), provider="fixed")
    law.launch(job("wide", demand(4), members=2))
    law.tick()
    assert not law.state.fleet.pending_orders
    law.node("h1", cpu=4)
    law.node("h2", cpu=4)
    law.run("wide:0:0", "wide:0:1")
    law.tick()
    assert [unit.phase for unit in law.units()] == [UnitPhase.JOINED] * 2
    law.finish("wide:0:0", "wide:0:1")
    law.tick(10_000)
    assert len(law.live()) == 2


# What must be true ----------------------------------------------------------------------------------------------------


def test_broken_books_are_noticed() -> None:
    law = Fleet(group(max=1))
    used(law, "a")
    (unit,) = law.units()
    unit.phase = UnitPhase.DELETING
    assert any("is being deleted, and holds" in line for line in check(law.state))
    assert any("open for work" in line for line in check(law.state))
    assert any("the orders are" in line for line in check(law.state))
    unit.phase = UnitPhase.JOINED
    more = evolve(unit, name="more", phase=UnitPhase.WANTED, requested_at=law.now, price_per_hour=3.0)
    law.state.fleet.put_unit(more)
    law.state.fleet.policy = evolve(law.policy, spend_limit_per_hour=1.0)
    assert any("1 units at most" in line for line in check(law.state))
    assert any("over the limit of 1" in line for line in check(law.state))


def test_the_command_line_tells_all_of_it_in_lines() -> None:
    law = Fleet(group(zones=("z1", "z2"), price_per_hour=2, tpu="v5litepod-16"), spend=9)
    law.tell(GroupScaled(session="d", ref=1, group="g", min=1))
    law.tick()
    law.answer(law.live()[0], ErrorKind.STOCKOUT, "none left")
    law.tick()
    lines = "\n".join(described(list_fleet(law.state), None))
    assert "v5litepod-16 (4 hosts)" in lines
    assert re.search(r"g in z1 rests for \S+ after stockout, 1 in a row: none left", lines)
    assert re.search(r"g-c-\d+ +z2 +wanted .* 0 of 4 .*to keep min and buffer", lines)
    assert "all together cost 2 an hour of 9 at most" in lines
    with pytest.raises(InvalidRequest, match="no group 'h'; the policy names g"):
        list_fleet(law.state, "h")
    assert described(list_fleet(Fleet().state), None) == [
        "no groups of machines: the policy names none (see docs/autoscaling.md)"
    ]
