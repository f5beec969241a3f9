"""Reservations in the law: held, grown, given back, lost, renewed, ended; and what runs in them."""

from __future__ import annotations

from typing import Any

import pytest

from fray.errors import InvalidRequest, NeverSchedulable, NoSuchReservation
from fray.model.messages.client import Role
from fray.model.policy.priority import Band
from fray.model.reservations import ReservationEventKind, ReservationState
from fray.model.specs import EndReason, JobSpec, JobState, Phase
from fray.scheduler.effects import CordonRequested, EventRecorded, SessionOpened
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.reservation_rows import Host
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job

NODES = 3


@pytest.fixture
def law() -> Cluster:
    law = Cluster()
    law.driver()
    for number in range(1, NODES + 1):
        law.node(f"n{number}", cpu=2, gpu="h100*2")
    return law


def inside(name: str, reservation: str = "r", cpu: float = 2, **more: Any) -> JobSpec:
    return job(name, demand(cpu), reservation_id=reservation, **more)


def run(law: Cluster, *specs: JobSpec) -> None:
    """Launched, and running."""
    law.launch(*specs)
    for spec in specs:
        for member in range(spec.members):
            law.see(f"{spec.name}:0:{member}", Phase.RUNNING)


def kinds(law: Cluster, name: str = "r") -> list[ReservationEventKind]:
    return [change.kind for change in reservation_info(law.state, name).events]


def held(law: Cluster, name: str = "r") -> int:
    return reservation_info(law.state, name).held_units


# Having ---------------------------------------------------------------------------------------------------------------


def test_a_minimum_is_held_whole_or_not_at_all(law: Cluster) -> None:
    run(law, job("other", demand(2)))
    info = law.reserve(need=demand(2), min_units=3, max_units=3)
    assert (info.state, info.units) == (ReservationState.WAITING, ())
    assert info.pending_resources.replicas == 3
    law.see("other:0:0", ended())
    info = reservation_info(law.state, "r")
    assert info.state is ReservationState.HELD
    assert [unit.nodes for unit in info.units] == [("n1",), ("n2",), ("n3",)]
    assert (info.allocated_resources.replicas, info.allocated_resources.cpu) == (3, 2)


def test_what_is_held_is_taken_from_everybody_else(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=3, max_units=3)
    law.launch(job("outside", demand(1)), inside("within"))
    assert law.info("outside").attempts == ()
    assert [attempt.node for attempt in law.info("within").attempts] == ["n1"]


def test_units_of_one_machine_are_one_machine_inside(law: Cluster) -> None:
    law.reserve(need=demand(0.5), min_units=4, max_units=4)
    law.launch(inside("large", cpu=1.5))
    assert len(law.info("large").attempts) == 1


def test_devices_of_a_unit_are_the_only_ones_inside(law: Cluster) -> None:
    law.reserve(need=demand(1, gpu=1), min_units=1, max_units=1)
    law.launch(job("two", demand(1, gpu=1), reservation_id="r"), job("out", demand(1, gpu=1)))
    (unit,) = reservation_info(law.state, "r").units
    assert law.state.attempts["two:0:0"].devices == unit.devices
    assert law.state.attempts["out:0:0"].devices != unit.devices


def test_it_grows_by_what_is_left_over_and_no_further_than_its_maximum(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=1, max_units=2)
    assert held(law) == 2
    assert kinds(law) == [ReservationEventKind.HELD, ReservationEventKind.GROWN]
    law.launch(job("other", demand(2)))
    assert law.info("other").attempts


def test_growth_comes_after_everybody_of_its_band_and_before_later_bands(law: Cluster) -> None:
    run(law, *(job(f"j{number}", demand(2)) for number in range(3)))
    law.reserve(need=demand(2), min_units=0, max_units=3)
    law.launch(job("same", demand(2)), job("later", demand(2), band=Band.BATCH))
    law.see("j0:0:0", ended())
    assert (len(law.info("same").attempts), held(law)) == (1, 0)
    law.see("j1:0:0", ended())
    assert (held(law), law.info("later").attempts) == (1, ())


def test_the_higher_priority_grows_first(law: Cluster) -> None:
    run(law, *(job(f"j{number}", demand(2)) for number in range(3)))
    law.reserve("low", need=demand(2), min_units=0, max_units=3)
    law.reserve("high", need=demand(2), min_units=0, max_units=1, priority=1)
    law.see("j0:0:0", ended())
    assert (held(law, "low"), held(law, "high")) == (0, 1)


def test_ports_inside_are_those_of_the_machine() -> None:
    law = Cluster()
    law.driver()
    law.node(cpu=4, ports=2)
    law.reserve(need=demand(1), min_units=1, max_units=1)
    run(
        law,
        job("out", demand(1, ports=1), ports=("http",)),
        job("in", demand(1, ports=1), ports=("http",), reservation_id="r"),
    )
    assert len({attempt.ports["http"] for attempt in law.state.attempts.values()}) == 2
    law.launch(job("late", demand(0, ports=1), ports=("http",)))
    assert not law.info("late").attempts
    law.see("in:0:0", ended())
    assert law.info("late").attempts


# Giving back ----------------------------------------------------------------------------------------------------------


def test_idle_units_beyond_the_minimum_are_given_to_who_needs_them(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=1, max_units=3)
    assert held(law) == 3
    law.launch(job("other", demand(2)))
    assert (held(law), len(law.info("other").attempts)) == (2, 1)
    law.launch(job("gang", demand(2), members=2))
    assert (held(law), law.info("gang").attempts) == (2, ())  # it would need more than is lent: nothing moves
    law.launch(job("last", demand(2)))
    assert (held(law), len(law.info("last").attempts)) == (1, 1)
    assert law.ask_launch(job("no", demand(2)))[0] is not None
    assert held(law) == 1


def test_a_unit_in_use_is_given_back_after_its_notice_and_its_job_waits_inside(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=1, max_units=3, notice_s=10.0)
    run(law, *(inside(f"w{number}", max_retries_preemption=1) for number in range(3)))
    law.launch(job("other", demand(2)))
    info = reservation_info(law.state, "r")
    assert info.events[-1].kind is ReservationEventKind.SHRINKING
    assert (info.events[-1].jobs, info.events[-1].notice_s) == (("w2",), 10.0)
    assert not law.wished("n3")["w2:0:0"]
    law.tick(10.0)
    assert law.wished("n3")["w2:0:0"]
    law.see("w2:0:0", ended(EndReason.PREEMPTED))
    assert [attempt.node for attempt in law.info("other").attempts] == ["n3"]
    assert kinds(law)[-1] is ReservationEventKind.SHRUNK
    assert law.states("w0", "w1", "w2") == [JobState.RUNNING, JobState.RUNNING, JobState.PENDING]
    assert "waits for room in reservation r: needs 2 CPUs" in law.info("w2").reason


def test_a_job_that_leaves_by_itself_within_the_notice_is_not_ended(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=0, max_units=1, notice_s=10.0)
    run(law, inside("w"), job("a", demand(2)), job("b", demand(2)))
    law.launch(job("other", demand(2)))
    law.now = 3.0
    law.see("w:0:0", ended())
    assert len(law.info("other").attempts) == 1
    assert law.states("w") == [JobState.SUCCEEDED]


def test_nothing_new_starts_on_a_unit_that_leaves(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=0, max_units=3, notice_s=10.0)
    run(law, *(inside(f"w{number}", cpu=1.5) for number in range(3)))
    law.launch(job("other", demand(2)))
    law.launch(*(inside(f"la{number}", cpu=0.5) for number in range(3)))
    leaving = {node for unit in reservation_info(law.state, "r").units if unit.leaving for node in unit.nodes}
    started = {attempt.node for attempt in law.state.attempts.values() if attempt.job_id.startswith("la")}
    assert leaving
    assert started
    assert not leaving & started


def test_grown_units_come_back_only_after_twice_the_notice(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=0, max_units=3, notice_s=10.0)
    run(law, *(inside(f"w{number}", max_retries_preemption=-1) for number in range(3)))
    law.launch(job("other", demand(2)))
    law.tick(10.0)
    law.see("w2:0:0", ended(EndReason.PREEMPTED))
    law.see("other:0:0", ended())
    assert held(law) == 2
    law.tick(20.0)
    assert held(law) == 3
    assert len(law.info("w2").members) == 1


def test_of_two_lenders_the_later_band_then_the_lower_priority_gives_first(law: Cluster) -> None:
    law.reserve("high", need=demand(2), min_units=0, max_units=1, priority=5)
    law.reserve("low", need=demand(2), min_units=0, max_units=1)
    law.reserve("batch", need=demand(2), min_units=0, max_units=1, band=Band.BATCH, priority=9)
    for number, left in enumerate((["high", "low"], ["high"], [])):
        law.launch(job(f"j{number}", demand(2)))
        assert [name for name in ("high", "low", "batch") if held(law, name)] == left


def test_an_earlier_band_keeps_what_it_has_grown_by(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=0, max_units=3, band=Band.PRODUCTION)
    law.launch(job("other", demand(2)))
    assert (held(law), law.info("other").attempts) == (3, ())


def test_units_on_machines_that_do_not_help_stay() -> None:
    law = Cluster()
    law.driver()
    law.node("near", cpu=2, region="a")
    law.node("far", cpu=2, region="b")
    law.reserve(need=demand(2), min_units=0, max_units=2)
    law.launch(job("there", demand(2, regions=("b",))))
    assert [unit.nodes for unit in reservation_info(law.state, "r").units] == [("near",)]


def test_jobs_on_the_devices_of_a_unit_leave_with_it(law: Cluster) -> None:
    law.reserve(need=demand(1, gpu=1), min_units=0, max_units=6, notice_s=0.0)
    run(law, *(job(f"g{number}", demand(1, gpu=1), reservation_id="r") for number in range(6)))
    law.launch(job("other", demand(1, gpu=2)))
    stopped = [attempt for node in ("n1", "n2", "n3") for attempt, stop in law.wished(node).items() if stop]
    assert len(stopped) == 2
    assert len({law.state.attempts[attempt].node for attempt in stopped}) == 1


def test_a_gang_inside_ends_whole(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=0, max_units=3, notice_s=0.0)
    run(law, inside("gang", members=3, max_retries_preemption=1))
    law.launch(job("other", demand(2)))
    assert [stop for node in ("n1", "n2", "n3") for stop in law.wished(node).values()] == [True] * 3


def test_an_earlier_band_takes_all_of_a_preemptible_one_and_it_waits_again(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=2, max_units=2, notice_s=0.0)
    run(law, inside("w", max_retries_preemption=1), job("other", demand(2), band=Band.PRODUCTION))
    law.launch(job("urgent", demand(2), band=Band.PRODUCTION))
    info = reservation_info(law.state, "r")
    assert (info.state, len(law.info("urgent").attempts)) == (ReservationState.WAITING, 1)
    assert ReservationEventKind.PREEMPTED in kinds(law)
    law.see("w:0:0", ended(EndReason.PREEMPTED))
    assert "waits for reservation r, which is waiting" in law.info("w").reason
    law.see("urgent:0:0", ended())
    assert reservation_info(law.state, "r").state is ReservationState.HELD
    assert len(law.info("w").members) == 1


def test_one_that_is_not_preemptible_keeps_its_minimum(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=3, max_units=3, preemptible=False)
    law.launch(job("urgent", demand(2), band=Band.PRODUCTION))
    assert (held(law), law.info("urgent").attempts) == (3, ())


def test_it_is_taken_no_more_often_than_the_policy_says(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=3, max_units=3, notice_s=0.0)
    for number in range(2):
        law.launch(job(f"urgent{number}", demand(2), band=Band.PRODUCTION))
        law.see(f"urgent{number}:0:0", ended())
        assert held(law) == 3
    law.launch(job("late", demand(2), band=Band.PRODUCTION))
    assert (held(law), law.info("late").attempts) == (3, ())


def test_what_does_not_help_is_not_taken(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=2, max_units=2)
    law.launch(job("wide", demand(2), members=9, band=Band.PRODUCTION))
    assert reservation_info(law.state, "r").state is ReservationState.HELD


def test_what_is_lent_goes_before_anybody_is_ended(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=0, max_units=1)
    run(law, job("batch", demand(2), band=Band.BATCH, max_retries_preemption=1))
    run(law, job("more", demand(2), band=Band.BATCH, max_retries_preemption=1))
    law.now = 1000.0
    law.launch(job("urgent", demand(2), band=Band.PRODUCTION))
    assert (held(law), len(law.info("urgent").attempts)) == (0, 1)
    assert law.states("batch", "more") == [JobState.RUNNING, JobState.RUNNING]


# Losing ---------------------------------------------------------------------------------------------------------------


def test_a_lost_machine_takes_its_unit_and_the_lack_is_made_good_first(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=2, max_units=2)
    run(law, job("other", demand(2)), inside("w"))
    law.die("n1")
    info = reservation_info(law.state, "r")
    assert (info.state, info.held_units) == (ReservationState.DEGRADED, 1)
    assert (info.events[-1].kind, info.events[-1].jobs) == (ReservationEventKind.LOST, ("w",))
    law.launch(job("later", demand(2)))
    law.see("other:0:0", ended())
    assert (held(law), law.info("later").attempts) == (2, ())
    assert reservation_info(law.state, "r").state is ReservationState.HELD


def test_a_silent_machine_keeps_its_unit_until_its_lease_is_over(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=1, max_units=1)
    law.silence("n1")
    law.tick(100.0)
    assert held(law) == 1
    law.tick(700.0)
    assert [unit.nodes for unit in reservation_info(law.state, "r").units] == [("n2",)]


def test_a_machine_that_begins_anew_has_lost_its_units(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=3, max_units=3)
    run(law, inside("w", max_retries_preemption=1))
    law.node("n1", "i2")
    assert kinds(law)[-2:] == [ReservationEventKind.LOST, ReservationEventKind.GROWN]
    assert len(law.info("w").members) == 1


def test_a_drained_machine_is_left_by_its_units_and_another_one_is_owed(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=2, max_units=2)
    run(law, inside("w", max_retries_preemption=1))
    law.tell(CordonRequested(session="d", ref=law.ref(), nodes=("n1",), drain=True))
    law.see("w:0:0", ended(EndReason.PREEMPTED))
    assert [unit.nodes for unit in reservation_info(law.state, "r").units] == [("n2",), ("n3",)]
    assert len(law.info("w").members) == 1


# Jobs inside ----------------------------------------------------------------------------------------------------------


def test_what_could_never_fit_is_refused(law: Cluster) -> None:
    law.reserve(need=demand(1), min_units=1, max_units=2)
    for spec in (inside("wide", cpu=3), inside("many", cpu=1, members=3)):
        with pytest.raises(NeverSchedulable, match="reservation r"):
            law.launch(spec)
    with pytest.raises(NeverSchedulable, match="at most 2 units of 1 CPU"):
        law.launch(job("gpu", demand(1, gpu=1), reservation_id="r"))
    law.launch(inside("fits", cpu=2))


def test_an_unknown_or_ended_reservation_is_refused(law: Cluster) -> None:
    with pytest.raises(NoSuchReservation, match="no reservation 'r'"):
        law.launch(inside("w"))
    law.reserve(need=demand(2))
    law.release()
    with pytest.raises(NoSuchReservation, match="has ended: released"):
        law.launch(inside("w"))


def test_a_starving_job_inside_holds_back_only_those_inside(law: Cluster) -> None:
    law.reserve(need=demand(1), min_units=2, max_units=2)
    run(law, inside("small", cpu=1))
    law.launch(inside("large"))
    law.now = 70.0
    law.launch(inside("held", cpu=1), job("outside", demand(1)))
    assert (law.info("held").attempts, len(law.info("outside").attempts)) == ((), 1)


def test_an_actor_that_takes_nothing_survives_the_units_of_its_machine(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=0, max_units=1)
    run(law, job("actor", demand(0), reservation_id="r"), job("a", demand(2)), job("b", demand(2)))
    law.launch(job("other", demand(2)))
    assert (held(law), len(law.info("other").attempts)) == (0, 1)
    assert law.states("actor") == [JobState.RUNNING]
    law.release()
    law.see("actor:0:0", ended(EndReason.STOPPED))
    assert reservation_info(law.state, "r").state is ReservationState.ENDED


# Ending ---------------------------------------------------------------------------------------------------------------


def test_release_ends_what_is_inside_and_then_frees_the_machines(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=3, max_units=3)
    run(law, inside("w", max_retries_preemption=5))
    law.launch(inside("waits"), inside("too"), inside("three"))
    law.launch(job("outside", demand(2), members=3))
    law.release()
    info = reservation_info(law.state, "r")
    assert info.state is ReservationState.CLOSING
    assert [law.state.jobs[name].stop_cause for name in ("w", "waits")] == [EndReason.STOPPED, EndReason.STOPPED]
    for name in ("w", "waits", "too"):
        law.see(f"{name}:0:0", ended(EndReason.STOPPED))
    assert law.info("w").error_message == "its reservation r ended: released"
    assert reservation_info(law.state, "r").state is ReservationState.ENDED
    assert len(law.info("outside").attempts) == 3
    law.release()


def test_it_ends_with_whoever_created_it(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=1, max_units=1)
    law.driver("other")
    run(law, job("foreign", demand(2), reservation_id="r"))
    law.close()
    assert law.state.jobs["foreign"].stop_cause is EndReason.OWNER_ENDED
    assert law.state.is_session_living("d")
    law.see("foreign:0:0", ended(EndReason.OWNER_ENDED))
    assert reservation_info(law.state, "r").state is ReservationState.ENDED
    assert not law.state.is_session_living("d")


def test_it_ends_with_the_job_that_created_it(law: Cluster) -> None:
    run(law, job("parent", demand(1), band=Band.PRODUCTION))
    law.process("parent:0:0")
    info = law.reserve(need=demand(2), session="s-parent:0:0")
    assert (info.owner, info.band) == ("parent:0:0", Band.PRODUCTION)
    law.see("parent:0:0", ended())
    assert reservation_info(law.state, "r").state is ReservationState.ENDED


def test_a_detached_one_stays(law: Cluster) -> None:
    law.reserve(need=demand(2), detached=True)
    law.close()
    assert reservation_info(law.state, "r").state is ReservationState.HELD


def test_a_band_that_the_policy_does_not_give_is_refused(law: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="band='system' is not for this user"):
        law.reserve(band=Band.SYSTEM)


def test_a_tool_can_only_make_detached_ones(law: Cluster) -> None:
    law.tell(SessionOpened(session="t", role=Role.TOOL, namespace="ns"))
    with pytest.raises(InvalidRequest, match="detached=True"):
        law.reserve(session="t")
    law.reserve(session="t", detached=True)


def test_its_time_runs_from_when_it_is_held_and_from_each_renewal(law: Cluster) -> None:
    run(law, *(job(f"j{number}", demand(2)) for number in range(3)))
    law.reserve(need=demand(2), ttl_s=200.0)
    law.now = 100.0
    law.see("j0:0:0", ended())
    assert reservation_info(law.state, "r").expires_at == 300.0
    law.tick(239.0)
    assert ReservationEventKind.EXPIRING not in kinds(law)
    run(law, inside("w"))
    law.tick(240.0)
    assert kinds(law)[-1] is ReservationEventKind.EXPIRING
    law.renew()
    assert kinds(law)[-1] is ReservationEventKind.RENEWED
    assert reservation_info(law.state, "r").expires_at == 440.0
    law.renew(ttl_s=1000.0)
    assert reservation_info(law.state, "r").expires_at == 1240.0
    law.tick(1240.0)
    assert reservation_info(law.state, "r").state is ReservationState.CLOSING
    law.see("w:0:0", ended(EndReason.STOPPED))
    assert law.info("w").error_message == "its reservation r ended: it expired: nobody renewed it"


def test_an_expiring_one_is_in_the_stories_of_its_jobs(law: Cluster) -> None:
    law.reserve(need=demand(2), ttl_s=100.0)
    run(law, inside("w"))
    effects = law.tick(50.0)
    told = [effect.event for effect in effects if isinstance(effect, EventRecorded) and effect.event.job == "w"]
    assert [(event.what, event.text) for event in told] == [
        ("reservation expiring", "r ends in 50 s, unless it is renewed")
    ]


def test_one_that_waits_expires_too(law: Cluster) -> None:
    run(law, *(job(f"j{number}", demand(2)) for number in range(3)))
    law.reserve(need=demand(2), ttl_s=10.0)
    law.tick(10.0)
    info = reservation_info(law.state, "r")
    assert (info.state, info.reason) == (ReservationState.ENDED, "it expired while it waited: nobody renewed it")


def test_after_a_restart_there_is_time_to_renew(law: Cluster) -> None:
    law.reserve(need=demand(2), min_units=1, max_units=2, ttl_s=300.0)
    run(law, inside("w"))
    law.now = 10_000.0
    law.restart()
    assert reservation_info(law.state, "r").expires_at == 10_090.0
    assert held(law) == 2


def test_a_repeated_creation_is_the_first_one(law: Cluster) -> None:
    first = law.reserve(need=demand(2))
    assert law.reserve(need=demand(2)) == first
    with pytest.raises(InvalidRequest, match="different request"):
        law.reserve(need=demand(1))
    law.release()
    assert law.reserve(need=demand(2)).state is ReservationState.ENDED


def test_what_no_machine_could_hold_is_refused_where_all_are_known() -> None:
    law = Cluster(declares_all_nodes=True)
    law.driver()
    law.node(cpu=2)
    with pytest.raises(NeverSchedulable, match="3 times 1 CPU"):
        law.reserve(need=demand(1), min_units=3)
    law.reserve(need=demand(1), min_units=2, max_units=9)


def test_ended_ones_are_forgotten_in_the_end() -> None:
    from fray.scheduler.state.rows import SchedulerConfig

    law = Cluster(rules=SchedulerConfig(finished_limit=2))
    law.driver()
    for number in range(4):
        law.reserve(f"r{number}")
        law.release(f"r{number}")
    assert list(law.state.reservations) == ["r2", "r3"]


# Rules that see what is broken ----------------------------------------------------------------------------------------


def broken(law: Cluster) -> str:
    return "\n".join(check(law.state, thorough=False))


@pytest.fixture
def used(law: Cluster) -> Cluster:
    """Two units of two GPUs, and a job on one of them."""
    law.reserve(need=demand(1, gpu=1), min_units=2, max_units=3)
    run(law, job("w", demand(1, gpu=1), reservation_id="r"))
    assert broken(law) == ""
    return law


def test_a_unit_that_the_pool_does_not_know_is_seen(used: Cluster) -> None:
    used.state.reservations["r"].units[0].hosts = (Host("n3", ("gpu-0",)),)
    assert "the pool thinks otherwise of node n3" in broken(used)
    assert "reservation r has a unit on n3, and no machine of it" in broken(used)


def test_a_device_in_two_units_is_seen(used: Cluster) -> None:
    first, second, *_ = used.state.reservations["r"].units
    second.hosts = first.hosts
    assert "is given 2 times" in broken(used)


def test_a_job_beyond_its_units_is_seen(used: Cluster) -> None:
    used.state.attempts["w:0:0"].devices = used.state.reservations["r"].units[1].devices
    assert "do not add up" in broken(used)


def test_a_reservation_below_its_minimum_is_seen(used: Cluster) -> None:
    row = used.state.reservations["r"]
    row.units[0].leaving = row.units[1].leaving = True
    assert "reservation r is held with 1 of 2 units" in broken(used)


def test_a_reservation_over_its_maximum_is_seen(used: Cluster) -> None:
    from attrs import evolve

    row = used.state.reservations["r"]
    row.spec = evolve(row.spec, min_units=0, max_units=1)
    assert "holds 3 of at most 1 units" in broken(used)


def test_one_that_waits_for_nothing_is_seen(used: Cluster) -> None:
    used.state.reservations["r"].phase = ReservationState.DEGRADED
    assert "reservation r waits as None, and should as" in broken(used)
    assert "degraded with 3 of 2 units" in broken(used)


def test_jobs_that_go_on_in_what_is_over_are_seen(used: Cluster) -> None:
    row = used.state.reservations["r"]
    row.phase = ReservationState.CLOSING
    assert "a job in it goes on" in broken(used)
    row.phase = ReservationState.ENDED
    assert "has ended with 3 units and jobs ['w']" in broken(used)


def test_one_that_outlives_its_owner_is_seen(used: Cluster) -> None:
    used.state.reservations["r"].owner = "nobody"
    assert "reservation r goes on without its owner nobody" in broken(used)


def test_a_pool_that_is_open_while_a_unit_leaves_is_seen(used: Cluster) -> None:
    used.state.reservations["r"].units[2].leaving = True
    assert "the pool of reservation r has" in broken(used)
