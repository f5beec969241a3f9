"""Machines under suspicion: what speaks against one, what does not, how it comes back, and that each rule is seen."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from fray.model.specs import EndReason, Outcome, Phase
from fray.scheduler.effects import ProbeWanted
from fray.scheduler.jobs.node_faults import FAULT_AGE_LIMIT_S, RELAPSE_S, fault_score, probe_wait_s, quarantine_limit
from fray.scheduler.nodes.view import nodes_info
from fray.scheduler.state.rows import Quarantine, SchedulerConfig
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job

KILLED = ended(EndReason.KILLED, "killed by signal 7")


@pytest.fixture
def scheduler() -> Cluster:
    """The first of three machines gets everything, as long as it is empty."""
    scheduler = Cluster()
    scheduler.driver()
    for name in ("n1", "n2", "n3"):
        scheduler.node(name)
    return scheduler


def end(scheduler: Cluster, name: str, outcome: Outcome = KILLED, *, ran_s: float | None = None, **more: Any) -> None:
    """A job that gets the machine that is first, and ends so."""
    scheduler.launch(job(name, **more))
    if ran_s is not None:
        scheduler.see(f"{name}:0:0", Phase.RUNNING)
        scheduler.now += ran_s
    scheduler.see(f"{name}:0:0", outcome)


def standing(scheduler: Cluster, name: str = "n1") -> str:
    return next(node.standing for node in nodes_info(scheduler.state) if node.name == name)


def suspect(scheduler: Cluster) -> None:
    for name in ("a", "b", "c"):
        end(scheduler, name)
    assert standing(scheduler) == "quarantined"


@pytest.mark.parametrize(
    ("outcome", "ran_s", "counts"),
    [
        (ended(EndReason.ENVIRONMENT, "no zygote"), None, 1),
        (KILLED, None, 1),
        (KILLED, 5.0, 1),
        (KILLED, 15.0, 0),
        (ended(EndReason.FAILURE, "boom"), 1.0, 0),
        (ended(EndReason.OUT_OF_MEMORY), 1.0, 0),
        (ended(EndReason.PORT_TAKEN), None, 0),
        (ended(EndReason.ENVIRONMENT, "disk full", machine_fault=True), None, 2),
        (ended(EndReason.FAILURE, "disk full", machine_fault=True), 500.0, 2),
    ],
)
def test_what_speaks_against_a_machine(scheduler: Cluster, outcome: Outcome, ran_s: float | None, counts: int) -> None:
    end(scheduler, "a", outcome, ran_s=ran_s)
    assert fault_score(scheduler.state, scheduler.state.nodes["n1"]) == counts


def test_a_machine_s_own_word_counts_twice(scheduler: Cluster) -> None:
    full = ended(EndReason.ENVIRONMENT, "no room on its disk", machine_fault=True)
    end(scheduler, "a", full)
    assert standing(scheduler) == ""
    end(scheduler, "b", full)
    assert standing(scheduler) == "quarantined"


def test_one_job_however_often_it_fails_is_never_enough(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=9, backoff_max_s=0.0))
    for generation in range(9):
        scheduler.see(f"a:{generation}:0", ended(EndReason.KILLED, machine_fault=True))
    assert standing(scheduler) == ""


def test_a_job_that_does_well_there_clears_it(scheduler: Cluster) -> None:
    for well in (ended(), ended(EndReason.FAILURE, "boom")):
        end(scheduler, "a")
        end(scheduler, "b")
        end(scheduler, f"well-{well.cause.value}", well, ran_s=61.0)
        assert fault_score(scheduler.state, scheduler.state.nodes["n1"]) == 0


def test_requested_ends_are_no_faults(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.terminate("a")
    scheduler.see("a:0:0", KILLED)
    assert scheduler.state.nodes["n1"].faults == ()


def test_what_is_an_hour_old_is_forgotten(scheduler: Cluster) -> None:
    end(scheduler, "a")
    end(scheduler, "b")
    scheduler.now += FAULT_AGE_LIMIT_S
    end(scheduler, "c")
    assert fault_score(scheduler.state, scheduler.state.nodes["n1"]) == 1


def test_all_strangers_at_its_ports_count_once_when_a_job_gives_up(scheduler: Cluster) -> None:
    scheduler.node("n1", "i2", ports=4)
    scheduler.cordon("n2", "n3")
    scheduler.launch(job("a", demand(1, ports=1), ports=("http",)))
    for generation in range(101):
        scheduler.see(f"a:{generation}:0", ended(EndReason.PORT_TAKEN))
        if scheduler.state.next_deadline() is not None:
            scheduler.tick()
    assert scheduler.info("a").cause is EndReason.PORT_TAKEN
    assert fault_score(scheduler.state, scheduler.state.nodes["n1"]) == 1


def test_a_third_of_the_machines_at_most_and_never_the_only_one() -> None:
    scheduler = Cluster()
    scheduler.driver()
    found = []
    for number in range(1, 10):
        scheduler.node(f"n{number}")
        found.append(quarantine_limit(scheduler.state))
    assert found == [0, 1, 1, 1, 1, 2, 2, 2, 3]


def test_no_machine_is_suspected_where_it_is_turned_off() -> None:
    scheduler = Cluster(SchedulerConfig(quarantine_share=0.0))
    scheduler.driver()
    scheduler.node("n1")
    scheduler.node("n2")
    for name in ("a", "b", "c", "d"):
        end(scheduler, name)
    assert standing(scheduler) == ""


def test_what_runs_there_stays_and_nothing_new_comes(scheduler: Cluster) -> None:
    scheduler.launch(job("stays", demand(0)))
    scheduler.run("stays:0:0")
    node = scheduler.state.attempts["stays:0:0"].node
    assert node == "n1"
    suspect(scheduler)
    scheduler.launch(*(job(f"new{n}", demand(2)) for n in range(4)))
    assert scheduler.desired("n1") == {"stays:0:0": False}


def test_probes_come_after_1_2_4_minutes_and_at_last_every_hour(scheduler: Cluster) -> None:
    suspect(scheduler)
    waits = []
    for _ in range(8):
        began = scheduler.now
        assert scheduler.tick() == [ProbeWanted(node="n1", incarnation="i1")]
        waits.append(scheduler.now - began)
        scheduler.probed("n1", "a fan is loud")
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_who_relapses_waits_longer(scheduler: Cluster) -> None:
    suspect(scheduler)
    scheduler.tick()
    scheduler.probed("n1")
    assert standing(scheduler) == ""
    for name in ("d", "e", "f"):
        end(scheduler, name)
    assert scheduler.state.next_deadline() == scheduler.now + 120
    scheduler.tick()
    scheduler.probed("n1")
    scheduler.now += RELAPSE_S
    for name in ("g", "h", "i"):
        end(scheduler, name)
    assert scheduler.state.next_deadline() == scheduler.now + 60
    assert probe_wait_s(scheduler.state.nodes["n1"], 0) == 60


def test_no_answer_is_an_answer(scheduler: Cluster) -> None:
    suspect(scheduler)
    scheduler.tick()
    scheduler.tick()
    assert scheduler.now == 60 + SchedulerConfig().probe_limit_s
    assert "did not answer within 90 s" in nodes_info(scheduler.state)[0].standing_reason
    scheduler.probed("n1")  # too late: the next one decides
    assert standing(scheduler) == "quarantined"


def test_a_silent_machine_is_probed_when_it_is_back(scheduler: Cluster) -> None:
    suspect(scheduler)
    scheduler.silence("n1")
    scheduler.tick(100)
    scheduler.node("n1")
    assert scheduler.state.next_deadline() == scheduler.now
    assert ProbeWanted(node="n1", incarnation="i1") in scheduler.tick()


def test_a_restarted_machine_is_probed_at_once_and_not_used_before(scheduler: Cluster) -> None:
    suspect(scheduler)
    scheduler.die("n1")
    scheduler.node("n1", "i2")
    assert standing(scheduler) == "quarantined"
    assert scheduler.tick() == [ProbeWanted(node="n1", incarnation="i2")]
    scheduler.probed("n1")
    assert standing(scheduler) == ""


def test_an_operator_may_have_it_back(scheduler: Cluster) -> None:
    suspect(scheduler)
    scheduler.uncordon("n1")
    assert (standing(scheduler), scheduler.state.next_deadline(), scheduler.state.nodes["n1"].faults) == ("", None, ())


def test_what_fray_made_up_for_a_run_makes_no_new_witness(scheduler: Cluster) -> None:
    """Actors of one class, in the own namespaces of three drivers that gave none: one bad class."""
    for number, name in enumerate(("Link-eb8gx2", "Link-nadjt7", "Link-vc6kzc", "Link-7j5b2g")):
        end(scheduler, name, namespace=f"anon-{number:012x}")
    end(scheduler, "worker-yitw3k-0", namespace="anon-dc5f98679bf8")
    assert (standing(scheduler), fault_score(scheduler.state, scheduler.state.nodes["n1"])) == ("", 2)
    end(scheduler, "Link-server", namespace="anon-6beb502c6509")
    assert standing(scheduler) == "quarantined"


def test_when_machines_leave_those_that_came_first_are_let_back() -> None:
    scheduler = Cluster()
    scheduler.driver()
    for number in range(6):
        scheduler.node(f"n{number}")
    for names in ("abc", "def"):  # of jobs that are alike the second machine would be no evidence
        for name in names:
            end(scheduler, name)
        scheduler.now += 1
    assert sorted(scheduler.state.quarantined) == ["n0", "n1"]
    scheduler.die("n5")
    assert sorted(scheduler.state.quarantined) == ["n1"]


def test_a_quarantine_against_the_rules_is_seen(scheduler: Cluster) -> None:
    scheduler.launch(job("late"))
    for name, jobs in (("n1", ("x",)), ("n2", ("x", "y"))):
        node = scheduler.state.nodes[name]
        node.quarantine = Quarantine(since=-1.0, reason="", jobs=jobs, probe_at=60.0)
        scheduler.state.node_changed(node)
    found = " ".join(check(scheduler.state))
    for sentence in ("because of ['x'] alone", "late:0:0 was placed on n1", "are in quarantine, the limit is 1"):
        assert sentence in found


def test_blames_that_are_not_indexed_are_seen(scheduler: Cluster) -> None:
    end(scheduler, "a")
    node = scheduler.state.nodes["n1"]
    node.faults = (evolve(node.faults[0], kind="another"),)
    assert any("index nodes_by_fault" in sentence for sentence in check(scheduler.state))
