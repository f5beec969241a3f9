"""Time limits: counted from the placement, by the scheduler's clock, over restarts; an end of its own kind."""

from __future__ import annotations

import pytest

from fray.model.specs import EndReason, JobState
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    return scheduler


def test_a_job_that_ran_for_its_limit_has_failed_and_says_so(scheduler: Cluster) -> None:
    scheduler.launch(job("a", time_limit_s=60.0, max_retries_failure=3))
    scheduler.run("a:0:0")
    scheduler.tick(60.0)
    assert scheduler.desired() == {"a:0:0": True}
    scheduler.see("a:0:0", ended(EndReason.TIME_LIMIT))
    info = scheduler.info("a")
    assert (info.state, info.cause, info.retries) == (JobState.FAILED, EndReason.TIME_LIMIT, {})
    assert info.error_message == "it ran for its time limit of 60 s"


def test_waiting_is_no_running(scheduler: Cluster) -> None:
    scheduler.launch(job("first", demand(4)), job("second", demand(4), time_limit_s=10.0))
    scheduler.tick(100.0)
    scheduler.see("first:0:0", ended())
    assert scheduler.state.next_deadline() == 110.0


def test_all_members_of_a_gang_are_ended(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=3, time_limit_s=10.0))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.tick(10.0)
    assert scheduler.desired() == {"gang:0:0": True, "gang:0:1": True, "gang:0:2": True}


def test_a_job_whose_machine_is_silent_has_failed_at_its_time_and_its_share_stays_taken(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(4), time_limit_s=60.0))
    scheduler.silence()
    scheduler.tick(60.0)
    assert scheduler.info("a").cause is EndReason.TIME_LIMIT
    assert scheduler.state.pool.machines["n1"].cpu_milli == 0


def test_a_job_that_is_being_ended_has_no_limit_any_more(scheduler: Cluster) -> None:
    scheduler.launch(job("a", time_limit_s=60.0))
    scheduler.terminate("a")
    assert scheduler.state.next_deadline() is None


def test_a_user_who_ends_it_during_its_last_moments_is_said_to_have_done_so(scheduler: Cluster) -> None:
    scheduler.launch(job("a", time_limit_s=60.0))
    scheduler.tick(60.0)
    scheduler.terminate("a")
    scheduler.see("a:0:0", ended(EndReason.TIME_LIMIT))
    assert scheduler.info("a").cause is EndReason.TIME_LIMIT
