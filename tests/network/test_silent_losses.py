"""Silent losses: cuts, changed addresses, gateways that forget, paths that go dead, machines that are gone."""

from __future__ import annotations

import os
import time

import pytest

from tests.network.cluster import Driver, open_test_cluster
from tests.network.conftest import Times
from tests.network.laboratory import Laboratory

COMPUTE_S = int(os.environ.get("NETWORK_COMPUTE_S", "25"))
"""Seconds for which a method computes; `make campaign` sets ten minutes."""


def longest_s(calls: list[list[object]]) -> float:
    """Return the time of the slowest of the calls of `Console.calls`, none of which may have failed."""
    assert not [error for _, _, error in calls if error]
    return max(float(str(took)) for _, took, _ in calls)


def assert_effects(driver: Driver, name: str, keys: int) -> None:
    """Check that the calls of `Console.calls` had one effect each."""
    assert driver.do("call", name, "effects") == {"keys": keys, "items": 0, "repeated": []}


@pytest.mark.parametrize("seconds", [4, 10, 20])
@pytest.mark.parametrize("between", ["driver and node", "driver and all", "node and all"])
def test_a_cut_costs_a_call_little_more_than_its_length(
    seconds: int, between: str, lab: Laboratory, times: Times
) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        calls = driver.start("calls", "ledger", "x", seconds + 8.0)
        ends = {"driver and node": ("laptop", "n1"), "driver and all": ("laptop",), "node and all": ("n1",)}[between]
        lab.cut(*ends, seconds=seconds)
        made = calls.value(seconds + 60)
        times.check(f"a call through a cut of {seconds} s between {between}", longest_s(made), seconds + 1.5)
        assert_effects(driver, "ledger", len(made))


@pytest.mark.in_test_all
def test_the_relay_takes_over_an_established_path_that_goes_dead(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        calls = driver.start("calls", "ledger", "x", 8.0)
        lab.cut("laptop", "n1")
        made = calls.value(120)
        times.check("a call over a path that went dead", longest_s(made), 6.0)
        assert_effects(driver, "ledger", len(made))


@pytest.mark.within(COMPUTE_S + 95)
def test_a_method_that_takes_long_is_not_taken_for_silence(lab: Laboratory) -> None:
    """One keeps the interpreter, so its process can answer no ping meanwhile, but its kernel acknowledges them."""
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        for name in ("computer", "sleeper"):
            driver.do("create", name, kind="Computer")
        driver.do("create", "ledger")
        calls = [
            driver.start("call", "computer", "compute", COMPUTE_S),
            driver.start("call", "sleeper", "sleep", COMPUTE_S),
            driver.start("call", "ledger", "add_slowly", "x", COMPUTE_S),
        ]
        assert [call.value(COMPUTE_S + 60) for call in calls] == ["n1", "n1", 1]
        assert all(call.took_s >= COMPUTE_S for call in calls)


@pytest.mark.in_test_all
def test_a_driver_whose_address_changes_keeps_its_session(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        laptop = lab.host("laptop")
        driver = cluster.open_driver(laptop)
        driver.do("create", "ledger")
        driver.do("launch", "job", 12.0)
        calls = driver.start("calls", "ledger", "x", 12.0)
        laptop.change_address("10.77.0.200")
        asked = driver.start("nodes")
        made = calls.value(120)
        times.check("a call over a changed address of the driver", longest_s(made), 10.0)
        asked.value()
        times.check("a request to the controller after that", asked.took_s, 10.0)
        driver.do("wait", "job")
        assert_effects(driver, "ledger", len(made))


@pytest.mark.parametrize(
    "remaps", [pytest.param(False, marks=pytest.mark.in_test_all, id="drops"), pytest.param(True, id="remaps")]
)
def test_a_driver_whose_gateway_forgets_it_keeps_its_session(remaps: bool, lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop", behind_nat=True, remaps=remaps))
        driver.do("create", "ledger")
        calls = driver.start("calls", "ledger", "x", 12.0)
        lab.forget_connections("laptop")
        asked = driver.start("nodes")
        made = calls.value(120)
        times.check("a call whose connection the gateway forgot", longest_s(made), 10.0)
        asked.value()
        times.check("a request to the controller after that", asked.took_s, 10.0)
        assert_effects(driver, "ledger", len(made))


def test_a_node_whose_address_changes_stays_a_member(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        calls = driver.start("calls", "ledger", "x", 30.0)
        lab.hosts["n1"].change_address("10.77.0.201")
        while not calls.is_done():
            assert driver.do("nodes") == {"n1": "alive"}
            time.sleep(0.5)
        made = calls.value()
        times.check("a call to an actor whose machine changed its address", longest_s(made), 10.0)
        assert_effects(driver, "ledger", len(made))


def test_a_node_whose_gateway_forgets_it_stays_a_member(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab) as cluster:
        cluster.start_node(lab.host("n1", behind_nat=True))
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        calls = driver.start("calls", "ledger", "x", 12.0)
        lab.forget_connections("n1")
        made = calls.value(120)
        times.check("a call to an actor behind a gateway that forgot its machine", longest_s(made), 10.0)
        assert driver.do("nodes") == {"n1": "alive"}
        assert_effects(driver, "ledger", len(made))


@pytest.mark.within(240)
def test_callers_of_a_machine_that_is_gone_know_when_it_is_suspect(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1", "n2", controller_options=("--suspect-s", "10")) as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger", on="n1")
        call = driver.start("call", "ledger", "add_slowly", "x", 100.0)
        driver.do("call", "ledger", "add", "y")
        gone_at = time.monotonic()
        lab.hosts["n1"].kill()
        later = driver.start("call", "ledger", "add", "z")
        assert "MachineLost" in call.error(60)
        times.check("a call to a machine that is gone (suspect after 10 s)", call.ended_at - gone_at, 12.0)
        assert "MachineLost" in later.error(60)
        times.check("a call made after its end", later.ended_at - gone_at, 12.0)


@pytest.mark.within(240)
def test_an_actor_that_may_overlap_answers_old_callers_when_its_machine_is_suspect(
    lab: Laboratory, times: Times
) -> None:
    with open_test_cluster(lab, "n1", "n2", controller_options=("--suspect-s", "10")) as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        assert driver.do("create", "ledger", on="", may_overlap=True, max_restarts=-1).startswith("n")
        old = driver.do("call", "ledger", "where").split()[0]
        gone_at = time.monotonic()
        lab.cut(old)
        before = driver.start("call", "ledger", "where", idempotent=True)
        answered_by = before.value(120).split()[0]
        assert answered_by not in (old, "")
        times.check("a call made before the machine was suspect (10 s)", before.ended_at - gone_at, 12.0)
        assert driver.do("call", "ledger", "add", "y") == 1
