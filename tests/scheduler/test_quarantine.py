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
def law() -> Cluster:
    """The first of three machines gets everything, as long as it is empty."""
    law = Cluster()
    law.driver()
    for name in ("n1", "n2", "n3"):
        law.node(name)
    return law


def end(law: Cluster, name: str, outcome: Outcome = KILLED, *, ran_s: float | None = None, **more: Any) -> None:
    """A job that gets the machine that is first, and ends so."""
    law.launch(job(name, **more))
    if ran_s is not None:
        law.see(f"{name}:0:0", Phase.RUNNING)
        law.now += ran_s
    law.see(f"{name}:0:0", outcome)


def standing(law: Cluster, name: str = "n1") -> str:
    return next(node.standing for node in nodes_info(law.state) if node.name == name)


def suspect(law: Cluster) -> None:
    for name in ("a", "b", "c"):
        end(law, name)
    assert standing(law) == "quarantined"


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
def test_what_speaks_against_a_machine(law: Cluster, outcome: Outcome, ran_s: float | None, counts: int) -> None:
    end(law, "a", outcome, ran_s=ran_s)
    assert fault_score(law.state, law.state.nodes["n1"]) == counts


def test_a_machine_s_own_word_counts_twice(law: Cluster) -> None:
    full = ended(EndReason.ENVIRONMENT, "no room on its disk", machine_fault=True)
    end(law, "a", full)
    assert standing(law) == ""
    end(law, "b", full)
    assert standing(law) == "quarantined"


def test_one_job_however_often_it_fails_is_never_enough(law: Cluster) -> None:
    law.launch(job("a", max_retries_failure=9, backoff_max_s=0.0))
    for generation in range(9):
        law.see(f"a:{generation}:0", ended(EndReason.KILLED, machine_fault=True))
    assert standing(law) == ""


def test_whoever_does_well_there_clears_it(law: Cluster) -> None:
    for well in (ended(), ended(EndReason.FAILURE, "boom")):
        end(law, "a")
        end(law, "b")
        end(law, f"well-{well.cause.value}", well, ran_s=61.0)
        assert fault_score(law.state, law.state.nodes["n1"]) == 0


def test_what_was_asked_to_end_speaks_against_nobody(law: Cluster) -> None:
    law.launch(job("a"))
    law.terminate("a")
    law.see("a:0:0", KILLED)
    assert law.state.nodes["n1"].faults == ()


def test_what_is_an_hour_old_is_forgotten(law: Cluster) -> None:
    end(law, "a")
    end(law, "b")
    law.now += FAULT_AGE_LIMIT_S
    end(law, "c")
    assert fault_score(law.state, law.state.nodes["n1"]) == 1


def test_all_strangers_at_its_ports_count_once_when_a_job_gives_up(law: Cluster) -> None:
    law.node("n1", "i2", ports=4)
    law.cordon("n2", "n3")
    law.launch(job("a", demand(1, ports=1), ports=("http",)))
    for generation in range(101):
        law.see(f"a:{generation}:0", ended(EndReason.PORT_TAKEN))
        if law.state.next_deadline() is not None:
            law.tick()
    assert law.info("a").cause is EndReason.PORT_TAKEN
    assert fault_score(law.state, law.state.nodes["n1"]) == 1


def test_a_third_of_the_machines_at_most_and_never_the_only_one() -> None:
    law = Cluster()
    law.driver()
    found = []
    for number in range(1, 10):
        law.node(f"n{number}")
        found.append(quarantine_limit(law.state))
    assert found == [0, 1, 1, 1, 1, 2, 2, 2, 3]


def test_where_it_is_turned_off_nobody_is_suspected() -> None:
    law = Cluster(SchedulerConfig(quarantine_share=0.0))
    law.driver()
    law.node("n1")
    law.node("n2")
    for name in ("a", "b", "c", "d"):
        end(law, name)
    assert standing(law) == ""


def test_what_runs_there_stays_and_nothing_new_comes(law: Cluster) -> None:
    law.launch(job("stays", demand(0)))
    law.run("stays:0:0")
    node = law.state.attempts["stays:0:0"].node
    assert node == "n1"
    suspect(law)
    law.launch(*(job(f"new{n}", demand(2)) for n in range(4)))
    assert law.wished("n1") == {"stays:0:0": False}


def test_probes_come_after_1_2_4_minutes_and_at_last_every_hour(law: Cluster) -> None:
    suspect(law)
    waits = []
    for _ in range(8):
        began = law.now
        assert law.tick() == [ProbeWanted(node="n1", incarnation="i1")]
        waits.append(law.now - began)
        law.probed("n1", "a fan is loud")
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_who_relapses_waits_longer(law: Cluster) -> None:
    suspect(law)
    law.tick()
    law.probed("n1")
    assert standing(law) == ""
    for name in ("d", "e", "f"):
        end(law, name)
    assert law.state.next_deadline() == law.now + 120
    law.tick()
    law.probed("n1")
    law.now += RELAPSE_S
    for name in ("g", "h", "i"):
        end(law, name)
    assert law.state.next_deadline() == law.now + 60
    assert probe_wait_s(law.state.nodes["n1"], 0) == 60


def test_no_answer_is_an_answer(law: Cluster) -> None:
    suspect(law)
    law.tick()
    law.tick()
    assert law.now == 60 + SchedulerConfig().probe_limit_s
    assert "did not answer within 90 s" in nodes_info(law.state)[0].standing_reason
    law.probed("n1")  # too late: the next one decides
    assert standing(law) == "quarantined"


def test_a_silent_machine_is_probed_when_it_is_back(law: Cluster) -> None:
    suspect(law)
    law.silence("n1")
    law.tick(100)
    law.node("n1")
    assert law.state.next_deadline() == law.now
    assert ProbeWanted(node="n1", incarnation="i1") in law.tick()


def test_a_machine_that_was_started_anew_is_probed_at_once_and_not_trusted_before(law: Cluster) -> None:
    suspect(law)
    law.die("n1")
    law.node("n1", "i2")
    assert standing(law) == "quarantined"
    assert law.tick() == [ProbeWanted(node="n1", incarnation="i2")]
    law.probed("n1")
    assert standing(law) == ""


def test_an_operator_may_have_it_back(law: Cluster) -> None:
    suspect(law)
    law.uncordon("n1")
    assert (standing(law), law.state.next_deadline(), law.state.nodes["n1"].faults) == ("", None, ())


def test_what_fray_made_up_for_a_run_makes_no_new_witness(law: Cluster) -> None:
    """Actors of one class, in the own namespaces of three drivers that gave none: one bad class."""
    for number, name in enumerate(("Link-eb8gx2", "Link-nadjt7", "Link-vc6kzc", "Link-7j5b2g")):
        end(law, name, namespace=f"anon-{number:012x}")
    end(law, "worker-yitw3k-0", namespace="anon-dc5f98679bf8")
    assert (standing(law), fault_score(law.state, law.state.nodes["n1"])) == ("", 2)
    end(law, "Link-server", namespace="anon-6beb502c6509")
    assert standing(law) == "quarantined"


def test_when_machines_leave_those_that_came_first_are_let_back() -> None:
    law = Cluster()
    law.driver()
    for number in range(6):
        law.node(f"n{number}")
    for names in ("abc", "def"):  # of jobs that are alike the second machine would be no evidence
        for name in names:
            end(law, name)
        law.now += 1
    assert sorted(law.state.quarantined) == ["n0", "n1"]
    law.die("n5")
    assert sorted(law.state.quarantined) == ["n1"]


def test_a_quarantine_against_the_rules_is_seen(law: Cluster) -> None:
    law.launch(job("late"))
    for name, jobs in (("n1", ("x",)), ("n2", ("x", "y"))):
        node = law.state.nodes[name]
        node.quarantine = Quarantine(since=-1.0, reason="", jobs=jobs, probe_at=60.0)
        law.state.node_changed(node)
    found = " ".join(check(law.state))
    for sentence in ("because of ['x'] alone", "late:0:0 was placed on n1", "are in quarantine, 1 may be"):
        assert sentence in found


def test_blames_that_are_not_indexed_are_seen(law: Cluster) -> None:
    end(law, "a")
    node = law.state.nodes["n1"]
    node.faults = (evolve(node.faults[0], kind="another"),)
    assert any("index nodes_by_fault" in sentence for sentence in check(law.state))
