"""Whose end makes room: compared with a search of all sets of jobs, on small clusters; and what is never chosen."""

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
    """After how many jobs those on the few machines in question are looked at: all of it holds either way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(victims, "JOBS_BEFORE_MACHINES", request.param)
        yield


def applicant(*parts: MemberGroup, band: Band = Band.PRODUCTION, same: str = "") -> Applicant:
    return Applicant("x", PlacementShape(PlacementRequest(parts, same)), 10_000, 0.0, band=band)


def cluster(policy: Policy = OFF) -> Cluster:
    law = Cluster(policy=policy)
    law.driver()
    return law


def all_units(law: Cluster, who: Applicant) -> list[PreemptionUnit]:
    may = is_victim_for(law.state, who)
    bands = bands_below(law.state, who)
    jobs = [law.state.jobs[job_id] for band in bands for _, _, job_id in law.state.running_by_band[band]]
    return [unit_of(law.state, one) for one in jobs if may(one)]


def makes_room(law: Cluster, who: Applicant, units: tuple[PreemptionUnit, ...]) -> bool:
    with HypotheticalPool(law.state) as trial:
        apply_pending(law.state, trial)
        trial.end(one for unit in units for one in unit.jobs)
        return trial.fits(who.shape.request)


def by_trying_all(law: Cluster, who: Applicant) -> Cost | None:
    """The least cost of any set of jobs whose end makes room."""
    units = all_units(law, who)
    sets = (one for count in range(len(units) + 1) for one in combinations(units, count))
    return min((total_cost(one) for one in sets if makes_room(law, who, one)), default=None)


def compare(law: Cluster, who: Applicant) -> PreemptionChoice | None:
    """The choice, after it has been found as good as it is said to be."""
    law.state.policy = ON
    before = repr(law.state.pool.machines)
    choice, least = would_preempt(law.state, who), by_trying_all(law, who)
    assert repr(law.state.pool.machines) == before
    if choice is None or least is None:
        single = len(who.shape.request.parts) == 1  # of several, an early one may stand in the way of a later one
        found = least is not None if single else makes_room(law, who, tuple(all_units(law, who)))
        assert choice is None
        assert not found or not bands_below(law.state, who), "somebody's end would make room"
        return None
    assert makes_room(law, who, choice.units)
    assert len(who.shape.request.parts) > 1 or not least[-1] or choice.units
    for unit in choice.units:
        assert not makes_room(law, who, tuple(other for other in choice.units if other is not unit)), "one to spare"
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
    law = cluster()
    for index, (cpu, gpu) in enumerate(machines):
        law.node(f"n{index}", cpu=cpu, gpu=gpu)
    for index, (need, members, of, after_s, preemptible) in enumerate(running):
        law.now += after_s
        need = evolve(need, preemptible=preemptible or index % 3 > 0)
        law.launch(job(f"j{index}", need, members=members, band=of))
    law.now += 100.0
    law.tick(law.now)
    compare(law, applicant(*wanted, band=band))


def launched(law: Cluster, *specs: JobSpec, at: float = 0.0) -> None:
    law.now = max(law.now, at)
    law.launch(*specs)


def test_later_bands_go_first_whatever_they_lose() -> None:
    law = cluster()
    law.node("n1", cpu=2)
    law.node("n2", cpu=2)
    launched(law, job("batch", demand(2), band=Band.BATCH))
    launched(law, job("mine", demand(2), band=Band.INTERACTIVE), at=1000.0)
    law.now = 1100.0
    choice = compare(law, applicant(MemberGroup((demand(1),))))
    assert choice is not None
    assert choice.victims == ("batch",)


def test_of_one_band_those_that_lose_least_and_a_checkpoint_counts() -> None:
    law = cluster()
    law.node("n1", cpu=1)
    law.node("n2", cpu=1)
    keeper = job("keeper", demand(1), band=Band.BATCH, entry=EntryKind.ACTOR, actor=ActorConfig(checkpoint_every_s=1.0))
    launched(law, keeper)
    law.run("keeper:0:0")
    law.process("keeper:0:0")
    launched(law, job("young", demand(1), band=Band.BATCH), at=500.0)
    law.now = 990.0
    law.checkpoint("s-keeper:0:0", 1, "blob")
    law.now = 1000.0
    choice = compare(law, applicant(MemberGroup((demand(1),))))
    assert choice is not None
    assert choice.victims == ("keeper",)


def test_one_gang_rather_than_two_jobs_that_lose_more() -> None:
    law = cluster()
    for index in range(4):
        law.node(f"n{index}", cpu=1)
    launched(law, job("a", demand(1), band=Band.BATCH), job("b", demand(1), band=Band.BATCH))
    launched(law, job("gang", demand(1), members=2, band=Band.BATCH), at=400.0)
    law.now = 500.0
    choice = compare(law, applicant(MemberGroup((demand(1),), 2)))
    assert choice is not None
    assert choice.victims == ("gang",)


def test_who_was_taken_first_is_spared_when_a_later_one_makes_room_for_all() -> None:
    """The cheap one of a small machine, then a gang that frees two: the first was in vain."""
    law = cluster()
    law.node("n0", cpu=1)
    launched(law, job("cheap", demand(1), band=Band.BATCH), at=90.0)
    law.node("n1", cpu=1)
    law.node("n2", cpu=1)
    launched(law, job("gang", demand(1), members=2, band=Band.BATCH))
    law.node("n3", cpu=2)
    launched(law, job("fixed", demand(1, preemptible=False), band=Band.BATCH))
    law.now = 100.0
    assert compare(law, applicant(MemberGroup((demand(1),), 3))) is not None


def test_whole_slices_are_emptied_and_no_others() -> None:
    law = cluster()
    for name, worker, slice_name in (("a0", 0, "a"), ("a1", 1, "a"), ("b0", 0, "b"), ("b1", 1, "b"), ("c0", 0, "c")):
        law.node(name, cpu=1, tpu="v5litepod-8*4", slice=slice_name, tpu_worker=str(worker))
    chip = Demand(100, device_kind="tpu", device_variant="v5litepod-8", device_count=4)
    names = [f"j{index}" for index in range(5)]
    launched(law, *(job(name, chip, band=Band.BATCH) for name in names))
    law.now = 100.0
    law.state.policy = ON
    choice = would_preempt(law.state, applicant(MemberGroup((chip,), 2, 2)))
    assert choice is not None
    nodes = sorted(law.state.attempts[f"{name}:0:0"].node for name in choice.victims)
    assert nodes in (["a0", "a1"], ["b0", "b1"])
    assert sorted(choice.placed[0].nodes) == nodes


def test_the_owner_of_the_applicant_is_never_its_victim() -> None:
    law = cluster()
    law.node("n1", cpu=1)
    launched(law, job("parent", demand(1), band=Band.BATCH))
    law.run("parent:0:0")
    law.process("parent:0:0")
    law.now = 100.0
    law.state.policy = ON
    law.launch(job("child", demand(1), band=Band.PRODUCTION), session="s-parent:0:0")
    assert law.wished() == {"parent:0:0": False}


def test_a_job_whose_child_may_not_be_ended_is_left_alone() -> None:
    law = cluster()
    law.node("n1", cpu=2)
    launched(law, job("parent", demand(1), band=Band.BATCH))
    law.run("parent:0:0")
    law.process("parent:0:0")
    law.launch(job("child", demand(1, preemptible=False), band=Band.BATCH), session="s-parent:0:0")
    law.now = 100.0
    assert compare(law, applicant(MemberGroup((demand(1),)))) is None


def test_the_children_of_a_victim_count_as_lost_and_as_freed() -> None:
    law = cluster()
    law.node("n1", cpu=2)
    launched(law, job("parent", demand(1), band=Band.BATCH))
    law.run("parent:0:0")
    law.process("parent:0:0")
    law.launch(job("child", demand(1), band=Band.BATCH), session="s-parent:0:0")
    law.now = 100.0
    choice = compare(law, applicant(MemberGroup((demand(2),))))
    assert choice is not None
    assert choice.victims == ("parent",)


def test_an_applicant_that_fits_by_what_ends_anyway_has_no_victims() -> None:
    law = cluster()
    law.node("n1", cpu=1)
    law.node("n2", cpu=1)
    launched(law, job("going", demand(1), band=Band.BATCH), job("staying", demand(1), band=Band.BATCH))
    law.terminate("going")
    law.now = 100.0
    choice = compare(law, applicant(MemberGroup((demand(1),))))
    assert choice is not None
    assert choice.victims == ()
    law.see("going:0:0", ended())
