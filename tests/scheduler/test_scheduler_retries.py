"""Retries by cause: budgets, exit rules, waits, crash loops, places; and the table in the docs."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from fray.errors import InvalidRequest
from fray.model.requests import JobRequest
from fray.model.resources import Demand
from fray.model.restart_policy import (
    CRASH_WAIT_S,
    CRASHES,
    JITTER,
    crash_loop_delay_s,
    restart_delay_s,
    with_jitter,
)
from fray.model.specs import ActorConfig, EndReason, EntryKind, ExitRule, JobSpec, JobState, Outcome, Phase
from fray.scheduler.jobs.retries import FREE_BUDGETS, PORT_RETRY_LIMIT, chosen_code
from fray.scheduler.lifecycle import BUDGETS, FALLBACK_BUDGET, FINAL_STATE, Budget
from tests.support.scheduler import Cluster, ended, job

PAGE = Path(__file__).parents[2] / "docs" / "retries.md"


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    for name in ("n1", "n2", "n3"):
        scheduler.node(name, cpu=2)
    return scheduler


def fail(scheduler: Cluster, job_id: str, generation: int, after_s: float = 1.0, **outcome: object) -> None:
    """The attempt runs, and fails so much later."""
    scheduler.run(f"{job_id}:{generation}:0")
    scheduler.now += after_s
    scheduler.see(f"{job_id}:{generation}:0", ended(EndReason.FAILURE, "no", **outcome))


# The table


def budget_word(cause: EndReason) -> str:
    budget = BUDGETS[cause]
    if budget is None:
        return "never retried"
    if budget in FREE_BUDGETS:
        return "none used"
    words = {budget: f"`max_retries_{budget.value.replace(' ', '_')}`" for budget in Budget}
    other = FALLBACK_BUDGET.get(budget)
    return words[budget] + (f"; where that is None, {words[other]}" if other else "")


def test_the_page_has_the_table_of_the_scheduler() -> None:
    lines = [f"| `{cause.value}` | {FINAL_STATE[cause].value} | {budget_word(cause)} |" for cause in EndReason]
    table = PAGE.read_text().split("lifecycle.py by tests")[1].split("<!-- end -->")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == lines


# Budgets


@pytest.mark.parametrize(
    ("cause", "own", "other"),
    [
        (EndReason.OUT_OF_MEMORY, "max_retries_out_of_memory", "max_retries_failure"),
        (EndReason.MACHINE_LOST, "max_retries_machine_loss", "max_retries_preemption"),
    ],
)
def test_a_budget_that_is_not_set_is_paid_by_another_and_one_that_is_pays_alone(
    scheduler: Cluster, cause: EndReason, own: str, other: str
) -> None:
    spend = ended(cause)
    scheduler.launch(job("a", **{other: 1}), job("b", **{own: 0, other: 9}), job("c", **{own: 1, other: 0}))
    for job_id, states in {"a": ["pending", "failed"], "b": ["failed"], "c": ["pending", "failed"]}.items():
        for generation, state in enumerate(states):
            scheduler.now += 100
            scheduler.see(f"{job_id}:{generation}:0", spend)
            assert scheduler.info(job_id).state == state, (job_id, generation)


# Exit codes


def test_rules_are_about_codes_that_a_process_chose() -> None:
    assert chosen_code(ended(EndReason.FAILURE, exit_code=3)) == 3
    assert chosen_code(ended(EndReason.FAILURE, exit_code=1, raised=True)) is None
    assert chosen_code(ended(EndReason.KILLED, signal=15)) == 143
    assert chosen_code(ended(EndReason.OUT_OF_MEMORY, signal=9)) is None
    assert chosen_code(ended(EndReason.STOPPED, exit_code=3)) is None


def test_what_is_ignored_is_a_success_without_a_value(scheduler: Cluster) -> None:
    scheduler.launch(job("a", exit_codes={3: ExitRule.IGNORE}, payload="p"))
    effects = scheduler.see("a:0:0", ended(EndReason.FAILURE, "SystemExit: 3", exit_code=3, value="pickled"))
    info = scheduler.info("a")
    assert (info.state, info.exit_code, info.value, info.error_message) == (JobState.SUCCEEDED, 3, None, None)
    assert "pickled" in {blob for effect in effects for blob in getattr(effect, "blobs", ())}


def test_a_rule_decides_for_the_member_of_a_gang_that_broke_first(scheduler: Cluster) -> None:
    rules = {2: ExitRule.FAIL, 3: ExitRule.IGNORE}
    scheduler.launch(job("g", members=2, max_retries_failure=5, exit_codes=rules))
    scheduler.run("g:0:0", "g:0:1")
    scheduler.see("g:0:0", ended(EndReason.FAILURE, exit_code=3))
    assert scheduler.info("g").state is JobState.RUNNING
    scheduler.see("g:0:1", ended(EndReason.FAILURE, "usage", exit_code=2))
    assert (scheduler.info("g").state, scheduler.info("g").first_member) == (JobState.FAILED, 1)


def test_an_exception_is_not_hidden_by_a_rule_for_one(scheduler: Cluster) -> None:
    scheduler.launch(job("a", exit_codes={1: ExitRule.IGNORE}))
    scheduler.see("a:0:0", ended(EndReason.FAILURE, "ValueError: no", exit_code=1, raised=True))
    assert scheduler.info("a").state is JobState.FAILED


# Waits


def test_jitter_shortens_by_up_to_a_quarter_and_is_the_same_in_every_run() -> None:
    waits = [with_jitter(8.0, f"train-k3j9x2m4:{generation}:0") for generation in range(200)]
    assert waits == [with_jitter(8.0, f"train-k3j9x2m4:{generation}:0") for generation in range(200)]
    assert 8.0 * (1 - JITTER) <= min(waits) < 6.2
    assert 7.8 < max(waits) <= 8.0
    assert 6.8 < statistics.mean(waits) < 7.2


def test_waits_double_up_to_the_most_and_a_crash_loop_has_a_curve_of_its_own() -> None:
    spec = JobSpec(job_id="a", name="a", namespace="n", entry=EntryKind.BINARY, backoff_s=3.0, backoff_max_s=10.0)
    assert [restart_delay_s(spec, streak) for streak in (1, 2, 3)] == [3.0, 6.0, 10.0]
    assert [crash_loop_delay_s(spec, crashes) for crashes in range(CRASHES - 1, CRASHES + 5)] == [0, 1, 2, 4, 8, 10]
    assert CRASH_WAIT_S == 1.0


def test_a_job_waits_after_its_own_failures_and_not_after_the_machines(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=9, max_retries_preemption=9, backoff_s=4.0))
    fail(scheduler, "a", 0, after_s=20.0)
    assert 3.0 <= (scheduler.state.next_deadline() or 0.0) - scheduler.now <= 4.0
    scheduler.tick()
    scheduler.see("a:1:0", ended(EndReason.PREEMPTED))
    assert scheduler.state.attempts["a:2:0"].living
    fail(scheduler, "a", 2, after_s=40.0)  # longer than any wait: a new trouble
    assert (scheduler.state.next_deadline() or 0.0) - scheduler.now <= 4.0


def test_no_wait_at_all_where_none_is_wanted(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=9, backoff_max_s=0.0))
    for generation in range(9):
        fail(scheduler, "a", generation)
    assert scheduler.state.attempts["a:9:0"].living


def test_an_actor_that_came_up_and_is_killed_again_and_again_is_in_no_crash_loop(scheduler: Cluster) -> None:
    scheduler.launch(job("a", Demand(), entry=EntryKind.ACTOR, actor=ActorConfig(max_restarts=-1)))
    for generation in range(5):
        attempt = f"a:{generation}:0"
        scheduler.run(attempt)
        scheduler.process(attempt)
        scheduler.register("a", "a", f"s-{attempt}")
        scheduler.see(attempt, ended(EndReason.KILLED, signal=9))
    assert scheduler.state.attempts["a:5:0"].living


def test_what_ran_for_long_unseen_has_not_crashed(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=-1))
    for generation in range(4):
        scheduler.now += 50
        scheduler.see(f"a:{generation}:0", Outcome(cause=EndReason.FAILURE, message="no", duration_s=45.0))
    assert scheduler.state.attempts["a:4:0"].living
    assert scheduler.info("a").attempts[0].start_time == 5.0


# Places


def test_a_member_goes_back_to_its_machine_unless_another_job_has_taken_it(scheduler: Cluster) -> None:
    scheduler.launch(job("g", Demand(cpu_milli=2000), members=2, max_retries_failure=3))
    scheduler.run("g:0:0", "g:0:1")
    scheduler.launch(job("other", Demand(cpu_milli=2000), max_retries_failure=0))
    scheduler.see("g:0:1", ended(EndReason.FAILURE))
    assert [scheduler.state.attempts[id_].node for id_ in ("g:0:0", "g:0:1", "other:0:0")] == ["n1", "n2", "n3"]
    scheduler.launch(job("thief", Demand(cpu_milli=2000)))
    assert scheduler.state.attempts["thief:0:0"].node == "n2"
    scheduler.see("other:0:0", ended())
    scheduler.see("g:0:0", ended(EndReason.GANG))
    assert [scheduler.state.attempts[id_].node for id_ in ("g:1:0", "g:1:1")] == ["n1", "n3"]
    scheduler.see("g:1:0", Phase.RUNNING)


# What a user writes


@pytest.mark.parametrize("budget", ["failure", "preemption", "machine_loss", "out_of_memory"])
def test_a_budget_is_a_number_or_any_number(budget: str) -> None:
    name = f"max_retries_{budget}"
    assert getattr(JobRequest("a", **{name: -1}), name) == -1  # type: ignore[arg-type]
    for wrong in (-2, "3", 1.5):
        with pytest.raises(InvalidRequest, match=f"{name}=.* must be 0 or more, or -1 for any number"):
            JobRequest("a", **{name: wrong})  # type: ignore[arg-type]


def test_an_attempt_without_an_account_is_placed_again_at_no_cost_and_counts_nothing_against_its_machine(
    scheduler: Cluster,
) -> None:
    scheduler.launch(job("a"))
    refusal = Outcome(cause=EndReason.NO_ACCOUNT, message="node n1 has no account for user 'ada'")
    for generation in range(PORT_RETRY_LIMIT + 1):
        scheduler.see(f"a:{generation}:0", refusal)
        if generation < PORT_RETRY_LIMIT:
            assert scheduler.states("a") == [JobState.PENDING]
            assert "node n1 has no account for user 'ada'" in scheduler.info("a").reason
            scheduler.tick()
    assert scheduler.info("a").cause is EndReason.NO_ACCOUNT
    assert not any(node.faults for node in scheduler.state.nodes.values())
