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
def law() -> Cluster:
    law = Cluster()
    law.driver()
    law.node()
    return law


def done(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(e.session, e.ref) for e in effects if isinstance(e, Reply) and e.message == Done()]


def over(effects: list[Effect]) -> list[str]:
    return [effect.session for effect in effects if isinstance(effect, CloseSession)]


def test_a_driver_that_comes_back_within_its_grace_keeps_its_jobs(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.lose()
    assert law.state.next_deadline() == 30.0
    law.now = 29.0
    law.driver()
    assert law.state.next_deadline() is None
    assert law.info("a").state is JobState.RUNNING


def test_a_driver_that_stays_away_loses_its_jobs_after_its_grace(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.lose()
    assert over(law.tick()) == ["d"], "the conversation is over from here on"
    assert law.now == 30.0
    assert law.wished() == {"a:0:0": True}
    law.now = 32.0
    assert over(law.see("a:0:0", ended(EndReason.OWNER_ENDED))) == ["d"]
    assert law.state.sessions["d"].ended_at == 30.0
    assert law.info("a").cause is EndReason.OWNER_ENDED


def test_a_driver_without_grace_ends_at_its_first_tick(law: Cluster) -> None:
    law.driver("quick", grace_s=0.0)
    law.launch(job("b", demand(99)), session="quick")
    law.lose("quick")
    law.tick()
    assert (law.now, law.info("b").state) == (0.0, JobState.STOPPED)


def test_a_goodbye_ends_all_at_once_and_is_answered_when_all_has_ended(law: Cluster) -> None:
    law.launch(job("a"), job("b", demand(99)))
    law.run("a:0:0")
    effects = law.close(ref=7)
    assert done(effects) == over(effects) == []
    assert law.info("b").state is JobState.STOPPED
    effects = law.see("a:0:0", ended(EndReason.OWNER_ENDED))
    assert (done(effects), over(effects)) == ([("d", 7)], ["d"])


def test_a_goodbye_waits_for_grandchildren_too(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.process("a:0:0")
    law.launch(job("b"), session="s-a:0:0")
    law.run("b:0:0")
    law.close(ref=7)
    assert done(law.see("a:0:0", ended(EndReason.OWNER_ENDED))) == []
    assert law.state.owned_jobs("d") == ("b",)
    assert done(law.see("b:0:0", ended(EndReason.OWNER_ENDED))) == [("d", 7)]


def test_a_goodbye_may_be_repeated_before_and_after_the_end(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.close(ref=1)
    law.close(ref=2)
    assert done(law.see("a:0:0", ended(EndReason.OWNER_ENDED))) == [("d", 1), ("d", 2)]
    assert done(law.close(ref=3)) == [("d", 3)]
    assert done(law.close("nobody", ref=4)) == [("nobody", 4)]


def test_an_ended_session_stays_ended(law: Cluster) -> None:
    law.close()
    assert over(law.driver()) == ["d"]
    with pytest.raises(ChannelClosed, match="session d has ended"):
        law.launch(job("late"))


def test_ended_sessions_are_remembered_up_to_a_limit() -> None:
    law = Cluster(SchedulerConfig(finished_limit=1))
    for name in ("a", "b"):
        law.driver(name)
        law.close(name)
    assert list(law.state.sessions) == ["b"]


def test_a_job_that_loses_its_connection_loses_nothing_else(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.process("a:0:0")
    law.launch(job("b"), session="s-a:0:0")
    law.tell(SessionLost(session="s-a:0:0"))
    assert law.state.next_deadline() is None
    assert law.info("b").state is JobState.PENDING


def test_the_end_of_an_attempt_ends_its_conversations(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.process("a:0:0")
    assert over(law.see("a:0:0", ended())) == ["s-a:0:0"]
    assert over(law.process("a:0:0", session="again")) == ["again"]


def test_a_process_that_says_goodbye_ends_what_it_launched_itself(law: Cluster) -> None:
    """A second conversation of the same attempt keeps its own."""
    law.launch(job("a"))
    law.run("a:0:0")
    for session, child in (("s1", "b"), ("s2", "c")):
        law.process("a:0:0", session)
        law.launch(job(child, demand(99)), session=session)
    assert done(law.close("s1", ref=5)) == [("s1", 5)]
    assert law.states("b", "c") == [JobState.STOPPED, JobState.PENDING]


def test_a_tool_owns_nothing_and_may_only_launch_detached_jobs(law: Cluster) -> None:
    law.tell(SessionOpened(session="t", role=Role.TOOL, namespace="ns"))
    with pytest.raises(InvalidRequest, match="detached=True"):
        law.launch(job("a"), session="t")
    law.launch(job("a", detached=True), session="t")
    law.lose("t")
    assert "t" not in law.state.sessions
    assert law.info("a").state is JobState.PENDING


def test_a_jobs_namespace_is_its_sessions_unless_it_has_its_own(law: Cluster) -> None:
    law.launch(job("a", namespace=""), job("b", namespace="other"))
    assert [law.info(name).namespace for name in "ab"] == ["ns", "other"]


def test_after_a_restart_every_driver_has_its_full_grace_again(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.lose()
    law.now = 29.0
    law.restart()
    assert law.state.sessions["d"].lost_at == 29.0
    law.now = 58.0
    law.driver()
    assert law.info("a").state is JobState.RUNNING


def test_a_goodbye_that_the_old_controller_heard_is_obeyed_by_the_new_one(law: Cluster) -> None:
    law.launch(job("a"))
    law.run("a:0:0")
    law.close(ref=1)
    law.restart()
    law.node()
    law.close(ref=2)
    assert done(law.see("a:0:0", ended(EndReason.OWNER_ENDED))) == [("d", 2)]


def test_proof_of_death_needs_no_grace(law: Cluster) -> None:
    law.launch(job("a", demand(99)))
    law.lose()
    effects = law.tell(SessionClosed(session="d", reason="its process is gone"))
    assert over(effects) == ["d"]
    assert law.info("a").error_message == "its owner d ended: its process is gone"
