"""Requeue: a running job ends on request of a person and waits again, which costs none of its retries."""

from __future__ import annotations

from typing import Any

import pytest

from fray.model.messages.client import RequeueResult
from fray.model.specs import ActorConfig, EndReason, EntryKind, JobState, Phase, SupervisedGroup, SupervisionStrategy
from fray.scheduler.effects import Effect, EventRecorded, Reply, RequeueRequested
from fray.scheduler.explain.explain import explain
from tests.support.scheduler import Cluster, ended, job, placed


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=1)
    return scheduler


def runs(scheduler: Cluster, name: str, **more: Any) -> None:
    scheduler.launch(job(name, **{"max_retries_preemption": 5} | more))
    scheduler.run(f"{name}:0:0")


def ask(scheduler: Cluster, reason: str = "why", **generations: int) -> list[Effect]:
    event = RequeueRequested(session="d", ref=scheduler.ref(), generations=generations, reason=reason)
    return scheduler.tell(event)


def requeue(scheduler: Cluster, **generations: int) -> RequeueResult:
    (answer,) = [effect.message for effect in ask(scheduler, **generations) if isinstance(effect, Reply)]
    assert isinstance(answer, RequeueResult)
    return answer


def test_a_requeued_job_ends_waits_at_its_place_and_runs_again_at_no_cost(scheduler: Cluster) -> None:
    runs(scheduler, "a", max_retries_failure=0, max_retries_preemption=1)
    scheduler.launch(job("b"))
    answer = requeue(scheduler, a=0)
    assert (answer.jobs, answer.refused) == (("a",), {})
    assert scheduler.desired("n1") == {"a:0:0": True}
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    # Before `b`, which was launched later.
    assert placed(scheduler) == ["a"]
    scheduler.run("a:1:0")
    assert scheduler.info("a").retries == {"requeue": 1}
    requeue(scheduler, a=1)
    scheduler.see("a:1:0", ended(EndReason.PREEMPTED))
    assert scheduler.info("a").retries == {"requeue": 2}
    # Its own failure counts as before.
    scheduler.run("a:2:0")
    scheduler.see("a:2:0", ended(EndReason.FAILURE, "boom"))
    assert scheduler.info("a").state is JobState.FAILED


def test_a_repeated_request_has_no_second_effect_and_the_same_answer(scheduler: Cluster) -> None:
    runs(scheduler, "a")
    first = requeue(scheduler, a=0)
    assert requeue(scheduler, a=0) == first
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    scheduler.run("a:1:0")
    scheduler.restart()
    scheduler.node("n1", holds=("a:1:0",), cpu=1)
    assert requeue(scheduler, a=0) == first
    assert scheduler.info("a").retries == {"requeue": 1}
    assert scheduler.info("a").state is JobState.RUNNING


def test_what_cannot_be_requeued_is_said(scheduler: Cluster) -> None:
    runs(scheduler, "a")
    scheduler.launch(job("waits"))
    refused = requeue(scheduler, a=3, waits=0, unknown=0).refused
    assert refused == {
        "a": "attempt 3 has ended, and attempt 0 runs",
        "waits": "it is pending, and only what runs can be requeued",
        "unknown": "it is not on record",
    }
    scheduler.terminate("a")
    assert requeue(scheduler, a=0).refused == {"a": "it is ending already, and only what runs can be requeued"}
    scheduler.see("a:0:0", ended(EndReason.STOPPED))
    assert requeue(scheduler, a=0).refused == {"a": "it is stopped, and only what runs can be requeued"}


@pytest.mark.parametrize(
    "what",
    [
        {"max_retries_preemption": 0},
        {"entry": EntryKind.ACTOR, "actor": ActorConfig(), "max_retries_preemption": 0},
    ],
)
def test_a_job_that_may_not_run_again_is_left_alone(scheduler: Cluster, what: dict[str, Any]) -> None:
    runs(scheduler, "once", **what)
    assert "its author allows no restart" in requeue(scheduler, once=0).refused["once"]
    assert scheduler.info("once").state is JobState.RUNNING


def test_a_job_that_is_stopped_while_it_is_requeued_is_stopped(scheduler: Cluster) -> None:
    runs(scheduler, "a")
    requeue(scheduler, a=0)
    scheduler.terminate("a")
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    assert scheduler.info("a").state is JobState.STOPPED


def test_a_job_that_is_done_before_it_notices_has_succeeded(scheduler: Cluster) -> None:
    runs(scheduler, "a")
    requeue(scheduler, a=0)
    scheduler.see("a:0:0", ended())
    assert scheduler.info("a").state is JobState.SUCCEEDED


def test_a_requeued_job_on_a_silent_machine_waits_for_proof(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=1)
    runs(scheduler, "a")
    node = scheduler.state.attempts["a:0:0"].node
    scheduler.silence(node)
    scheduler.tick()
    requeue(scheduler, a=0)
    assert "a:1:0" not in scheduler.state.attempts
    scheduler.die(node)
    assert scheduler.state.attempts["a:1:0"].node != node
    assert scheduler.info("a").retries == {"requeue": 1}


def test_siblings_restart_with_a_requeued_member_by_their_strategy(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=1)
    siblings = [SupervisedGroup(group_id="g", strategy=SupervisionStrategy.ONE_FOR_ALL, index=n) for n in range(2)]
    config = ActorConfig(max_restarts=0)
    scheduler.launch(*(job(f"g{one.index}", entry=EntryKind.ACTOR, actor=config, siblings=one) for one in siblings))
    scheduler.run("g0:0:0", "g1:0:0")
    requeue(scheduler, g0=0)
    scheduler.see("g0:0:0", ended(EndReason.PREEMPTED))
    scheduler.see("g1:0:0", ended(EndReason.SIBLING))
    assert {"g0:1:0", "g1:1:0"} <= scheduler.state.attempts.keys()
    assert scheduler.state.jobs["g0"].restart_times == ()


def test_events_and_the_explanation_say_who_requeued_it(scheduler: Cluster) -> None:
    runs(scheduler, "a")
    effects = ask(scheduler, "room for the demo", a=0)
    assert "requeues: 1, the last one: room for the demo (by driver d)" in explain(scheduler.state, "a", scheduler.now)
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    scheduler.see("a:1:0", Phase.RUNNING)
    texts = [one.event.text for one in effects if isinstance(one, EventRecorded) and one.event.what == "requeued"]
    assert texts == ["room for the demo (by driver d)"]
    assert "requeues: 1, the last one: room for the demo (by driver d)" in explain(scheduler.state, "a", scheduler.now)
