"""Who makes room for whom in the law: seldom, whole, for somebody who then really comes."""

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
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job, member, placed

BATCH, PRODUCTION = {"band": Band.BATCH, "max_retries_preemption": 9}, {"band": Band.PRODUCTION}


def a_law(cpu: float = 4, **preemption: object) -> Cluster:
    law = Cluster(policy=Policy(preemption=Preemption(**preemption)))  # type: ignore[arg-type]
    law.driver()
    law.node("n1", cpu=cpu)
    return law


def batch(name: str, cpu: float = 1, **more: object) -> JobSpec:
    return job(name, demand(cpu), **(BATCH | more))  # type: ignore[arg-type]


def production(name: str, cpu: float = 1, **more: object) -> JobSpec:
    return job(name, demand(cpu), **(PRODUCTION | more))  # type: ignore[arg-type]


def going(law: Cluster) -> list[str]:
    """Attempts that are being ended."""
    return [attempt.attempt_id for attempt in law.state.attempts.values() if attempt.living and attempt.stop_cause]


def obey(law: Cluster) -> None:
    """Whatever is being ended, ends."""
    for attempt_id in going(law):
        law.see(attempt_id, ended(EndReason.PREEMPTED))


def test_production_takes_the_place_of_batch_and_batch_comes_back() -> None:
    law = a_law(cpu=1)
    law.launch(batch("work"))
    law.now = 60.0
    law.launch(production("prod"))
    assert going(law) == ["work:0:0"]
    obey(law)
    assert placed(law) == ["prod"]
    assert law.info("work").state is JobState.PENDING
    law.see("prod:0:0", ended())
    assert placed(law) == ["work"]
    assert law.info("work").retries == {"preempted": 1}


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
    law = Cluster()
    law.driver()
    law.node("n1", cpu=1)
    law.tell(PolicyChanged(policy=Policy(users={"*": TenantPolicy(bands=tuple(Band))})))
    law.launch(job("old", demand(1), band=victim))
    law.now = 100.0
    law.launch(job("new", demand(1), band=band))
    assert bool(going(law)) is taken


def test_the_policy_says_who_may_and_whether_anybody_may() -> None:
    law = a_law(cpu=1, bands=(Band.INTERACTIVE,))
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(job("mine", demand(1)))
    assert going(law) == ["work:0:0"]
    law = a_law(cpu=1, enabled=False)
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(production("prod"))
    assert going(law) == []


def test_twice_an_hour_and_no_more() -> None:
    law = a_law(cpu=1, shield_s=0.0)
    law.launch(batch("work"))
    times = 0
    for minute in range(1, 60):
        law.now = 60.0 * minute
        law.tick(law.now)
        law.launch(production(f"prod{minute}"))
        times += bool(going(law))
        obey(law)
        for name in [name for name in placed(law) if name != "work"]:
            law.see(f"{name}:0:0", ended())
    assert times == 2
    assert law.state.jobs["work"].preempted_at == (60.0, 120.0)


def test_a_kind_of_job_that_was_refused_before_is_looked_at_again_for_one_of_an_earlier_band() -> None:
    law = a_law(cpu=1)
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(job("mine", demand(1)))
    assert going(law) == []
    law.launch(production("prod"))
    assert going(law) == ["work:0:0"]


def test_what_is_left_is_kept_for_whom_it_was_left_and_no_second_round_follows() -> None:
    law = a_law(cpu=2)
    law.launch(batch("a"), batch("b"))
    law.now = 100.0
    law.launch(production("prod", 2))
    law.see("a:0:0", ended(EndReason.PREEMPTED))
    law.launch(production("small", 1), job("any", demand(1)))
    assert placed(law) == ["b"]
    law.see("b:0:0", ended(EndReason.PREEMPTED))
    assert placed(law) == ["prod"]
    assert law.state.claims == {}


def test_a_claim_ends_with_whoever_has_it() -> None:
    law = a_law(cpu=1)
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(production("prod"), job("any", demand(1)))
    law.terminate("prod")
    assert law.state.claims == {}
    obey(law)
    assert placed(law) == ["any"]


def test_a_claim_of_a_machine_that_is_gone_is_given_up_and_others_make_room() -> None:
    law = a_law(cpu=1)
    law.launch(batch("one"))
    law.node("n2", cpu=1)
    law.launch(batch("two"))
    law.now = 100.0
    law.launch(production("prod"))
    (first,) = going(law)
    law.die(law.state.attempts[first].node)
    assert len(going(law)) == 1
    assert going(law) != [first]
    obey(law)
    assert "prod" in placed(law)


def test_devices_that_what_is_left_of_a_victim_still_holds_are_waited_for_and_not_for_ever() -> None:
    law = Cluster(policy=Policy(preemption=Preemption()))
    law.driver()
    law.node("n1", gpu="h100")
    law.node("n2", gpu="h100")
    law.launch(job("one", demand(gpu=1), **BATCH), job("two", demand(gpu=1), **BATCH))  # type: ignore[arg-type]
    law.now = 100.0
    law.launch(job("prod", demand(gpu=1), **PRODUCTION))  # type: ignore[arg-type]
    (first,) = going(law)
    law.see(first, ended(EndReason.PREEMPTED), busy={"gpu-0": "held by process 7"})
    law.now = 130.0
    law.launch(job("other", demand(gpu=1), **BATCH))  # type: ignore[arg-type]
    assert going(law) == []  # the devices will come, nobody else has to go for them
    law.tick()
    assert law.now == 160.0
    assert len(going(law)) == 1
    assert going(law) != [first]
    obey(law)
    assert "prod" in placed(law)


def test_who_is_to_start_soon_anyway_takes_nobodys_place() -> None:
    law = a_law(cpu=2)
    law.launch(batch("ends", time_limit_s=110.0), batch("goes on"))
    law.now = 100.0
    law.launch(production("prod"))
    assert going(law) == []
    law.tick(110.0)
    assert going(law) == ["ends:0:0"]  # for its time
    law.see("ends:0:0", ended(EndReason.TIME_LIMIT))
    assert placed(law) == ["goes on", "prod"]


def test_whoever_is_done_when_he_is_asked_to_end_is_done() -> None:
    law = a_law(cpu=1)
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(production("prod"))
    law.see("work:0:0", ended())
    assert law.info("work").state is JobState.SUCCEEDED
    assert placed(law) == ["prod"]


def test_a_victim_that_somebody_ends_meanwhile_does_not_come_back() -> None:
    law = a_law(cpu=1)
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(production("prod"))
    law.terminate("work")
    obey(law)
    assert law.info("work").state is JobState.STOPPED
    assert placed(law) == ["prod"]


def test_a_job_without_a_budget_for_it_ends_as_preempted() -> None:
    law = a_law(cpu=1)
    law.launch(batch("once", max_retries_preemption=0))
    law.now = 100.0
    law.launch(production("prod"))
    obey(law)
    info = law.info("once")
    assert (info.state, info.cause) == (JobState.FAILED, EndReason.PREEMPTED)
    assert info.error_message is not None
    assert info.error_message.startswith("for prod (production)")


def test_an_actor_that_is_preempted_has_not_failed() -> None:
    law = a_law(cpu=1)
    config = ActorConfig(max_restarts=0)
    law.launch(batch("actor", entry=EntryKind.ACTOR, actor=config, max_retries_preemption=0))
    law.now = 100.0
    law.launch(production("prod"))
    obey(law)
    assert law.info("actor").state is JobState.PENDING
    law.see("prod:0:0", ended())
    assert placed(law) == ["actor"]
    assert law.state.jobs["actor"].restart_times == ()
    law.see("actor:1:0", ended(EndReason.FAILURE))
    assert law.info("actor").state is JobState.FAILED


def test_siblings_begin_anew_with_a_preempted_one_as_their_strategy_says() -> None:
    law = a_law(cpu=2)
    config = ActorConfig(max_restarts=0)
    siblings = [
        SupervisedGroup(group_id="g", strategy=SupervisionStrategy.ONE_FOR_ALL, index=index) for index in range(2)
    ]
    law.launch(*(batch(f"g{one.index}", entry=EntryKind.ACTOR, actor=config, siblings=one) for one in siblings))
    law.now = 100.0
    law.launch(production("prod"))
    assert len(going(law)) == 1
    obey(law)
    assert len(going(law)) == 1
    for attempt_id in going(law):
        law.see(attempt_id, ended(EndReason.SIBLING))
    law.see("prod:0:0", ended())
    assert sorted(placed(law)) == ["g0", "g1"]


def test_a_job_group_goes_as_a_whole_or_not_at_all() -> None:
    law = a_law(cpu=3)
    law.launch_group("g", member("g-a", **BATCH), member("g-b", **BATCH))
    law.launch(batch("c"))
    law.now = 100.0
    law.launch(production("prod", 2))
    assert sorted(going(law)) == ["g-a:0:0", "g-b:0:0"]
    obey(law)
    assert sorted(placed(law)) == ["c", "prod"]
    law.see("prod:0:0", ended())
    assert sorted(placed(law)) == ["c", "g-a", "g-b"]
    assert law.info("g-a").retries == {"preempted": 1}


def test_a_job_group_waits_for_its_victims_as_one() -> None:
    law = a_law(cpu=2)
    law.launch(batch("a"), batch("b"))
    law.now = 100.0
    law.launch_group("g", member("g-a", **PRODUCTION), member("g-b", **PRODUCTION))
    assert sorted(going(law)) == ["a:0:0", "b:0:0"]
    law.see("a:0:0", ended(EndReason.PREEMPTED))
    assert placed(law) == ["b"]
    law.see("b:0:0", ended(EndReason.PREEMPTED))
    assert sorted(placed(law)) == ["g-a", "g-b"]


def test_each_of_many_production_jobs_takes_one_place_in_its_turn_and_none_waits_for_the_one_before() -> None:
    law = a_law(cpu=8)
    law.launch(*(batch(f"b{index}") for index in range(8)))
    law.now = 100.0
    law.launch(*(production(f"p{index}") for index in range(5)))
    assert len(going(law)) == 5
    obey(law)
    assert sorted(placed(law)) == sorted(["b0", "b1", "b2", *(f"p{index}" for index in range(5))])


# Taking back what is borrowed


def quotas(**cpus: int) -> Policy:
    terms = {user: TenantPolicy(quota=Amounts(cpu_milli=1000 * cpu)) for user, cpu in cpus.items()}
    return Policy(users=terms, preemption=Preemption(bands=()))


def of(user: str, count: int, first: int = 0, **more: object) -> list[JobSpec]:
    again = {"max_retries_preemption": 9}
    return [job(f"{user}{n}", demand(1), user=user, **(again | more)) for n in range(first, first + count)]  # type: ignore[arg-type]


def users(law: Cluster) -> list[str]:
    """Whose jobs run, and are not being ended."""
    rows = [law.state.jobs[name] for name in placed(law)]
    return sorted(row.spec.user for row in rows if row.is_active)


def test_who_is_within_his_quota_takes_back_what_another_has_borrowed_and_no_more() -> None:
    law = a_law(cpu=4)
    law.tell(PolicyChanged(policy=quotas(alice=2, bob=2)))
    law.launch(*of("alice", 4))
    law.now = 100.0
    law.launch(*of("bob", 3))
    assert users(law) == ["alice", "alice"]
    obey(law)
    assert users(law) == ["alice", "alice", "bob", "bob"]
    law.now = 300.0
    law.tick(law.now)
    assert going(law) == []  # nobody is beyond his quota: there is nothing to take back


def test_nobody_is_pushed_below_his_quota_by_one_who_needs_much_at_once() -> None:
    law = a_law(cpu=4)
    law.tell(PolicyChanged(policy=quotas(alice=3, bob=2)))
    law.launch(*of("alice", 4))
    law.now = 100.0
    law.launch(job("bob", demand(2), user="bob"))
    assert going(law) == []
    law.launch(job("bobs", demand(1), user="bob"))
    assert len(going(law)) == 1


def test_no_earlier_band_is_taken_back_from_for_a_later_one() -> None:
    law = a_law(cpu=2)
    law.tell(PolicyChanged(policy=quotas(alice=1, bob=1)))
    law.launch(*of("alice", 2, band=Band.PRODUCTION))
    law.now = 100.0
    law.launch(*of("bob", 1))
    assert going(law) == []
    law.launch(*of("bob", 1, first=1, band=Band.PRODUCTION))
    assert len(going(law)) == 1


def test_taking_back_has_the_same_shield_and_the_policy_can_forbid_it() -> None:
    law = a_law(cpu=2)
    law.tell(PolicyChanged(policy=quotas(alice=1, bob=1)))
    law.launch(*of("alice", 2))
    law.launch(*of("bob", 1))
    assert going(law) == []
    law.tick(65.0)
    assert len(going(law)) == 1
    law = a_law(cpu=2)
    law.tell(PolicyChanged(policy=evolve(quotas(alice=1, bob=1), preemption=Preemption(bands=(), reclaim=False))))
    law.launch(*of("alice", 2))
    law.now = 100.0
    law.launch(*of("bob", 1))
    assert going(law) == []


# What comes without anybody's end


def test_what_a_reservation_has_beyond_its_minimum_is_given_back_before_anybody_is_ended() -> None:
    law = a_law(cpu=2)
    law.launch(batch("work"))
    law.reserve("r", demand(1), min_units=0, max_units=4)
    law.now = 100.0
    law.launch(production("prod"))
    assert going(law) == []
    assert sorted(placed(law)) == ["prod", "work"]


def test_a_machine_that_was_asked_for_just_now_is_waited_for_but_not_for_ever() -> None:
    group = GroupConfig(name="more", provider="command", max=1, cpu=1)
    law = Cluster(policy=Policy(groups=(group,)))
    law.driver()
    law.tell(MachinesListed(provider="command", asked_at=0.0, machines=()))
    law.node("n1", cpu=1)
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(production("prod"))
    law.tick(103.0)
    assert going(law) == []
    assert [unit.reason for unit in law.state.fleet.units.values()] == ["for prod"]
    law.tick(219.0)
    assert going(law) == []
    law.tick(226.0)
    assert going(law) == ["work:0:0"]


# The invariants see what is wrong


def preempted(law: Cluster) -> Cluster:
    law.launch(batch("work"))
    law.now = 100.0
    law.launch(production("prod"))
    return law


def test_a_job_that_is_ended_too_often_is_seen() -> None:
    law = preempted(a_law(cpu=1))
    law.state.jobs["work"].preempted_at = (90.0, 95.0, 100.0)
    assert any("was preempted 3 times in 3600 s" in sentence for sentence in check(law.state))


def test_a_claim_of_nobody_and_one_for_nothing_are_seen() -> None:
    law = preempted(a_law(cpu=1))
    claim = law.state.claims["prod"]
    law.state.claims["work"] = evolve(claim, applicant="work")
    assert any("has a claim, and does not wait" in sentence for sentence in check(law.state))
    law.state.claims = {"prod": evolve(claim, victims=())}
    assert any("shares of 0 victims" in sentence for sentence in check(law.state))


def test_one_share_that_is_claimed_twice_is_seen() -> None:
    law = preempted(a_law(cpu=1))
    law.launch(production("other"))
    law.state.claims["other"] = evolve(law.state.claims["prod"], applicant="other")
    assert any("claims more of n1 than there will be" in sentence for sentence in check(law.state))


def test_a_job_beyond_its_time_is_seen() -> None:
    law = a_law()
    law.launch(batch("work", time_limit_s=10.0))
    law.state.meta.now = 20.0
    assert any("runs on, though its time was over" in sentence for sentence in check(law.state))


def test_nobody_takes_the_place_of_his_own_band() -> None:
    law = a_law(cpu=1)
    law.launch(production("first"))
    law.now = 100.0
    law.launch(production("prod"))
    assert going(law) == []
