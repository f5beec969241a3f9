"""Machines: silence, leases, proof of death, incarnations, and reports that repair or change nothing."""

from __future__ import annotations

import pytest

from fray.model.specs import EndReason, JobState, Phase
from fray.scheduler.effects import AttemptAnnotated, DesiredAttemptsChanged, EventRecorded, JobInfoChanged
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.nodes.nodes import ANNOTATION_LIMIT_CHARS
from fray.scheduler.nodes.view import nodes_info
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.views import job_info
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def law() -> Cluster:
    """A job running on the only machine."""
    law = Cluster()
    law.driver()
    law.node(gpu="h100*1")
    law.launch(job("a", demand(1, gpu=1), max_retries_preemption=1))
    law.run("a:0:0")
    return law


# Silence


def test_a_silent_machine_is_suspect_after_30_s_and_given_up_after_600(law: Cluster) -> None:
    law.silence()
    assert [node.alive for node in nodes_info(law.state)] == [True]
    assert JobInfoChanged(job_id="a") in law.tick()
    assert law.now == 30.0
    assert [node.alive for node in nodes_info(law.state)] == [False]
    assert law.info("a").state is JobState.RUNNING
    assert "silent machines: n1" in law.info("a").reason
    law.tick()
    assert law.now == 600.0
    assert (law.info("a").state, law.info("a").attempts[0].cause) == (JobState.PENDING, EndReason.MACHINE_LOST)


def test_nothing_is_placed_on_a_silent_machine(law: Cluster) -> None:
    law.silence()
    law.launch(job("b"))
    assert law.info("b").state is JobState.PENDING
    assert "b:0:0" not in law.state.attempts


def test_a_machine_that_comes_back_in_time_keeps_what_it_holds(law: Cluster) -> None:
    law.silence()
    law.tick()
    law.now = 500.0
    law.node()
    assert law.info("a").reason == ""
    assert law.report("n1", [("a:0:0", Phase.RUNNING)], full=True) == []
    assert law.state.next_deadline() is None


def test_proof_of_death_spares_the_lease(law: Cluster) -> None:
    law.silence()
    law.now = 10.0
    law.die()
    assert law.info("a").attempts[0].message == "the node n1 is gone: machine deleted"
    assert law.info("a").state is JobState.PENDING
    assert nodes_info(law.state) == ()


def test_a_new_incarnation_proves_the_old_one_dead(law: Cluster) -> None:
    law.node(incarnation="i2", gpu="h100*1")
    assert law.info("a").attempts[0].cause is EndReason.MACHINE_LOST
    assert law.wished() == {"a:1:0": False}


def test_the_dead_incarnation_can_say_nothing(law: Cluster) -> None:
    law.node(incarnation="i2", gpu="h100*1")
    assert law.report("n1", [("a:1:0", Phase.RUNNING)], incarnation="i1") == []
    law.incarnations["n1"] = "i1"
    assert law.silence() == law.die() == []
    assert law.state.nodes["n1"].phase is NodePhase.ALIVE


def test_a_machine_that_comes_back_after_its_lease_changes_nothing(law: Cluster) -> None:
    law.node("n2", gpu="h100*1")
    law.silence("n1")
    law.tick(600.0)
    assert law.wished("n2") == {"a:1:0": False}
    law.node("n1")
    law.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert law.wished("n1") == {}
    assert law.see("a:0:0", ended(value="stale"), node="n1")[-1].blobs == ("stale",)  # type: ignore[union-attr]
    assert law.info("a").state is JobState.PENDING


def test_nothing_new_is_placed_beside_a_stray_until_it_is_gone(law: Cluster) -> None:
    """A machine frozen beyond its lease still runs what was given up: its device is not given twice."""
    law.silence()
    law.tick(600.0)
    law.node()
    assert law.wished() == {}
    law.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert law.wished() == {}
    assert "is still ending a:0:0" in law.info("a").reason
    law.report("n1", [], gone=("a:0:0",))
    assert law.wished() == {"a:1:0": False}


HELD = "held by pid 77 (python)"


def test_a_device_that_somebody_holds_is_not_given_again_until_it_is_free(law: Cluster) -> None:
    law.launch(job("b", demand(1, gpu=1)))
    law.see("a:0:0", ended(), busy={"gpu-0": HELD})
    assert law.wished() == {}
    assert "has 0 of 1 gpu h100 free; not to be given now: gpu-0 held by pid 77 (python)" in law.info("b").reason
    assert nodes_info(law.state)[0].busy == {"gpu-0": HELD}
    law.launch(job("c"))
    assert list(law.wished()) == ["c:0:0"]
    law.report("n1", [], gone=("a:0:0",))
    assert list(law.wished()) == ["c:0:0", "b:0:0"]


def test_what_is_held_is_known_to_the_next_controller_and_an_old_report_changes_nothing(law: Cluster) -> None:
    law.see("a:0:0", ended(), busy={"gpu-0": HELD}, serial=5)
    law.launch(job("b", demand(1, gpu=1)))
    law.restart()
    law.node()
    law.report("n1", [], full=True, busy={"gpu-0": HELD}, serial=7)
    assert law.wished() == {}
    law.report("n1", [], full=True, serial=6)
    assert law.wished() == {}
    law.report("n1", [], serial=8)
    assert law.wished() == {"b:0:0": False}


def test_a_device_may_become_busy_and_free_again_while_somebody_has_it(law: Cluster) -> None:
    law.launch(job("b", demand(1, gpu=1)))
    law.report("n1", [], busy={"gpu-0": HELD, "gpu-9": "of a machine that was"})
    law.report("n1", [])
    law.see("a:0:0", ended())
    assert law.wished() == {"b:0:0": False}


def test_a_returning_machine_gets_nothing_new_before_it_tells_what_it_holds(law: Cluster) -> None:
    law.silence()
    law.node()
    law.launch(job("b"))
    assert "has not yet told what it holds" in law.info("b").reason
    law.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert list(law.wished()) == ["a:0:0", "b:0:0"]


def test_a_machine_unknown_to_us_that_holds_attempts_must_tell_them_first() -> None:
    law = Cluster()
    law.driver()
    law.launch(job("b"))
    law.node(holds=("x:0:0",))
    assert law.wished() == {}
    law.report("n1", [("x:0:0", Phase.RUNNING)], full=True)
    assert law.wished() == {}
    law.report("n1", [("x:0:0", ended())])
    assert list(law.wished()) == ["b:0:0"]


def test_a_lost_machine_is_struck_off_after_a_day() -> None:
    law = Cluster(SchedulerConfig(forget_node_s=1000.0))
    law.node()
    law.silence()
    law.tick(1600.0)
    assert nodes_info(law.state) == ()
    assert law.state.next_deadline() is None


# Ends that do not wait for silent machines


def test_a_stopped_job_does_not_wait_for_a_silent_machine(law: Cluster) -> None:
    law.silence()
    law.terminate("a")
    assert law.info("a").state is JobState.RUNNING
    law.tick()
    assert (law.now, law.info("a").state) == (30.0, JobState.STOPPED)


def test_its_process_still_holds_its_device_until_it_is_proven_dead(law: Cluster) -> None:
    law.silence()
    law.terminate("a")
    law.tick()
    law.launch(job("b", demand(0, gpu=1)))
    law.node()
    law.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert law.wished() == {"a:0:0": True}
    law.see("a:0:0", ended(EndReason.STOPPED))
    assert law.wished() == {"b:0:0": False}


def test_children_of_a_process_that_is_given_up_end_with_it(law: Cluster) -> None:
    law.node("n2")
    law.process("a:0:0")
    law.launch(job("child", demand(4)), session="s-a:0:0")
    law.run("child:0:0")
    law.silence("n1")
    law.terminate("a")
    law.tick()
    assert law.wished("n2") == {"child:0:0": True}


def test_a_stop_that_comes_when_the_machine_is_suspect_is_final_at_once(law: Cluster) -> None:
    law.silence()
    law.tick()
    law.terminate("a")
    assert law.info("a").state is JobState.STOPPED


# Reports


def test_an_attempt_the_node_never_spoke_of_is_wished_again(law: Cluster) -> None:
    law.launch(job("b"))
    law.silence()
    law.node()
    effects = law.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert DesiredAttemptsChanged(node="n1", changed=("b:0:0",)) in effects
    assert law.info("b").state is JobState.PENDING


def test_an_attempt_the_node_no_longer_knows_was_killed(law: Cluster) -> None:
    law.report("n1", [], full=True)
    assert law.info("a").cause is EndReason.KILLED
    assert law.info("a").error_message == "the node n1 no longer knows it"


def test_an_attempt_the_node_has_forgotten_unasked_was_killed(law: Cluster) -> None:
    law.report("n1", [], gone=("a:0:0",))
    assert law.info("a").cause is EndReason.KILLED


def test_an_old_full_report_does_not_miss_what_came_after_it(law: Cluster) -> None:
    law.report("n1", [("a:0:0", Phase.RUNNING)], serial=7)
    law.report("n1", [], full=True, serial=6)
    assert law.info("a").state is JobState.RUNNING
    law.report("n1", [], full=True, serial=8)
    assert law.info("a").cause is EndReason.KILLED


def test_a_report_of_another_nodes_attempt_is_a_stray_and_no_news(law: Cluster) -> None:
    law.node("n2")
    law.report("n2", [("a:0:0", ended(EndReason.FAILURE))])
    assert law.info("a").state is JobState.RUNNING
    law.report("n2", [("a:0:0", Phase.RUNNING)])
    assert law.state.nodes["n2"].stray_attempts == ("a:0:0",)


def test_reports_of_unknown_nodes_are_ignored(law: Cluster) -> None:
    law.incarnations["n9"] = "i9"
    assert law.report("n9", [("a:0:0", ended())]) == []
    assert law.silence("n9") == law.die("n9") == []


# Restarts of the controller


def test_after_a_restart_running_jobs_go_on_and_silence_is_counted_anew(law: Cluster) -> None:
    law.silence()
    law.now = 599.0
    law.restart()
    assert law.info("a").state is JobState.RUNNING
    assert law.state.next_deadline() == 629.0
    law.driver()
    law.node()
    law.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    law.see("a:0:0", ended(value="v"))
    assert law.info("a").value == "v"


def test_budgets_survive_a_restart(law: Cluster) -> None:
    law.see("a:0:0", ended(EndReason.PREEMPTED))
    law.restart()
    law.node(incarnation="i2", gpu="h100*1")
    assert (law.info("a").state, law.info("a").cause) == (JobState.FAILED, EndReason.MACHINE_LOST)


def test_the_laws_time_never_goes_back(law: Cluster) -> None:
    law.now = 50.0
    law.silence()
    law.now = 10.0
    law.restart()
    assert law.state.now == 50.0
    assert law.state.next_deadline() == 80.0


def test_what_a_node_remarks_of_a_living_attempt_goes_into_the_story_and_nothing_else_changes() -> None:
    law = Cluster()
    law.driver()
    law.node()
    law.launch(job("a"))
    law.run("a:0:0")

    def remark(**other: str) -> list[str]:
        said = {"node": "n1", "incarnation": "i1", "attempt_id": "a:0:0", "kind": "stalled", "text": "x" * 5000}
        effects = law.tell(AttemptAnnotated(**{**said, **other}))
        return [effect.event.text for effect in effects if isinstance(effect, EventRecorded)]

    (line,) = remark()
    assert line.startswith("a:0:0 on n1: xxx")
    assert len(line) == ANNOTATION_LIMIT_CHARS
    assert remark(incarnation="i0") == remark(node="n2") == remark(attempt_id="b:0:0") == []
    law.see("a:0:0", ended(EndReason.FAILURE, "stalled: …", captured="its stacks", peak_memory_bytes=7, cpu_s=1.5))
    assert remark() == []
    (attempt,) = job_info(law.state, "a").attempts
    assert (attempt.captured, attempt.peak_memory_bytes, attempt.cpu_s) == ("its stacks", 7, 1.5)
