"""Interaction of the parts of the scheduler: claims, quotas, reservations, machine groups and holds."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.messages.node import NodeHello
from fray.model.policy.machine_groups import GroupConfig
from fray.model.policy.policy import (
    Amounts,
    Policy,
    Preemption,
    TenantPolicy,
)
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.model.specs import EndReason, JobSpec, JobState
from fray.scheduler.effects import NodeJoined, PolicyChanged
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.pool.requests import PlacementRequest, request_of
from fray.scheduler.queue.queue import Queue
from fray.scheduler.state.rows import Quarantine, SchedulerConfig
from tests.support.scheduler import Cluster, capacity, demand, ended, job, member

EAGER = Policy(preemption=Preemption(shield_s=0.0, patience_s=0.0))
GROUP = GroupConfig("g", "process", cpu=4, max=2)


def test_without_groups_of_machines_no_plan_is_due() -> None:
    scheduler = Cluster(policy=Policy(groups=(GROUP,)))
    scheduler.driver()
    scheduler.launch(job("waits"))
    assert scheduler.state.fleet.plan_at is not None
    scheduler.tell(PolicyChanged(policy=Policy()))
    assert scheduler.state.next_deadline() is None


def test_jobs_in_a_reservation_are_charged_to_its_quota_only() -> None:
    scheduler = Cluster(policy=Policy(users={"ann": TenantPolicy(quota=Amounts(cpu_milli=4000), borrow=False)}))
    scheduler.driver()
    scheduler.node("n1", cpu=8)
    scheduler.reserve("r", demand(2), min_units=2, max_units=2, user="ann")
    scheduler.launch(job("within", demand(4), user="ann", reservation_id="r"), job("beside", demand(1), user="ann"))
    assert [len(scheduler.info(name).attempts) for name in ("within", "beside")] == [1, 0]


def test_within_a_reservation_no_quota_is_reclaimed() -> None:
    quotas = {"ann": TenantPolicy(quota=Amounts(cpu_milli=1000)), "bob": TenantPolicy(quota=Amounts(cpu_milli=9000))}
    scheduler = Cluster(policy=evolve(EAGER, users=quotas))
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.reserve("r", demand(2), user="carl")
    scheduler.launch(job("borrowed", demand(2), user="ann"), job("in1", demand(2), user="ann", reservation_id="r"))
    scheduler.run("borrowed:0:0", "in1:0:0")
    scheduler.now = 100.0
    scheduler.launch(job("in2", demand(2), user="bob", reservation_id="r"))
    assert scheduler.state.claims == {}
    assert scheduler.info("in1").state is JobState.RUNNING


def test_a_refused_renewal_changes_nothing() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.reserve("r", demand(1), ttl_s=100.0)
    due = scheduler.state.next_deadline()
    scheduler.renew("r", -5.0)
    assert (scheduler.state.reservations["r"].spec.ttl_s, scheduler.state.next_deadline()) == (100.0, due)


def claiming(policy: Policy = EAGER) -> Cluster:
    """Two machines, each with a batch job; a production job has the claim to one of them."""
    scheduler = Cluster(policy=policy)
    scheduler.driver()
    for name in ("n1", "n2"):
        scheduler.node(name, cpu=4)
    for name in ("low1", "low2"):
        scheduler.launch(job(name, demand(4), band=Band.BATCH, max_retries_preemption=9))
        scheduler.run(f"{name}:0:0")
    scheduler.now = 10.0
    scheduler.launch(job("high", demand(4), band=Band.PRODUCTION))
    assert list(scheduler.state.claims) == ["high"]
    return scheduler


def test_a_claim_to_a_machine_that_comes_into_quarantine_is_made_elsewhere() -> None:
    scheduler = claiming()
    (share,) = scheduler.state.claims["high"].shares
    for name in ("x1", "x2"):  # a fleet of two has no machine to spare
        scheduler.node(name, cpu=1)
    victim = scheduler.state.claims["high"].victims[0]
    node = scheduler.state.nodes[share.node]
    node.quarantine = Quarantine(since=scheduler.now, reason="it is bad", jobs=("a", "b"), probe_at=scheduler.now + 60)
    scheduler.state.node_changed(node)
    scheduler.see(f"{victim}:0:0", ended(EndReason.PREEMPTED))
    claim = scheduler.state.claims.get("high")
    assert claim is not None
    assert claim.shares[0].node != share.node


@pytest.mark.parametrize("first", ["high", "high2"])
def test_a_claim_is_served_although_an_equal_earlier_applicant_still_waits(first: str) -> None:
    """Whichever victim ends first, the job that has claimed its machine starts."""
    scheduler = claiming()
    scheduler.launch(job("high2", demand(4), band=Band.PRODUCTION))
    claims = dict(scheduler.state.claims)
    (victim,) = claims[first].victims
    scheduler.see(f"{victim}:0:0", ended(EndReason.PREEMPTED))
    started = [name for name in ("high", "high2") if scheduler.info(name).attempts]
    assert started == [first]
    (other,) = scheduler.state.claims
    (victim,) = claims[other].victims
    scheduler.see(f"{victim}:0:0", ended(EndReason.PREEMPTED))
    assert scheduler.state.claims == {}
    assert all(scheduler.info(name).attempts for name in ("high", "high2"))


def test_a_claim_within_a_reservation_goes_with_the_unit() -> None:
    scheduler = Cluster(policy=EAGER)
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.node("n2", cpu=4)
    scheduler.reserve("r", demand(4), min_units=1, max_units=2, notice_s=60.0)
    for name in ("low1", "low2"):
        scheduler.launch(job(name, demand(4), band=Band.BATCH, reservation_id="r", max_retries_preemption=9))
        scheduler.run(f"{name}:0:0")
    scheduler.now = 10.0
    scheduler.launch(job("high", demand(4), band=Band.PRODUCTION, reservation_id="r"))
    (share,) = scheduler.state.claims["high"].shares
    scheduler.drain(share.node)
    claim = scheduler.state.claims.get("high")
    assert claim is None or claim.shares[0].node != share.node


def test_a_member_that_was_placed_has_no_limit_on_its_wait_any_more() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    again = {"max_retries_failure": 3, "wait_limit_s": 30.0}
    scheduler.launch_group("g", member("a", **again), member("b", **again))
    assert [timed for timed in scheduler.state.timers.at if timed[0] == "wait"] == []


def test_a_request_with_a_device_alternative_is_not_weightless() -> None:
    either = job("either", demand(0), alternatives=(Demand(0, device_kind="gpu", device_count=1),))
    assert request_of(job("none", demand(0))).is_weightless
    assert not request_of(either).is_weightless


def test_a_job_that_takes_only_ports_leaves_claimed_ports() -> None:
    scheduler = Cluster(policy=EAGER)
    scheduler.driver()
    size = evolve(capacity(cpu=4, ports=2))
    scheduler.incarnations["n1"] = "i1"
    scheduler.tell(NodeJoined(hello=NodeHello(node="n1", incarnation="i1", boot_id="b", capacity=size)))
    scheduler.launch(job("low", demand(4), band=Band.BATCH))
    scheduler.run("low:0:0")
    scheduler.now = 10.0
    need = evolve(demand(4), ports=2)
    scheduler.launch(job("high", need, ports=("a", "b"), band=Band.PRODUCTION))
    scheduler.launch(job("light", evolve(demand(0), ports=1), ports=("a",)))
    scheduler.see("low:0:0", ended(EndReason.PREEMPTED))
    assert [len(scheduler.info(name).attempts) for name in ("high", "light")] == [1, 0]


def test_a_job_that_launches_itself_endlessly_is_refused() -> None:
    scheduler = Cluster(SchedulerConfig(depth_limit=3))
    scheduler.driver()
    scheduler.node("n1")
    scheduler.launch(job("j1", demand(0)))
    for number in (1, 2):
        scheduler.run(f"j{number}:0:0")
        scheduler.process(f"j{number}:0:0", f"s{number}")
        scheduler.launch(job(f"j{number + 1}", demand(0)), session=f"s{number}")
    scheduler.run("j3:0:0")
    scheduler.process("j3:0:0", "s3")
    with pytest.raises(InvalidRequest, match="does it launch itself"):
        scheduler.launch(job("j4", demand(0)), session="s3")
    scheduler.launch(job("apart", demand(0), detached=True), session="s3")
    scheduler.silence()
    scheduler.tick(100.0)
    scheduler.close()
    assert scheduler.states("j1", "j2", "j3", "apart") == [JobState.STOPPED] * 3 + [JobState.PENDING]


def test_all_jobs_of_a_group_are_of_one_user() -> None:
    scheduler = Cluster()
    scheduler.driver()
    with pytest.raises(InvalidRequest, match="user"):
        scheduler.launch_group("g", member("a", user="ann"), member("b", user="bob"))


def test_growth_searches_no_victims_and_has_no_timer() -> None:
    scheduler = Cluster(policy=Policy(groups=(GROUP,), preemption=Preemption(shield_s=0.0)))
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.launch(job("low", demand(4), band=Band.BATCH))
    scheduler.run("low:0:0")
    scheduler.reserve("r", demand(4), min_units=0, max_units=1, band=Band.PRODUCTION)
    assert [timed for timed in scheduler.state.timers.at if timed[0] == "seek"] == []


def test_applicants_that_cannot_starve_are_not_sorted_by_arrival() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.reserve("r", demand(4), min_units=0, max_units=1)
    scheduler.launch(*(job(f"j{number}") for number in range(5)))
    queue: Queue = scheduler.state.queue
    assert queue.aged(-1.0, 10) == []
    assert queue._sorted
    assert len(queue._arrivals) == 5


def test_a_job_that_waited_for_a_quota_leaves_no_trace_when_it_ends() -> None:
    scheduler = Cluster(policy=Policy(users={"ann": TenantPolicy(quota=Amounts(cpu_milli=1000), borrow=False)}))
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.launch(job("j1", user="ann"), job("j2", user="ann"))
    assert list(scheduler.state.queue.over_quota) == ["user:ann"]
    scheduler.terminate("j2")
    assert scheduler.state.queue.over_quota == {}
    assert scheduler.info("j2").cause is EndReason.STOPPED


def test_nothing_is_planned_when_nothing_waits() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.launch(job("large", demand(3)), job("other", demand(3)))
    scheduler.now = 100.0
    scheduler.tick(100.0)
    scheduler.launch(job("third", demand(3)))
    scheduler.terminate("other", "third")
    assert (scheduler.state.start_plans, scheduler.state.queue.held_machines) == ({}, {})


# Little is looked at --------------------------------------------------------------------------------------------------


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[PlacementRequest]:
    """All requests a pool was asked to place."""
    asked: list[PlacementRequest] = []
    place = MachinePool.place

    def counted(pool: MachinePool, ask: PlacementRequest, *more: Any) -> Any:
        asked.append(ask)
        return place(pool, ask, *more)

    monkeypatch.setattr(MachinePool, "place", counted)
    return asked


def unlike(count: int, least: float = 1.0) -> list[JobSpec]:
    """Return jobs with a different request each."""
    return [job(f"u{number}", demand(least + number / 1000), band=Band.BATCH) for number in range(count)]


def steps_only(scheduler: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the checks of the tests off, so that only the work of the scheduler is counted."""
    monkeypatch.setattr("tests.support.scheduler.check", lambda state: [])
    monkeypatch.setattr(Cluster, "overlooked", lambda self: iter(()))


def test_claimed_room_is_not_tried_for_others(tries: list[PlacementRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Cluster(policy=EAGER)
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.launch(*(job(f"low{half}", demand(2), band=Band.BATCH) for half in "ab"))
    scheduler.run("lowa:0:0", "lowb:0:0")
    scheduler.launch(*unlike(100))
    scheduler.now = 10.0
    scheduler.launch(job("high", demand(4), band=Band.PRODUCTION))
    steps_only(scheduler, monkeypatch)
    tries.clear()
    scheduler.see("lowa:0:0", ended(EndReason.PREEMPTED))
    assert len(tries) < 10
    scheduler.see("lowb:0:0", ended(EndReason.PREEMPTED))
    assert scheduler.info("high").attempts


def test_machines_given_to_a_reservation_are_tried_for_jobs_inside_only(
    tries: list[PlacementRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4.9)
    scheduler.launch(job("runs", demand(3)), *unlike(100, 2.0))
    scheduler.reserve("r", demand(1), min_units=1, max_units=1, band=Band.PRODUCTION)
    scheduler.launch(job("inside", demand(1), reservation_id="r"), job("more", demand(1), reservation_id="r"))
    steps_only(scheduler, monkeypatch)
    tries.clear()
    scheduler.reserve("s", demand(0.001), min_units=0, max_units=1, band=Band.PRODUCTION)
    scheduler.see("inside:0:0", ended())
    assert scheduler.info("more").attempts
    assert len(tries) < 10


def test_room_taken_by_one_of_many_shapes_is_not_tried_for_the_others(
    tries: list[PlacementRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.launch(job("runs", demand(2)), job("ends", demand(2)), *unlike(100, 1.5))
    scheduler.run("runs:0:0", "ends:0:0")
    steps_only(scheduler, monkeypatch)
    tries.clear()
    scheduler.see("ends:0:0", ended())
    assert scheduler.info("u0").attempts
    assert len(tries) < 10
