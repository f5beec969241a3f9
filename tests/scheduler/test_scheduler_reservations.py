"""Reservations in the scheduler: held, grown, given back, lost, renewed, ended; and what runs in them."""

from __future__ import annotations

from typing import Any

import pytest

from fray.errors import InvalidRequest, NeverSchedulable, NoSuchReservation
from fray.model.messages.client import Role
from fray.model.policy.priority import Band
from fray.model.reservations import ReservationEventKind, ReservationState
from fray.model.specs import EndReason, JobSpec, JobState, Phase
from fray.scheduler.effects import CordonRequested, EventRecorded, SessionOpened
from fray.scheduler.lifecycle import SessionPhase
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.reservation_rows import Host
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job, placed

NODES = 3


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    for number in range(1, NODES + 1):
        scheduler.node(f"n{number}", cpu=2, gpu="h100*2")
    return scheduler


def inside(name: str, reservation: str = "r", cpu: float = 2, **more: Any) -> JobSpec:
    return job(name, demand(cpu), reservation_id=reservation, **more)


def run(scheduler: Cluster, *specs: JobSpec) -> None:
    """Launched, and running."""
    scheduler.launch(*specs)
    for spec in specs:
        for member in range(spec.members):
            scheduler.see(f"{spec.name}:0:{member}", Phase.RUNNING)


def kinds(scheduler: Cluster, name: str = "r") -> list[ReservationEventKind]:
    return [change.kind for change in reservation_info(scheduler.state, name).events]


def held(scheduler: Cluster, name: str = "r") -> int:
    return reservation_info(scheduler.state, name).held_units


# Having ---------------------------------------------------------------------------------------------------------------


def test_a_minimum_is_held_whole_or_not_at_all(scheduler: Cluster) -> None:
    run(scheduler, job("other", demand(2)))
    info = scheduler.reserve(need=demand(2), min_units=3, max_units=3)
    assert (info.state, info.units) == (ReservationState.WAITING, ())
    assert info.pending_resources.replicas == 3
    scheduler.see("other:0:0", ended())
    info = reservation_info(scheduler.state, "r")
    assert info.state is ReservationState.HELD
    assert [unit.nodes for unit in info.units] == [("n1",), ("n2",), ("n3",)]
    assert (info.allocated_resources.replicas, info.allocated_resources.cpu) == (3, 2)


def test_what_is_held_is_taken_from_everybody_else(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=3, max_units=3)
    scheduler.launch(job("outside", demand(1)), inside("within"))
    assert scheduler.info("outside").attempts == ()
    assert [attempt.node for attempt in scheduler.info("within").attempts] == ["n1"]


def test_units_of_one_machine_are_one_machine_inside(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(0.5), min_units=4, max_units=4)
    scheduler.launch(inside("large", cpu=1.5))
    assert len(scheduler.info("large").attempts) == 1


def test_devices_of_a_unit_are_the_only_ones_inside(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(1, gpu=1), min_units=1, max_units=1)
    scheduler.launch(job("two", demand(1, gpu=1), reservation_id="r"), job("out", demand(1, gpu=1)))
    (unit,) = reservation_info(scheduler.state, "r").units
    assert scheduler.state.attempts["two:0:0"].devices == unit.devices
    assert scheduler.state.attempts["out:0:0"].devices != unit.devices


def test_it_grows_by_what_is_left_over_and_no_further_than_its_maximum(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=1, max_units=2)
    assert held(scheduler) == 2
    assert kinds(scheduler) == [ReservationEventKind.HELD, ReservationEventKind.GROWN]
    scheduler.launch(job("other", demand(2)))
    assert scheduler.info("other").attempts


def test_growth_comes_after_everybody_of_its_band_and_before_later_bands(scheduler: Cluster) -> None:
    run(scheduler, *(job(f"j{number}", demand(2)) for number in range(3)))
    scheduler.reserve(need=demand(2), min_units=0, max_units=3)
    scheduler.launch(job("same", demand(2)), job("later", demand(2), band=Band.BATCH))
    scheduler.see("j0:0:0", ended())
    assert (len(scheduler.info("same").attempts), held(scheduler)) == (1, 0)
    scheduler.see("j1:0:0", ended())
    assert (held(scheduler), scheduler.info("later").attempts) == (1, ())


def test_the_higher_priority_grows_first(scheduler: Cluster) -> None:
    run(scheduler, *(job(f"j{number}", demand(2)) for number in range(3)))
    scheduler.reserve("low", need=demand(2), min_units=0, max_units=3)
    scheduler.reserve("high", need=demand(2), min_units=0, max_units=1, priority=1)
    scheduler.see("j0:0:0", ended())
    assert (held(scheduler, "low"), held(scheduler, "high")) == (0, 1)


def test_a_gang_outside_starts_with_the_ports_that_a_job_inside_releases() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node(cpu=4, ports=2)
    scheduler.reserve("r", demand(1))
    scheduler.launch(job("in", demand(0, ports=1), ports=("http",), reservation_id="r"))
    scheduler.launch(job("gang", demand(0.5, ports=1), ports=("http",), members=2))
    assert placed(scheduler) == ["in"]
    scheduler.see("in:0:0", ended())
    assert placed(scheduler) == ["gang", "gang"]


def test_ports_inside_are_those_of_the_machine() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node(cpu=4, ports=2)
    scheduler.reserve(need=demand(1), min_units=1, max_units=1)
    run(
        scheduler,
        job("out", demand(1, ports=1), ports=("http",)),
        job("in", demand(1, ports=1), ports=("http",), reservation_id="r"),
    )
    assert len({attempt.ports["http"] for attempt in scheduler.state.attempts.values()}) == 2
    scheduler.launch(job("late", demand(0, ports=1), ports=("http",)))
    assert not scheduler.info("late").attempts
    scheduler.see("in:0:0", ended())
    assert scheduler.info("late").attempts


# Giving back ----------------------------------------------------------------------------------------------------------


def test_idle_units_beyond_the_minimum_are_released_for_others(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=1, max_units=3)
    assert held(scheduler) == 3
    scheduler.launch(job("other", demand(2)))
    assert (held(scheduler), len(scheduler.info("other").attempts)) == (2, 1)
    scheduler.launch(job("gang", demand(2), members=2))
    assert (held(scheduler), scheduler.info("gang").attempts) == (
        2,
        (),
    )  # it would need more than is lent: nothing moves
    scheduler.launch(job("last", demand(2)))
    assert (held(scheduler), len(scheduler.info("last").attempts)) == (1, 1)
    assert scheduler.ask_launch(job("no", demand(2)))[0] is not None
    assert held(scheduler) == 1


def test_a_unit_in_use_is_given_back_after_its_notice_and_its_job_waits_inside(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=1, max_units=3, notice_s=10.0)
    run(scheduler, *(inside(f"w{number}", max_retries_preemption=1) for number in range(3)))
    scheduler.launch(job("other", demand(2)))
    info = reservation_info(scheduler.state, "r")
    assert info.events[-1].kind is ReservationEventKind.SHRINKING
    assert (info.events[-1].jobs, info.events[-1].notice_s) == (("w2",), 10.0)
    assert not scheduler.desired("n3")["w2:0:0"]
    scheduler.tick(10.0)
    assert scheduler.desired("n3")["w2:0:0"]
    scheduler.see("w2:0:0", ended(EndReason.PREEMPTED))
    assert [attempt.node for attempt in scheduler.info("other").attempts] == ["n3"]
    assert kinds(scheduler)[-1] is ReservationEventKind.SHRUNK
    assert scheduler.states("w0", "w1", "w2") == [JobState.RUNNING, JobState.RUNNING, JobState.PENDING]
    assert "waits for room in reservation r: needs 2 CPUs" in scheduler.info("w2").reason


def test_a_job_that_leaves_by_itself_within_the_notice_is_not_ended(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=0, max_units=1, notice_s=10.0)
    run(scheduler, inside("w"), job("a", demand(2)), job("b", demand(2)))
    scheduler.launch(job("other", demand(2)))
    scheduler.now = 3.0
    scheduler.see("w:0:0", ended())
    assert len(scheduler.info("other").attempts) == 1
    assert scheduler.states("w") == [JobState.SUCCEEDED]


def test_nothing_new_starts_on_a_unit_that_leaves(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=0, max_units=3, notice_s=10.0)
    run(scheduler, *(inside(f"w{number}", cpu=1.5) for number in range(3)))
    scheduler.launch(job("other", demand(2)))
    scheduler.launch(*(inside(f"la{number}", cpu=0.5) for number in range(3)))
    leaving = {node for unit in reservation_info(scheduler.state, "r").units if unit.leaving for node in unit.nodes}
    started = {attempt.node for attempt in scheduler.state.attempts.values() if attempt.job_id.startswith("la")}
    assert leaving
    assert started
    assert not leaving & started


def test_grown_units_come_back_only_after_twice_the_notice(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=0, max_units=3, notice_s=10.0)
    run(scheduler, *(inside(f"w{number}", max_retries_preemption=-1) for number in range(3)))
    scheduler.launch(job("other", demand(2)))
    scheduler.tick(10.0)
    scheduler.see("w2:0:0", ended(EndReason.PREEMPTED))
    scheduler.see("other:0:0", ended())
    assert held(scheduler) == 2
    scheduler.tick(20.0)
    assert held(scheduler) == 3
    assert len(scheduler.info("w2").members) == 1


def test_of_two_lenders_the_later_band_then_the_lower_priority_gives_first(scheduler: Cluster) -> None:
    scheduler.reserve("high", need=demand(2), min_units=0, max_units=1, priority=5)
    scheduler.reserve("low", need=demand(2), min_units=0, max_units=1)
    scheduler.reserve("batch", need=demand(2), min_units=0, max_units=1, band=Band.BATCH, priority=9)
    for number, left in enumerate((["high", "low"], ["high"], [])):
        scheduler.launch(job(f"j{number}", demand(2)))
        assert [name for name in ("high", "low", "batch") if held(scheduler, name)] == left


def test_an_earlier_band_keeps_what_it_has_grown_by(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=0, max_units=3, band=Band.PRODUCTION)
    scheduler.launch(job("other", demand(2)))
    assert (held(scheduler), scheduler.info("other").attempts) == (3, ())


def test_units_on_machines_that_do_not_help_stay() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("near", cpu=2, region="a")
    scheduler.node("far", cpu=2, region="b")
    scheduler.reserve(need=demand(2), min_units=0, max_units=2)
    scheduler.launch(job("there", demand(2, regions=("b",))))
    assert [unit.nodes for unit in reservation_info(scheduler.state, "r").units] == [("near",)]


def test_jobs_on_the_devices_of_a_unit_leave_with_it(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(1, gpu=1), min_units=0, max_units=6, notice_s=0.0)
    run(scheduler, *(job(f"g{number}", demand(1, gpu=1), reservation_id="r") for number in range(6)))
    scheduler.launch(job("other", demand(1, gpu=2)))
    stopped = [attempt for node in ("n1", "n2", "n3") for attempt, stop in scheduler.desired(node).items() if stop]
    assert len(stopped) == 2
    assert len({scheduler.state.attempts[attempt].node for attempt in stopped}) == 1


def test_a_gang_inside_ends_whole(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=0, max_units=3, notice_s=0.0)
    run(scheduler, inside("gang", members=3, max_retries_preemption=1))
    scheduler.launch(job("other", demand(2)))
    assert [stop for node in ("n1", "n2", "n3") for stop in scheduler.desired(node).values()] == [True] * 3


def test_an_earlier_band_seizes_a_preemptible_reservation_which_waits_again(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=2, max_units=2, notice_s=0.0)
    run(scheduler, inside("w", max_retries_preemption=1), job("other", demand(2), band=Band.PRODUCTION))
    scheduler.launch(job("urgent", demand(2), band=Band.PRODUCTION))
    info = reservation_info(scheduler.state, "r")
    assert (info.state, len(scheduler.info("urgent").attempts)) == (ReservationState.WAITING, 1)
    assert ReservationEventKind.PREEMPTED in kinds(scheduler)
    scheduler.see("w:0:0", ended(EndReason.PREEMPTED))
    assert "waits for reservation r, which is waiting" in scheduler.info("w").reason
    scheduler.see("urgent:0:0", ended())
    assert reservation_info(scheduler.state, "r").state is ReservationState.HELD
    assert len(scheduler.info("w").members) == 1


def test_a_reservation_that_is_not_preemptible_keeps_its_minimum(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=3, max_units=3, preemptible=False)
    scheduler.launch(job("urgent", demand(2), band=Band.PRODUCTION))
    assert (held(scheduler), scheduler.info("urgent").attempts) == (3, ())


def test_it_is_taken_no_more_often_than_the_policy_says(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=3, max_units=3, notice_s=0.0)
    for number in range(2):
        scheduler.launch(job(f"urgent{number}", demand(2), band=Band.PRODUCTION))
        scheduler.see(f"urgent{number}:0:0", ended())
        assert held(scheduler) == 3
    scheduler.launch(job("late", demand(2), band=Band.PRODUCTION))
    assert (held(scheduler), scheduler.info("late").attempts) == (3, ())


def test_what_does_not_help_is_not_taken(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=2, max_units=2)
    scheduler.launch(job("wide", demand(2), members=9, band=Band.PRODUCTION))
    assert reservation_info(scheduler.state, "r").state is ReservationState.HELD


def test_surplus_is_released_before_any_job_is_preempted(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=0, max_units=1)
    run(scheduler, job("batch", demand(2), band=Band.BATCH, max_retries_preemption=1))
    run(scheduler, job("more", demand(2), band=Band.BATCH, max_retries_preemption=1))
    scheduler.now = 1000.0
    scheduler.launch(job("urgent", demand(2), band=Band.PRODUCTION))
    assert (held(scheduler), len(scheduler.info("urgent").attempts)) == (0, 1)
    assert scheduler.states("batch", "more") == [JobState.RUNNING, JobState.RUNNING]


# Losing ---------------------------------------------------------------------------------------------------------------


def test_a_lost_machine_takes_its_unit_and_the_lack_is_made_good_first(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=2, max_units=2)
    run(scheduler, job("other", demand(2)), inside("w"))
    scheduler.die("n1")
    info = reservation_info(scheduler.state, "r")
    assert (info.state, info.held_units) == (ReservationState.DEGRADED, 1)
    assert (info.events[-1].kind, info.events[-1].jobs) == (ReservationEventKind.LOST, ("w",))
    scheduler.launch(job("later", demand(2)))
    scheduler.see("other:0:0", ended())
    assert (held(scheduler), scheduler.info("later").attempts) == (2, ())
    assert reservation_info(scheduler.state, "r").state is ReservationState.HELD


def test_a_silent_machine_keeps_its_unit_until_its_lease_has_expired(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=1, max_units=1)
    scheduler.silence("n1")
    scheduler.tick(100.0)
    assert held(scheduler) == 1
    scheduler.tick(700.0)
    assert [unit.nodes for unit in reservation_info(scheduler.state, "r").units] == [("n2",)]


def test_a_restarted_machine_has_lost_its_units(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=3, max_units=3)
    run(scheduler, inside("w", max_retries_preemption=1))
    scheduler.node("n1", "i2")
    assert kinds(scheduler)[-2:] == [ReservationEventKind.LOST, ReservationEventKind.GROWN]
    assert len(scheduler.info("w").members) == 1


def test_units_leave_a_drained_machine_and_are_replaced(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=2, max_units=2)
    run(scheduler, inside("w", max_retries_preemption=1))
    scheduler.tell(CordonRequested(session="d", ref=scheduler.ref(), nodes=("n1",), drain=True))
    scheduler.see("w:0:0", ended(EndReason.PREEMPTED))
    assert [unit.nodes for unit in reservation_info(scheduler.state, "r").units] == [("n2",), ("n3",)]
    assert len(scheduler.info("w").members) == 1


# Jobs inside ----------------------------------------------------------------------------------------------------------


def test_what_could_never_fit_is_refused(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(1), min_units=1, max_units=2)
    for spec in (inside("wide", cpu=3), inside("many", cpu=1, members=3)):
        with pytest.raises(NeverSchedulable, match="reservation r"):
            scheduler.launch(spec)
    with pytest.raises(NeverSchedulable, match="at most 2 units of 1 CPU"):
        scheduler.launch(job("gpu", demand(1, gpu=1), reservation_id="r"))
    scheduler.launch(inside("fits", cpu=2))


def test_an_unknown_or_ended_reservation_is_refused(scheduler: Cluster) -> None:
    with pytest.raises(NoSuchReservation, match="no reservation 'r'"):
        scheduler.launch(inside("w"))
    scheduler.reserve(need=demand(2))
    scheduler.release()
    with pytest.raises(NoSuchReservation, match="has ended: released"):
        scheduler.launch(inside("w"))


def test_a_starving_job_inside_holds_back_only_those_inside(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(1), min_units=2, max_units=2)
    run(scheduler, inside("small", cpu=1))
    scheduler.launch(inside("large"))
    scheduler.now = 70.0
    scheduler.launch(inside("held", cpu=1), job("outside", demand(1)))
    assert (scheduler.info("held").attempts, len(scheduler.info("outside").attempts)) == ((), 1)


def test_an_actor_that_takes_nothing_survives_the_units_of_its_machine(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=0, max_units=1)
    run(scheduler, job("actor", demand(0), reservation_id="r"), job("a", demand(2)), job("b", demand(2)))
    scheduler.launch(job("other", demand(2)))
    assert (held(scheduler), len(scheduler.info("other").attempts)) == (0, 1)
    assert scheduler.states("actor") == [JobState.RUNNING]
    scheduler.release()
    scheduler.see("actor:0:0", ended(EndReason.STOPPED))
    assert reservation_info(scheduler.state, "r").state is ReservationState.ENDED


# Ending ---------------------------------------------------------------------------------------------------------------


def test_release_ends_what_is_inside_and_then_frees_the_machines(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=3, max_units=3)
    run(scheduler, inside("w", max_retries_preemption=5))
    scheduler.launch(inside("waits"), inside("too"), inside("three"))
    scheduler.launch(job("outside", demand(2), members=3))
    scheduler.release()
    info = reservation_info(scheduler.state, "r")
    assert info.state is ReservationState.CLOSING
    assert [scheduler.state.jobs[name].stop_cause for name in ("w", "waits")] == [EndReason.STOPPED, EndReason.STOPPED]
    for name in ("w", "waits", "too"):
        scheduler.see(f"{name}:0:0", ended(EndReason.STOPPED))
    assert scheduler.info("w").error_message == "its reservation r ended: released"
    assert reservation_info(scheduler.state, "r").state is ReservationState.ENDED
    assert len(scheduler.info("outside").attempts) == 3
    scheduler.release()


def test_a_reservation_ends_with_its_owner(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=1, max_units=1)
    scheduler.driver("other")
    run(scheduler, job("foreign", demand(2), reservation_id="r"))
    scheduler.close()
    assert scheduler.state.jobs["foreign"].stop_cause is EndReason.OWNER_ENDED
    assert scheduler.state.sessions["d"].phase is SessionPhase.CLOSING
    scheduler.see("foreign:0:0", ended(EndReason.OWNER_ENDED))
    assert reservation_info(scheduler.state, "r").state is ReservationState.ENDED
    assert scheduler.state.sessions["d"].phase is SessionPhase.ENDED


def test_it_ends_with_the_job_that_created_it(scheduler: Cluster) -> None:
    run(scheduler, job("parent", demand(1), band=Band.PRODUCTION))
    scheduler.process("parent:0:0")
    info = scheduler.reserve(need=demand(2), session="s-parent:0:0")
    assert (info.owner, info.band) == ("parent:0:0", Band.PRODUCTION)
    scheduler.see("parent:0:0", ended())
    assert reservation_info(scheduler.state, "r").state is ReservationState.ENDED


def test_a_detached_reservation_stays(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), detached=True)
    scheduler.close()
    assert reservation_info(scheduler.state, "r").state is ReservationState.HELD


def test_a_band_that_the_policy_does_not_give_is_refused(scheduler: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="band='system' is not for this user"):
        scheduler.reserve(band=Band.SYSTEM)


def test_a_tool_can_only_create_detached_reservations(scheduler: Cluster) -> None:
    scheduler.tell(SessionOpened(session="t", role=Role.TOOL, namespace="ns"))
    with pytest.raises(InvalidRequest, match="detached=True"):
        scheduler.reserve(session="t")
    scheduler.reserve(session="t", detached=True)


def test_its_time_runs_from_when_it_is_held_and_from_each_renewal(scheduler: Cluster) -> None:
    run(scheduler, *(job(f"j{number}", demand(2)) for number in range(3)))
    scheduler.reserve(need=demand(2), ttl_s=200.0)
    scheduler.now = 100.0
    scheduler.see("j0:0:0", ended())
    assert reservation_info(scheduler.state, "r").expires_at == 300.0
    scheduler.tick(239.0)
    assert ReservationEventKind.EXPIRING not in kinds(scheduler)
    run(scheduler, inside("w"))
    scheduler.tick(240.0)
    assert kinds(scheduler)[-1] is ReservationEventKind.EXPIRING
    scheduler.renew()
    assert kinds(scheduler)[-1] is ReservationEventKind.RENEWED
    assert reservation_info(scheduler.state, "r").expires_at == 440.0
    scheduler.renew(ttl_s=1000.0)
    assert reservation_info(scheduler.state, "r").expires_at == 1240.0
    scheduler.tick(1240.0)
    assert reservation_info(scheduler.state, "r").state is ReservationState.CLOSING
    scheduler.see("w:0:0", ended(EndReason.STOPPED))
    assert scheduler.info("w").error_message == "its reservation r ended: it expired: it was not renewed"


def test_an_expiring_reservation_is_in_the_events_of_its_jobs(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), ttl_s=100.0)
    run(scheduler, inside("w"))
    effects = scheduler.tick(50.0)
    events = [effect.event for effect in effects if isinstance(effect, EventRecorded) and effect.event.job == "w"]
    assert [(event.what, event.text) for event in events] == [
        ("reservation expiring", "r ends in 50 s, unless it is renewed")
    ]


def test_a_waiting_reservation_expires_too(scheduler: Cluster) -> None:
    run(scheduler, *(job(f"j{number}", demand(2)) for number in range(3)))
    scheduler.reserve(need=demand(2), ttl_s=10.0)
    scheduler.tick(10.0)
    info = reservation_info(scheduler.state, "r")
    assert (info.state, info.reason) == (ReservationState.ENDED, "it expired while it waited: it was not renewed")


def test_after_a_restart_there_is_time_to_renew(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2), min_units=1, max_units=2, ttl_s=300.0)
    run(scheduler, inside("w"))
    scheduler.now = 10_000.0
    scheduler.restart()
    assert reservation_info(scheduler.state, "r").expires_at == 10_090.0
    assert held(scheduler) == 2


def test_a_repeated_creation_is_the_first_one(scheduler: Cluster) -> None:
    first = scheduler.reserve(need=demand(2))
    assert scheduler.reserve(need=demand(2)) == first
    with pytest.raises(InvalidRequest, match="different request"):
        scheduler.reserve(need=demand(1))
    scheduler.release()
    assert scheduler.reserve(need=demand(2)).state is ReservationState.ENDED


def test_what_no_machine_could_hold_is_refused_where_all_are_known() -> None:
    scheduler = Cluster(declares_all_nodes=True)
    scheduler.driver()
    scheduler.node(cpu=2)
    with pytest.raises(NeverSchedulable, match="3 times 1 CPU"):
        scheduler.reserve(need=demand(1), min_units=3)
    scheduler.reserve(need=demand(1), min_units=2, max_units=9)


def test_ended_reservations_are_dropped_in_the_end() -> None:
    from fray.scheduler.state.rows import SchedulerConfig

    scheduler = Cluster(rules=SchedulerConfig(finished_limit=2))
    scheduler.driver()
    for number in range(4):
        scheduler.reserve(f"r{number}")
        scheduler.release(f"r{number}")
    assert list(scheduler.state.reservations) == ["r2", "r3"]


# Rules that see what is broken ----------------------------------------------------------------------------------------


def broken(scheduler: Cluster) -> str:
    return "\n".join(check(scheduler.state, thorough=False))


@pytest.fixture
def used(scheduler: Cluster) -> Cluster:
    """Two units of two GPUs, and a job on one of them."""
    scheduler.reserve(need=demand(1, gpu=1), min_units=2, max_units=3)
    run(scheduler, job("w", demand(1, gpu=1), reservation_id="r"))
    assert broken(scheduler) == ""
    return scheduler


def test_a_unit_that_the_pool_does_not_know_is_seen(used: Cluster) -> None:
    used.state.reservations["r"].units[0].hosts = (Host("n3", ("gpu-0",)),)
    assert "the pool differs on node n3" in broken(used)
    assert "reservation r has a unit on n3, and no machine of it" in broken(used)


def test_a_device_in_two_units_is_seen(used: Cluster) -> None:
    first, second, *_ = used.state.reservations["r"].units
    second.hosts = first.hosts
    assert "is allocated 2 times" in broken(used)


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


def test_a_reservation_that_waits_without_need_is_found(used: Cluster) -> None:
    used.state.reservations["r"].phase = ReservationState.DEGRADED
    assert "reservation r waits as None, expected" in broken(used)
    assert "degraded with 3 of 2 units" in broken(used)


def test_running_jobs_in_an_ended_reservation_are_found(used: Cluster) -> None:
    row = used.state.reservations["r"]
    row.phase = ReservationState.CLOSING
    assert "a job in it continues" in broken(used)
    row.phase = ReservationState.ENDED
    assert "has ended with 3 units and jobs ['w']" in broken(used)


def test_a_reservation_that_outlives_its_owner_is_found(used: Cluster) -> None:
    used.state.reservations["r"].owner = "unknown"
    assert "reservation r continues without its owner unknown" in broken(used)


def test_a_pool_that_is_open_while_a_unit_leaves_is_seen(used: Cluster) -> None:
    used.state.reservations["r"].units[2].leaving = True
    assert "the pool of reservation r has" in broken(used)
