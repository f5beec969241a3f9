"""What would let something start, when, and what would become of a request: tried out, and nothing is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fray.model.messages.maintenance import ForecastVerdict
from fray.model.specs import EndReason, EntryKind, JobSpec, JobState
from fray.net.codec import to_json
from fray.scheduler.explain.explain import explain
from fray.scheduler.explain.forecast import StartForecast, forecast_start
from fray.scheduler.explain.what_if import what_if
from fray.scheduler.pool.requests import request_of
from fray.scheduler.queue.applicant import PlacementShape
from fray.scheduler.state.rows import TABLES
from fray.scheduler.state.state import State
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def law() -> Cluster:
    law = Cluster()
    law.driver()
    law.node("n1", ports=4)
    law.node("n2", gpu="h100*2", ports=4)
    return law


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


def looked(law: Cluster, spec: JobSpec) -> StartForecast:
    return forecast_start(law.state, PlacementShape(request_of(spec)))


SIZES = st.tuples(st.sampled_from([0, 1, 2, 4]), st.sampled_from([0, 0, 1, 2]), st.integers(1, 3), st.integers(0, 2))


@settings(max_examples=25, deadline=None)
@given(there=st.lists(SIZES, max_size=6), asked=SIZES, limits=st.booleans())
def test_asking_changes_nothing(there: list[Any], asked: Any, limits: bool) -> None:
    law = Cluster()
    law.driver()
    law.node("n1", ports=3)
    law.node("n2", gpu="h100*2", ports=3)
    for number, size in enumerate(there):
        law.launch(sized(f"j{number}", size, time_limit_s=60.0 + number if limits else None))
    law.state.take_dirty()
    before = everything(law.state)
    told = what_if(law.state, sized("asked", asked))
    assert everything(law.state) == before
    assert law.state.take_dirty() == ([], [])
    assert check(law.state) == []
    # and it is true: who is told that it starts now does, and who is told that it waits does
    law.launch(sized("asked", asked))
    placed = [attempt.node for attempt in law.state.members(law.state.jobs["asked"])]
    assert sorted(placed) == sorted(told.nodes)
    assert (told.verdict is ForecastVerdict.NOW) is bool(placed)


def sized(name: str, size: Any, **more: Any) -> Any:
    cpu, gpu, members, ports = size
    need = demand(cpu, gpu=gpu, ports=ports)
    return job(name, need, members=members, ports=tuple("ab"[:ports]), gang=False, **more)


@settings(max_examples=15, deadline=None)
@given(there=st.lists(SIZES, min_size=2, max_size=5), asked=SIZES)
def test_whose_end_is_said_to_be_enough_is_enough(there: list[Any], asked: Any) -> None:
    law = Cluster()
    law.driver()
    law.node("n1", ports=3)
    law.node("n2", gpu="h100*2", ports=3)
    for number, size in enumerate(there):
        law.launch(sized(f"j{number}", size))
    running = [row.job_id for row in law.state.jobs.values() if row.phase.value == "starting"]
    law.terminate(*(row.job_id for row in law.state.jobs.values() if row.job_id not in running))
    spec = sized("asked", asked)
    with_all = looked(law, spec)
    for name in running:
        law_twin = copy.deepcopy(law)
        law_twin.see_all_end(name)
        law_twin.launch(spec)
        starts = bool(law_twin.state.members(law_twin.state.jobs["asked"]))
        if with_all != StartForecast(at=law.state.now, enough=True):
            assert (name in with_all.alone) is starts


def test_the_time_it_starts_is_known_from_the_limits_of_those_who_hold_what_it_needs(law: Cluster) -> None:
    law.launch(job("a", demand(3), time_limit_s=100.0), job("b", demand(3), time_limit_s=300.0))
    gang = job("gang", demand(4), members=2)
    assert looked(law, gang) == StartForecast((), 300.0, ("a", "b"), (), enough=True)
    assert looked(law, job("c", demand(2))).at == 100.0
    law.launch(gang)
    assert explain(law.state, "gang", law.now).splitlines()[-3:-1] == [
        "it would start if several of those ended that hold what it needs: a, b",
        "expected start: in 300 s at the latest, when a, b have reached their time limits, "
        "unless others before it take that",
    ]
    law.now = 40.0
    law.launch(job("x", demand(0)))
    assert "in 260 s at the latest" in explain(law.state, "gang", law.now)


def test_who_is_being_ended_has_ended_by_its_ladder(law: Cluster) -> None:
    law.launch(job("a", demand(4)), job("b", demand(4)))
    law.terminate("a")
    assert looked(law, job("c", demand(4))).at == 5.0


def test_a_limit_that_is_not_enough_leaves_it_unknown_and_says_for_whom(law: Cluster) -> None:
    law.launch(job("a", demand(4), time_limit_s=100.0), job("b", demand(4)))
    found = looked(law, job("gang", demand(4), members=2))
    assert (found.at, found.endless, found.enough) == (None, ("b",), True)


def test_what_can_never_be_is_said_so() -> None:
    law = Cluster(declares_all_nodes=True)
    law.driver()
    law.node("n1", cpu=4)
    told = what_if(law.state, job("huge", demand(64)))
    assert told.verdict is ForecastVerdict.NEVER
    assert "the largest machine is n1" in told.text


def test_a_place_in_line_is_that_of_its_band(law: Cluster) -> None:
    law.launch(job("a", demand(4)), job("b", demand(4)))
    law.launch(job("c", demand(4)))
    assert what_if(law.state, job("d", demand(4))).place == 2
    assert "number 2 in line" in what_if(law.state, job("d", demand(4))).text


def test_machines_kept_for_who_starves_are_not_promised(law: Cluster) -> None:
    law.launch(job("a", demand(2)), job("gang", demand(4), members=2))
    assert what_if(law.state, job("small", demand(1))).starts_now
    law.now = 100.0
    law.launch(job("x", demand(0)))
    told = what_if(law.state, job("small", demand(1)))
    assert told.verdict is ForecastVerdict.WAIT
    assert "there is room for it now" in told.text


# Limits on waiting ----------------------------------------------------------------------------------------------------


def test_a_job_that_has_waited_as_long_as_it_may_fails_with_its_reason(law: Cluster) -> None:
    law.launch(job("a", demand(4)), job("b", demand(4)))
    law.launch(job("c", demand(3), wait_limit_s=60.0))
    law.tick()
    info = law.info("c")
    assert (law.now, info.state, info.cause) == (60.0, JobState.FAILED, EndReason.UNSCHEDULABLE)
    assert info.error_message is not None
    assert info.error_message.startswith("it waited 60 s for machines, its limit: needs 3 CPUs; of the machines")
    assert law.state.next_deadline() is None


def test_a_wait_that_is_over_in_time_has_no_limit_any_more(law: Cluster) -> None:
    law.launch(job("c", demand(3), wait_limit_s=60.0))
    assert law.state.next_deadline() is None
    law.launch(job("a", demand(4)), job("d", demand(4), wait_limit_s=60.0))
    law.terminate("d")
    assert law.state.next_deadline() is None


def test_each_wait_counts_anew_also_over_a_restart(law: Cluster) -> None:
    law.launch(job("a", demand(4), wait_limit_s=60.0, max_retries_failure=5), job("b", demand(4)))
    law.cordon("n1")
    law.now = 100.0
    law.see("a:0:0", ended(EndReason.FAILURE))
    law.now = 110.0
    law.restart()
    law.driver()
    assert law.state.timers.at == {("wait", "a"): 160.0}
    law.node("n1")
    law.node("n2")
    law.tick(160.0)
    assert law.info("a").cause is EndReason.UNSCHEDULABLE


def test_an_actor_without_resources_goes_to_the_machine_with_the_fewest(law: Cluster) -> None:
    for number in range(4):
        law.launch(job(f"actor{number}", demand(0), entry=EntryKind.ACTOR))
    law.cordon("n1")
    law.launch(job("late", demand(0), entry=EntryKind.ACTOR), job("later", demand(0), entry=EntryKind.ACTOR))
    nodes = {attempt.job_id: attempt.node for attempt in law.state.attempts.values()}
    assert nodes == {"actor0": "n1", "actor1": "n2", "actor2": "n1", "actor3": "n2", "late": "n2", "later": "n2"}
    law.uncordon("n1")
    law.launch(job("last", demand(0), entry=EntryKind.ACTOR))
    assert law.state.attempts["last:0:0"].node == "n1"


def test_machines_out_of_service_that_would_help_are_named(law: Cluster) -> None:
    law.node("small", cpu=1)
    law.cordon("n1", "n2", "small")
    law.launch(job("a", demand(4)))
    text = explain(law.state, "a", law.now)
    assert "it would start if more machines joined that it can use, or if n1 or n2 were back in service" in text
