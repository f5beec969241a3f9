"""Preemption: few jobs, whole, and only for an applicant that is then placed."""

from __future__ import annotations

import pytest
from attrs import evolve

from fray.model.policy.machine_groups import GroupConfig
from fray.model.policy.policy import (
    Amounts,
    Policy,
    Preemption,
    TenantPolicy,
)
from fray.model.policy.priority import Band
from fray.model.specs import ActorConfig, EndReason, EntryKind, JobSpec, JobState, SupervisedGroup, SupervisionStrategy
from fray.scheduler.effects import MachinesListed, PolicyChanged
from fray.scheduler.explain.forecast import what_if
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job, member, placed

BATCH, PRODUCTION = {"band": Band.BATCH, "max_retries_preemption": 9}, {"band": Band.PRODUCTION}


def make_cluster(cpu: float = 4, **preemption: object) -> Cluster:
    scheduler = Cluster(policy=Policy(preemption=Preemption(**preemption)))  # type: ignore[arg-type]
    scheduler.driver()
    scheduler.node("n1", cpu=cpu)
    return scheduler


def batch(name: str, cpu: float = 1, **more: object) -> JobSpec:
    return job(name, demand(cpu), **(BATCH | more))  # type: ignore[arg-type]


def production(name: str, cpu: float = 1, **more: object) -> JobSpec:
    return job(name, demand(cpu), **(PRODUCTION | more))  # type: ignore[arg-type]


def going(scheduler: Cluster) -> list[str]:
    """Attempts that are being ended."""
    return [
        attempt.attempt_id for attempt in scheduler.state.attempts.values() if attempt.living and attempt.stop_cause
    ]


def obey(scheduler: Cluster) -> None:
    """Whatever is being ended, ends."""
    for attempt_id in going(scheduler):
        scheduler.see(attempt_id, ended(EndReason.PREEMPTED))


def test_production_takes_the_place_of_batch_and_batch_comes_back() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(batch("work"))
    scheduler.now = 60.0
    scheduler.launch(production("prod"))
    assert going(scheduler) == ["work:0:0"]
    obey(scheduler)
    assert placed(scheduler) == ["prod"]
    assert scheduler.info("work").state is JobState.PENDING
    scheduler.see("prod:0:0", ended())
    assert placed(scheduler) == ["work"]
    assert scheduler.info("work").retries == {"preempted": 1}


@pytest.mark.parametrize(
    ("band", "victim", "taken"),
    [
        (Band.SYSTEM, Band.PRODUCTION, True),
        (Band.PRODUCTION, Band.PRODUCTION, False),
        (Band.PRODUCTION, Band.INTERACTIVE, True),
        (Band.INTERACTIVE, Band.BATCH, False),
        (Band.BATCH, Band.BATCH, False),
    ],
)
def test_by_default_system_and_production_go_before_all_later_bands(band: Band, victim: Band, taken: bool) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=1)
    scheduler.tell(PolicyChanged(policy=Policy(users={"*": TenantPolicy(bands=tuple(Band))})))
    scheduler.launch(job("old", demand(1), band=victim))
    scheduler.now = 100.0
    scheduler.launch(job("new", demand(1), band=band))
    assert bool(going(scheduler)) is taken


def test_the_policy_says_which_bands_may_preempt() -> None:
    scheduler = make_cluster(cpu=1, bands=(Band.INTERACTIVE,))
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(job("mine", demand(1)))
    assert going(scheduler) == ["work:0:0"]
    scheduler = make_cluster(cpu=1, enabled=False)
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    assert going(scheduler) == []


def test_twice_an_hour_and_no_more() -> None:
    scheduler = make_cluster(cpu=1, shield_s=0.0)
    scheduler.launch(batch("work"))
    times = 0
    for minute in range(1, 60):
        scheduler.now = 60.0 * minute
        scheduler.tick(scheduler.now)
        scheduler.launch(production(f"prod{minute}"))
        times += bool(going(scheduler))
        obey(scheduler)
        for name in [name for name in placed(scheduler) if name != "work"]:
            scheduler.see(f"{name}:0:0", ended())
    assert times == 2
    assert scheduler.state.jobs["work"].preempted_at == (60.0, 120.0)


def test_a_refused_shape_is_searched_again_for_an_earlier_band() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(job("mine", demand(1)))
    assert going(scheduler) == []
    scheduler.launch(production("prod"))
    assert going(scheduler) == ["work:0:0"]


def test_freed_machines_are_claimed_and_no_second_preemption_follows() -> None:
    scheduler = make_cluster(cpu=2)
    scheduler.launch(batch("a"), batch("b"))
    scheduler.now = 100.0
    scheduler.launch(production("prod", 2))
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    scheduler.launch(production("small", 1), job("any", demand(1)))
    assert placed(scheduler) == ["b"]
    scheduler.see("b:0:0", ended(EndReason.PREEMPTED))
    assert placed(scheduler) == ["prod"]
    assert scheduler.state.claims == {}


def test_a_claim_is_served_at_once_behind_a_starving_job_that_holds_all_machines() -> None:
    scheduler = make_cluster(shield_s=0.0)
    scheduler.launch(production("base", 3), batch("work"))
    scheduler.launch(production("whole", 4))  # it has no victims: they would not suffice
    scheduler.now = 1.0
    scheduler.launch(production("prod"))
    assert going(scheduler) == ["work:0:0"]
    scheduler.now = 100.0
    obey(scheduler)
    assert list(scheduler.state.queue.held_machines["whole"].nodes) == ["n1"]
    assert "prod" in placed(scheduler)
    scheduler.launch(production("later"))
    scheduler.see("prod:0:0", ended())
    assert "later" not in placed(scheduler)  # without a claim it waits behind the starving job


def test_a_claim_ends_with_its_applicant() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"), job("any", demand(1)))
    scheduler.terminate("prod")
    assert scheduler.state.claims == {}
    obey(scheduler)
    assert placed(scheduler) == ["any"]


def test_a_claim_of_a_machine_that_is_gone_is_given_up_and_others_make_room() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(batch("one"))
    scheduler.node("n2", cpu=1)
    scheduler.launch(batch("two"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    (first,) = going(scheduler)
    scheduler.die(scheduler.state.attempts[first].node)
    assert len(going(scheduler)) == 1
    assert going(scheduler) != [first]
    obey(scheduler)
    assert "prod" in placed(scheduler)


def test_devices_that_what_is_left_of_a_victim_still_holds_are_waited_for_and_not_for_ever() -> None:
    scheduler = Cluster(policy=Policy(preemption=Preemption()))
    scheduler.driver()
    scheduler.node("n1", gpu="h100")
    scheduler.node("n2", gpu="h100")
    scheduler.launch(job("one", demand(gpu=1), **BATCH), job("two", demand(gpu=1), **BATCH))  # type: ignore[arg-type]
    scheduler.now = 100.0
    scheduler.launch(job("prod", demand(gpu=1), **PRODUCTION))  # type: ignore[arg-type]
    (first,) = going(scheduler)
    scheduler.see(first, ended(EndReason.PREEMPTED), busy={"gpu-0": "held by process 7"})
    scheduler.now = 130.0
    scheduler.launch(job("other", demand(gpu=1), **BATCH))  # type: ignore[arg-type]
    assert going(scheduler) == []  # the devices will come, no other job has to end for them
    scheduler.tick()
    assert scheduler.now == 160.0
    assert len(going(scheduler)) == 1
    assert going(scheduler) != [first]
    obey(scheduler)
    assert "prod" in placed(scheduler)


def test_an_applicant_that_starts_soon_anyway_preempts_nothing() -> None:
    scheduler = make_cluster(cpu=2)
    scheduler.launch(batch("ends", time_limit_s=110.0), batch("stays"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    assert going(scheduler) == []
    scheduler.tick(110.0)
    assert going(scheduler) == ["ends:0:0"]  # for its time
    scheduler.see("ends:0:0", ended(EndReason.TIME_LIMIT))
    assert placed(scheduler) == ["stays", "prod"]


def test_a_victim_that_succeeds_meanwhile_has_succeeded() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    scheduler.see("work:0:0", ended())
    assert scheduler.info("work").state is JobState.SUCCEEDED
    assert placed(scheduler) == ["prod"]


def test_a_victim_that_is_terminated_meanwhile_is_not_retried() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    scheduler.terminate("work")
    obey(scheduler)
    assert scheduler.info("work").state is JobState.STOPPED
    assert placed(scheduler) == ["prod"]


def test_a_job_without_a_budget_for_it_ends_as_preempted() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(batch("once", max_retries_preemption=0))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    obey(scheduler)
    info = scheduler.info("once")
    assert (info.state, info.cause) == (JobState.FAILED, EndReason.PREEMPTED)
    assert info.error_message is not None
    assert info.error_message.startswith("for prod (production)")


def test_an_actor_that_is_preempted_has_not_failed() -> None:
    scheduler = make_cluster(cpu=1)
    config = ActorConfig(max_restarts=0)
    scheduler.launch(batch("actor", entry=EntryKind.ACTOR, actor=config, max_retries_preemption=0))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    obey(scheduler)
    assert scheduler.info("actor").state is JobState.PENDING
    scheduler.see("prod:0:0", ended())
    assert placed(scheduler) == ["actor"]
    assert scheduler.state.jobs["actor"].restart_times == ()
    scheduler.see("actor:1:0", ended(EndReason.FAILURE))
    assert scheduler.info("actor").state is JobState.FAILED


def test_siblings_restart_with_a_preempted_member_by_their_strategy() -> None:
    scheduler = make_cluster(cpu=2)
    config = ActorConfig(max_restarts=0)
    siblings = [
        SupervisedGroup(group_id="g", strategy=SupervisionStrategy.ONE_FOR_ALL, index=index) for index in range(2)
    ]
    scheduler.launch(*(batch(f"g{one.index}", entry=EntryKind.ACTOR, actor=config, siblings=one) for one in siblings))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    assert len(going(scheduler)) == 1
    obey(scheduler)
    assert len(going(scheduler)) == 1
    for attempt_id in going(scheduler):
        scheduler.see(attempt_id, ended(EndReason.SIBLING))
    scheduler.see("prod:0:0", ended())
    assert sorted(placed(scheduler)) == ["g0", "g1"]


def test_a_job_group_is_preempted_whole_or_not_at_all() -> None:
    scheduler = make_cluster(cpu=3)
    scheduler.launch_group("g", member("g-a", **BATCH), member("g-b", **BATCH))
    scheduler.launch(batch("c"))
    scheduler.now = 100.0
    scheduler.launch(production("prod", 2))
    assert sorted(going(scheduler)) == ["g-a:0:0", "g-b:0:0"]
    obey(scheduler)
    assert sorted(placed(scheduler)) == ["c", "prod"]
    scheduler.see("prod:0:0", ended())
    assert sorted(placed(scheduler)) == ["c", "g-a", "g-b"]
    assert scheduler.info("g-a").retries == {"preempted": 1}


def test_a_job_group_waits_for_its_victims_as_one() -> None:
    scheduler = make_cluster(cpu=2)
    scheduler.launch(batch("a"), batch("b"))
    scheduler.now = 100.0
    scheduler.launch_group("g", member("g-a", **PRODUCTION), member("g-b", **PRODUCTION))
    assert sorted(going(scheduler)) == ["a:0:0", "b:0:0"]
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    assert placed(scheduler) == ["b"]
    scheduler.see("b:0:0", ended(EndReason.PREEMPTED))
    assert sorted(placed(scheduler)) == ["g-a", "g-b"]


def test_many_production_jobs_preempt_one_job_each_without_waiting_for_one_another() -> None:
    scheduler = make_cluster(cpu=8)
    scheduler.launch(*(batch(f"b{index}") for index in range(8)))
    scheduler.now = 100.0
    scheduler.launch(*(production(f"p{index}") for index in range(5)))
    assert len(going(scheduler)) == 5
    obey(scheduler)
    assert sorted(placed(scheduler)) == sorted(["b0", "b1", "b2", *(f"p{index}" for index in range(5))])


# Taking back what is borrowed


def quotas(**cpus: int) -> Policy:
    terms = {user: TenantPolicy(quota=Amounts(cpu_milli=1000 * cpu)) for user, cpu in cpus.items()}
    return Policy(users=terms, preemption=Preemption(bands=()))


def of(user: str, count: int, first: int = 0, **more: object) -> list[JobSpec]:
    again = {"max_retries_preemption": 9}
    return [job(f"{user}{n}", demand(1), user=user, **(again | more)) for n in range(first, first + count)]  # type: ignore[arg-type]


def users(scheduler: Cluster) -> list[str]:
    """Return the users of the running jobs that are not being ended."""
    rows = [scheduler.state.jobs[name] for name in placed(scheduler)]
    return sorted(row.spec.user for row in rows if row.is_active)


def test_a_tenant_within_its_quota_reclaims_what_another_has_borrowed_and_no_more() -> None:
    scheduler = make_cluster(cpu=4)
    scheduler.tell(PolicyChanged(policy=quotas(alice=2, bob=2)))
    scheduler.launch(*of("alice", 4))
    scheduler.now = 100.0
    scheduler.launch(*of("bob", 3))
    assert users(scheduler) == ["alice", "alice"]
    obey(scheduler)
    assert users(scheduler) == ["alice", "alice", "bob", "bob"]
    scheduler.now = 300.0
    scheduler.tick(scheduler.now)
    assert going(scheduler) == []  # no tenant is beyond its quota: there is nothing to reclaim


def test_a_forecast_for_a_new_shape_says_that_it_would_take_back_what_is_borrowed() -> None:
    scheduler = make_cluster(cpu=4)
    scheduler.tell(PolicyChanged(policy=quotas(alice=2, bob=2)))
    scheduler.launch(*of("alice", 4))
    scheduler.now = 100.0
    scheduler.launch(job("x", demand(0)))
    assert len(what_if(scheduler.state, job("asked", demand(2), user="bob")).preempts) == 2
    assert not what_if(scheduler.state, job("asked", demand(3), user="bob")).preempts, "it would exceed bob's quota"


def test_no_tenant_is_pushed_below_its_quota_by_a_large_request() -> None:
    scheduler = make_cluster(cpu=4)
    scheduler.tell(PolicyChanged(policy=quotas(alice=3, bob=2)))
    scheduler.launch(*of("alice", 4))
    scheduler.now = 100.0
    scheduler.launch(job("bob", demand(2), user="bob"))
    assert going(scheduler) == []
    scheduler.launch(job("bobs", demand(1), user="bob"))
    assert len(going(scheduler)) == 1


def test_no_earlier_band_is_taken_back_from_for_a_later_one() -> None:
    scheduler = make_cluster(cpu=2)
    scheduler.tell(PolicyChanged(policy=quotas(alice=1, bob=1)))
    scheduler.launch(*of("alice", 2, band=Band.PRODUCTION))
    scheduler.now = 100.0
    scheduler.launch(*of("bob", 1))
    assert going(scheduler) == []
    scheduler.launch(*of("bob", 1, first=1, band=Band.PRODUCTION))
    assert len(going(scheduler)) == 1


def test_taking_back_has_the_same_shield_and_the_policy_can_forbid_it() -> None:
    scheduler = make_cluster(cpu=2)
    scheduler.tell(PolicyChanged(policy=quotas(alice=1, bob=1)))
    scheduler.launch(*of("alice", 2))
    scheduler.launch(*of("bob", 1))
    assert going(scheduler) == []
    scheduler.tick(65.0)
    assert len(going(scheduler)) == 1
    scheduler = make_cluster(cpu=2)
    scheduler.tell(PolicyChanged(policy=evolve(quotas(alice=1, bob=1), preemption=Preemption(bands=(), reclaim=False))))
    scheduler.launch(*of("alice", 2))
    scheduler.now = 100.0
    scheduler.launch(*of("bob", 1))
    assert going(scheduler) == []


# Machines that come without preemption


def test_surplus_of_a_reservation_is_released_before_any_job_is_preempted() -> None:
    scheduler = make_cluster(cpu=2)
    scheduler.launch(batch("work"))
    scheduler.reserve("r", demand(1), min_units=0, max_units=4)
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    assert going(scheduler) == []
    assert sorted(placed(scheduler)) == ["prod", "work"]


def test_a_machine_that_was_asked_for_just_now_is_waited_for_but_not_for_ever() -> None:
    group = GroupConfig(name="more", provider="command", max=1, cpu=1)
    scheduler = Cluster(policy=Policy(groups=(group,)))
    scheduler.driver()
    scheduler.tell(MachinesListed(provider="command", asked_at=0.0, machines=()))
    scheduler.node("n1", cpu=1)
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    scheduler.tick(103.0)
    assert going(scheduler) == []
    assert [unit.reason for unit in scheduler.state.fleet.units.values()] == ["for prod"]
    scheduler.tick(219.0)
    assert going(scheduler) == []
    scheduler.tick(226.0)
    assert going(scheduler) == ["work:0:0"]


# The invariants see what is wrong


def preempted(scheduler: Cluster) -> Cluster:
    scheduler.launch(batch("work"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    return scheduler


def test_a_job_that_is_ended_too_often_is_seen() -> None:
    scheduler = preempted(make_cluster(cpu=1))
    scheduler.state.jobs["work"].preempted_at = (90.0, 95.0, 100.0)
    assert any("was preempted 3 times in 3600 s" in sentence for sentence in check(scheduler.state))


def test_a_job_that_was_ended_often_under_an_earlier_policy_is_sound() -> None:
    scheduler = make_cluster(cpu=1, shield_s=0.0)
    scheduler.launch(batch("work"))
    for minute in (1, 2):
        scheduler.now = 60.0 * minute
        scheduler.launch(production(f"prod{minute}"))
        obey(scheduler)
        scheduler.see(f"prod{minute}:0:0", ended())
    assert scheduler.state.jobs["work"].preempted_at == (60.0, 120.0)
    scheduler.now = 180.0
    policy = scheduler.state.policy
    scheduler.tell(PolicyChanged(policy=evolve(policy, preemption=evolve(policy.preemption, limit=1))))
    assert check(scheduler.state) == []


def test_claims_without_an_applicant_or_without_victims_are_found() -> None:
    scheduler = preempted(make_cluster(cpu=1))
    claim = scheduler.state.claims["prod"]
    scheduler.state.claims["work"] = evolve(claim, applicant="work")
    assert any("has a claim, and does not wait" in sentence for sentence in check(scheduler.state))
    scheduler.state.claims = {"prod": evolve(claim, victims=())}
    assert any("shares of 0 victims" in sentence for sentence in check(scheduler.state))


def test_a_share_that_is_claimed_twice_is_found() -> None:
    scheduler = preempted(make_cluster(cpu=1))
    scheduler.launch(production("other"))
    scheduler.state.claims["other"] = evolve(scheduler.state.claims["prod"], applicant="other")
    assert any("claims more of n1 than there will be" in sentence for sentence in check(scheduler.state))


def test_a_job_beyond_its_time_is_seen() -> None:
    scheduler = make_cluster()
    scheduler.launch(batch("work", time_limit_s=10.0))
    scheduler.state.meta.now = 20.0
    assert any("runs beyond its time limit" in sentence for sentence in check(scheduler.state))


def test_a_job_does_not_preempt_its_own_band() -> None:
    scheduler = make_cluster(cpu=1)
    scheduler.launch(production("first"))
    scheduler.now = 100.0
    scheduler.launch(production("prod"))
    assert going(scheduler) == []
