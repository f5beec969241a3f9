"""Restarts, back-off and strategies: what the transcripts do not tell."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.messages.node import NodeHello
from fray.model.restart_policy import restart_delay_s
from fray.model.specs import (
    ActorConfig,
    EndReason,
    EntryKind,
    JobSpec,
    JobState,
    Phase,
    SupervisedGroup,
    SupervisionStrategy,
)
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, capacity, demand, ended, job


@pytest.fixture
def law() -> Cluster:
    law = Cluster()
    law.driver()
    law.node("n1", cpu=8)
    return law


def actor(name: str, **config: Any) -> JobSpec:
    return job(name, demand(0), entry=EntryKind.ACTOR, actor=ActorConfig(**config))


def group(strategy: SupervisionStrategy, count: int = 3, name: str = "g", **config: Any) -> list[JobSpec]:
    config = {"max_restarts": 2, "restart_period_s": 60.0} | config
    return [
        job(
            f"{name}{index}",
            demand(0),
            entry=EntryKind.ACTOR,
            actor=ActorConfig(**config),
            siblings=SupervisedGroup(group_id=name, strategy=strategy, index=index),
        )
        for index in range(count)
    ]


def fail(law: Cluster, *attempts: str) -> None:
    for attempt in attempts:
        law.now += 0.01
        law.see(attempt, ended(EndReason.FAILURE, "boom"))


def test_the_back_off_doubles_up_to_its_limit() -> None:
    config = ActorConfig(backoff_s=0.5, backoff_max_s=3.0)
    assert [restart_delay_s(config, streak) for streak in (1, 2, 3, 4, 400)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_failures_and_lost_machines_of_an_actor_have_one_account(law: Cluster) -> None:
    law.launch(actor("a", max_restarts=2))
    fail(law, "a:0:0")
    law.node("n2", cpu=8)
    law.die("n1")
    law.run("a:2:0")
    fail(law, "a:2:0")
    assert law.info("a").state is JobState.FAILED
    assert "restarted 2 times" in (law.info("a").error_message or "")


def test_an_actor_that_may_always_restart_does(law: Cluster) -> None:
    law.launch(actor("a", max_restarts=-1))
    fail(law, *(f"a:{generation}:0" for generation in range(200)))
    assert law.info("a").state is JobState.PENDING


def test_an_actor_that_must_start_and_does_not_is_not_made_anew_and_later_failures_are(law: Cluster) -> None:
    broken = ended(EndReason.FAILURE, "OSError: no weights", constructing=True)
    for name, must_start in (("a", True), ("b", False)):
        law.launch(actor(name, max_restarts=-1, must_start=must_start))
        law.see(f"{name}:0:0", broken)
    assert (law.info("a").state, law.info("b").state) == (JobState.FAILED, JobState.PENDING)
    assert law.info("a").error_message == "OSError: no weights"
    made_anew = law.state.jobs["b"]
    made_anew.spec = evolve(made_anew.spec, actor=ActorConfig(max_restarts=-1, must_start=True))
    assert "although its constructor had raised OSError: no weights" in "; ".join(check(law.state))
    made_anew.spec = evolve(made_anew.spec, actor=ActorConfig(max_restarts=-1))
    law.launch(actor("c", max_restarts=-1, must_start=True))
    fail(law, "c:0:0")  # it was made, and died
    law.see("c:1:0", broken)
    assert law.info("c").state is JobState.PENDING


def test_an_actor_whose_environment_is_wrong_is_not_made_anew(law: Cluster) -> None:
    law.launch(actor("a", max_restarts=-1))
    law.see("a:0:0", ended(EndReason.ENVIRONMENT, "no such module"))
    assert law.info("a").error_message == "no such module"


def test_the_failure_of_each_strategy_takes_those_it_names(law: Cluster) -> None:
    expected = {
        SupervisionStrategy.ONE_FOR_ONE: {1: False},
        SupervisionStrategy.ONE_FOR_ALL: {0: True, 2: True},
        SupervisionStrategy.REST_FOR_ONE: {0: False, 2: True},
    }
    for strategy, stopped in expected.items():
        law.launch(*group(strategy, name=strategy.value))
        law.run(*(f"{strategy.value}{index}:0:0" for index in range(3)))
        fail(law, f"{strategy.value}1:0:0")
        wished = law.wished()
        for index, stop in stopped.items():
            generation = 1 if index == 1 else 0
            assert wished[f"{strategy.value}{index}:{generation}:0"] is stop


def test_a_restart_with_a_sibling_costs_nothing(law: Cluster) -> None:
    law.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2))
    for generation in range(2):
        law.run(f"g0:{generation}:0", f"g1:{generation}:0")
        fail(law, f"g0:{generation}:0")
        law.see(f"g1:{generation}:0", ended(EndReason.SIBLING))
    law.run("g0:2:0", "g1:2:0")
    assert law.state.jobs["g1"].retries == {EndReason.SIBLING: 2}
    fail(law, "g1:2:0")
    assert law.states("g0", "g1") == [JobState.RUNNING, JobState.FAILED]
    law.see("g0:2:0", ended(EndReason.SIBLING))
    assert law.info("g0").cause is EndReason.SIBLING


def test_a_sibling_that_fails_while_it_is_being_ended_is_no_second_setback(law: Cluster) -> None:
    law.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2, max_restarts=1))
    law.run("g0:0:0", "g1:0:0")
    fail(law, "g0:0:0", "g1:0:0")
    assert law.wished() == {"g0:1:0": False, "g1:1:0": False}


def test_a_waiting_member_begins_with_the_others(law: Cluster) -> None:
    """A sibling that has no machine yet is kept from starting in between."""
    specs = group(SupervisionStrategy.ONE_FOR_ALL, 2)
    law.launch(specs[0], job("g1", demand(99), entry=EntryKind.ACTOR, actor=specs[1].actor, siblings=specs[1].siblings))
    law.run("g0:0:0")
    fail(law, "g0:0:0")
    assert law.states("g0", "g1") == [JobState.PENDING, JobState.PENDING]
    assert law.wished() == {"g0:1:0": False}


def test_a_member_that_ends_in_order_leaves_the_others(law: Cluster) -> None:
    law.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2))
    law.run("g0:0:0", "g1:0:0")
    law.see("g0:0:0", ended())
    assert law.wished() == {"g1:0:0": False}
    fail(law, "g1:0:0")
    assert law.wished() == {"g1:1:0": False}


def test_an_owner_that_ends_while_a_group_begins_anew_ends_it(law: Cluster) -> None:
    law.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 3, backoff_s=5.0))
    law.run("g0:0:0", "g1:0:0", "g2:0:0")
    fail(law, "g0:0:0")
    law.see("g1:0:0", ended(EndReason.SIBLING))
    law.close()
    law.see("g2:0:0", ended(EndReason.SIBLING))
    assert [law.info(f"g{index}").cause for index in range(3)] == [EndReason.OWNER_ENDED] * 3
    assert law.state.next_deadline() is None


def test_a_sibling_on_a_silent_machine_is_waited_for_until_proof(law: Cluster) -> None:
    law.node("n2", cpu=8)
    specs = group(SupervisionStrategy.ONE_FOR_ALL, 2)
    law.launch(*specs)
    assert {a.node for a in law.state.attempts.values()} == {"n1", "n2"}
    law.run("g0:0:0", "g1:0:0")
    law.silence("n2")
    law.tick()
    first = next(a for a in law.state.attempts.values() if a.node == "n1")
    fail(law, first.attempt_id)
    assert "begins anew with its siblings" in law.info(first.job_id).reason
    law.die("n2")
    assert set(law.wished("n1")) == {"g0:1:0", "g1:1:0"}


def test_a_group_survives_a_restart_of_the_controller(law: Cluster) -> None:
    law.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2))
    law.run("g0:0:0", "g1:0:0")
    fail(law, "g0:0:0")
    law.restart()
    law.node("n1")
    law.report("n1", [("g1:0:0", Phase.STOPPING)], full=True)
    law.see("g1:0:0", ended(EndReason.SIBLING))
    assert set(law.wished()) == {"g0:1:0", "g1:1:0"}


def test_a_group_is_launched_together_and_once(law: Cluster) -> None:
    specs = group(SupervisionStrategy.ONE_FOR_ALL, 2)
    for bad in ([specs[1]], [*specs, actor("x")], [specs[0], job("y", siblings=specs[1].siblings)]):
        with pytest.raises(InvalidRequest, match="supervised group 'g'"):
            law.launch(*bad)
    law.launch(*specs)
    law.launch(*specs)
    with pytest.raises(InvalidRequest, match="supervised group 'g'"):
        law.launch(*(job(f"z{i}", entry=EntryKind.ACTOR, siblings=s.siblings) for i, s in enumerate(specs)))


def test_a_held_job_that_no_longer_fits_any_declared_machine_ends_at_the_restart() -> None:
    law = Cluster()
    law.driver()
    law.node("n1", cpu=8)
    law.launch(job("a", demand(8), entry=EntryKind.ACTOR, actor=ActorConfig(max_restarts=3, backoff_s=9.0)))
    fail(law, "a:0:0")
    small = NodeHello(node="n1", incarnation="i1", boot_id="b", capacity=capacity(4))
    law.node("n1", incarnation="i2", cpu=4)
    law.restart(declares_all_nodes=True, declared=(small,))
    assert law.info("a").cause is EndReason.UNSCHEDULABLE
    assert law.state.next_deadline() is not None  # the node's silence alone
