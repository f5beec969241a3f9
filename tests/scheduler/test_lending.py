"""Lending of CPUs: trees of jobs do not starve, other jobs do not notice, and what cannot be lent is found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fray.model.messages.client import Done
from fray.model.policy.policy import Amounts, Policy, TenantPolicy
from fray.model.specs import EndReason, JobState, Phase
from fray.scheduler.effects import PolicyChanged, Reply, WaitReported
from fray.scheduler.explain.explain import explain
from tests.support.scheduler import GB, Cluster, demand, ended, job, placed


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=1, memory=8 * GB)
    return scheduler


def start(scheduler: Cluster, name: str, parent: str = "", **more: object) -> None:
    """Launch a job of one CPU and 1 GB and, if it is placed, run and connect it."""
    need = more.pop("need", None) or demand(1, GB)
    scheduler.launch(job(name, need, **more), session=f"s-{parent}:0:0" if parent else "d")  # type: ignore[arg-type]
    if name in placed(scheduler):
        run(scheduler, name)


def run(scheduler: Cluster, name: str) -> None:
    scheduler.run(f"{name}:0:0")
    scheduler.process(f"{name}:0:0")


def wait(scheduler: Cluster, name: str, waiting: bool = True) -> list[Reply]:
    """Report that the process of a job waits."""
    event = WaitReported(session=f"s-{name}:0:0", ref=scheduler.ref(), waiting=waiting)
    return [effect for effect in scheduler.tell(event) if isinstance(effect, Reply)]


def end(scheduler: Cluster, name: str) -> None:
    scheduler.see(f"{name}:0:0", ended())


def free_cpu(scheduler: Cluster, node: str = "n1") -> int:
    return scheduler.state.pool.machines[node].cpu_milli


def loans(scheduler: Cluster, name: str) -> dict[str, int]:
    return scheduler.state.attempts[f"{name}:0:0"].loans


# Lending --------------------------------------------------------------------------------------------------------------


def test_a_child_runs_on_the_cpu_of_its_waiting_parent(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    start(scheduler, "child", "parent")
    assert placed(scheduler) == ["parent"]
    (reply,) = wait(scheduler, "parent")
    assert reply.message == Done()
    assert placed(scheduler) == ["parent", "child"]
    assert loans(scheduler, "child") == {"parent:0:0": 1000}
    assert free_cpu(scheduler) == 0


def test_a_parent_that_waits_before_it_launches_lends_as_well(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    wait(scheduler, "parent")
    start(scheduler, "child", "parent")
    assert placed(scheduler) == ["parent", "child"]


def test_a_tree_of_twenty_levels_runs_on_one_cpu(scheduler: Cluster) -> None:
    start(scheduler, "l0", need=demand(1, GB // 16))
    for level in range(1, 20):
        start(scheduler, f"l{level}", f"l{level - 1}", need=demand(1, GB // 16))
        wait(scheduler, f"l{level - 1}")
        run(scheduler, f"l{level}")
    assert len(placed(scheduler)) == 20
    for level in reversed(range(20)):
        end(scheduler, f"l{level}")
    assert free_cpu(scheduler) == 1000


def test_what_one_child_uses_is_not_lent_to_another(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    wait(scheduler, "parent")
    start(scheduler, "first", "parent")
    start(scheduler, "second", "parent")
    assert placed(scheduler) == ["parent", "first"]
    end(scheduler, "first")
    assert placed(scheduler) == ["parent", "second"]


def test_halves_of_a_cpu_are_lent_to_two(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    wait(scheduler, "parent")
    for name in ("first", "second", "third"):
        start(scheduler, name, "parent", need=demand(0.5, GB))
    assert placed(scheduler) == ["parent", "first", "second"]


def test_two_ancestors_lend_together(scheduler: Cluster) -> None:
    scheduler.node("n1", "i2", cpu=2)
    start(scheduler, "top")
    start(scheduler, "middle", "top")
    start(scheduler, "wide", "middle", need=demand(2, GB))
    wait(scheduler, "top")
    assert "wide" not in placed(scheduler)
    wait(scheduler, "middle")
    assert loans(scheduler, "wide") == {"middle:0:0": 1000, "top:0:0": 1000}


def test_a_parent_that_stops_waiting_continues_beside_its_child_and_lends_no_more(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    wait(scheduler, "parent")
    start(scheduler, "first", "parent")
    start(scheduler, "second", "parent")
    wait(scheduler, "parent", False)
    assert scheduler.desired() == {"parent:0:0": False, "first:0:0": False}
    end(scheduler, "first")
    assert placed(scheduler) == ["parent"], "its CPU is its own again"


def test_free_cpus_are_used_before_lent_ones_and_a_loan_is_no_room_for_others(scheduler: Cluster) -> None:
    scheduler.node("n1", "i2", cpu=2)
    start(scheduler, "parent")
    wait(scheduler, "parent")
    start(scheduler, "child", "parent")
    assert loans(scheduler, "child") == {}
    start(scheduler, "another", "parent")
    assert loans(scheduler, "another") == {"parent:0:0": 1000}
    start(scheduler, "stranger")
    assert "stranger" not in placed(scheduler)


def test_a_job_of_another_user_gets_neither_the_loan_nor_a_later_turn(scheduler: Cluster) -> None:
    start(scheduler, "parent", user="ann")
    start(scheduler, "stranger", user="bob")
    wait(scheduler, "parent")
    start(scheduler, "child", "parent", user="ann")
    assert placed(scheduler) == ["parent", "child"]
    end(scheduler, "child")
    assert placed(scheduler) == ["parent"]
    end(scheduler, "parent")
    assert placed(scheduler) == ["stranger"]


def test_memory_is_not_lent(scheduler: Cluster) -> None:
    start(scheduler, "parent", need=demand(1, 4 * GB))
    start(scheduler, "other", need=demand(0, 3 * GB))
    wait(scheduler, "parent")
    start(scheduler, "child", "parent", need=demand(1, 2 * GB))
    assert "child" not in placed(scheduler)
    end(scheduler, "other")
    assert "child" in placed(scheduler)


def test_a_gang_takes_lent_and_free_cpus(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=1)
    start(scheduler, "parent")
    wait(scheduler, "parent")
    scheduler.launch(job("gang", demand(1, GB), members=2), session="s-parent:0:0")
    assert [attempt.loans for attempt in scheduler.state.members(scheduler.state.jobs["gang"])] == [
        {"parent:0:0": 1000},
        {},
    ]


def test_drivers_and_dead_processes_lend_nothing(scheduler: Cluster) -> None:
    assert scheduler.tell(WaitReported(session="d", ref=scheduler.ref(), waiting=True))
    start(scheduler, "parent")
    end(scheduler, "parent")
    wait(scheduler, "parent")
    assert not scheduler.state.lenders


def test_a_quota_counts_a_lent_cpu_once(scheduler: Cluster) -> None:
    policy = Policy(users={"ann": TenantPolicy(quota=Amounts(cpu_milli=1000, memory_bytes=2 * GB), borrow=False)})
    scheduler.tell(PolicyChanged(policy=policy))
    start(scheduler, "parent", user="ann")
    wait(scheduler, "parent")
    start(scheduler, "child", "parent", user="ann")
    assert placed(scheduler) == ["parent", "child"]
    wait(scheduler, "child")
    start(scheduler, "third", "child", user="ann")
    assert "third" not in placed(scheduler), "its memory is over the quota"


# Ends -----------------------------------------------------------------------------------------------------------------


def test_an_attempt_that_outlives_its_lender_keeps_the_cpu(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    wait(scheduler, "parent")
    start(scheduler, "child", "parent")
    start(scheduler, "stranger")
    end(scheduler, "parent")
    assert placed(scheduler) == ["child"], "it is being ended, and until then the CPU is in use"
    assert (loans(scheduler, "child"), free_cpu(scheduler)) == ({}, 0)
    scheduler.see("child:0:0", ended(EndReason.OWNER_ENDED))
    assert placed(scheduler) == ["stranger"]


def test_the_loan_of_an_ended_job_in_the_middle_passes_to_the_one_below(scheduler: Cluster) -> None:
    start(scheduler, "top")
    wait(scheduler, "top")
    start(scheduler, "middle", "top")
    wait(scheduler, "middle")
    start(scheduler, "low", "middle")
    end(scheduler, "middle")
    assert loans(scheduler, "low") == {"top:0:0": 1000}
    scheduler.see("low:0:0", ended(EndReason.OWNER_ENDED))
    assert scheduler.state.cpu_to_lend(scheduler.state.attempts["top:0:0"]) == 1000


def test_loans_survive_a_restart_of_the_controller(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    wait(scheduler, "parent")
    start(scheduler, "child", "parent")
    start(scheduler, "second", "parent")
    scheduler.restart()
    assert loans(scheduler, "child") == {"parent:0:0": 1000}
    scheduler.node("n1")
    scheduler.report("n1", [("parent:0:0", Phase.RUNNING), ("child:0:0", ended())], full=True)
    assert placed(scheduler) == ["parent", "second"]


# What cannot be lent --------------------------------------------------------------------------------------------------


def test_a_job_that_fits_only_without_its_ancestors_fails_within_five_seconds(scheduler: Cluster) -> None:
    start(scheduler, "parent", need=demand(1, 5 * GB))
    wait(scheduler, "parent")
    start(scheduler, "child", "parent", need=demand(1, 4 * GB))
    scheduler.tick(4.9)
    info = scheduler.info("child")
    assert (info.state, info.cause) == (JobState.FAILED, EndReason.UNSCHEDULABLE)
    assert info.error_message == (
        "it needs 1 CPU, 4 GB memory, which no machine has beside the jobs above it, and these end only after it: "
        "parent:0:0 (5 GB memory of n1); request less for one of them"
    )


def test_devices_of_all_ancestors_count(scheduler: Cluster) -> None:
    scheduler.node("n1", "i2", cpu=4, gpu="h100*2")
    start(scheduler, "top", need=demand(1, GB, gpu=1))
    start(scheduler, "middle", "top", need=demand(1, GB, gpu=1))
    start(scheduler, "low", "middle", need=demand(1, GB, gpu=1))
    scheduler.tick(5.0)
    assert "middle:0:0" in str(scheduler.info("low").error_message)
    assert "top:0:0" in str(scheduler.info("low").error_message)


def test_a_job_that_waits_for_others_than_its_ancestors_goes_on_waiting(scheduler: Cluster) -> None:
    start(scheduler, "other", need=demand(0, 4 * GB))
    start(scheduler, "parent", need=demand(1, 2 * GB))
    wait(scheduler, "parent")
    start(scheduler, "child", "parent", need=demand(1, 3 * GB))
    scheduler.tick(60.0)
    assert scheduler.info("child").state is JobState.PENDING
    end(scheduler, "other")
    assert "child" in placed(scheduler)


def test_an_ancestor_that_grows_too_large_later_is_found_later(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=1, memory=8 * GB)
    start(scheduler, "parent", need=demand(1, 5 * GB))
    start(scheduler, "other", need=demand(1, GB))
    start(scheduler, "child", "parent", need=demand(1, 4 * GB))
    scheduler.tick(10.0)
    assert scheduler.info("child").state is JobState.PENDING, "n2 has room for it, once the other job has ended"


# Explaining -----------------------------------------------------------------------------------------------------------


def test_explain_says_who_lends_what_to_whom(scheduler: Cluster) -> None:
    start(scheduler, "parent")
    wait(scheduler, "parent")
    start(scheduler, "first", "parent")
    start(scheduler, "second", "parent")
    pages = {name: explain(scheduler.state, name, 0.0) for name in ("parent", "first", "second")}
    assert "parent:0:0 waits for jobs below it and lends its 1 CPU (0 CPUs left, used by first:0:0)" in pages["parent"]
    assert "first:0:0 runs on 1 CPU lent by parent:0:0" in pages["first"]
    assert "above it, parent:0:0 on n1 waits and lends its 1 CPU (0 CPUs left, used by first:0:0)" in pages["second"]


# Random trees ---------------------------------------------------------------------------------------------------------

acts = st.lists(
    st.tuples(
        st.sampled_from(["launch", "launch", "wait", "resume", "end", "restart"]),
        st.integers(0, 30),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([GB // 4, GB]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(acts)
def test_random_trees_keep_the_invariants_and_give_everything_back(
    acts: list[tuple[str, int, float, int]],
) -> None:
    """The invariants are checked after every step; in the end all machines are free."""
    scheduler = Cluster()
    scheduler.driver()
    for name in ("n1", "n2"):
        scheduler.node(name, cpu=2, memory=8 * GB)
    for number, (act, pick, cpu, memory) in enumerate(acts):
        living = placed(scheduler)
        parent = living[pick % len(living)] if living else ""
        if act == "launch":
            start(scheduler, f"j{number}", parent if pick % 4 else "", need=demand(cpu, memory))
        elif act == "restart":
            scheduler.restart()
        elif living and act in ("wait", "resume"):
            run(scheduler, parent)
            wait(scheduler, parent, act == "wait")
        elif living:
            end(scheduler, parent)
        for name in placed(scheduler):
            if name not in living:
                run(scheduler, name)
    while living := placed(scheduler):
        for name in living:
            scheduler.see(f"{name}:0:0", ended())
        scheduler.tick(scheduler.now + 10.0)
    assert [free_cpu(scheduler, name) for name in ("n1", "n2")] == [2000, 2000]
    assert not scheduler.state.lenders
    assert not scheduler.state.lent_to
