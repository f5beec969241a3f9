"""Owners: grace, goodbyes, ends that are waited for, and sessions that stay ended."""

from __future__ import annotations

import pytest

from fray.errors import ChannelClosed, InvalidRequest
from fray.model.messages.client import Done, Role
from fray.model.specs import EndReason, JobState
from fray.scheduler.effects import CloseSession, Effect, Reply, SessionClosed, SessionLost, SessionOpened
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node()
    return scheduler


def done(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(e.session, e.ref) for e in effects if isinstance(e, Reply) and e.message == Done()]


def over(effects: list[Effect]) -> list[str]:
    return [effect.session for effect in effects if isinstance(effect, CloseSession)]


def test_a_driver_that_comes_back_within_its_grace_keeps_its_jobs(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.lose()
    assert scheduler.state.next_deadline() == 30.0
    scheduler.now = 29.0
    scheduler.driver()
    assert scheduler.state.next_deadline() is None
    assert scheduler.info("a").state is JobState.RUNNING


def test_a_driver_that_stays_away_loses_its_jobs_after_its_grace(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.lose()
    assert over(scheduler.tick()) == ["d"], "the conversation is over from here on"
    assert scheduler.now == 30.0
    assert scheduler.desired() == {"a:0:0": True}
    scheduler.now = 32.0
    assert over(scheduler.see("a:0:0", ended(EndReason.OWNER_ENDED))) == ["d"]
    assert scheduler.state.sessions["d"].ended_at == 30.0
    assert scheduler.info("a").cause is EndReason.OWNER_ENDED


def test_a_driver_without_grace_ends_at_its_first_tick(scheduler: Cluster) -> None:
    scheduler.driver("quick", grace_s=0.0)
    scheduler.launch(job("b", demand(99)), session="quick")
    scheduler.lose("quick")
    scheduler.tick()
    assert (scheduler.now, scheduler.info("b").state) == (0.0, JobState.STOPPED)


def test_a_goodbye_ends_all_at_once_and_is_answered_when_all_has_ended(scheduler: Cluster) -> None:
    scheduler.launch(job("a"), job("b", demand(99)))
    scheduler.run("a:0:0")
    effects = scheduler.close(ref=7)
    assert done(effects) == over(effects) == []
    assert scheduler.info("b").state is JobState.STOPPED
    effects = scheduler.see("a:0:0", ended(EndReason.OWNER_ENDED))
    assert (done(effects), over(effects)) == ([("d", 7)], ["d"])


def test_a_goodbye_waits_for_grandchildren_too(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.process("a:0:0")
    scheduler.launch(job("b"), session="s-a:0:0")
    scheduler.run("b:0:0")
    scheduler.close(ref=7)
    assert done(scheduler.see("a:0:0", ended(EndReason.OWNER_ENDED))) == []
    assert scheduler.state.owned_jobs("d") == ("b",)
    assert done(scheduler.see("b:0:0", ended(EndReason.OWNER_ENDED))) == [("d", 7)]


def test_a_goodbye_may_be_repeated_before_and_after_the_end(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.close(ref=1)
    scheduler.close(ref=2)
    assert done(scheduler.see("a:0:0", ended(EndReason.OWNER_ENDED))) == [("d", 1), ("d", 2)]
    assert done(scheduler.close(ref=3)) == [("d", 3)]
    assert done(scheduler.close("unknown", ref=4)) == [("unknown", 4)]


def test_an_ended_session_stays_ended(scheduler: Cluster) -> None:
    scheduler.close()
    assert over(scheduler.driver()) == ["d"]
    with pytest.raises(ChannelClosed, match="session d has ended"):
        scheduler.launch(job("late"))


def test_ended_sessions_are_remembered_up_to_a_limit() -> None:
    scheduler = Cluster(SchedulerConfig(finished_limit=1))
    for name in ("a", "b"):
        scheduler.driver(name)
        scheduler.close(name)
    assert list(scheduler.state.sessions) == ["b"]


def test_a_job_that_loses_its_connection_loses_nothing_else(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.process("a:0:0")
    scheduler.launch(job("b"), session="s-a:0:0")
    scheduler.tell(SessionLost(session="s-a:0:0"))
    assert scheduler.state.next_deadline() is None
    assert scheduler.info("b").state is JobState.PENDING


def test_the_end_of_an_attempt_ends_its_conversations(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.process("a:0:0")
    assert over(scheduler.see("a:0:0", ended())) == ["s-a:0:0"]
    assert over(scheduler.process("a:0:0", session="again")) == ["again"]


def test_a_process_that_says_goodbye_ends_what_it_launched_itself(scheduler: Cluster) -> None:
    """A second conversation of the same attempt keeps its own."""
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    for session, child in (("s1", "b"), ("s2", "c")):
        scheduler.process("a:0:0", session)
        scheduler.launch(job(child, demand(99)), session=session)
    assert done(scheduler.close("s1", ref=5)) == [("s1", 5)]
    assert scheduler.states("b", "c") == [JobState.STOPPED, JobState.PENDING]


def test_a_tool_owns_nothing_and_may_only_launch_detached_jobs(scheduler: Cluster) -> None:
    scheduler.tell(SessionOpened(session="t", role=Role.TOOL, namespace="ns"))
    with pytest.raises(InvalidRequest, match="detached=True"):
        scheduler.launch(job("a"), session="t")
    scheduler.launch(job("a", detached=True), session="t")
    scheduler.lose("t")
    assert "t" not in scheduler.state.sessions
    assert scheduler.info("a").state is JobState.PENDING


def test_a_jobs_namespace_is_its_sessions_unless_it_has_its_own(scheduler: Cluster) -> None:
    scheduler.launch(job("a", namespace=""), job("b", namespace="other"))
    assert [scheduler.info(name).namespace for name in "ab"] == ["ns", "other"]


def test_after_a_restart_every_driver_has_its_full_grace_again(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.lose()
    scheduler.now = 29.0
    scheduler.restart()
    assert scheduler.state.sessions["d"].lost_at == 29.0
    scheduler.now = 58.0
    scheduler.driver()
    assert scheduler.info("a").state is JobState.RUNNING


def test_a_goodbye_that_the_old_controller_heard_is_obeyed_by_the_new_one(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.close(ref=1)
    scheduler.restart()
    scheduler.node()
    scheduler.close(ref=2)
    assert done(scheduler.see("a:0:0", ended(EndReason.OWNER_ENDED))) == [("d", 2)]


def test_proof_of_death_needs_no_grace(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(99)))
    scheduler.lose()
    effects = scheduler.tell(SessionClosed(session="d", reason="its process is gone"))
    assert over(effects) == ["d"]
    assert scheduler.info("a").error_message == "its owner d ended: its process is gone"
