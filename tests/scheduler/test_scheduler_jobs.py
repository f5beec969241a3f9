"""Jobs and attempts: whole gangs, retries by cause, first causes, cascades, and one outcome for good."""

from __future__ import annotations

import pytest

from fray.errors import InvalidRequest
from fray.model.specs import RESULT_GONE, EndReason, EntryKind, JobState, Outcome, Phase
from fray.scheduler.effects import (
    DeleteBlobs,
    DesiredAttemptsChanged,
    Effect,
    EventRecorded,
    JobInfoChanged,
    NamesChanged,
)
from fray.scheduler.explain.explain import explain
from fray.scheduler.jobs.retention import skip_generations, truncate_outcome
from fray.scheduler.lifecycle import (
    ATTEMPT_TABLE,
    BUDGETS,
    FINAL_STATE,
    JOB_TABLE,
    NODE_TABLE,
    AttemptObservation,
    AttemptPhase,
    IllegalTransition,
    JobEvent,
    JobPhase,
    NodeEvent,
    NodePhase,
    next_phase,
)
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.views import list_jobs
from tests.support.scheduler import Cluster, demand, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    """One driver and two machines of 4 CPUs."""
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1")
    scheduler.node("n2")
    return scheduler


# Tables


def test_every_living_phase_of_an_attempt_answers_every_sight() -> None:
    living = [phase for phase in AttemptPhase if phase is not AttemptPhase.ENDED]
    assert set(ATTEMPT_TABLE) == {(phase, sight) for phase in living for sight in AttemptObservation}


def test_every_cause_has_a_budget_line_and_a_final_state() -> None:
    assert set(BUDGETS) == set(FINAL_STATE) == set(EndReason)


def test_no_move_leads_out_of_the_end() -> None:
    assert not [phase for phase, _ in JOB_TABLE if phase is JobPhase.ENDED]
    with pytest.raises(IllegalTransition, match="'ended' has no transition 'placed'"):
        next_phase(JOB_TABLE, JobPhase.ENDED, JobEvent.PLACED)


def test_every_node_can_join_and_every_silence_can_be_due() -> None:
    for phase in NodePhase:
        assert NODE_TABLE[phase, NodeEvent.JOINED] is NodePhase.ALIVE
        assert (phase, NodeEvent.TIMED_OUT) in NODE_TABLE or phase in (NodePhase.ALIVE, NodePhase.LOST)


# One job


def test_a_job_runs_and_its_value_is_the_attempts(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    assert scheduler.info("a").state is JobState.PENDING
    scheduler.now = 5.0
    scheduler.see("a:0:0", Phase.STARTING)
    assert scheduler.info("a").state is JobState.PENDING
    scheduler.see("a:0:0", Phase.RUNNING)
    assert scheduler.info("a").state is JobState.RUNNING
    scheduler.now = 9.0
    scheduler.see("a:0:0", ended(value="v"))
    info = scheduler.info("a")
    assert (info.state, info.cause, info.value) == (JobState.SUCCEEDED, EndReason.SUCCEEDED, "v")
    assert (info.start_time, info.end_time, info.error_message) == (5.0, 9.0, None)


def test_a_job_so_short_that_only_its_end_was_seen_has_run(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.now = 10.0
    scheduler.see("a:0:0", ended(duration_s=4.0))
    assert (scheduler.info("a").state, scheduler.info("a").start_time) == (JobState.SUCCEEDED, 6.0)


def test_a_failure_without_budget_is_the_jobs_outcome_with_its_value(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.see("a:0:0", ended(EndReason.FAILURE, "ValueError: no", exit_code=1, value="e"))
    info = scheduler.info("a")
    assert (info.state, info.cause, info.error_message) == (JobState.FAILED, EndReason.FAILURE, "ValueError: no")
    assert (info.exit_code, info.value) == (1, "e")


def test_old_news_and_late_reports_change_nothing(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.see("a:0:0", Phase.RUNNING)
    assert scheduler.see("a:0:0", Phase.STARTING) == []
    scheduler.see("a:0:0", ended())
    assert scheduler.see("a:0:0", ended(EndReason.FAILURE, "too late"), node="n1") == []
    assert scheduler.info("a").state is JobState.SUCCEEDED


def test_a_late_reports_value_is_forgotten(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.see("a:0:0", ended(value="v"))
    assert scheduler.see("a:0:0", ended(value="other"), node="n1") == [DeleteBlobs(blobs=("other",))]
    assert scheduler.see("a:0:0", ended(value="v"), node="n1") == []


def test_an_end_without_outcome_counts_as_killed(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.see("a:0:0", Phase.ENDED)
    assert scheduler.info("a").cause is EndReason.KILLED


# Retries


@pytest.mark.parametrize("cause", [EndReason.FAILURE, EndReason.KILLED, EndReason.OUT_OF_MEMORY])
def test_these_causes_spend_the_failure_budget(scheduler: Cluster, cause: EndReason) -> None:
    scheduler.launch(job("a", max_retries_failure=1, max_retries_preemption=100))
    scheduler.see("a:0:0", ended(cause))
    assert scheduler.info("a").state is JobState.PENDING
    scheduler.see("a:1:0", ended(cause))
    assert (scheduler.info("a").state, scheduler.info("a").cause) == (JobState.FAILED, cause)


@pytest.mark.parametrize("cause", [EndReason.PREEMPTED, EndReason.MACHINE_LOST])
def test_these_causes_spend_the_preemption_budget(scheduler: Cluster, cause: EndReason) -> None:
    scheduler.launch(job("a", max_retries_failure=100, max_retries_preemption=1))
    scheduler.see("a:0:0", ended(cause))
    scheduler.see("a:1:0", ended(cause))
    assert (scheduler.info("a").state, scheduler.info("a").cause) == (JobState.FAILED, cause)


@pytest.mark.parametrize("cause", [EndReason.ENVIRONMENT, EndReason.UNSCHEDULABLE])
def test_these_causes_are_never_retried(scheduler: Cluster, cause: EndReason) -> None:
    scheduler.launch(job("a", max_retries_failure=100, max_retries_preemption=100))
    scheduler.see("a:0:0", ended(cause))
    assert (scheduler.info("a").state, scheduler.info("a").cause) == (JobState.FAILED, cause)


def test_a_negative_budget_has_no_end(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=-1))
    for generation in range(20):
        scheduler.see(f"a:{generation}:0", ended(EndReason.FAILURE))
    assert scheduler.info("a").state is JobState.PENDING


def test_a_retry_keeps_its_place_in_the_queue(scheduler: Cluster) -> None:
    scheduler.launch(job("first", demand(4), max_retries_failure=1), job("other", demand(4)))
    scheduler.launch(job("later", demand(4)))
    scheduler.see("first:0:0", ended(EndReason.FAILURE))
    assert "first:1:0" in scheduler.desired("n1")
    assert scheduler.info("later").state is JobState.PENDING


def test_records_of_old_generations_are_bounded() -> None:
    scheduler = Cluster(SchedulerConfig(records_limit=3))
    scheduler.driver()
    scheduler.node()
    scheduler.launch(job("a", max_retries_failure=-1, backoff_max_s=0))
    for generation in range(9):
        scheduler.see(f"a:{generation}:0", ended(EndReason.FAILURE, value=f"v{generation}"))
    kept = [attempt.attempt_id for attempt in scheduler.info("a").attempts]
    assert kept == ["a:6:0", "a:7:0", "a:8:0", "a:9:0"]
    assert scheduler.state.blob_refs == {}


def test_no_generation_is_used_twice_by_the_jobs_of_a_restored_store(scheduler: Cluster) -> None:
    scheduler.launch(job("runs", demand(4), max_retries_failure=2), job("other", demand(4)))
    scheduler.launch(job("waits", demand(4)))
    scheduler.see("runs:0:0", ended(EndReason.FAILURE))
    scheduler.run("runs:1:0", "other:0:0")
    for first in (100_001, 200_001):
        skip_generations(scheduler.state)
        scheduler.save()
        scheduler.restart()
        assert scheduler.state.meta.first_generation == first
    scheduler.driver()
    # What runs according to the backup may still do.
    running = {"n1": "runs:1:0", "n2": "other:0:0"}
    for name, attempt in running.items():
        scheduler.node(name)
        scheduler.report(name, [(attempt, Phase.RUNNING)], full=True)
        assert list(scheduler.desired(name)) == [attempt]
    scheduler.see("other:0:0", ended())
    scheduler.see("runs:1:0", ended(EndReason.FAILURE))
    scheduler.tick(scheduler.now + 60.0)
    scheduler.launch(job("new", demand(0)))
    kept = [[each.attempt_id for each in scheduler.info(name).attempts] for name in ("waits", "runs", "new")]
    assert kept == [["waits:200001:0"], ["runs:200001:0"], ["new:200001:0"]]


def test_what_a_large_gang_says_of_its_end_is_bounded_together() -> None:
    said = Outcome(cause=EndReason.FAILURE, message="x" * 10_000_000)
    assert [len(truncate_outcome(said, members).message) // 100 for members in (1, 400, 4_000, 100_000)] == [
        80,
        80,
        10,
        3,
    ]


# Gangs


def test_a_gang_starts_whole_or_waits_whole(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", demand(3), members=3))
    assert scheduler.desired("n1") == scheduler.desired("n2") == {}
    scheduler.node("n3")
    assert [list(scheduler.desired(node)) for node in ("n1", "n2", "n3")] == [["gang:0:0"], ["gang:0:1"], ["gang:0:2"]]


def test_a_gang_is_running_when_every_member_is(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=2))
    scheduler.run("gang:0:0")
    assert scheduler.info("gang").state is JobState.PENDING
    scheduler.run("gang:0:1")
    assert scheduler.info("gang").state is JobState.RUNNING


def test_a_members_success_leaves_the_others_alone_and_the_first_ones_value_is_the_gangs(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=2))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.see("gang:0:1", ended(value="second"))
    assert scheduler.desired("n1") | scheduler.desired("n2") == {"gang:0:0": False}
    effects = scheduler.see("gang:0:0", ended(value="first"))
    assert (scheduler.info("gang").state, scheduler.info("gang").value) == (JobState.SUCCEEDED, "first")
    assert DeleteBlobs(blobs=("second",)) in effects


def test_the_first_cause_ends_the_gang_and_is_its_outcome(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=3))
    scheduler.run("gang:0:0", "gang:0:1", "gang:0:2")
    scheduler.see("gang:0:1", ended(EndReason.OUT_OF_MEMORY, "too big"))
    desired = scheduler.state.desired_attempt("gang:0:2")
    assert desired is not None
    assert (desired.stop, desired.stop_cause) == (True, EndReason.GANG)
    scheduler.see("gang:0:0", ended(EndReason.FAILURE, "connection reset"))
    assert scheduler.info("gang").state is JobState.RUNNING
    scheduler.see("gang:0:2", ended(EndReason.GANG))
    assert scheduler.info("gang").cause is EndReason.OUT_OF_MEMORY
    assert scheduler.info("gang").error_message == "too big (member 1 of 3, on n1, was the first to end)"


def test_a_gang_is_retried_only_after_its_last_member_has_ended(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=2, max_retries_failure=1))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.see("gang:0:0", ended(EndReason.FAILURE))
    assert not [attempt for node in ("n1", "n2") for attempt in scheduler.desired(node) if ":1:" in attempt]
    scheduler.see("gang:0:1", ended(EndReason.GANG))
    assert sorted([*scheduler.desired("n1"), *scheduler.desired("n2")]) == ["gang:1:0", "gang:1:1"]


def test_a_machines_death_is_the_cause_of_its_gangs_earlier_symptoms(scheduler: Cluster) -> None:
    """The others fail within seconds; the silence proves the death ten minutes later."""
    scheduler.launch(job("gang", demand(3), members=2, max_retries_preemption=1))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.now = 100.0
    scheduler.see("gang:0:1", ended(EndReason.FAILURE, "connection reset by peer"))
    scheduler.now = 103.0
    scheduler.silence("n1")
    scheduler.tick(200.0)
    assert scheduler.info("gang").state is JobState.RUNNING
    scheduler.tick(703.0)
    assert scheduler.info("gang").state is JobState.PENDING
    assert scheduler.state.jobs["gang"].retries == {EndReason.MACHINE_LOST: 1}


def test_a_machine_that_falls_silent_long_after_a_failure_is_not_its_cause(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", demand(3), members=2, max_retries_preemption=1))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.see("gang:0:1", ended(EndReason.FAILURE, "my own fault"))
    scheduler.now = 60.0
    scheduler.silence("n1")
    scheduler.tick(90.0)
    assert scheduler.info("gang").error_message == "my own fault (member 1 of 2, on n2, was the first to end)"


# Stopping


def test_a_waiting_job_stops_at_once(scheduler: Cluster) -> None:
    scheduler.launch(job("big", demand(99)))
    scheduler.terminate("big")
    assert (scheduler.info("big").state, scheduler.info("big").cause) == (JobState.STOPPED, EndReason.STOPPED)


def test_a_running_job_stops_when_its_node_says_so(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=9))
    scheduler.run("a:0:0")
    effects = scheduler.terminate("a")
    assert DesiredAttemptsChanged(node="n1", changed=("a:0:0",)) in effects
    assert scheduler.desired() == {"a:0:0": True}
    assert scheduler.info("a").state is JobState.RUNNING
    effects = scheduler.see("a:0:0", ended(EndReason.STOPPED))
    assert DesiredAttemptsChanged(node="n1", gone=("a:0:0",)) in effects
    assert (scheduler.info("a").state, scheduler.info("a").error_message) == (JobState.STOPPED, "terminated on request")


@pytest.mark.parametrize("last", [EndReason.FAILURE, EndReason.KILLED, EndReason.MACHINE_LOST])
def test_however_a_stopped_process_ends_its_job_was_stopped(scheduler: Cluster, last: EndReason) -> None:
    scheduler.launch(job("a", max_retries_failure=9, max_retries_preemption=9))
    scheduler.run("a:0:0")
    scheduler.terminate("a")
    scheduler.see("a:0:0", ended(last, value="e"))
    assert (scheduler.info("a").state, scheduler.info("a").cause, scheduler.info("a").value) == (
        JobState.STOPPED,
        EndReason.STOPPED,
        None,
    )


def test_a_job_that_was_done_before_the_request_arrived_has_succeeded(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.terminate("a")
    scheduler.see("a:0:0", ended(value="v"))
    assert (scheduler.info("a").state, scheduler.info("a").value) == (JobState.SUCCEEDED, "v")


def test_a_failing_gang_that_is_stopped_is_not_retried_and_says_both(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=2, max_retries_failure=5))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.see("gang:0:0", ended(EndReason.FAILURE, "boom"))
    scheduler.terminate("gang")
    scheduler.see("gang:0:1", ended(EndReason.GANG))
    assert scheduler.info("gang").cause is EndReason.STOPPED
    assert scheduler.info("gang").error_message == "terminated on request; it would have been retried after: boom"


def test_a_failing_gang_without_budget_has_failed_even_if_it_is_stopped_afterwards(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=2))
    scheduler.run("gang:0:0", "gang:0:1")
    scheduler.see("gang:0:0", ended(EndReason.FAILURE, "boom"))
    scheduler.terminate("gang")
    scheduler.see("gang:0:1", ended(EndReason.GANG))
    assert (scheduler.info("gang").cause, scheduler.info("gang").error_message) == (EndReason.FAILURE, "boom")


def test_stopping_twice_or_what_is_unknown_changes_nothing(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.terminate("a")
    assert not [
        effect
        for effect in scheduler.terminate("a", "unknown")
        if isinstance(effect, JobInfoChanged | DesiredAttemptsChanged)
    ]


# Cascades


def test_what_an_attempt_launched_ends_with_it(scheduler: Cluster) -> None:
    scheduler.launch(job("parent", max_retries_failure=1))
    scheduler.run("parent:0:0")
    scheduler.process("parent:0:0")
    scheduler.launch(job("child"), session="s-parent:0:0")
    scheduler.run("child:0:0")
    scheduler.process("child:0:0")
    scheduler.launch(job("grandchild"), session="s-child:0:0")
    scheduler.see("parent:0:0", ended(EndReason.FAILURE))
    assert scheduler.state.desired_attempt("child:0:0").stop  # type: ignore[union-attr]
    assert scheduler.info("parent").state is JobState.PENDING
    scheduler.see("child:0:0", ended(EndReason.OWNER_ENDED))
    assert scheduler.state.desired_attempt("grandchild:0:0").stop  # type: ignore[union-attr]
    scheduler.see("grandchild:0:0", ended(EndReason.OWNER_ENDED))
    assert scheduler.states("child", "grandchild") == [JobState.STOPPED] * 2
    assert scheduler.info("child").cause is EndReason.OWNER_ENDED


def test_a_waiting_child_ends_in_the_same_step_as_its_owner(scheduler: Cluster) -> None:
    scheduler.launch(job("parent"))
    scheduler.run("parent:0:0")
    scheduler.process("parent:0:0")
    scheduler.launch(job("child", demand(99)), session="s-parent:0:0")
    scheduler.see("parent:0:0", ended())
    assert scheduler.info("child").state is JobState.STOPPED
    assert "parent:0:0 ended (succeeded)" in (scheduler.info("child").error_message or "")


def test_a_detached_child_outlives_its_launcher(scheduler: Cluster) -> None:
    scheduler.launch(job("parent"))
    scheduler.run("parent:0:0")
    scheduler.process("parent:0:0")
    scheduler.launch(job("child", detached=True), session="s-parent:0:0")
    scheduler.see("parent:0:0", ended())
    assert (scheduler.info("child").state, scheduler.info("child").owner) == (JobState.PENDING, "")
    assert scheduler.state.jobs["child"].root == ""


# Records


def test_ended_jobs_are_kept_up_to_a_limit_and_the_oldest_are_forgotten() -> None:
    scheduler = Cluster(SchedulerConfig(finished_limit=2))
    scheduler.driver()
    scheduler.node()
    for name in "abc":
        scheduler.launch(job(name, payload=f"p{name}"))
        effects = scheduler.see(f"{name}:0:0", ended(value=f"v{name}"))
    assert effects[-1] == DeleteBlobs(blobs=("pc", "va"))
    assert [info.job_id for info in list_jobs(scheduler.state)] == ["b", "c"]
    assert [key for key in scheduler.store if key[1].startswith("a")] == [("job_tombstone", "a")]


def test_of_a_forgotten_job_a_line_is_kept_so_that_it_never_runs_again() -> None:
    scheduler = Cluster(SchedulerConfig(finished_limit=1, history_limit=2))
    scheduler.driver()
    scheduler.node()
    for name in "abcd":
        scheduler.launch(job(name))
        scheduler.see(f"{name}:0:0", ended(EndReason.FAILURE, f"no {name}") if name == "b" else ended(value=f"v{name}"))
    scheduler.restart()
    scheduler.driver()
    scheduler.node()
    assert list(scheduler.state.job_tombstones) == ["b", "c"]
    assert [info.state for info in (*scheduler.launch(job("b")), *scheduler.launch(job("c")))] == [
        "failed",
        "succeeded",
    ]
    assert (scheduler.info("b").error_message, scheduler.info("c").error_message) == ("no b", RESULT_GONE)
    assert explain(scheduler.state, "b", scheduler.now) == "b ended long ago (failure): no b; no more is on record"
    with pytest.raises(InvalidRequest, match="differs in name"):
        scheduler.launch(job("other", job_id="b"))
    assert scheduler.launch(job("a"))[0].state is JobState.PENDING  # beyond the bound


def test_ended_jobs_are_kept_no_longer_than_their_time() -> None:
    scheduler = Cluster(SchedulerConfig(finished_keep_s=100.0))
    scheduler.driver()
    scheduler.node()
    scheduler.launch(job("a"), job("b"))
    scheduler.see("a:0:0", ended())
    scheduler.now = 50.0
    scheduler.see("b:0:0", ended())
    scheduler.now = 120.0
    scheduler.driver("e")
    assert (list(scheduler.state.jobs), list(scheduler.state.job_tombstones)) == (["b"], ["a"])


def test_what_attempts_say_of_their_ends_has_a_length() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node()
    scheduler.launch(job("a", max_retries_failure=20, backoff_max_s=0))
    for generation in range(10):
        scheduler.see(f"a:{generation}:0", ended(EndReason.FAILURE, f"first {'x' * 10**6} last", captured="s" * 10**6))
    first, second, third, *_, last, _ = scheduler.info("a").attempts
    assert last.message[:7] + last.message[-6:] == "first xx last"
    assert len(last.message) < 8_100
    assert (first.captured, second.captured, len(third.captured) < 64_100) == ("", "", True)
    assert len(third.captured) > 60_000


def test_a_payload_is_kept_as_long_as_any_job_needs_it(scheduler: Cluster) -> None:
    scheduler.launch(job("a", payload="p"), job("b", payload="p"))
    assert not [effect for effect in scheduler.see("a:0:0", ended()) if isinstance(effect, DeleteBlobs)]
    assert DeleteBlobs(blobs=("p",)) in scheduler.see("b:0:0", ended())


def test_an_actors_watchers_are_notified_of_its_end(scheduler: Cluster) -> None:
    scheduler.launch(job("a", entry=EntryKind.ACTOR))
    assert NamesChanged(key="actor:a") in scheduler.see("a:0:0", ended(EndReason.FAILURE, "boom"))
    assert scheduler.names("actor:a").ended == ended(EndReason.FAILURE, "boom")


def test_the_event_log_has_the_events_of_a_job(scheduler: Cluster) -> None:
    found = [
        scheduler.ask_launch(job("a", max_retries_failure=1)),
        scheduler.see("a:0:0", ended(EndReason.FAILURE, "boom")),
    ]
    found += [scheduler.see("a:1:0", Phase.RUNNING), scheduler.see("a:1:0", ended())]
    events = [effect.event for effects in found for effect in effects if isinstance(effect, EventRecorded)]
    assert [event.what for event in events] == [
        "launched",
        "placed",
        "attempt ended",
        "retrying",
        "placed",
        "running",
        "attempt ended",
        "ended",
    ]
    assert events[3].text == "failure 1 of 1 after failure: boom"


def test_results_have_a_limit_together_and_those_of_the_oldest_go_first() -> None:
    scheduler = Cluster(SchedulerConfig(results_limit_bytes=25))
    scheduler.driver()
    scheduler.node()
    for name in "abc":
        scheduler.launch(job(name))
        effects = scheduler.see(f"{name}:0:0", ended(value=f"v{name}", value_bytes=10))
    assert effects[-1] == DeleteBlobs(blobs=("va",))
    scheduler.restart()
    found = [(info.value, info.error_message) for info in list_jobs(scheduler.state)]
    assert found == [(None, RESULT_GONE), ("vb", None), ("vc", None)]
    assert scheduler.info("a").state is JobState.SUCCEEDED


def test_watchers_of_a_large_gang_get_a_few_records_and_not_one_for_each_member() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=200)
    scheduler.launch(job("gang", demand(1), members=128))
    found = sum(_tells(scheduler.see(f"gang:0:{member}", Phase.RUNNING), "gang") for member in range(128))
    assert 10 <= found <= 24
    assert scheduler.info("gang").state is JobState.RUNNING
    assert _tells(scheduler.see("gang:0:5", ended(EndReason.FAILURE, "boom")), "gang")


def _tells(effects: list[Effect], job_id: str) -> bool:
    return any(isinstance(effect, JobInfoChanged) and effect.job_id == job_id for effect in effects)
