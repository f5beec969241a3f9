"""Machines out of service: what the transcripts do not tell, and that each rule is seen when it is broken."""

from __future__ import annotations

import pytest
from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.messages.maintenance import NodesMarked
from fray.model.specs import EndReason, EntryKind, JobState, Phase
from fray.scheduler.effects import Effect, EventRecorded, Refusal, Reply
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.nodes.view import nodes_info
from fray.scheduler.state.rows import Cordon, SchedulerConfig
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1")
    scheduler.node("n2")
    return scheduler


def marked(effects: list[Effect]) -> NodesMarked:
    found = [effect.message for effect in effects if isinstance(effect, Reply)]
    assert isinstance(found[0], NodesMarked)
    return found[0]


def running(scheduler: Cluster, name: str = "a", **more: object) -> str:
    scheduler.launch(job(name, **{"max_retries_preemption": 5} | more))  # type: ignore[arg-type]
    scheduler.run(f"{name}:0:0")
    return scheduler.state.attempts[f"{name}:0:0"].node


def test_a_cordoned_machine_keeps_what_it_runs_and_gets_nothing_new(scheduler: Cluster) -> None:
    node = running(scheduler)
    scheduler.cordon(node, reason="loud")
    scheduler.launch(*(job(f"b{n}", demand(1)) for n in range(4)))
    assert set(scheduler.desired(node)) == {"a:0:0"}
    assert scheduler.info("a").state is JobState.RUNNING


def test_a_drained_job_whose_budget_is_spent_ends_as_preempted_and_says_by_whom(scheduler: Cluster) -> None:
    node = running(scheduler, max_retries_preemption=0)
    scheduler.drain(node, reason="new kernel")
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED, "requested"))
    assert (scheduler.info("a").state, scheduler.info("a").cause) == (JobState.FAILED, EndReason.PREEMPTED)
    assert scheduler.info("a").error_message == f"its machine {node} is drained by driver d (new kernel)"


def test_a_slice_of_the_same_name_in_another_zone_stays_in_service(scheduler: Cluster) -> None:
    for name, zone in (("e0", "east"), ("e1", "east"), ("w0", "west"), ("w1", "west")):
        scheduler.node(name, slice="s", tpu_worker=name[1], zone=zone)
    found = marked(scheduler.cordon("e1"))
    assert [node.name for node in found.nodes] == ["e0", "e1"]
    assert found.notes == ("e1 is a host of the slice s, which is one unit: e0 as well",)


def test_a_drain_leaves_alone_what_is_ending_already(scheduler: Cluster) -> None:
    node = running(scheduler)
    scheduler.terminate("a")
    scheduler.drain(node)
    scheduler.see("a:0:0", ended(EndReason.STOPPED))
    assert scheduler.info("a").cause is EndReason.STOPPED


def test_a_job_on_a_silent_machine_that_is_drained_waits_for_proof(scheduler: Cluster) -> None:
    node = running(scheduler)
    scheduler.silence(node)
    scheduler.tick()
    scheduler.drain(node)
    assert "a:1:0" not in scheduler.state.attempts
    scheduler.die(node)
    assert scheduler.state.attempts["a:1:0"].node != node


def test_a_second_drain_may_be_shorter_and_a_cordon_takes_none_back(scheduler: Cluster) -> None:
    node = running(scheduler)
    scheduler.drain(node, finish_s=1000)
    assert "drain" in marked(scheduler.cordon(node)).notes[0]
    assert scheduler.state.next_deadline() == 1000
    scheduler.now = 5
    scheduler.drain(node, finish_s=10)
    assert scheduler.state.next_deadline() == 15
    scheduler.tick()
    assert scheduler.desired(node) == {"a:0:0": True}
    assert scheduler.state.next_deadline() is None


def test_a_drain_that_is_taken_back_in_time_ends_nothing(scheduler: Cluster) -> None:
    node = running(scheduler)
    scheduler.drain(node, finish_s=10)
    scheduler.uncordon(node)
    assert scheduler.state.next_deadline() is None
    assert scheduler.desired(node) == {"a:0:0": False}


def test_a_cordon_outlives_the_machine_for_30_days(scheduler: Cluster) -> None:
    scheduler.cordon("n1", reason="broken fan")
    scheduler.die("n1")
    assert scheduler.state.nodes["n1"].phase is NodePhase.LOST
    assert [info.alive for info in nodes_info(scheduler.state)] == [False, True]
    scheduler.restart()
    scheduler.node("n2")
    scheduler.now += 20 * 86_400
    scheduler.node("n1", "i2", cpu=2)
    assert nodes_info(scheduler.state)[0].standing_reason == "is cordoned by driver d (broken fan)"
    scheduler.die("n1")
    scheduler.tick(scheduler.now + SchedulerConfig().forget_cordoned_s + SchedulerConfig().lease_s)
    assert "n1" not in scheduler.state.nodes


def test_a_leaving_machine_stays_drained_if_an_operator_had_drained_it(scheduler: Cluster) -> None:
    scheduler.drain("n1", reason="new kernel")
    scheduler.leave("n1")
    scheduler.die("n1")
    scheduler.node("n1", "i2")
    assert nodes_info(scheduler.state)[0].standing == "drained"
    assert "shutting down" not in str(marked(scheduler.uncordon("n1")).notes)


@pytest.mark.parametrize(("finish_s", "expected"), [(0.0, 0.0), (10.0, 10.0), (60.0, 30.0)])
def test_a_machine_that_leaves_gives_no_longer_notice_than_it_has_time(finish_s: float, expected: float) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1")
    scheduler.launch(job("a", entry=EntryKind.ACTOR, notice_s=30.0))
    scheduler.run("a:0:0")
    scheduler.leave("n1", finish_s)
    assert scheduler.state.jobs["a"].notice_s == expected


def test_who_leaves_cannot_be_kept(scheduler: Cluster) -> None:
    scheduler.leave("n1")
    assert "is shutting down" in marked(scheduler.uncordon("n1")).notes[0]
    assert nodes_info(scheduler.state)[0].standing == "leaving"


def test_a_machine_that_leaves_under_a_cordon_stays_closed_when_the_cordon_is_lifted(scheduler: Cluster) -> None:
    scheduler.cordon("n1", reason="broken fan")
    scheduler.leave("n1")
    assert nodes_info(scheduler.state)[0].standing == "leaving"
    assert "is shutting down" in marked(scheduler.uncordon("n1")).notes[0]
    scheduler.launch(job("a"))
    assert scheduler.desired("n1") == {}
    scheduler.die("n1")
    scheduler.node("n1", "i2")
    assert nodes_info(scheduler.state)[0].standing == ""


@pytest.mark.parametrize("is_cordoned_before", [True, False])
def test_a_cordon_of_a_machine_that_leaves_holds_for_its_next_process(
    scheduler: Cluster, is_cordoned_before: bool
) -> None:
    if is_cordoned_before:
        scheduler.cordon("n1", reason="broken fan")
    scheduler.leave("n1")
    if not is_cordoned_before:
        effects = scheduler.cordon("n1", reason="broken fan")
        assert "the cordon holds when it returns" in marked(effects).notes[0]
        assert [(one.event.what, one.event.text) for one in effects if isinstance(one, EventRecorded)] == [
            ("node cordoned", "n1 by driver d: broken fan")
        ]
    scheduler.restart()
    assert nodes_info(scheduler.state)[0].standing == "leaving"
    scheduler.node("n1", "i2")
    assert nodes_info(scheduler.state)[0].standing_reason == "is cordoned by driver d (broken fan)"


def test_what_an_earlier_incarnation_says_of_leaving_is_not_heard(scheduler: Cluster) -> None:
    before = scheduler.incarnations["n1"]
    scheduler.node("n1", "i2")
    scheduler.incarnations["n1"] = before
    scheduler.leave("n1")
    assert nodes_info(scheduler.state)[0].standing == ""


def test_one_unknown_machine_refuses_all_and_names_the_near_ones(scheduler: Cluster) -> None:
    (refusal,) = scheduler.drain("n1", "n1b")
    assert isinstance(refusal, Refusal)
    assert isinstance(refusal.error, InvalidRequest)
    assert "did you mean n1" in str(refusal.error)
    assert scheduler.state.nodes["n1"].cordon is None


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        (Cordon(since=-1.0, by="d"), "which is cordoned since -1.0"),
        (Cordon(since=9.0, by="d", drain=True), "stays on n1, which is drained"),
        (Cordon(since=9.0, by="d", drain=True, until=20.0, drained_at=9.0), "counts as drained and holds"),
    ],
)
def test_what_stands_on_a_closed_machine_against_the_rules_is_seen(
    scheduler: Cluster, mark: Cordon, sentence: str
) -> None:
    scheduler.launch(job("a"))
    node = scheduler.state.nodes["n1"]
    node.cordon = mark
    scheduler.state.node_changed(node)
    assert any(sentence in broken for broken in check(scheduler.state))


def test_a_drain_that_is_not_seen_to_be_over_is_seen(scheduler: Cluster) -> None:
    scheduler.drain("n1")
    node = scheduler.state.nodes["n1"]
    assert node.cordon is not None
    node.cordon = evolve(node.cordon, drained_at=None)
    assert any("does not count as drained" in broken for broken in check(scheduler.state))


def test_a_time_that_is_not_kept_is_seen(scheduler: Cluster) -> None:
    running(scheduler)
    scheduler.drain("n1", finish_s=5)
    scheduler.state.timers.take_due(99.0)
    assert any("timers are" in broken for broken in check(scheduler.state))


def test_late_news_of_a_preempted_gang_that_was_done_count_only_if_all_were(scheduler: Cluster) -> None:
    scheduler.launch(job("g", demand(3), members=2, max_retries_preemption=1))
    scheduler.run("g:0:0", "g:0:1")
    scheduler.drain("n1")
    scheduler.see("g:0:0", ended())
    scheduler.see("g:0:1", ended(EndReason.PREEMPTED))
    assert scheduler.info("g").state is JobState.PENDING
    scheduler.uncordon("n1")
    scheduler.see("g:1:0", Phase.RUNNING)
