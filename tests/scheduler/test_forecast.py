"""Forecasts of starts, and of requests that are not submitted: tried out without changing anything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fray.model.messages.maintenance import ForecastVerdict
from fray.model.resources import Demand
from fray.model.specs import EndReason, EntryKind, JobSpec, JobState
from fray.net.codec import to_json
from fray.scheduler.backfill.start_plan import MARGIN_S
from fray.scheduler.explain.explain import explain
from fray.scheduler.explain.forecast import StartForecast, forecast_start, what_if
from fray.scheduler.pool.requests import request_of
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.state.rows import TABLES
from fray.scheduler.state.state import State
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", ports=4)
    scheduler.node("n2", gpu="h100*2", ports=4)
    return scheduler


def everything(state: State) -> tuple[Any, ...]:
    """All rows, and all that the pool knows."""
    rows = [to_json(row) for table in TABLES for row in state.rows(table).values()]
    pool = state.pool
    machines = [
        (name, m.is_open, m.cpu_milli, m.memory_bytes, m.disk_bytes, m.attempts, m.devices, sorted(m.ports.given))
        for name, m in pool.machines.items()
    ]
    marks = [machine.ports.mark() for machine in pool.machines.values()]
    return copy.deepcopy((rows, machines, marks, pool.version, pool.changes, list(pool.freed), state.timers.at))


def looked(scheduler: Cluster, spec: JobSpec) -> StartForecast:
    return forecast_start(scheduler.state, PlacementShape(request_of(spec)))


SIZES = st.tuples(st.sampled_from([0, 1, 2, 4]), st.sampled_from([0, 0, 1, 2]), st.integers(1, 3), st.integers(0, 2))


@settings(max_examples=25, deadline=None)
@given(there=st.lists(SIZES, max_size=6), asked=SIZES, limits=st.booleans())
def test_asking_changes_nothing(there: list[Any], asked: Any, limits: bool) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", ports=3)
    scheduler.node("n2", gpu="h100*2", ports=3)
    for number, size in enumerate(there):
        scheduler.launch(sized(f"j{number}", size, time_limit_s=60.0 + number if limits else None))
    scheduler.state.take_dirty()
    before = everything(scheduler.state)
    forecast = what_if(scheduler.state, sized("asked", asked))
    assert everything(scheduler.state) == before
    assert scheduler.state.take_dirty() == ([], [])
    assert check(scheduler.state) == []
    # and it is true: a job forecast to start now starts, and one forecast to wait waits
    scheduler.launch(sized("asked", asked))
    placed = [attempt.node for attempt in scheduler.state.members(scheduler.state.jobs["asked"])]
    assert sorted(placed) == sorted(forecast.nodes)
    assert (forecast.verdict is ForecastVerdict.NOW) is bool(placed)


def sized(name: str, size: Any, **more: Any) -> Any:
    cpu, gpu, members, ports = size
    need = demand(cpu, gpu=gpu, ports=ports)
    return job(name, need, members=members, ports=tuple("ab"[:ports]), gang=False, **more)


@settings(max_examples=15, deadline=None)
@given(there=st.lists(SIZES, min_size=2, max_size=5), asked=SIZES)
def test_whose_end_is_said_to_be_enough_is_enough(there: list[Any], asked: Any) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", ports=3)
    scheduler.node("n2", gpu="h100*2", ports=3)
    for number, size in enumerate(there):
        scheduler.launch(sized(f"j{number}", size))
    running = [row.job_id for row in scheduler.state.jobs.values() if row.phase.value == "starting"]
    scheduler.terminate(*(row.job_id for row in scheduler.state.jobs.values() if row.job_id not in running))
    spec = sized("asked", asked)
    with_all = looked(scheduler, spec)
    for name in running:
        copy_of_cluster = copy.deepcopy(scheduler)
        copy_of_cluster.see_all_end(name)
        copy_of_cluster.launch(spec)
        starts = bool(copy_of_cluster.state.members(copy_of_cluster.state.jobs["asked"]))
        if with_all != StartForecast(at=scheduler.state.now, enough=True):
            assert (name in with_all.alone) is starts


def test_the_time_it_starts_is_known_from_the_limits_of_those_who_hold_what_it_needs(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(3), time_limit_s=100.0), job("b", demand(3), time_limit_s=300.0))
    gang = job("gang", demand(4), members=2)
    assert looked(scheduler, gang) == StartForecast((), 300.0 + 5.0 + MARGIN_S, ("a", "b"), (), enough=True)
    assert looked(scheduler, job("c", demand(2))).at == 100.0 + 5.0 + MARGIN_S
    scheduler.launch(gang)
    assert explain(scheduler.state, "gang", scheduler.now).splitlines()[-3:-1] == [
        "it would start if several of those ended that hold what it needs: a, b",
        "expected start: in 315 s at the latest, when a, b have ended by their time limits, "
        "unless requests before it take that",
    ]
    scheduler.now = 40.0
    scheduler.launch(job("x", demand(0)))
    assert "in 275 s at the latest" in explain(scheduler.state, "gang", scheduler.now)


def test_who_is_being_ended_has_ended_by_its_ladder(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(4)), job("b", demand(4)))
    scheduler.terminate("a")
    assert looked(scheduler, job("c", demand(4))).at == 5.0 + MARGIN_S


def test_a_limit_that_is_not_enough_leaves_it_unknown_and_says_for_whom(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(4), time_limit_s=100.0), job("b", demand(4)))
    found = looked(scheduler, job("gang", demand(4), members=2))
    assert (found.at, found.endless, found.enough) == (None, ("b",), True)


def test_what_can_never_be_is_said_so() -> None:
    scheduler = Cluster(declares_all_nodes=True)
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    forecast = what_if(scheduler.state, job("huge", demand(64)))
    assert forecast.verdict is ForecastVerdict.NEVER
    assert "the largest machine is n1" in forecast.text


def test_hosts_of_several_incomplete_slices_are_not_enough_for_a_slice() -> None:
    scheduler = Cluster()
    scheduler.driver()
    for name in ("a0", "b0"):
        scheduler.node(name, tpu="v4-16*4", slice=name[0], tpu_worker=name[1])
    scheduler.launch(job("holder", demand(4)))
    need = Demand(1000, device_kind="tpu", device_variant="v4-16", device_count=4)
    assert not looked(scheduler, job("slice", need, members=2)).enough
    assert "it would start if more machines joined" in what_if(scheduler.state, job("slice", need, members=2)).text


def test_a_place_in_line_is_that_of_its_band(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(4)), job("b", demand(4)))
    scheduler.launch(job("c", demand(4)))
    assert what_if(scheduler.state, job("d", demand(4))).place == 2
    assert "number 2 in the queue" in what_if(scheduler.state, job("d", demand(4))).text


def test_machines_kept_for_who_starves_are_not_promised(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(2)), job("gang", demand(4), members=2))
    assert what_if(scheduler.state, job("small", demand(1))).starts_now
    scheduler.now = 100.0
    scheduler.launch(job("x", demand(0)))
    forecast = what_if(scheduler.state, job("small", demand(1)))
    assert forecast.verdict is ForecastVerdict.WAIT
    assert "there is room for it now" in forecast.text


# Limits on waiting ----------------------------------------------------------------------------------------------------


def test_a_job_that_has_waited_as_long_as_it_may_fails_with_its_reason(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(4)), job("b", demand(4)))
    scheduler.launch(job("c", demand(3), wait_limit_s=60.0))
    scheduler.tick()
    info = scheduler.info("c")
    assert (scheduler.now, info.state, info.cause) == (60.0, JobState.FAILED, EndReason.UNSCHEDULABLE)
    assert info.error_message is not None
    assert info.error_message.startswith("it waited 60 s for machines, its limit: needs 3 CPUs; of the machines")
    assert scheduler.state.next_deadline() is None


def test_a_wait_that_is_over_in_time_has_no_limit_any_more(scheduler: Cluster) -> None:
    scheduler.launch(job("c", demand(3), wait_limit_s=60.0))
    assert scheduler.state.next_deadline() is None
    scheduler.launch(job("a", demand(4)), job("d", demand(4), wait_limit_s=60.0))
    scheduler.terminate("d")
    assert scheduler.state.next_deadline() is None


def test_each_wait_counts_from_zero_also_over_a_restart(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(4), wait_limit_s=60.0, max_retries_failure=5), job("b", demand(4)))
    scheduler.cordon("n1")
    scheduler.now = 100.0
    scheduler.see("a:0:0", ended(EndReason.FAILURE))
    scheduler.now = 110.0
    scheduler.restart()
    scheduler.driver()
    assert scheduler.state.timers.at == {("wait", "a"): 160.0}
    scheduler.node("n1")
    scheduler.node("n2")
    scheduler.tick(160.0)
    assert scheduler.info("a").cause is EndReason.UNSCHEDULABLE


def test_an_actor_without_resources_goes_to_the_machine_with_the_fewest(scheduler: Cluster) -> None:
    for number in range(4):
        scheduler.launch(job(f"actor{number}", demand(0), entry=EntryKind.ACTOR))
    scheduler.cordon("n1")
    scheduler.launch(job("late", demand(0), entry=EntryKind.ACTOR), job("later", demand(0), entry=EntryKind.ACTOR))
    nodes = {attempt.job_id: attempt.node for attempt in scheduler.state.attempts.values()}
    assert nodes == {"actor0": "n1", "actor1": "n2", "actor2": "n1", "actor3": "n2", "late": "n2", "later": "n2"}
    scheduler.uncordon("n1")
    scheduler.launch(job("last", demand(0), entry=EntryKind.ACTOR))
    assert scheduler.state.attempts["last:0:0"].node == "n1"


def test_machines_out_of_service_that_would_help_are_named(scheduler: Cluster) -> None:
    scheduler.node("small", cpu=1)
    scheduler.cordon("n1", "n2", "small")
    scheduler.launch(job("a", demand(4)))
    text = explain(scheduler.state, "a", scheduler.now)
    assert "it would start if more machines joined that it can use, or if n1 or n2 were back in service" in text
