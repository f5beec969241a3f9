"""Choice of victims, compared with a search of all sets of jobs on small clusters; and what is never chosen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from attrs import evolve
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fray.model.policy.policy import Policy, Preemption
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.model.specs import ActorConfig, EntryKind, JobSpec
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest
from fray.scheduler.preemption import victims
from fray.scheduler.preemption.cost import (
    Cost,
    PreemptionUnit,
    total_cost,
    unit_of,
)
from fray.scheduler.preemption.preemption import (
    apply_pending,
    bands_below,
    is_victim_for,
    would_preempt,
)
from fray.scheduler.preemption.victims import PreemptionChoice
from fray.scheduler.queue.applicant import Applicant, PlacementShape
from fray.scheduler.state.what_if_pool import HypotheticalPool
from tests.support.scheduler import Cluster, demand, ended, job

OFF = Policy(preemption=Preemption(enabled=False))
ON = Policy(preemption=Preemption(shield_s=0.0))


@pytest.fixture(autouse=True, scope="module", params=[victims.JOBS_BEFORE_MACHINES, 0], ids=["by cost", "by machine"])
def soon(request: pytest.FixtureRequest) -> Iterator[None]:
    """Number of jobs after which jobs on the few candidate machines are sought: results hold either way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(victims, "JOBS_BEFORE_MACHINES", request.param)
        yield


def applicant(*parts: MemberGroup, band: Band = Band.PRODUCTION, same: str = "") -> Applicant:
    return Applicant("x", PlacementShape(PlacementRequest(parts, same)), 10_000, 0.0, band=band)


def cluster(policy: Policy = OFF) -> Cluster:
    scheduler = Cluster(policy=policy)
    scheduler.driver()
    return scheduler


def all_units(scheduler: Cluster, who: Applicant) -> list[PreemptionUnit]:
    may = is_victim_for(scheduler.state, who)
    bands = bands_below(scheduler.state, who)
    jobs = [scheduler.state.jobs[job_id] for band in bands for _, _, job_id in scheduler.state.running_by_band[band]]
    return [unit_of(scheduler.state, one) for one in jobs if may(one)]


def makes_room(scheduler: Cluster, who: Applicant, units: tuple[PreemptionUnit, ...]) -> bool:
    with HypotheticalPool(scheduler.state) as trial:
        apply_pending(scheduler.state, trial)
        trial.end(one for unit in units for one in unit.jobs)
        return trial.fits(who.shape.request)


def by_trying_all(scheduler: Cluster, who: Applicant) -> Cost | None:
    """The least cost of any set of jobs whose end makes room."""
    units = all_units(scheduler, who)
    sets = (one for count in range(len(units) + 1) for one in combinations(units, count))
    return min((total_cost(one) for one in sets if makes_room(scheduler, who, one)), default=None)


def compare(scheduler: Cluster, who: Applicant) -> PreemptionChoice | None:
    """The choice, after it has been found as good as it is said to be."""
    scheduler.state.policy = ON
    before = repr(scheduler.state.pool.machines)
    choice, least = would_preempt(scheduler.state, who), by_trying_all(scheduler, who)
    assert repr(scheduler.state.pool.machines) == before
    if choice is None or least is None:
        single = len(who.shape.request.parts) == 1  # of several, an early one may stand in the way of a later one
        found = least is not None if single else makes_room(scheduler, who, tuple(all_units(scheduler, who)))
        assert choice is None
        assert not found or not bands_below(scheduler.state, who), "ending some jobs would make room"
        return None
    assert makes_room(scheduler, who, choice.units)
    assert len(who.shape.request.parts) > 1 or not least[-1] or choice.units
    for unit in choice.units:
        assert not makes_room(scheduler, who, tuple(other for other in choice.units if other is not unit)), (
            "one to spare"
        )
    worst = next((rank for rank, work in enumerate(choice.cost[:-1]) if work), None)
    if worst is not None and len(who.shape.request.parts) == 1:
        assert not any(least[:worst]), "an earlier band"
        assert least[worst], "an earlier band than is needed"
        assert choice.cost[worst] <= len(choice.units) * who.shape.request.members * least[worst]
    return choice


demands = st.builds(
    lambda cpu, gpu: demand(cpu, gpu=gpu),
    st.sampled_from([0.5, 1, 1, 2, 3, 4]),
    st.sampled_from([0, 0, 0, 1, 2]),
)
jobs = st.tuples(
    demands,
    st.sampled_from([1, 1, 1, 2, 3]),
    st.sampled_from([Band.PRODUCTION, Band.INTERACTIVE, Band.BATCH, Band.BATCH]),
    st.sampled_from([0.0, 10.0, 100.0]),
    st.booleans(),
)
parts = st.builds(lambda need, members: MemberGroup((need,), members), demands, st.integers(1, 3))


@settings(max_examples=100, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.lists(st.tuples(st.sampled_from([2, 4]), st.sampled_from(["", "", "h100*2"])), min_size=1, max_size=4),
    st.lists(jobs, max_size=8),
    st.lists(parts, min_size=1, max_size=2),
    st.sampled_from([Band.SYSTEM, Band.PRODUCTION, Band.INTERACTIVE]),
)
def test_the_choice_is_as_good_as_the_search_of_all_sets(
    machines: list[tuple[int, str]],
    running: list[tuple[Demand, int, Band, float, bool]],
    wanted: list[MemberGroup],
    band: Band,
) -> None:
    scheduler = cluster()
    for index, (cpu, gpu) in enumerate(machines):
        scheduler.node(f"n{index}", cpu=cpu, gpu=gpu)
    for index, (need, members, of, after_s, preemptible) in enumerate(running):
        scheduler.now += after_s
        need = evolve(need, preemptible=preemptible or index % 3 > 0)
        scheduler.launch(job(f"j{index}", need, members=members, band=of))
    scheduler.now += 100.0
    scheduler.tick(scheduler.now)
    compare(scheduler, applicant(*wanted, band=band))


def launched(scheduler: Cluster, *specs: JobSpec, at: float = 0.0) -> None:
    scheduler.now = max(scheduler.now, at)
    scheduler.launch(*specs)


def test_later_bands_go_first_whatever_they_lose() -> None:
    scheduler = cluster()
    scheduler.node("n1", cpu=2)
    scheduler.node("n2", cpu=2)
    launched(scheduler, job("batch", demand(2), band=Band.BATCH))
    launched(scheduler, job("mine", demand(2), band=Band.INTERACTIVE), at=1000.0)
    scheduler.now = 1100.0
    choice = compare(scheduler, applicant(MemberGroup((demand(1),))))
    assert choice is not None
    assert choice.victims == ("batch",)


def test_the_least_loss_is_chosen_within_a_band_and_a_checkpoint_counts() -> None:
    scheduler = cluster()
    scheduler.node("n1", cpu=1)
    scheduler.node("n2", cpu=1)
    saver = job("saver", demand(1), band=Band.BATCH, entry=EntryKind.ACTOR, actor=ActorConfig(checkpoint_every_s=1.0))
    launched(scheduler, saver)
    scheduler.run("saver:0:0")
    scheduler.process("saver:0:0")
    launched(scheduler, job("young", demand(1), band=Band.BATCH), at=500.0)
    scheduler.now = 990.0
    scheduler.checkpoint("s-saver:0:0", 1, "blob")
    scheduler.now = 1000.0
    choice = compare(scheduler, applicant(MemberGroup((demand(1),))))
    assert choice is not None
    assert choice.victims == ("saver",)


def test_a_gang_is_chosen_before_two_jobs_that_lose_more() -> None:
    scheduler = cluster()
    for index in range(4):
        scheduler.node(f"n{index}", cpu=1)
    launched(scheduler, job("a", demand(1), band=Band.BATCH), job("b", demand(1), band=Band.BATCH))
    launched(scheduler, job("gang", demand(1), members=2, band=Band.BATCH), at=400.0)
    scheduler.now = 500.0
    choice = compare(scheduler, applicant(MemberGroup((demand(1),), 2)))
    assert choice is not None
    assert choice.victims == ("gang",)


def test_what_made_room_on_the_first_machines_counts_when_the_search_goes_on_to_more() -> None:
    scheduler = cluster()
    scheduler.node("last", cpu=2)
    launched(scheduler, job("old", demand(2), band=Band.BATCH))
    for index in range(victims.MIN_SITES - 1):  # their jobs are cheap, and their end makes no room
        scheduler.node(f"n{index}", cpu=2)
        launched(scheduler, job(f"fixed{index}", demand(1, preemptible=False), band=Band.BATCH), at=100.0)
        launched(scheduler, job(f"in-vain{index}", demand(1), band=Band.BATCH))
    scheduler.node("first", cpu=2)
    launched(scheduler, job("young", demand(2), band=Band.BATCH), at=200.0)
    scheduler.now = 1000.0
    scheduler.state.policy = ON
    choice = would_preempt(scheduler.state, applicant(MemberGroup((demand(2),), 2)))
    assert choice is not None
    assert sorted(choice.victims) == ["old", "young"]


def test_an_early_choice_is_dropped_when_a_later_one_makes_room_for_all() -> None:
    """The cheap one of a small machine, then a gang that frees two: the first was in vain."""
    scheduler = cluster()
    scheduler.node("n0", cpu=1)
    launched(scheduler, job("cheap", demand(1), band=Band.BATCH), at=90.0)
    scheduler.node("n1", cpu=1)
    scheduler.node("n2", cpu=1)
    launched(scheduler, job("gang", demand(1), members=2, band=Band.BATCH))
    scheduler.node("n3", cpu=2)
    launched(scheduler, job("fixed", demand(1, preemptible=False), band=Band.BATCH))
    scheduler.now = 100.0
    assert compare(scheduler, applicant(MemberGroup((demand(1),), 3))) is not None


def test_whole_slices_are_emptied_and_no_others() -> None:
    scheduler = cluster()
    for name, worker, slice_name in (("a0", 0, "a"), ("a1", 1, "a"), ("b0", 0, "b"), ("b1", 1, "b"), ("c0", 0, "c")):
        scheduler.node(name, cpu=1, tpu="v5litepod-8*4", slice=slice_name, tpu_worker=str(worker))
    chip = Demand(100, device_kind="tpu", device_variant="v5litepod-8", device_count=4)
    names = [f"j{index}" for index in range(5)]
    launched(scheduler, *(job(name, chip, band=Band.BATCH) for name in names))
    scheduler.now = 100.0
    scheduler.state.policy = ON
    choice = would_preempt(scheduler.state, applicant(MemberGroup((chip,), 2, 2)))
    assert choice is not None
    nodes = sorted(scheduler.state.attempts[f"{name}:0:0"].node for name in choice.victims)
    assert nodes in (["a0", "a1"], ["b0", "b1"])
    assert sorted(choice.placed[0].nodes) == nodes


def test_the_owner_of_the_applicant_is_never_its_victim() -> None:
    scheduler = cluster()
    scheduler.node("n1", cpu=1)
    launched(scheduler, job("parent", demand(1), band=Band.BATCH))
    scheduler.run("parent:0:0")
    scheduler.process("parent:0:0")
    scheduler.now = 100.0
    scheduler.state.policy = ON
    scheduler.launch(job("child", demand(1), band=Band.PRODUCTION), session="s-parent:0:0")
    assert scheduler.desired() == {"parent:0:0": False}


def test_a_job_whose_child_may_not_be_ended_is_left_alone() -> None:
    scheduler = cluster()
    scheduler.node("n1", cpu=2)
    launched(scheduler, job("parent", demand(1), band=Band.BATCH))
    scheduler.run("parent:0:0")
    scheduler.process("parent:0:0")
    scheduler.launch(job("child", demand(1, preemptible=False), band=Band.BATCH), session="s-parent:0:0")
    scheduler.now = 100.0
    assert compare(scheduler, applicant(MemberGroup((demand(1),)))) is None


def test_the_children_of_a_victim_count_as_lost_and_as_freed() -> None:
    scheduler = cluster()
    scheduler.node("n1", cpu=2)
    launched(scheduler, job("parent", demand(1), band=Band.BATCH))
    scheduler.run("parent:0:0")
    scheduler.process("parent:0:0")
    scheduler.launch(job("child", demand(1), band=Band.BATCH), session="s-parent:0:0")
    scheduler.now = 100.0
    choice = compare(scheduler, applicant(MemberGroup((demand(2),))))
    assert choice is not None
    assert choice.victims == ("parent",)


def test_an_applicant_that_fits_by_what_ends_anyway_has_no_victims() -> None:
    scheduler = cluster()
    scheduler.node("n1", cpu=1)
    scheduler.node("n2", cpu=1)
    launched(scheduler, job("going", demand(1), band=Band.BATCH), job("staying", demand(1), band=Band.BATCH))
    scheduler.terminate("going")
    scheduler.now = 100.0
    choice = compare(scheduler, applicant(MemberGroup((demand(1),))))
    assert choice is not None
    assert choice.victims == ()
    scheduler.see("going:0:0", ended())
