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
def scheduler() -> Cluster:
    """A job running on the only machine."""
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node(gpu="h100*1")
    scheduler.launch(job("a", demand(1, gpu=1), max_retries_preemption=1))
    scheduler.run("a:0:0")
    return scheduler


# Silence


def test_a_silent_machine_is_suspect_after_30_s_and_given_up_after_600(scheduler: Cluster) -> None:
    scheduler.silence()
    assert [node.alive for node in nodes_info(scheduler.state)] == [True]
    assert JobInfoChanged(job_id="a") in scheduler.tick()
    assert scheduler.now == 30.0
    assert [node.alive for node in nodes_info(scheduler.state)] == [False]
    assert scheduler.info("a").state is JobState.RUNNING
    assert "silent machines: n1" in scheduler.info("a").reason
    scheduler.tick()
    assert scheduler.now == 600.0
    assert (scheduler.info("a").state, scheduler.info("a").attempts[0].cause) == (
        JobState.PENDING,
        EndReason.MACHINE_LOST,
    )


def test_nothing_is_placed_on_a_silent_machine(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.launch(job("b"))
    assert scheduler.info("b").state is JobState.PENDING
    assert "b:0:0" not in scheduler.state.attempts


def test_a_machine_that_comes_back_in_time_keeps_what_it_holds(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.tick()
    scheduler.now = 500.0
    scheduler.node()
    assert scheduler.info("a").reason == ""
    assert scheduler.report("n1", [("a:0:0", Phase.RUNNING)], full=True) == []
    assert scheduler.state.next_deadline() is None


def test_proof_of_death_spares_the_lease(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.now = 10.0
    scheduler.die()
    assert scheduler.info("a").attempts[0].message == "the node n1 is gone: machine deleted"
    assert scheduler.info("a").state is JobState.PENDING
    assert nodes_info(scheduler.state) == ()


def test_a_new_incarnation_proves_the_old_one_dead(scheduler: Cluster) -> None:
    scheduler.node(incarnation="i2", gpu="h100*1")
    assert scheduler.info("a").attempts[0].cause is EndReason.MACHINE_LOST
    assert scheduler.desired() == {"a:1:0": False}


def test_the_dead_incarnation_can_say_nothing(scheduler: Cluster) -> None:
    scheduler.node(incarnation="i2", gpu="h100*1")
    assert scheduler.report("n1", [("a:1:0", Phase.RUNNING)], incarnation="i1") == []
    scheduler.incarnations["n1"] = "i1"
    assert scheduler.silence() == scheduler.die() == []
    assert scheduler.state.nodes["n1"].phase is NodePhase.ALIVE


def test_a_machine_that_comes_back_after_its_lease_changes_nothing(scheduler: Cluster) -> None:
    scheduler.node("n2", gpu="h100*1")
    scheduler.silence("n1")
    scheduler.tick(600.0)
    assert scheduler.desired("n2") == {"a:1:0": False}
    scheduler.node("n1")
    scheduler.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert scheduler.desired("n1") == {}
    assert scheduler.see("a:0:0", ended(value="stale"), node="n1")[-1].blobs == ("stale",)  # type: ignore[union-attr]
    assert scheduler.info("a").state is JobState.PENDING


def test_nothing_new_is_placed_beside_a_stray_until_it_is_gone(scheduler: Cluster) -> None:
    """A machine frozen beyond its lease still runs what was given up: its device is not given twice."""
    scheduler.silence()
    scheduler.tick(600.0)
    scheduler.node()
    assert scheduler.desired() == {}
    scheduler.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert scheduler.desired() == {}
    assert "is still ending a:0:0" in scheduler.info("a").reason
    scheduler.report("n1", [], gone=("a:0:0",))
    assert scheduler.desired() == {"a:1:0": False}


HELD = "held by pid 77 (python)"


def test_a_device_in_use_is_not_allocated_until_it_is_free(scheduler: Cluster) -> None:
    scheduler.launch(job("b", demand(1, gpu=1)))
    scheduler.see("a:0:0", ended(), busy={"gpu-0": HELD})
    assert scheduler.desired() == {}
    assert "has 0 of 1 gpu h100 free; unavailable devices: gpu-0 held by pid 77 (python)" in scheduler.info("b").reason
    assert nodes_info(scheduler.state)[0].busy == {"gpu-0": HELD}
    scheduler.launch(job("c"))
    assert list(scheduler.desired()) == ["c:0:0"]
    scheduler.report("n1", [], gone=("a:0:0",))
    assert list(scheduler.desired()) == ["c:0:0", "b:0:0"]


def test_what_is_held_is_known_to_the_next_controller(scheduler: Cluster) -> None:
    scheduler.see("a:0:0", ended(), busy={"gpu-0": HELD})
    scheduler.launch(job("b", demand(1, gpu=1)))
    scheduler.restart()
    scheduler.node()
    scheduler.report("n1", [], full=True, busy={"gpu-0": HELD})
    assert scheduler.desired() == {}
    scheduler.report("n1", [])
    assert scheduler.desired() == {"b:0:0": False}


def test_a_device_may_become_busy_and_free_again_while_it_is_allocated(scheduler: Cluster) -> None:
    scheduler.launch(job("b", demand(1, gpu=1)))
    scheduler.report("n1", [], busy={"gpu-0": HELD, "gpu-9": "of a machine that was"})
    scheduler.report("n1", [])
    scheduler.see("a:0:0", ended())
    assert scheduler.desired() == {"b:0:0": False}


def test_a_returning_machine_gets_nothing_new_before_it_tells_what_it_holds(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.node()
    scheduler.launch(job("b"))
    assert "has not reported what it holds yet" in scheduler.info("b").reason
    scheduler.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert list(scheduler.desired()) == ["a:0:0", "b:0:0"]


def test_a_machine_unknown_to_us_that_holds_attempts_must_tell_them_first() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.launch(job("b"))
    scheduler.node(holds=("x:0:0",))
    assert scheduler.desired() == {}
    scheduler.report("n1", [("x:0:0", Phase.RUNNING)], full=True)
    assert scheduler.desired() == {}
    scheduler.report("n1", [("x:0:0", ended())])
    assert list(scheduler.desired()) == ["b:0:0"]


def test_a_lost_machine_is_struck_off_after_a_day() -> None:
    scheduler = Cluster(SchedulerConfig(forget_node_s=1000.0))
    scheduler.node()
    scheduler.silence()
    scheduler.tick(1600.0)
    assert nodes_info(scheduler.state) == ()
    assert scheduler.state.next_deadline() is None


# Ends that do not wait for silent machines


def test_a_stopped_job_does_not_wait_for_a_silent_machine(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.terminate("a")
    assert scheduler.info("a").state is JobState.RUNNING
    scheduler.tick()
    assert (scheduler.now, scheduler.info("a").state) == (30.0, JobState.STOPPED)


def test_its_process_still_holds_its_device_until_it_is_proven_dead(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.terminate("a")
    scheduler.tick()
    scheduler.launch(job("b", demand(0, gpu=1)))
    scheduler.node()
    scheduler.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert scheduler.desired() == {"a:0:0": True}
    scheduler.see("a:0:0", ended(EndReason.STOPPED))
    assert scheduler.desired() == {"b:0:0": False}


def test_children_of_a_process_that_is_given_up_end_with_it(scheduler: Cluster) -> None:
    scheduler.node("n2")
    scheduler.process("a:0:0")
    scheduler.launch(job("child", demand(4)), session="s-a:0:0")
    scheduler.run("child:0:0")
    scheduler.silence("n1")
    scheduler.terminate("a")
    scheduler.tick()
    assert scheduler.desired("n2") == {"child:0:0": True}


def test_a_stop_that_comes_when_the_machine_is_suspect_is_final_at_once(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.tick()
    scheduler.terminate("a")
    assert scheduler.info("a").state is JobState.STOPPED


# Reports


def test_an_attempt_the_node_never_spoke_of_is_wished_again(scheduler: Cluster) -> None:
    scheduler.launch(job("b"))
    scheduler.silence()
    scheduler.node()
    effects = scheduler.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    assert DesiredAttemptsChanged(node="n1", changed=("b:0:0",)) in effects
    assert scheduler.info("b").state is JobState.PENDING


def test_an_attempt_the_node_no_longer_knows_was_killed(scheduler: Cluster) -> None:
    scheduler.report("n1", [], full=True)
    assert scheduler.info("a").cause is EndReason.KILLED
    assert scheduler.info("a").error_message == "the node n1 no longer has it"


def test_an_attempt_the_node_has_forgotten_unasked_was_killed(scheduler: Cluster) -> None:
    scheduler.report("n1", [], gone=("a:0:0",))
    assert scheduler.info("a").cause is EndReason.KILLED


def test_a_report_of_another_nodes_attempt_is_a_stray_and_no_news(scheduler: Cluster) -> None:
    scheduler.node("n2")
    scheduler.report("n2", [("a:0:0", ended(EndReason.FAILURE))])
    assert scheduler.info("a").state is JobState.RUNNING
    scheduler.report("n2", [("a:0:0", Phase.RUNNING)])
    assert scheduler.state.nodes["n2"].stray_attempts == ("a:0:0",)


def test_reports_of_unknown_nodes_are_ignored(scheduler: Cluster) -> None:
    scheduler.incarnations["n9"] = "i9"
    assert scheduler.report("n9", [("a:0:0", ended())]) == []
    assert scheduler.silence("n9") == scheduler.die("n9") == []


# Restarts of the controller


def test_after_a_restart_running_jobs_continue_and_silence_is_counted_from_zero(scheduler: Cluster) -> None:
    scheduler.silence()
    scheduler.now = 599.0
    scheduler.restart()
    assert scheduler.info("a").state is JobState.RUNNING
    assert scheduler.state.next_deadline() == 629.0
    scheduler.driver()
    scheduler.node()
    scheduler.report("n1", [("a:0:0", Phase.RUNNING)], full=True)
    scheduler.see("a:0:0", ended(value="v"))
    assert scheduler.info("a").value == "v"


def test_budgets_survive_a_restart(scheduler: Cluster) -> None:
    scheduler.see("a:0:0", ended(EndReason.PREEMPTED))
    scheduler.restart()
    scheduler.node(incarnation="i2", gpu="h100*1")
    assert (scheduler.info("a").state, scheduler.info("a").cause) == (JobState.FAILED, EndReason.MACHINE_LOST)


def test_the_schedulers_clock_never_goes_back(scheduler: Cluster) -> None:
    scheduler.now = 50.0
    scheduler.silence()
    scheduler.now = 10.0
    scheduler.restart()
    assert scheduler.state.now == 50.0
    assert scheduler.state.next_deadline() == 80.0


def test_what_a_node_remarks_of_a_living_attempt_goes_into_the_story_and_nothing_else_changes() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node()
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")

    def remark(**other: str) -> list[str]:
        said = {"node": "n1", "incarnation": "i1", "attempt_id": "a:0:0", "kind": "stalled", "text": "x" * 5000}
        effects = scheduler.tell(AttemptAnnotated(**{**said, **other}))
        return [effect.event.text for effect in effects if isinstance(effect, EventRecorded)]

    (line,) = remark()
    assert line.startswith("a:0:0 on n1: xxx")
    assert len(line) == ANNOTATION_LIMIT_CHARS
    assert remark(incarnation="i0") == remark(node="n2") == remark(attempt_id="b:0:0") == []
    scheduler.see(
        "a:0:0", ended(EndReason.FAILURE, "stalled: …", captured="its stacks", peak_memory_bytes=7, cpu_s=1.5)
    )
    assert remark() == []
    (attempt,) = job_info(scheduler.state, "a").attempts
    assert (attempt.captured, attempt.peak_memory_bytes, attempt.cpu_s) == ("its stacks", 7, 1.5)
