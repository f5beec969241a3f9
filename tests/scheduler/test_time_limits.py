"""Time limits: counted from the placement, by the law's clock, over restarts; an end of its own kind."""

from __future__ import annotations

import pytest

from fray.model.specs import EndReason, JobState
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def law() -> Cluster:
    law = Cluster()
    law.driver()
    law.node("n1", cpu=4)
    return law


def test_a_job_that_ran_for_its_limit_has_failed_and_says_so(law: Cluster) -> None:
    law.launch(job("a", time_limit_s=60.0, max_retries_failure=3))
    law.run("a:0:0")
    law.tick(60.0)
    assert law.wished() == {"a:0:0": True}
    law.see("a:0:0", ended(EndReason.TIME_LIMIT))
    info = law.info("a")
    assert (info.state, info.cause, info.retries) == (JobState.FAILED, EndReason.TIME_LIMIT, {})
    assert info.error_message == "it ran for its time limit of 60 s"


def test_waiting_is_no_running(law: Cluster) -> None:
    law.launch(job("first", demand(4)), job("second", demand(4), time_limit_s=10.0))
    law.tick(100.0)
    law.see("first:0:0", ended())
    assert law.state.next_deadline() == 110.0


def test_all_members_of_a_gang_are_ended(law: Cluster) -> None:
    law.launch(job("gang", members=3, time_limit_s=10.0))
    law.run("gang:0:0", "gang:0:1")
    law.tick(10.0)
    assert law.wished() == {"gang:0:0": True, "gang:0:1": True, "gang:0:2": True}


def test_a_job_whose_machine_is_silent_has_failed_at_its_time_and_its_share_stays_taken(law: Cluster) -> None:
    law.launch(job("a", demand(4), time_limit_s=60.0))
    law.silence()
    law.tick(60.0)
    assert law.info("a").cause is EndReason.TIME_LIMIT
    assert law.state.pool.machines["n1"].cpu_milli == 0


def test_whoever_is_being_ended_has_no_limit_any_more(law: Cluster) -> None:
    law.launch(job("a", time_limit_s=60.0))
    law.terminate("a")
    assert law.state.next_deadline() is None


def test_a_user_who_ends_it_during_its_last_moments_is_said_to_have_done_so(law: Cluster) -> None:
    law.launch(job("a", time_limit_s=60.0))
    law.tick(60.0)
    law.terminate("a")
    law.see("a:0:0", ended(EndReason.TIME_LIMIT))
    assert law.info("a").cause is EndReason.TIME_LIMIT
