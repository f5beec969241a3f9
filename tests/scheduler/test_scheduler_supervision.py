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
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=8)
    return scheduler


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


def fail(scheduler: Cluster, *attempts: str) -> None:
    for attempt in attempts:
        scheduler.now += 0.01
        scheduler.see(attempt, ended(EndReason.FAILURE, "boom"))


def test_the_back_off_doubles_up_to_its_limit() -> None:
    config = ActorConfig(backoff_s=0.5, backoff_max_s=3.0)
    assert [restart_delay_s(config, streak) for streak in (1, 2, 3, 4, 400)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_failures_and_lost_machines_of_an_actor_have_one_account(scheduler: Cluster) -> None:
    scheduler.launch(actor("a", max_restarts=2))
    fail(scheduler, "a:0:0")
    scheduler.node("n2", cpu=8)
    scheduler.die("n1")
    scheduler.run("a:2:0")
    fail(scheduler, "a:2:0")
    assert scheduler.info("a").state is JobState.FAILED
    assert "restarted 2 times" in (scheduler.info("a").error_message or "")


def test_an_actor_that_may_always_restart_does(scheduler: Cluster) -> None:
    scheduler.launch(actor("a", max_restarts=-1))
    fail(scheduler, *(f"a:{generation}:0" for generation in range(200)))
    assert scheduler.info("a").state is JobState.PENDING


def test_an_actor_that_must_start_and_does_not_is_not_restarted_but_is_after_later_failures(scheduler: Cluster) -> None:
    broken = ended(EndReason.FAILURE, "OSError: no weights", constructing=True)
    for name, must_start in (("a", True), ("b", False)):
        scheduler.launch(actor(name, max_restarts=-1, must_start=must_start))
        scheduler.see(f"{name}:0:0", broken)
    assert (scheduler.info("a").state, scheduler.info("b").state) == (JobState.FAILED, JobState.PENDING)
    assert scheduler.info("a").error_message == "OSError: no weights"
    restarted = scheduler.state.jobs["b"]
    restarted.spec = evolve(restarted.spec, actor=ActorConfig(max_restarts=-1, must_start=True))
    assert "although its constructor had raised OSError: no weights" in "; ".join(check(scheduler.state))
    restarted.spec = evolve(restarted.spec, actor=ActorConfig(max_restarts=-1))
    scheduler.launch(actor("c", max_restarts=-1, must_start=True))
    fail(scheduler, "c:0:0")  # it was made, and died
    scheduler.see("c:1:0", broken)
    assert scheduler.info("c").state is JobState.PENDING


def test_an_actor_whose_environment_is_wrong_is_not_restarted(scheduler: Cluster) -> None:
    scheduler.launch(actor("a", max_restarts=-1))
    scheduler.see("a:0:0", ended(EndReason.ENVIRONMENT, "no such module"))
    assert scheduler.info("a").error_message == "no such module"


def test_the_failure_of_each_strategy_takes_those_it_names(scheduler: Cluster) -> None:
    expected = {
        SupervisionStrategy.ONE_FOR_ONE: {1: False},
        SupervisionStrategy.ONE_FOR_ALL: {0: True, 2: True},
        SupervisionStrategy.REST_FOR_ONE: {0: False, 2: True},
    }
    for strategy, stopped in expected.items():
        scheduler.launch(*group(strategy, name=strategy.value))
        scheduler.run(*(f"{strategy.value}{index}:0:0" for index in range(3)))
        fail(scheduler, f"{strategy.value}1:0:0")
        wished = scheduler.desired()
        for index, stop in stopped.items():
            generation = 1 if index == 1 else 0
            assert wished[f"{strategy.value}{index}:{generation}:0"] is stop


def test_a_restart_with_a_sibling_costs_nothing(scheduler: Cluster) -> None:
    scheduler.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2))
    for generation in range(2):
        scheduler.run(f"g0:{generation}:0", f"g1:{generation}:0")
        fail(scheduler, f"g0:{generation}:0")
        scheduler.see(f"g1:{generation}:0", ended(EndReason.SIBLING))
    scheduler.run("g0:2:0", "g1:2:0")
    assert scheduler.state.jobs["g1"].retries == {EndReason.SIBLING: 2}
    fail(scheduler, "g1:2:0")
    assert scheduler.states("g0", "g1") == [JobState.RUNNING, JobState.FAILED]
    scheduler.see("g0:2:0", ended(EndReason.SIBLING))
    assert scheduler.info("g0").cause is EndReason.SIBLING


def test_a_sibling_that_fails_while_it_is_being_ended_is_no_second_setback(scheduler: Cluster) -> None:
    scheduler.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2, max_restarts=1))
    scheduler.run("g0:0:0", "g1:0:0")
    fail(scheduler, "g0:0:0", "g1:0:0")
    assert scheduler.desired() == {"g0:1:0": False, "g1:1:0": False}


def test_a_waiting_member_begins_with_the_others(scheduler: Cluster) -> None:
    """A sibling that has no machine yet is kept from starting in between."""
    specs = group(SupervisionStrategy.ONE_FOR_ALL, 2)
    scheduler.launch(
        specs[0], job("g1", demand(99), entry=EntryKind.ACTOR, actor=specs[1].actor, siblings=specs[1].siblings)
    )
    scheduler.run("g0:0:0")
    fail(scheduler, "g0:0:0")
    assert scheduler.states("g0", "g1") == [JobState.PENDING, JobState.PENDING]
    assert scheduler.desired() == {"g0:1:0": False}


def test_a_member_that_ends_in_order_leaves_the_others(scheduler: Cluster) -> None:
    scheduler.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2))
    scheduler.run("g0:0:0", "g1:0:0")
    scheduler.see("g0:0:0", ended())
    assert scheduler.desired() == {"g1:0:0": False}
    fail(scheduler, "g1:0:0")
    assert scheduler.desired() == {"g1:1:0": False}


def test_an_owner_that_ends_while_a_group_restarts_ends_it(scheduler: Cluster) -> None:
    scheduler.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 3, backoff_s=5.0))
    scheduler.run("g0:0:0", "g1:0:0", "g2:0:0")
    fail(scheduler, "g0:0:0")
    scheduler.see("g1:0:0", ended(EndReason.SIBLING))
    scheduler.close()
    scheduler.see("g2:0:0", ended(EndReason.SIBLING))
    assert [scheduler.info(f"g{index}").cause for index in range(3)] == [EndReason.OWNER_ENDED] * 3
    assert scheduler.state.next_deadline() is None


def test_a_sibling_on_a_silent_machine_is_waited_for_until_proof(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=8)
    specs = group(SupervisionStrategy.ONE_FOR_ALL, 2)
    scheduler.launch(*specs)
    assert {a.node for a in scheduler.state.attempts.values()} == {"n1", "n2"}
    scheduler.run("g0:0:0", "g1:0:0")
    scheduler.silence("n2")
    scheduler.tick()
    first = next(a for a in scheduler.state.attempts.values() if a.node == "n1")
    fail(scheduler, first.attempt_id)
    assert "restarts with its siblings" in scheduler.info(first.job_id).reason
    scheduler.die("n2")
    assert set(scheduler.desired("n1")) == {"g0:1:0", "g1:1:0"}


def test_a_group_survives_a_restart_of_the_controller(scheduler: Cluster) -> None:
    scheduler.launch(*group(SupervisionStrategy.ONE_FOR_ALL, 2))
    scheduler.run("g0:0:0", "g1:0:0")
    fail(scheduler, "g0:0:0")
    scheduler.restart()
    scheduler.node("n1")
    scheduler.report("n1", [("g1:0:0", Phase.STOPPING)], full=True)
    scheduler.see("g1:0:0", ended(EndReason.SIBLING))
    assert set(scheduler.desired()) == {"g0:1:0", "g1:1:0"}


def test_a_group_is_launched_together_and_once(scheduler: Cluster) -> None:
    specs = group(SupervisionStrategy.ONE_FOR_ALL, 2)
    for bad in ([specs[1]], [*specs, actor("x")], [specs[0], job("y", siblings=specs[1].siblings)]):
        with pytest.raises(InvalidRequest, match="supervised group 'g'"):
            scheduler.launch(*bad)
    scheduler.launch(*specs)
    scheduler.launch(*specs)
    with pytest.raises(InvalidRequest, match="supervised group 'g'"):
        scheduler.launch(*(job(f"z{i}", entry=EntryKind.ACTOR, siblings=s.siblings) for i, s in enumerate(specs)))


def test_a_held_job_that_no_longer_fits_any_declared_machine_ends_at_the_restart() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=8)
    scheduler.launch(job("a", demand(8), entry=EntryKind.ACTOR, actor=ActorConfig(max_restarts=3, backoff_s=9.0)))
    fail(scheduler, "a:0:0")
    small = NodeHello(node="n1", incarnation="i1", boot_id="b", capacity=capacity(4))
    scheduler.node("n1", incarnation="i2", cpu=4)
    scheduler.restart(declares_all_nodes=True, declared=(small,))
    assert scheduler.info("a").cause is EndReason.UNSCHEDULABLE
    assert scheduler.state.next_deadline() is not None  # the node's silence alone
