"""Searches for victims that are too much for one step: the next ones continue them, with what has changed meanwhile."""

from __future__ import annotations

import random

import pytest

from fray.model.policy.policy import Policy, Preemption
from fray.scheduler.effects import Tick
from fray.scheduler.pool.requests import MemberGroup
from fray.scheduler.preemption import preemption, victims
from fray.scheduler.preemption.preemption import would_preempt
from fray.scheduler.queue import queue
from fray.testing.invariants.check import check
from tests.scheduler.test_preemption import BATCH, going, obey, production
from tests.scheduler.test_victims import applicant
from tests.support.scheduler import Cluster, demand, ended, job, placed

MACHINES = 12


@pytest.fixture(autouse=True)
def one_machine_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step visits a few jobs, and examines those on one machine; the best of two machines are taken first."""
    monkeypatch.setattr(preemption, "MAX_EXAMINED", 3)
    monkeypatch.setattr(victims, "MIN_SITES", 2)
    monkeypatch.setattr(queue, "WORK_PER_STEP", 1)


def cluster(seed: int = 1) -> Cluster:
    """Full machines with jobs of different sizes and ages."""
    rng = random.Random(seed)
    scheduler = Cluster(policy=Policy(preemption=Preemption(shield_s=0.0)))
    scheduler.driver()
    for index in range(MACHINES):
        scheduler.node(f"n{index}", cpu=4)
    for index in range(MACHINES * 2):
        scheduler.now += rng.choice((1.0, 5.0, 20.0))
        need = demand(rng.choice((1, 2, 3)), preemptible=rng.random() < 0.9)
        scheduler.launch(job(f"b{index}", need, **BATCH))
    scheduler.now += 100.0
    scheduler.tell(Tick())
    return scheduler


def wait_for_claim(scheduler: Cluster, job_id: str) -> int:
    """Let steps pass until victims were found for it; return how many."""
    for steps in range(200):
        if job_id in scheduler.state.claims:
            return steps
        scheduler.tick(scheduler.now + preemption.NEXT_STEP_S)
    raise AssertionError(f"no victims for {job_id}: {scheduler.info(job_id).reason}")


@pytest.mark.parametrize("by_machine", [False, True])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("members", [1, 3, 6])
def test_a_search_over_many_steps_finds_the_victims_of_one_without_a_limit(
    monkeypatch: pytest.MonkeyPatch, seed: int, members: int, by_machine: bool
) -> None:
    monkeypatch.setattr(victims, "JOBS_BEFORE_MACHINES", 0 if by_machine else 5)
    scheduler = cluster(seed)
    choice = would_preempt(scheduler.state, applicant(MemberGroup((demand(4),), members)))
    scheduler.launch(production("prod", 4, members=members))
    if choice is None:
        for _ in range(100):
            scheduler.tick(scheduler.now + preemption.NEXT_STEP_S)
        assert not scheduler.state.claims
        assert not scheduler.state.paused_searches
        return
    if not choice.units:
        assert "prod" in placed(scheduler)
        return
    steps = wait_for_claim(scheduler, "prod")
    assert steps >= members, "a machine in each"
    assert sorted(scheduler.state.claims["prod"].victims) == sorted(choice.victims)
    assert not scheduler.state.paused_searches
    obey(scheduler)
    assert placed(scheduler).count("prod") == members
    check(scheduler.state)


def paused(scheduler: Cluster, members: int = 3) -> None:
    """Launch a gang, and let the search for it find the first machines."""
    scheduler.launch(production("prod", 4, members=members))
    for _ in range(4):
        scheduler.tick(scheduler.now + preemption.NEXT_STEP_S)
    assert scheduler.state.paused_searches
    assert not scheduler.state.claims


def found_first(scheduler: Cluster) -> list[str]:
    """Jobs that the paused search would end on the machine that it found first."""
    (memory,) = scheduler.state.paused_searches.values()
    (progress,) = memory._progress.values()
    return [unit.key for unit in progress.sites[0].units]


def test_jobs_that_end_while_the_search_is_paused_are_no_victims() -> None:
    scheduler = cluster()
    paused(scheduler)
    gone = found_first(scheduler)[0]
    node = scheduler.state.attempts[f"{gone}:0:0"].node
    scheduler.cordon(node)
    scheduler.see(f"{gone}:0:0", ended())
    wait_for_claim(scheduler, "prod")
    assert gone not in scheduler.state.claims["prod"].victims
    assert node not in {share.node for share in scheduler.state.claims["prod"].shares}
    check(scheduler.state)


def test_a_job_that_must_not_be_ended_any_more_is_no_victim_and_the_search_begins_again() -> None:
    scheduler = cluster()
    paused(scheduler)
    kept = found_first(scheduler)
    for name in kept:  # what it launches ends with it, and must not
        scheduler.process(f"{name}:0:0", name)
        scheduler.launch(job(f"child-of-{name}", demand(0, preemptible=False)), session=name)
    wait_for_claim(scheduler, "prod")
    assert not set(kept) & set(scheduler.state.claims["prod"].victims)
    check(scheduler.state)


def test_a_search_that_was_not_continued_for_a_while_begins_again() -> None:
    scheduler = cluster()
    paused(scheduler)
    (memory,) = scheduler.state.paused_searches.values()
    scheduler.tick(scheduler.now + preemption.KEEP_PAUSED_S + 1)
    assert list(scheduler.state.paused_searches.values()) != [memory]
    wait_for_claim(scheduler, "prod")


def test_searches_for_several_applicants_are_continued_side_by_side() -> None:
    scheduler = cluster()
    for index in range(3):
        scheduler.launch(production(f"prod{index}", 4 - index, members=2))
    for index in range(3):
        wait_for_claim(scheduler, f"prod{index}")
    obey(scheduler)
    assert len(placed(scheduler)) >= 6
    check(scheduler.state)


def test_no_more_searches_are_kept_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "MAX_PAUSED", 2)
    scheduler = cluster()
    for index in range(4):
        scheduler.launch(production(f"prod{index}", 3 + index / 10, members=3))
        scheduler.tick(scheduler.now + preemption.NEXT_STEP_S)
    assert len(scheduler.state.paused_searches) == 2
    assert going(scheduler) == []
