"""Choice of surplus units to release, compared with a search of all sets; and random runs of reservations."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from fray.model.policy.priority import Band
from fray.model.specs import EndReason, Phase
from fray.scheduler.backfill.backfill import capacity_after_pending
from fray.scheduler.explain.explain import explain
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest
from fray.scheduler.queue.applicant import Applicant, PlacementShape
from fray.scheduler.reservations.reclaim_surplus import (
    SurplusUnit,
    _leaving,
    _spare,
    _useful,
    _without,
    choose_units,
)
from fray.scheduler.state.what_if_pool import HypotheticalPool
from tests.support.scheduler import Cluster, demand, ended, job

ACTS = ("reserve", "inside", "outside", "end", "end", "die", "join", "tick", "release", "run")


def fits_without(scheduler: Cluster, applicant: Applicant, given_back: tuple[SurplusUnit, ...]) -> bool:
    """The twin's only question, asked of the pool itself; it is left as it was."""
    with HypotheticalPool(scheduler.state) as trial:
        for lent in given_back:
            lent.move_share(trial, +1)
        return trial.fits(applicant.shape.request)


def allowed(chosen: tuple[SurplusUnit, ...]) -> bool:
    """No reservation gives more than it has to spare."""
    names = [lent.reservation.id for lent in chosen]
    return all(names.count(lent.reservation.id) <= lent.reservation.surplus_units for lent in chosen)


def free(scheduler: Cluster) -> list[tuple[int, int, list[str]]]:
    machines = scheduler.state.pool.machines.values()
    return [(m.cpu_milli, m.attempts, sorted(d for ids in m.devices.values() for d in ids)) for m in machines]


cpus = st.sampled_from([0.5, 1.0, 1.5, 2.0])
gpus = st.integers(0, 1)


@settings(max_examples=100)
@given(st.data())
def test_units_are_chosen_like_by_trying_every_set(data: st.DataObject) -> None:
    scheduler = Cluster()
    scheduler.driver()
    for number in range(data.draw(st.integers(1, 3))):
        scheduler.node(f"n{number}", cpu=3, gpu="h100*2")
    for number in range(data.draw(st.integers(1, 3))):
        least = data.draw(st.integers(0, 1))
        need = demand(data.draw(cpus), gpu=data.draw(gpus))
        more = {"min_units": least, "max_units": least + data.draw(st.integers(1, 3))}
        scheduler.reserve(f"r{number}", need, notice_s=5.0, priority=data.draw(st.integers(0, 2)), **more)
        for at in range(data.draw(st.integers(0, 2))):
            scheduler.launch(
                job(
                    f"in{number}.{at}",
                    demand(need.cpu_milli / 1000, gpu=need.device_count),
                    reservation_id=f"r{number}",
                )
            )
    members = data.draw(st.integers(1, 2))
    need = demand(data.draw(cpus), gpu=data.draw(gpus))
    applicant = Applicant("wants", PlacementShape(PlacementRequest((MemberGroup((need,), members),))), 1_000_000, 0.0)
    if fits_without(scheduler, applicant, ()):
        return
    before = free(scheduler)
    found = choose_units(scheduler.state, applicant)
    chosen = tuple(found or ())
    assert free(scheduler) == before
    useful = _useful(scheduler.state, applicant)
    leaving, spare = tuple(_leaving(scheduler.state, useful)), list(_spare(scheduler.state, useful, applicant))
    sets = chain.from_iterable(combinations(spare, count) for count in range(1, len(spare) + 1))
    possible = [found for found in sets if allowed(found) and fits_without(scheduler, applicant, (*leaving, *found))]
    if chosen:
        assert allowed(chosen)
        assert fits_without(scheduler, applicant, (*leaving, *chosen))
        for lent in chosen:
            fewer = tuple(other for other in chosen if other is not lent)
            assert not fits_without(scheduler, applicant, (*leaving, *fewer)), "one too many"
    elif found is not None:
        assert fits_without(scheduler, applicant, leaving)
    else:
        assert members > 1 or not possible, "there was a way"


@settings(max_examples=40)
@given(st.data())
def test_the_invariants_hold_whatever_happens(data: st.DataObject) -> None:
    """Every step is checked by the invariants, which rebuild all indexes (`Cluster`)."""
    scheduler = Cluster()
    scheduler.driver()
    for number in range(3):
        scheduler.node(f"n{number}", cpu=3, gpu="h100*2", ports=4)
    for number in range(data.draw(st.integers(5, 25))):
        _act(scheduler, data, number)
    scheduler.restart()
    scheduler.close()
    for _ in range(40):
        for attempt in [one for one in scheduler.state.attempts.values() if one.living]:
            if attempt.living:
                scheduler.see(attempt.attempt_id, ended(EndReason.OWNER_ENDED), node=attempt.node)
        if not any(one.living for one in scheduler.state.attempts.values()):
            break
    assert not scheduler.state.reservation_pools


def _act(scheduler: Cluster, data: st.DataObject, number: int) -> None:
    what = data.draw(
        st.sampled_from(["reserve", "inside", "outside", "end", "end", "die", "join", "tick", "release", "run"])
    )
    names = list(scheduler.state.reservation_pools)
    living = [one for one in scheduler.state.attempts.values() if one.living]
    scheduler.now += 1.0
    if what == "reserve":
        least = data.draw(st.integers(0, 2))
        scheduler.ask_reservation(
            f"r{number}",
            demand(data.draw(cpus), gpu=data.draw(gpus)),
            min_units=least,
            max_units=max(1, least + data.draw(st.integers(0, 2))),
            notice_s=data.draw(st.sampled_from([0.0, 3.0])),
            ttl_s=data.draw(st.sampled_from([10.0, 1000.0])),
            preemptible=True,
        )
    elif what in ("inside", "outside") and (names or what == "outside"):
        where = data.draw(st.sampled_from(names)) if what == "inside" else ""
        scheduler.ask_launch(
            job(
                f"j{number}",
                demand(data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])), gpu=data.draw(gpus), ports=1),
                ports=("http",),
                members=data.draw(st.integers(1, 2)) if not where else 1,
                reservation_id=where,
                max_retries_preemption=2,
            )
        )
    elif what == "end" and living:
        attempt = data.draw(st.sampled_from(living))
        cause = attempt.stop_cause or data.draw(st.sampled_from([EndReason.SUCCEEDED, EndReason.FAILURE]))
        scheduler.see(attempt.attempt_id, ended(cause))
    elif what == "run" and living:
        scheduler.see(data.draw(st.sampled_from(living)).attempt_id, Phase.RUNNING)
    elif what == "die" and len(scheduler.state.nodes) > 1:
        scheduler.die(data.draw(st.sampled_from(sorted(scheduler.state.nodes))))
    elif what == "join":
        scheduler.node(f"n{data.draw(st.integers(0, 2))}", f"i{number}", cpu=3, gpu="h100*2", ports=4)
    elif what == "tick":
        scheduler.tick(scheduler.now + data.draw(st.sampled_from([1.0, 4.0, 20.0])))
    elif what == "release" and names:
        scheduler.release(data.draw(st.sampled_from(names)))


def test_units_of_a_seized_reservation_are_claimed_for_the_gang() -> None:
    """The reservation must not take its idle units, which are free at once, again before the busy one is released."""
    scheduler = Cluster()
    scheduler.driver()
    for name in ("a", "b", "c"):
        scheduler.node(name, cpu=2)
    scheduler.reserve("r", demand(2), min_units=1, max_units=3)
    scheduler.tick(1.0)
    scheduler.tick(2.0)
    assert len(scheduler.state.reservations["r"].units) == 3
    scheduler.launch(job("inside", reservation_id="r"))
    scheduler.run("inside:0:0")
    scheduler.launch(job("prod", demand(2), members=3, band=Band.PRODUCTION))
    assert [change.kind for change in scheduler.state.reservations["r"].events].count("preempted") == 1
    assert "preempts r" in explain(scheduler.state, "prod", scheduler.now)
    scheduler.tick(10.0)
    scheduler.see("inside:0:0", ended(EndReason.PREEMPTED))
    assert {attempt.node for attempt in scheduler.state.attempts.values() if attempt.job_id == "prod"} == {
        "a",
        "b",
        "c",
    }
    assert scheduler.state.reservations["r"].phase == "waiting"


def test_no_reservation_is_seized_for_room_that_another_job_has_claimed() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("a", cpu=3)
    scheduler.node("b", cpu=2)
    scheduler.launch(job("batch", demand(2), band=Band.BATCH))
    scheduler.run("batch:0:0")
    scheduler.reserve("r", demand(1), min_units=1)
    scheduler.tick(100.0)
    scheduler.launch(job("gang", demand(2), members=2, band=Band.PRODUCTION))
    assert list(scheduler.state.claims) == ["gang"]
    request = PlacementRequest((MemberGroup((demand(3),), 1),))
    other = Applicant("other", PlacementShape(request), 1_000_000, 0.0)
    reservation = scheduler.state.reservations["r"]
    assert _without(scheduler.state, other, [reservation]) == [], "it would not fit beside the gang"
    assert _without(scheduler.state, scheduler.state.queue.applicants["gang"], [reservation]) == []
    scheduler.terminate("gang")
    assert [surplus.unit for surplus in _without(scheduler.state, other, [reservation])] == reservation.units


def test_units_of_a_reservation_that_is_being_closed_count_as_free_soon() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("a", cpu=3)
    scheduler.reserve("r", demand(2), min_units=1)
    scheduler.launch(job("inside", reservation_id="r"))
    scheduler.run("inside:0:0")
    machine = scheduler.state.pool.machines["a"]
    assert capacity_after_pending(scheduler.state, machine, "").cpu_milli == 1000
    scheduler.release("r")
    assert scheduler.state.reservations["r"].phase == "closing"
    assert capacity_after_pending(scheduler.state, machine, "").cpu_milli == 3000


def test_surplus_and_preemption_may_suffice_together() -> None:
    scheduler = Cluster()
    scheduler.driver()
    for name in ("a", "b", "c"):
        scheduler.node(name, cpu=2)
    scheduler.launch(job("batch", demand(2)))
    scheduler.run("batch:0:0")
    scheduler.reserve("r", demand(2), min_units=1, max_units=2, preemptible=False)
    scheduler.tick(1.0)
    scheduler.tick(100.0)
    assert len(scheduler.state.reservations["r"].units) == 2
    scheduler.launch(job("prod", demand(2), members=2, band=Band.PRODUCTION))
    assert len(scheduler.state.reservations["r"].units) == 1
    scheduler.see("batch:0:0", ended(EndReason.PREEMPTED))
    assert len([attempt for attempt in scheduler.state.attempts.values() if attempt.job_id == "prod"]) == 2
