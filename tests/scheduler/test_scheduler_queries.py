"""Jobs by id, name, prefix and tree: adoption, requests that differ, ends that were asked for, and by whom."""

from __future__ import annotations

import pytest

from fray.errors import InvalidRequest, NameInUse
from fray.model.messages.client import Role, TerminateResult
from fray.model.specs import EndReason, JobState, Phase
from fray.scheduler.effects import Effect, Reply, SessionOpened, TerminateRequested
from fray.scheduler.jobs.queries import find_job
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    """Two drivers of one namespace, one of another, and a machine of 40 CPUs."""
    scheduler = Cluster()
    scheduler.driver()
    scheduler.driver("e")
    scheduler.driver("x", namespace="elsewhere")
    scheduler.node("n1", cpu=40)
    return scheduler


def terminate(scheduler: Cluster, *jobs: str, session: str = "d", **what: object) -> tuple[str, ...]:
    """Return the jobs whose end was requested."""
    asked = TerminateRequested(session=session, ref=scheduler.ref(), jobs=jobs, reason="enough", **what)  # type: ignore[arg-type]
    return ended_by(scheduler.tell(asked))


def ended_by(effects: list[Effect]) -> tuple[str, ...]:
    return next(e.message.jobs for e in effects if isinstance(e, Reply) and isinstance(e.message, TerminateResult))


# Ids and adoption


def test_a_launch_under_a_known_id_gives_that_job_also_when_it_has_ended(scheduler: Cluster) -> None:
    scheduler.launch(job("train", job_id="train-run1", signature="f#1"))
    assert (
        scheduler.launch(job("train", job_id="train-run1", signature="f#1", payload="p"), session="e")[0].owner == "d"
    )
    scheduler.see("train-run1:0:0", ended(value="v"))
    (again,) = scheduler.launch(job("train", job_id="train-run1", signature="f#1"), session="e")
    assert (again.state, again.value) == (JobState.SUCCEEDED, "v")


def test_a_different_request_under_a_known_id_is_refused_and_says_in_what_it_differs(scheduler: Cluster) -> None:
    scheduler.launch(job("train", job_id="train-run1", signature="f#1"))
    with pytest.raises(InvalidRequest, match="it differs in resources, entrypoint or its arguments"):
        scheduler.launch(job("train", demand(2), job_id="train-run1", signature="f#2"))


def test_of_two_adopting_drivers_one_launches_and_both_get_its_job(scheduler: Cluster) -> None:
    first = scheduler.launch(job("train", job_id="train-1", adopt_existing=True, signature="f#1", cwd="/a"))
    second = scheduler.launch(
        job("train", job_id="train-2", adopt_existing=True, signature="f#1", cwd="/b"), session="e"
    )
    assert [info.job_id for info in (*first, *second)] == ["train-1", "train-1"]
    assert second[0].owner == "d"
    scheduler.close("e")
    assert scheduler.info("train-1").state is not JobState.STOPPED  # it is not the adopter's
    scheduler.close("d")
    assert scheduler.info("train-1").ended_by == "its owner d ended: driver left"


def test_a_different_request_under_a_taken_name_is_refused_and_says_in_what_it_differs(scheduler: Cluster) -> None:
    scheduler.launch(job("train", job_id="train-1"))
    with pytest.raises(NameInUse, match="differs in resources, max_retries_failure; launch the same") as refused:
        scheduler.launch(
            job("train", demand(2), job_id="train-2", max_retries_failure=3, adopt_existing=True), session="e"
        )
    assert refused.value.details["differs"] == ("resources", "max_retries_failure")


def test_a_name_is_adopted_only_in_its_namespace_and_only_of_one_that_stays(scheduler: Cluster) -> None:
    scheduler.launch(job("train", job_id="train-1"))
    there = scheduler.launch(job("train", job_id="train-2", namespace="elsewhere", adopt_existing=True), session="x")
    assert there[0].job_id == "train-2"
    scheduler.run("train-1:0:0")
    scheduler.terminate("train-1")
    assert scheduler.launch(job("train", job_id="train-3", adopt_existing=True))[0].job_id == "train-3"


def test_of_many_jobs_those_that_are_there_are_adopted_and_the_others_launched(scheduler: Cluster) -> None:
    scheduler.launch(job("w/1", job_id="w/1-a"))
    asked = [job(f"w/{n}", job_id=f"w/{n}-b", adopt_existing=True) for n in range(3)]
    assert [info.job_id for info in scheduler.launch(*asked, session="e")] == ["w/0-b", "w/1-a", "w/2-b"]
    assert [info.job_id for info in scheduler.launch(*asked, session="e")] == ["w/0-b", "w/1-a", "w/2-b"]  # asked again
    assert len(scheduler.state.jobs) == 3


# Ends


def test_ends_are_asked_for_by_id_name_and_prefix_and_asking_again_does_nothing(scheduler: Cluster) -> None:
    scheduler.launch(*[job(f"rl/rollout/{n}", job_id=f"r{n}") for n in range(3)], job("rl/learner"), job("other"))
    scheduler.launch(job("rl/rollout/9", job_id="x9", namespace="elsewhere"), session="x")
    scheduler.run("r0:0:0", "r1:0:0", "r2:0:0", "rl/learner:0:0", "other:0:0", "x9:0:0")
    assert terminate(scheduler, "r0", "unknown") == ("r0",)
    assert terminate(scheduler, prefix="rl/rollout/") == ("r1", "r2")
    assert terminate(scheduler, prefix="rl/") == ("rl/learner",)
    assert terminate(scheduler, "r0", prefix="rl/") == ()
    assert terminate(scheduler, name="other") == ("other",)
    assert terminate(scheduler, name="other") == ()
    assert scheduler.info("x9").state is JobState.RUNNING
    assert terminate(scheduler, prefix="rl/", namespace="*") == ("x9",)


def test_a_tree_ends_with_what_its_jobs_have_launched_the_detached_ones_too(scheduler: Cluster) -> None:
    scheduler.launch(job("top"))
    scheduler.run("top:0:0")
    scheduler.process("top:0:0")
    scheduler.launch(job("child"), job("free", detached=True), session="s-top:0:0")
    scheduler.run("child:0:0", "free:0:0")
    scheduler.process("free:0:0")
    scheduler.launch(job("below"), session="s-free:0:0")
    scheduler.run("below:0:0")
    assert scheduler.info("below").parent == "free"
    assert terminate(scheduler, "top") == ("top",)
    scheduler.see("top:0:0", ended(EndReason.STOPPED))
    assert scheduler.info("child").ended_by.startswith("its owner top:0:0 ended")
    assert scheduler.states("free", "below") == [JobState.RUNNING, JobState.RUNNING]
    assert set(terminate(scheduler, "top", tree=True)) == {"free", "below"}


def test_only_ones_own_jobs_are_taken_back(scheduler: Cluster) -> None:
    scheduler.launch(job("a"), session="d")
    assert terminate(scheduler, "a", session="e", own=True) == ()
    assert terminate(scheduler, "a", session="d", own=True) == ("a",)


def test_the_user_who_requested_an_end_is_on_record(scheduler: Cluster) -> None:
    scheduler.tell(SessionOpened(session="t", role=Role.TOOL, namespace="ns", user="alice"))
    scheduler.launch(job("a"), job("b"))
    scheduler.run("a:0:0")
    scheduler.process("a:0:0")
    terminate(scheduler, "b", session="s-a:0:0")
    terminate(scheduler, "a", session="t")
    assert (scheduler.info("b").ended_by, scheduler.info("a").ended_by) == ("job a", "alice")
    scheduler.see("a:0:0", ended(EndReason.STOPPED, exit_code=0, cpu_s=2.5, peak_memory_bytes=10**7, duration_s=3.0))
    info = scheduler.info("a")
    assert (info.cause, info.ended_by, info.error_message) == (EndReason.STOPPED, "alice", "enough")
    attempt = info.attempts[0]
    assert (attempt.cpu_s, attempt.peak_memory_bytes, attempt.duration_s) == (2.5, 10**7, 3.0)


# Looking


def test_a_name_finds_the_living_job_else_the_last_that_ended_and_roots_of_others(scheduler: Cluster) -> None:
    scheduler.launch(job("a", job_id="a1"))
    scheduler.see("a1:0:0", ended())
    scheduler.launch(job("a", job_id="a2"))
    scheduler.see("a2:0:0", ended())
    assert find_job(scheduler.state, "ns", "a") == "a2"
    scheduler.launch(job("a", job_id="a3"))
    assert find_job(scheduler.state, "ns", "a") == "a3"
    scheduler.launch(job("lab/serve/1", job_id="root", namespace="lab/serve", detached=True), session="x")
    assert find_job(scheduler.state, "ns", "lab/serve/1") == "root"
    assert find_job(scheduler.state, "ns", "lab/serve/1", "ns") is None
    assert find_job(scheduler.state, "elsewhere", "a") is None
    assert find_job(scheduler.state, "elsewhere", "a", "*") == "a3"


def test_the_history_of_a_job_is_in_its_info(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=2, max_retries_failure=1))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.now = 20.0
    scheduler.see("gang:0:1", ended(EndReason.FAILURE, "no", exit_code=3))
    scheduler.see("gang:0:0", ended(EndReason.GANG))
    scheduler.run("gang:1:0", "gang:1:1")
    scheduler.now = 40.0
    scheduler.see("gang:1:0", ended(EndReason.KILLED, "killed by signal 9", signal=9))
    scheduler.see("gang:1:1", ended(EndReason.GANG))
    info = scheduler.info("gang")
    assert (info.retries, info.first_member, info.duration_s) == ({"failure": 1}, 0, 40.0)
    assert info.error_message == (
        "killed by signal 9 (member 0 of 2, on n1, was the first to end; it was retried once, after failure: no)"
    )
    assert scheduler.see("gang:1:0", Phase.RUNNING) == []
