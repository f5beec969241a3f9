"""Resets and ICMP errors of firewalls and middleboxes: they prove nothing about a process elsewhere."""

from __future__ import annotations

import time

import pytest

from tests.network.cluster import open_test_cluster
from tests.network.conftest import Times
from tests.network.laboratory import Laboratory
from tests.network.test_silent_losses import assert_effects, longest_s


@pytest.mark.in_test_all
def test_a_firewall_that_resets_is_not_taken_for_the_death_of_an_actor(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        slow = driver.start("call", "ledger", "add_slowly", "slow", 5.0)
        calls = driver.start("calls", "ledger", "x", 8.0)
        lab.firewall("n1", except_from="controller", seconds=3)
        made = calls.value(60)
        times.check("a call during 3 s of a firewall that resets", longest_s(made), 4.5)
        assert slow.value(60) == 1
        assert_effects(driver, "ledger", len(made) + 1)


@pytest.mark.in_test_all
def test_connections_that_a_middlebox_resets_are_made_again(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        calls = driver.start("calls", "ledger", "x", 6.0, pause_s=0.01)
        for ends in (("laptop", "n1"), ("laptop", "controller"), ("n1", "controller")):
            lab.reset_connections(*ends)
            time.sleep(1.0)
        made = calls.value(60)
        times.check("a call whose connection was reset", longest_s(made), 2.0)
        assert lab.seen()["reset both"] > 0
        assert_effects(driver, "ledger", len(made))


@pytest.mark.parametrize("code", [1, 3, 13], ids=["host", "port", "firewall"])
def test_icmp_errors_end_no_call(code: int, lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        calls = driver.start("calls", "ledger", "x", 12.0)
        lab.reject("laptop", "n1", code=code, seconds=4)
        lab.reject("laptop", "controller", code=code, seconds=4)
        made = calls.value(60)
        times.check(f"a call during 4 s of ICMP errors of code {code}", longest_s(made), 5.5)
        assert_effects(driver, "ledger", len(made))


@pytest.mark.in_test_all
def test_the_end_of_a_process_is_known_at_once_and_its_next_incarnation_answers(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        pid = int(driver.do("create", "ledger", max_restarts=-1).split()[1])
        call = driver.start("call", "ledger", "add_slowly", "x", 60.0)
        repeated = driver.start("call", "ledger", "add_slowly", "z", 1.0, idempotent=True)
        driver.do("call", "ledger", "add", "y")
        ended_at = time.monotonic()
        lab.hosts["n1"].output_of("kill", "-9", str(pid))
        assert "OutcomeUnknown" in call.error(60)
        times.check("the end of a killed actor's call", call.ended_at - ended_at, 2.0)
        assert int(driver.do("call", "ledger", "where").split()[1]) != pid, "the next incarnation answers"
        assert repeated.value(60) == 1
        assert driver.do("call", "ledger", "add", "x") == 1


def test_a_node_that_is_killed_alone_is_lost_at_once(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1", "n2") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        old = driver.do("create", "ledger", max_restarts=-1, may_overlap=True).split()[0]
        call = driver.start("call", "ledger", "add_slowly", "x", 60.0)
        driver.do("call", "ledger", "add", "y")
        killed_at = time.monotonic()
        cluster.daemons[old].kill()
        assert call.error(60).startswith(("OutcomeUnknown", "MachineLost"))
        times.check("the end of a call to an actor below a killed node", call.ended_at - killed_at, 2.0)
        again = driver.start("call", "ledger", "where")
        assert again.value(60).split()[0] != old
        times.check("an actor below a killed node answers elsewhere", again.ended_at - killed_at, 3.0)
