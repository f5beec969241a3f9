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
def law() -> Cluster:
    """Two drivers of one namespace, one of another, and a machine of 40 CPUs."""
    law = Cluster()
    law.driver()
    law.driver("e")
    law.driver("x", namespace="elsewhere")
    law.node("n1", cpu=40)
    return law


def terminate(law: Cluster, *jobs: str, session: str = "d", **what: object) -> tuple[str, ...]:
    """Whose end was asked for."""
    asked = TerminateRequested(session=session, ref=law.ref(), jobs=jobs, reason="enough", **what)  # type: ignore[arg-type]
    return ended_by(law.tell(asked))


def ended_by(effects: list[Effect]) -> tuple[str, ...]:
    return next(e.message.jobs for e in effects if isinstance(e, Reply) and isinstance(e.message, TerminateResult))


# Ids and adoption


def test_a_launch_under_a_known_id_gives_that_job_also_when_it_has_ended(law: Cluster) -> None:
    law.launch(job("train", job_id="train-run1", signature="f#1"))
    assert law.launch(job("train", job_id="train-run1", signature="f#1", payload="p"), session="e")[0].owner == "d"
    law.see("train-run1:0:0", ended(value="v"))
    (again,) = law.launch(job("train", job_id="train-run1", signature="f#1"), session="e")
    assert (again.state, again.value) == (JobState.SUCCEEDED, "v")


def test_a_different_request_under_a_known_id_is_refused_and_says_in_what_it_differs(law: Cluster) -> None:
    law.launch(job("train", job_id="train-run1", signature="f#1"))
    with pytest.raises(InvalidRequest, match="it differs in resources, entrypoint or its arguments"):
        law.launch(job("train", demand(2), job_id="train-run1", signature="f#2"))


def test_of_two_adopting_drivers_one_launches_and_both_get_its_job(law: Cluster) -> None:
    first = law.launch(job("train", job_id="train-1", adopt_existing=True, signature="f#1", cwd="/a"))
    second = law.launch(job("train", job_id="train-2", adopt_existing=True, signature="f#1", cwd="/b"), session="e")
    assert [info.job_id for info in (*first, *second)] == ["train-1", "train-1"]
    assert second[0].owner == "d"
    law.close("e")
    assert law.info("train-1").state is not JobState.STOPPED  # it is not the adopter's
    law.close("d")
    assert law.info("train-1").ended_by == "its owner d ended: driver left"


def test_a_different_request_under_a_taken_name_is_refused_and_says_in_what_it_differs(law: Cluster) -> None:
    law.launch(job("train", job_id="train-1"))
    with pytest.raises(NameInUse, match="differs in resources, max_retries_failure; ask for the same") as refused:
        law.launch(job("train", demand(2), job_id="train-2", max_retries_failure=3, adopt_existing=True), session="e")
    assert refused.value.details["differs"] == ("resources", "max_retries_failure")


def test_a_name_is_adopted_only_in_its_namespace_and_only_of_one_that_stays(law: Cluster) -> None:
    law.launch(job("train", job_id="train-1"))
    there = law.launch(job("train", job_id="train-2", namespace="elsewhere", adopt_existing=True), session="x")
    assert there[0].job_id == "train-2"
    law.run("train-1:0:0")
    law.terminate("train-1")
    assert law.launch(job("train", job_id="train-3", adopt_existing=True))[0].job_id == "train-3"


def test_of_many_jobs_those_that_are_there_are_adopted_and_the_others_launched(law: Cluster) -> None:
    law.launch(job("w/1", job_id="w/1-a"))
    asked = [job(f"w/{n}", job_id=f"w/{n}-b", adopt_existing=True) for n in range(3)]
    assert [info.job_id for info in law.launch(*asked, session="e")] == ["w/0-b", "w/1-a", "w/2-b"]
    assert [info.job_id for info in law.launch(*asked, session="e")] == ["w/0-b", "w/1-a", "w/2-b"]  # asked again
    assert len(law.state.jobs) == 3


# Ends


def test_ends_are_asked_for_by_id_name_and_prefix_and_asking_again_does_nothing(law: Cluster) -> None:
    law.launch(*[job(f"rl/rollout/{n}", job_id=f"r{n}") for n in range(3)], job("rl/learner"), job("other"))
    law.launch(job("rl/rollout/9", job_id="x9", namespace="elsewhere"), session="x")
    law.run("r0:0:0", "r1:0:0", "r2:0:0", "rl/learner:0:0", "other:0:0", "x9:0:0")
    assert terminate(law, "r0", "unknown") == ("r0",)
    assert terminate(law, prefix="rl/rollout/") == ("r1", "r2")
    assert terminate(law, prefix="rl/") == ("rl/learner",)
    assert terminate(law, "r0", prefix="rl/") == ()
    assert terminate(law, name="other") == ("other",)
    assert terminate(law, name="other") == ()
    assert law.info("x9").state is JobState.RUNNING
    assert terminate(law, prefix="rl/", namespace="*") == ("x9",)


def test_a_tree_ends_with_what_its_jobs_have_launched_the_detached_ones_too(law: Cluster) -> None:
    law.launch(job("top"))
    law.run("top:0:0")
    law.process("top:0:0")
    law.launch(job("child"), job("free", detached=True), session="s-top:0:0")
    law.run("child:0:0", "free:0:0")
    law.process("free:0:0")
    law.launch(job("below"), session="s-free:0:0")
    law.run("below:0:0")
    assert law.info("below").parent == "free"
    assert terminate(law, "top") == ("top",)
    law.see("top:0:0", ended(EndReason.STOPPED))
    assert law.info("child").ended_by.startswith("its owner top:0:0 ended")
    assert law.states("free", "below") == [JobState.RUNNING, JobState.RUNNING]
    assert set(terminate(law, "top", tree=True)) == {"free", "below"}


def test_only_ones_own_jobs_are_taken_back(law: Cluster) -> None:
    law.launch(job("a"), session="d")
    assert terminate(law, "a", session="e", own=True) == ()
    assert terminate(law, "a", session="d", own=True) == ("a",)


def test_who_asked_for_an_end_is_told(law: Cluster) -> None:
    law.tell(SessionOpened(session="t", role=Role.TOOL, namespace="ns", user="alice"))
    law.launch(job("a"), job("b"))
    law.run("a:0:0")
    law.process("a:0:0")
    terminate(law, "b", session="s-a:0:0")
    terminate(law, "a", session="t")
    assert (law.info("b").ended_by, law.info("a").ended_by) == ("job a", "alice")
    law.see("a:0:0", ended(EndReason.STOPPED, exit_code=0, cpu_s=2.5, peak_memory_bytes=10**7, duration_s=3.0))
    info = law.info("a")
    assert (info.cause, info.ended_by, info.error_message) == (EndReason.STOPPED, "alice", "enough")
    attempt = info.attempts[0]
    assert (attempt.cpu_s, attempt.peak_memory_bytes, attempt.duration_s) == (2.5, 10**7, 3.0)


# Looking


def test_a_name_finds_the_living_job_else_the_last_that_ended_and_roots_of_others(law: Cluster) -> None:
    law.launch(job("a", job_id="a1"))
    law.see("a1:0:0", ended())
    law.launch(job("a", job_id="a2"))
    law.see("a2:0:0", ended())
    assert find_job(law.state, "ns", "a") == "a2"
    law.launch(job("a", job_id="a3"))
    assert find_job(law.state, "ns", "a") == "a3"
    law.launch(job("lab/serve/1", job_id="root", namespace="lab/serve", detached=True), session="x")
    assert find_job(law.state, "ns", "lab/serve/1") == "root"
    assert find_job(law.state, "ns", "lab/serve/1", "ns") is None
    assert find_job(law.state, "elsewhere", "a") is None
    assert find_job(law.state, "elsewhere", "a", "*") == "a3"


def test_the_history_of_a_job_is_in_its_info(law: Cluster) -> None:
    law.launch(job("gang", members=2, max_retries_failure=1))
    law.run("gang:0:0", "gang:0:1")
    law.now = 20.0
    law.see("gang:0:1", ended(EndReason.FAILURE, "no", exit_code=3))
    law.see("gang:0:0", ended(EndReason.GANG))
    law.run("gang:1:0", "gang:1:1")
    law.now = 40.0
    law.see("gang:1:0", ended(EndReason.KILLED, "killed by signal 9", signal=9))
    law.see("gang:1:1", ended(EndReason.GANG))
    info = law.info("gang")
    assert (info.retries, info.first_member, info.duration_s) == ({"failure": 1}, 0, 40.0)
    assert info.error_message == (
        "killed by signal 9 (member 0 of 2, on n1, was the first to end; it was retried once, after failure: no)"
    )
    assert law.see("gang:1:0", Phase.RUNNING) == []
