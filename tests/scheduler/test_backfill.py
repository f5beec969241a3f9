"""Backfill: gaps are used without delaying the first applicant that does not fit."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from hypothesis import Phase as Stage
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fray.model.policy.policy import Policy, Preemption
from fray.model.policy.priority import Band
from fray.model.specs import EndReason, JobSpec, TerminationPolicy
from fray.scheduler.backfill import start_plan
from fray.scheduler.backfill.start_plan import MARGIN_S, ends_at, make_plan
from fray.scheduler.placement import placement
from fray.scheduler.placement.placement import FEW_MACHINES
from fray.scheduler.pool.requests import nodes_of
from fray.scheduler.queue import queue
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State
from fray.scheduler.state.what_if_pool import HypotheticalPool
from tests.support.scheduler import Cluster, demand, ended, job, placed

QUICK = settings(max_examples=30, deadline=None, phases=(Stage.explicit, Stage.reuse, Stage.generate))
NO_TERMINATION = TerminationPolicy(cancel_s=0.0, term_s=0.0)
Run: TypeAlias = tuple[float, JobSpec, float]
"""Time of the launch, the job, and seconds for which it would run."""


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    return scheduler


# Simulation of whole runs --------------------------------------------------------------------------------------------


def play(machines: list[int], runs: list[Run], rules: SchedulerConfig | None = None) -> dict[str, float]:
    """Return when each job got its machines, if each runs for the given time, or to the end of its limit."""
    scheduler = Cluster(rules, policy=Policy(preemption=Preemption(enabled=False)))
    scheduler.driver()
    for index, cpu in enumerate(machines):
        scheduler.node(f"n{index}", cpu=cpu)
    length_s = {spec.job_id: run_s for _, spec, run_s in runs}
    coming = sorted(runs, key=lambda run: run[0])
    began: dict[str, float] = {}
    for _ in range(400):
        began |= {a.job_id: a.placed_at for a in scheduler.state.attempts.values() if a.job_id not in began}
        over = {name: began[name] + length_s[name] for name in dict.fromkeys(placed(scheduler))}
        times = [*over.values(), *(at for at, _, _ in coming[:1])]
        deadline = scheduler.state.next_deadline()
        at = min([*times, *([] if deadline is None else [deadline])], default=None)
        if at is None or at > 5000.0:
            return began
        scheduler.now = max(scheduler.now, at)
        scheduler.tick(scheduler.now)
        for name, end in over.items():
            spec = scheduler.state.jobs[name].spec
            limited = scheduler.state.jobs[name].first_outcome is not None
            if end <= scheduler.now or limited:
                outcome = ended(EndReason.TIME_LIMIT) if limited else ended()
                for member in range(spec.members):
                    scheduler.see(f"{name}:0:{member}", outcome)
        while coming and coming[0][0] <= scheduler.now:
            scheduler.launch(coming.pop(0)[1])
    return began


def limited(name: str, cpu: float, limit_s: float | None, members: int = 1) -> JobSpec:
    return job(name, demand(cpu), members=members, time_limit_s=limit_s, termination=NO_TERMINATION)


limits = st.sampled_from([10.0, 30.0, 60.0, 100.0, 300.0])
shares = st.sampled_from([0.5, 1.0, 2.0, 3.0])
firsts = st.lists(st.tuples(shares, limits), min_size=1, max_size=5)
laters = st.lists(
    st.tuples(st.floats(2.0, 150.0), shares, st.one_of(st.none(), limits), st.integers(1, 3), st.floats(1.0, 400.0)),
    max_size=6,
)
heads = st.tuples(st.sampled_from([2.0, 3.0, 4.0]), st.integers(1, 3))
fleets = st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3)


def runs_of(first: list[tuple[float, float]], head: tuple[float, int], share: float = 1.0) -> list[Run]:
    before = [(0.0, limited(f"a{i}", cpu, limit_s), limit_s * share) for i, (cpu, limit_s) in enumerate(first)]
    return [*before, (1.0, limited("head", head[0], 50.0, head[1]), 50.0)]


def later_runs(later: list[tuple[float, float, float | None, int, float]]) -> list[Run]:
    return [
        (at, limited(f"z{i}", cpu, limit_s, members), min(run_s, limit_s or run_s))
        for i, (at, cpu, limit_s, members, run_s) in enumerate(later)
    ]


@QUICK
@given(fleets, firsts, heads, laters)
def test_later_jobs_do_not_delay_the_first_job_that_does_not_fit(
    machines: list[int],
    first: list[tuple[float, float]],
    head: tuple[float, int],
    later: list[tuple[float, float, float | None, int, float]],
) -> None:
    alone, crowded = (play(machines, runs_of(first, head) + more) for more in ([], later_runs(later)))
    assume(all(alone.get(f"a{i}") == 0.0 for i in range(len(first))))  # else the head is not the first that waits
    if "head" in alone:
        assert crowded["head"] <= alone["head"]


@QUICK
@given(fleets, firsts, heads, laters, st.sampled_from([0.2, 0.5, 0.9]))
def test_it_starts_no_later_than_planned_when_jobs_end_before_their_limits(
    machines: list[int],
    first: list[tuple[float, float]],
    head: tuple[float, int],
    later: list[tuple[float, float, float | None, int, float]],
    share: float,
) -> None:
    alone = play(machines, runs_of(first, head))  # to the end of every limit
    crowded = play(machines, runs_of(first, head, share) + later_runs(later))
    assume(all(alone.get(f"a{i}") == 0.0 for i in range(len(first))))
    if "head" in alone:
        assert crowded["head"] <= alone["head"] + MARGIN_S


@QUICK
@given(
    fleets,
    st.lists(st.tuples(shares, st.floats(10.0, 300.0)), min_size=1, max_size=4),
    heads,
    st.lists(st.tuples(st.floats(2.0, 250.0), shares, st.floats(5.0, 400.0)), max_size=8),
)
def test_no_job_starves_where_nothing_has_a_limit(
    machines: list[int],
    first: list[tuple[float, float]],
    head: tuple[float, int],
    later: list[tuple[float, float, float]],
) -> None:
    """A job starts at the latest when everything has ended that ran after it had waited for a minute."""
    before = [(0.0, limited(f"a{index}", cpu, None), run_s) for index, (cpu, run_s) in enumerate(first)]
    flood = [(at, limited(f"z{index}", cpu, None), run_s) for index, (at, cpu, run_s) in enumerate(later)]
    runs = [*before, (1.0, limited("head", head[0], None, head[1]), 50.0), *flood]
    began = play(machines, runs)
    length_s = {spec.job_id: run_s for _, spec, run_s in runs}
    assume(sum(cpu // head[0] for cpu in machines) >= head[1])
    assume(all(began.get(f"a{index}") == 0.0 for index in range(len(first))))
    there = [began[name] + length_s[name] for name in began if name != "head" and began[name] < 61.0]
    assert began["head"] <= max(61.0, *there)


# Plans ----------------------------------------------------------------------------------------------------------------


@QUICK
@example(  # the head fits at once, on a machine that is planned for a job before it
    machines=[2, 2, 4], first=[(0.5, 300.0), (2.0, 100.0), (2.0, 30.0), (3.0, 100.0), (2.0, 100.0)], head=(2.0, 1)
)
@given(fleets, firsts, heads)
def test_a_plan_is_the_first_time_at_which_it_fits(
    machines: list[int], first: list[tuple[float, float]], head: tuple[float, int]
) -> None:
    scheduler = Cluster()
    scheduler.driver()
    for index, cpu in enumerate(machines):
        scheduler.node(f"n{index}", cpu=cpu)
    scheduler.launch(*(spec for _, spec, _ in runs_of(first, head)))
    if "head" not in scheduler.state.queue:
        return
    applicant, state = scheduler.state.queue.applicants["head"], scheduler.state
    running = [row for row in state.jobs.values() if row.is_active]
    earliest = None
    for at in (state.now, *sorted(end for row in running if (end := ends_at(state, row)) is not None)):
        with HypotheticalPool(state) as trial:
            trial.end(row for row in running if (end := ends_at(state, row)) is not None and end <= at)
            if trial.fits(applicant.shape.request):
                earliest = at
                break
    assert make_plan(state, applicant).at == earliest


# Requests of each kind that a count of members alone does not decide.
requests = st.sampled_from(
    [
        job("head", demand(2), members=3),
        job("head", demand(1, gpu=2)),
        job("head", demand(1, gpu=1), members=3),
        job("head", demand(1, gpu=4), alternatives=(demand(4), demand(3, gpu=1))),
        job("head", demand(2, zones=("a",)), members=2),
        job("head", demand(1, ports=3), ports=("p", "q", "r")),
        job("head", demand(1, ports=2), members=2, ports=("p", "q")),
    ]
)


@QUICK
@given(
    st.lists(st.tuples(st.sampled_from([2, 4]), st.integers(0, 4), st.sampled_from("ab")), min_size=1, max_size=4),
    st.lists(
        st.tuples(shares, st.integers(0, 2), st.integers(0, 2), limits, st.integers(1, 2)), min_size=1, max_size=8
    ),
    requests,
)
def test_a_plan_is_that_of_a_try_after_each_end(
    machines: list[tuple[int, int, str]], first: list[tuple[float, int, int, float, int]], head: JobSpec
) -> None:
    scheduler = Cluster()
    scheduler.driver()
    for index, (cpu, gpu, zone) in enumerate(machines):
        scheduler.node(f"n{index}", cpu=cpu, gpu=f"h100*{gpu}" if gpu else "", zone=zone, ports=4)
    for index, (cpu, gpu, ports, limit_s, members) in enumerate(first):
        need = demand(cpu, gpu=gpu, ports=ports)
        known = {"members": members, "time_limit_s": limit_s, "termination": NO_TERMINATION}
        scheduler.launch(job(f"a{index}", need, ports=("p", "q")[:ports], **known))
    scheduler.launch(head)
    if "head" not in scheduler.state.queue:
        return
    applicant, state = scheduler.state.queue.applicants["head"], scheduler.state
    at, nodes = plan_by_tries(state, applicant)
    plan = make_plan(state, applicant)
    assert (plan.at, list(plan.shares)) == (at, nodes)


def plan_by_tries(state: State, applicant: Applicant) -> tuple[float | None, list[str]]:
    """Return when and where it fits, by a try in the pool after each end."""
    with HypotheticalPool(state) as trial:
        at = state.now
        for job_id in ("", *(job_id for _, _, job_id in state.time_limits)):
            if job_id:
                row = state.jobs[job_id]
                trial.end((row,))
                at = max(at, ends_at(state, row) or 0.0)
            placed = trial.place(applicant.shape.request)
            if placed is not None:
                return at, list(nodes_of(placed))
    return None, []


def test_a_trial_that_is_undone_restores_the_stamps_of_machines_and_never_one_from_within() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    scheduler.launch(job("work", demand(2)))
    state, request = scheduler.state, scheduler.state.queue.shape_of(job("more", demand(1)), False).request
    machine, row = state.pool.machines["n1"], state.jobs["work"]
    before = machine.stamp
    with HypotheticalPool(state) as trial:
        trial.end((row,))
        assert machine.stamp != before
    assert machine.stamp == before
    # What was calculated between the placement and the end is of a machine with the placed member.
    with HypotheticalPool(state) as trial:
        assert trial.place(request) is not None
        placed = machine.stamp
        trial.end((row,))
        ended = machine.stamp
    assert machine.stamp not in (placed, ended)
    with HypotheticalPool(state) as trial:
        trial.end((row,))
        trial.commit()
    assert machine.stamp != before


def test_a_plan_that_is_too_much_for_a_step_is_made_in_the_next_and_nothing_is_placed_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plans(work: int) -> tuple[dict[str, float | None], list[str], int]:
        monkeypatch.setattr(queue, "WORK_PER_STEP", work)
        scheduler = Cluster(policy=Policy(preemption=Preemption(enabled=False)))
        scheduler.driver()
        for index in range(6):
            scheduler.node(f"n{index}", cpu=4, zone=f"z{index}")
            scheduler.launch(job(f"long{index}", demand(2, zones=(f"z{index}",)), time_limit_s=100.0 + index))
            scheduler.launch(job(f"large{index}", demand(4, zones=(f"z{index}",))))
        scheduler.now = 70.0
        scheduler.launch(job("endless", demand(2)))
        most, seen = 0, -1
        while len(scheduler.state.start_plans) != seen:
            seen = len(scheduler.state.start_plans)
            assert "endless" not in placed(scheduler)
            scheduler.now += 0.1
            scheduler.tick(scheduler.now)
            most = max(most, len(scheduler.state.start_plans) - seen)
        made = {name: plan.at for name, plan in scheduler.state.start_plans.items()}
        return made, placed(scheduler), most

    monkeypatch.setattr(start_plan, "PLAN_WORK", 100)
    whole, parts = plans(1_000_000), plans(100)
    assert whole[:2] == parts[:2]
    assert len(whole[0]) == 6
    assert parts[2] == 1


def test_what_comes_behind_a_plan_for_the_next_step_is_tried_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "WORK_PER_STEP", 100)
    monkeypatch.setattr(start_plan, "PLAN_WORK", 100)
    scheduler = Cluster(policy=Policy(preemption=Preemption(enabled=False)))
    scheduler.driver()
    for index in range(3):
        scheduler.node(f"n{index}", cpu=4, zone=f"z{index}")
        scheduler.launch(job(f"long{index}", demand(2, zones=(f"z{index}",)), time_limit_s=100.0 + index))
        scheduler.launch(job(f"large{index}", demand(4, zones=(f"z{index}",))))
    scheduler.node("other", cpu=1, zone="elsewhere")
    scheduler.now = 70.0
    scheduler.launch(job("small", demand(1, zones=("elsewhere",))))
    assert "small" not in placed(scheduler)
    while scheduler.state.queue.is_unfinished:
        scheduler.tick(scheduler.now + 0.1)
    assert "small" in placed(scheduler)


def test_what_is_too_much_to_place_beside_holds_in_one_step_is_placed_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "MAX_PLACED", 2)
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4, zone="a")
    scheduler.launch(job("long", demand(2), time_limit_s=100.0), job("large", demand(4, zones=("a",))))
    scheduler.node("n2", cpu=5, zone="b")
    scheduler.launch(job("whole", demand(5)))
    scheduler.launch(*(job(f"small{index}", demand(1, zones=("b",))) for index in range(6)))
    scheduler.see_all_end("whole")
    counts = [len(placed(scheduler))]
    while scheduler.state.queue.is_unfinished:
        scheduler.tick(scheduler.now + 0.1)
        counts.append(len(placed(scheduler)))
    assert counts == [3, 5, 6]  # with "long"


def test_a_gap_is_used_by_jobs_that_surely_end_in_time(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(2), time_limit_s=100.0), job("large", demand(4)))
    scheduler.now = 10.0
    scheduler.launch(job("short", demand(1), time_limit_s=50.0), job("endless", demand(1)))
    assert placed(scheduler) == ["long", "short"]


def test_without_limits_small_jobs_pass_for_a_minute(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1)), job("large", demand(4)), job("small", demand(1)))
    assert placed(scheduler) == ["long", "small"]


def test_a_job_that_fits_beside_the_plan_needs_no_limit(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(2), time_limit_s=100.0), job("large", demand(3)))
    scheduler.launch(job("beside", demand(1)), job("too much", demand(1)))
    assert placed(scheduler) == ["long", "beside"]


def test_members_that_fit_beside_a_plan_one_by_one_may_be_too_many_together(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(2), time_limit_s=100.0), job("large", demand(3)))
    scheduler.launch(job("pair", demand(0.75), members=2))
    assert placed(scheduler) == ["long"]
    scheduler.node("n2", cpu=0.5)
    assert placed(scheduler) == ["long"]
    scheduler.node("n3", cpu=0.75)  # one here, one beside
    assert placed(scheduler) == ["long", "pair", "pair"]


def test_the_notice_of_an_earlier_preemption_does_not_delay_a_plan(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(4), notice_s=600.0, max_retries_preemption=1))
    scheduler.drain("n1")
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    scheduler.uncordon("n1")
    scheduler.terminate("a")
    scheduler.launch(job("next", demand(4)))
    assert scheduler.state.start_plans["next"].at == 5.0 + MARGIN_S


def test_machines_without_a_plan_are_free_to_all(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1), time_limit_s=100.0), job("large", demand(4)))
    scheduler.node("n2", cpu=2)
    scheduler.now = 300.0
    scheduler.launch(job("late", demand(2)))
    assert "late" in placed(scheduler)


def test_a_new_plan_is_made_when_a_planned_machine_falls_silent(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=4)
    scheduler.launch(job("one", demand(2), time_limit_s=50.0), job("two", demand(4), time_limit_s=100.0))
    scheduler.launch(job("large", demand(4)))
    assert list(scheduler.state.start_plans["large"].shares) == ["n1"]
    scheduler.now = 10.0
    scheduler.silence("n1")
    scheduler.launch(job("small", demand(0.5)))
    assert list(scheduler.state.start_plans["large"].shares) == ["n2"]


def test_no_plan_uses_machines_held_for_an_earlier_applicant() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4, zone="a")
    scheduler.node("n2", cpu=4, zone="b")
    scheduler.launch(job("endless", demand(3, zones=("a",))), job("timed", demand(4), time_limit_s=600.0))
    scheduler.launch(job("large", demand(4, zones=("a",))))
    scheduler.now = 100.0
    scheduler.tick(scheduler.now)
    scheduler.launch(job("later", demand(1)))  # n1 has a free CPU, which is held for the starving job
    scheduler.now = 200.0
    scheduler.launch(job("last", demand(4)))  # by now both others are starving
    assert list(scheduler.state.queue.applicants) == ["large", "later", "last"]
    assert scheduler.state.start_plans["large"].at is None
    plan = scheduler.state.start_plans["later"]
    assert list(plan.shares) == ["n2"]
    assert plan.at is not None
    assert plan.at > 600.0


def test_what_waits_behind_a_hold_on_all_machines_is_tried_when_the_hold_is_gone() -> None:
    scheduler = Cluster(policy=Policy(preemption=Preemption(enabled=False)))
    scheduler.driver()
    for number in range(2 * FEW_MACHINES):
        scheduler.node(f"n{number}", cpu=4)
    scheduler.launch(*(job(f"runs{number}", demand(2)) for number in range(4 * FEW_MACHINES)))
    late = [f"late{number}" for number in range(2 * FEW_MACHINES)]
    scheduler.launch(job("whole", demand(4)), job("early", demand(3)), *(job(name, demand(1)) for name in late))
    scheduler.now = 100.0  # all of them are starving now, and the first one holds all machines
    for number in range(0, 4 * FEW_MACHINES, 2):
        scheduler.see(f"runs{number}:0:0", ended())
    assert len(scheduler.state.queue.held_machines["whole"].nodes) == 2 * FEW_MACHINES
    assert not set(late) & set(placed(scheduler))
    scheduler.terminate("whole")
    assert not set(late) & set(placed(scheduler))  # the other one holds them now
    scheduler.terminate("early")
    assert set(late) <= set(placed(scheduler))


def test_after_a_restart_the_plan_is_made_again_from_the_rows(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(2), time_limit_s=100.0), job("large", demand(4)), job("late", demand(1)))
    scheduler.now = 5.0
    scheduler.restart()
    scheduler.driver()
    scheduler.node("n1")
    scheduler.report("n1", [], full=True)
    scheduler.launch(job("later", demand(1)))
    assert "late" not in placed(scheduler)
    assert "later" not in placed(scheduler)


def test_an_earlier_band_is_the_first_however_late_it_comes(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(2), time_limit_s=100.0), job("large", demand(4)))
    scheduler.launch(job("prod", demand(2), band=Band.PRODUCTION))
    assert placed(scheduler) == ["long", "prod"]
