"""Machines, controllers and drivers that come back, and calls, launches and streams that were pending meanwhile."""

from __future__ import annotations

import sys
import time

import pytest

from bench.histories.checks import attempts
from bench.histories.records import Kind
from tests.network.actors import OVERLAPS
from tests.network.campaign import incarnations
from tests.network.cluster import STARTED, SUSPECT, open_test_cluster
from tests.network.conftest import Times
from tests.network.host import SHARED
from tests.network.laboratory import Laboratory
from tests.network.test_silent_losses import COMPUTE_S, assert_effects, longest_s
from tests.upgrade.builds import PREVIOUS, export_build

LEASE_S = 240
"""The shortest lease that daemons accept."""


@pytest.mark.within(240)
def test_calls_continue_to_a_machine_that_only_the_controller_has_lost(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1", controller_options=("--suspect-s", "10")) as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        lab.cut("controller", "n1")
        slow = driver.start("call", "ledger", "add_slowly", "slow", 15.0)
        made = driver.start("calls", "ledger", "x", 20.0).value(120)
        assert longest_s(made) < 10
        assert slow.value(60) == 1
        lab.heal()
        cluster.wait_state(driver, "n1", "alive")
        assert_effects(driver, "ledger", len(made) + 1)


@pytest.mark.within(240)
def test_a_machine_that_the_controller_has_lost_is_lost_for_callers_whose_connection_is_lost_too(
    lab: Laboratory, times: Times
) -> None:
    with open_test_cluster(lab, "n1", controller_options=("--suspect-s", "10")) as cluster:
        driver, other = (cluster.open_driver(lab.host(name)) for name in ("laptop", "other"))
        where = driver.do("create", "ledger")
        other.do("find", "ledger")
        call = driver.start("call", "ledger", "add_slowly", "slow", 100.0)
        driver.do("call", "ledger", "add", "first")
        others = other.start("calls", "ledger", "x", 16.0)
        cut_at = time.monotonic()
        for caller in ("controller", "laptop"):
            lab.cut(caller, "n1")
        assert "MachineLost" in call.error(60)
        times.check("a call to a machine out of reach (suspect after 10 s)", call.ended_at - cut_at, 12.0)
        assert "MachineLost" in driver.start("call", "ledger", "where").error(60)
        made = others.value(60)
        times.check("a call of another caller, whose connection answers", longest_s(made), 1.5)
        lab.heal()
        cluster.wait_state(driver, "n1", "alive")
        assert driver.do("call", "ledger", "where") == where
        assert_effects(driver, "ledger", len(made) + 2)


@pytest.mark.within(240)
def test_calls_of_a_caller_that_was_cut_off_itself_go_on_when_their_connection_answers_again(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1", controller_options=("--suspect-s", "10")) as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        call = driver.start("call", "ledger", "add_slowly", "slow", 40.0)
        driver.do("call", "ledger", "add", "first")
        lab.cut("laptop")
        lab.cut("controller", "n1")
        cluster.wait_log(SUSPECT)
        made = driver.start("calls", "ledger", "x", 8.0)
        assert not call.is_done()
        lab.heal("laptop")
        longest_s(made.value(60))
        assert call.value(90) == 1
        assert_effects(driver, "ledger", len(made.value()) + 2)


@pytest.mark.skipif(COMPUTE_S < LEASE_S, reason="takes five minutes: run with NETWORK_COMPUTE_S=600")
@pytest.mark.within(LEASE_S + 180)
def test_what_a_silent_machine_ran_starts_elsewhere_after_its_lease_and_nothing_overlaps(
    lab: Laboratory, times: Times
) -> None:
    lease = ("--lease-s", str(LEASE_S))
    with open_test_cluster(lab, controller_options=(*lease, "--suspect-s", "10")) as cluster:
        for name in ("n1", "n2"):
            cluster.start_node(lab.host(name), *lease)
        driver = cluster.open_driver(lab.host("laptop"))
        old = driver.do("create", "ledger", max_restarts=-1).split()[0]
        driver.do("call", "ledger", "add", "x")
        cut_at = time.monotonic()
        lab.cut(old)
        elsewhere = driver.start("call", "ledger", "where", idempotent=True)
        new = elsewhere.value(LEASE_S + 60)
        assert new.split()[0] not in (old, "")
        assert elsewhere.ended_at - cut_at >= LEASE_S - 10, "it may have been heard last a heartbeat before"
        times.check(f"an actor answers elsewhere (lease of {LEASE_S} s)", elsewhere.ended_at - cut_at, LEASE_S + 10)
        lab.heal()
        cluster.wait_state(driver, old, "alive")
        assert driver.do("call", "ledger", "where") == new
        assert driver.do("call", "ledger", "add", "x") == 1
        assert not (lab.shared / OVERLAPS).exists()
        history = [one for each in incarnations(lab) for one in each.operations(may_overlap=False)]
        runs = [one for one in history if one.kind is Kind.RUN]
        assert [run.machine for run in runs] == [old, new.split()[0]]
        assert runs[0].end is not None, "it has shown signs of life"
        assert cut_at + 10 < runs[0].end < cut_at + LEASE_S
        assert list(attempts(history)) == []


@pytest.mark.in_test_all
@pytest.mark.within(240)
def test_a_machine_that_has_rebooted_is_a_member_again(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger", max_restarts=-1)
        cluster.start_node(lab.host("n2"))
        cluster.wait_state(driver, "n2", "alive")
        driver.do("create", "elsewhere", on="n2")
        host = lab.hosts["n1"]
        host.kill()
        killed = driver.start("call", "ledger", "add", "x", idempotent=True)
        host.start()
        began = time.monotonic()
        node = cluster.start_node(host)
        assert killed.value(120) == 1
        assert node.is_running()
        times.check("an actor of a rebooted machine answers", killed.ended_at - began, 10.0)
        # The state directories of both nodes have the same path, and these machines share one tree of control groups:
        # it must not take the groups of the other node for leftovers of its own.
        assert "of an earlier run" not in node.log.read_text()
        assert driver.do("call", "elsewhere", "add", "x") == 1


def test_a_node_that_is_started_again_under_a_new_address_is_a_member_at_once(lab: Laboratory) -> None:
    """The controller has not heard that the first one has ended."""
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        cluster.wait_state(driver, "n1", "alive")
        host = lab.hosts["n1"]
        host.change_address("10.77.0.201")
        cluster.daemons["n1"].kill()
        node = cluster.start_node(host)
        driver.do("create", "ledger", max_restarts=-1, timeout_s=20)
        assert driver.do("call", "ledger", "add", "x") == 1
        assert node.is_running()


@pytest.mark.in_test_all
def test_calls_do_not_notice_a_controller_whose_machine_reboots(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        driver.do("launch", "job", 6.0)
        calls = driver.start("calls", "ledger", "x", 6.0)
        cluster.controller.kill()
        cluster.controller.start()
        cluster.start_controller()
        made = calls.value(60)
        times.check("a direct call while the controller's machine rebooted", longest_s(made), 1.5)
        driver.do("wait", "job")
        assert_effects(driver, "ledger", len(made))


@pytest.mark.within(240)
@pytest.mark.parametrize(("how", "away_s"), [("frozen", 10), ("killed", 10), ("cut", 60), ("off", 60)])
def test_a_launch_waits_no_longer_than_the_controller_is_away(
    how: str, away_s: int, lab: Laboratory, times: Times
) -> None:
    with open_test_cluster(lab, "n1", controller_options=("--driver-grace-s", "120")) as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "before")
        host = cluster.controller
        {"cut": lambda: lab.cut(host.name), "frozen": host.freeze, "off": host.kill}.get(
            how, cluster.daemons[host.name].kill
        )()
        launch = driver.start("create", "ledger")
        time.sleep(away_s)
        assert not launch.is_done()
        began = time.monotonic()
        if how == "cut":
            lab.heal()
        elif how == "frozen":
            host.thaw()
        else:
            if how == "off":
                host.start()
            cluster.start_controller()
            began = cluster.wait_log(STARTED, times=2)
        launch.value(120)
        times.check(f"a launch after a controller was away for {away_s} s ({how})", launch.ended_at - began, 3.0)


@pytest.mark.within(240)
def test_relayed_calls_wait_no_longer_than_the_controller_is_away(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        lab.cut("laptop", "n1")
        driver.do("call", "ledger", "add", "first")
        calls = driver.start("calls", "ledger", "x", 20.0)
        cluster.daemons["controller"].kill()
        killed_at = time.monotonic()
        time.sleep(8)
        cluster.start_controller()
        began = cluster.wait_log(STARTED, times=2)
        made = calls.value(120)
        longest_s(made)
        assert not any(killed_at + 1 < at + took < began for at, took, _ in made), "they are relayed"
        next_at = min(at + took for at, took, _ in made if at + took > began)
        times.check("a relayed call after the controller was killed for 8 s", next_at - began, 3.0)
        assert_effects(driver, "ledger", len(made) + 1)


def test_a_cut_shorter_than_the_suspicion_of_a_machine_restarts_nothing(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1", "n2") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        where = driver.do("create", "ledger", max_restarts=-1, may_overlap=True)
        lab.cut("controller", where.split()[0])
        time.sleep(24)
        lab.heal()
        cluster.wait_state(driver, where.split()[0], "alive")
        assert driver.do("call", "ledger", "where") == where
        text = (lab.directory / "controller.programs.log").read_text()
        assert "is silent" in text
        assert SUSPECT not in text


@pytest.mark.within(240)
def test_waits_calls_and_streams_of_a_driver_that_returns_too_late_end_with_its_session(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1", controller_options=("--driver-grace-s", "5")) as cluster:
        other = cluster.open_driver(lab.host("other"))
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        driver.do("launch", "job", 200.0)
        waits = [
            driver.start("call", "ledger", "add_slowly", "x", 200.0),
            driver.start("exchange", "ledger", "y", 10_000_000),
            driver.start("wait", "job"),
        ]
        lab.cut("laptop")
        while other.do("living", "ledger"):
            time.sleep(0.2)
        lab.heal()
        assert ["SessionEnded" in wait.error(60) for wait in waits] == [True] * 3, waits


@pytest.mark.within(240)
def test_a_machine_that_was_frozen_changes_nothing_afterwards(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1", "n2", controller_options=("--suspect-s", "10")) as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        old = driver.do("create", "ledger", max_restarts=-1).split()[0]
        driver.do("call", "ledger", "add", "x")
        lab.hosts[old].freeze()
        cluster.wait_state(driver, old, "silent")
        lab.hosts[old].thaw()
        cluster.wait_state(driver, old, "alive")
        assert driver.do("call", "ledger", "add", "x") == 2, "the same incarnation answers"
        assert not (lab.shared / OVERLAPS).exists()


def test_what_a_driver_owns_ends_with_its_machine(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1", controller_options=("--driver-grace-s", "5")) as cluster:
        other = cluster.open_driver(lab.host("other"))
        laptop = lab.host("laptop")
        cluster.open_driver(laptop).do("create", "ledger")
        assert other.do("living", "ledger")
        gone_at = time.monotonic()
        laptop.kill()
        while other.do("living", "ledger"):
            time.sleep(0.2)
        times.check("the end of what a lost driver owned (grace 5 s)", time.monotonic() - gone_at, 25.0)


@pytest.mark.in_test_all
def test_an_actor_served_by_a_driver_is_called_directly_from_other_machines(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("serve", "at-home")
        assert driver.do("ask_job", "at-home", "x") == 1
        seen = lab.seen()
        assert seen.get("n1 to laptop", 0) > 0, "it was relayed"


@pytest.mark.in_test_all
def test_an_actor_served_behind_a_gateway_is_called_through_the_relay(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop", behind_nat=True))
        driver.do("serve", "at-home")
        assert driver.do("ask_job", "at-home", "x") == 1


def test_new_actors_of_a_machine_with_a_new_address_are_dialed_there(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        laptop = lab.host("laptop")
        driver = cluster.open_driver(laptop)
        driver.do("create", "before")
        lab.hosts["n1"].change_address("10.77.0.201")
        driver.do("create", "after", timeout_s=120)
        before = lab.seen()["laptop to n1"]
        driver.do("calls", "after", "x", 1.0)
        assert lab.seen()["laptop to n1"] > before, "calls are relayed"


def test_actors_of_a_machine_with_a_new_address_are_dialed_there_by_new_callers(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        cluster.open_driver(lab.host("laptop")).do("create", "ledger")
        lab.host("other")
        changed_at = time.monotonic()
        lab.hosts["n1"].change_address("10.77.0.201")
        while True:
            # Each is a new caller: one that is connected by the relay stays there.
            other = cluster.open_driver(lab.hosts["other"])
            other.do("find", "ledger")
            before = lab.seen().get("other to n1", 0)
            began = time.monotonic()
            other.do("calls", "ledger", "x", 1.0)
            if lab.seen().get("other to n1", 0) > before:
                break
            other.program.kill()
        times.check("an actor of a machine with a new address is dialed there", began - changed_at, 30.0)


@pytest.mark.parametrize("older", ["caller", "host"])
def test_callers_and_hosts_of_the_previous_release_are_relayed(older: str, lab: Laboratory) -> None:
    export_build(PREVIOUS, lab.shared / "previous")
    tree = f"{SHARED}/previous"
    with open_test_cluster(lab, "n1") as cluster:
        host = cluster.open_driver(lab.host("laptop", behind_nat=True), tree if older == "host" else "")
        host.do("serve", "at-home")
        caller = cluster.open_driver(lab.host("other"), tree if older == "caller" else "")
        caller.do("find", "at-home")
        made = caller.do("calls", "at-home", "x", 2.0)
        assert_effects(caller, "at-home", len(made))


def test_a_stream_fills_a_long_path(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        lab.link("laptop", "n1", delay_s=0.025)
        right, _ = driver.do("stream", "ledger", 1000)
        assert right
        right, rate = driver.do("stream", "ledger", 40_000)
        assert right
        times.check("40,000 items of a stream at 50 ms", 40_000 / rate, 4.0)


@pytest.mark.in_test_all
def test_calls_streams_and_arrays_arrive_once_over_a_bad_network(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        for a, b in (("laptop", "n1"), ("laptop", "controller"), ("n1", "controller")):
            lab.link(a, b, delay_s=0.005, jitter_s=0.01, loss=0.02)
        calls = driver.start("calls", "ledger", "x", 5.0, pause_s=0.0)
        exchange = driver.start("exchange", "ledger", "e", 2000)
        array = driver.start("send_array", "ledger", "array", 3_000_000)
        made = calls.value(120)
        assert longest_s(made) < 60
        assert exchange.value(120)
        assert array.value(120)
        assert lab.seen()["lost"] > 0
        assert driver.do("call", "ledger", "effects") == {"keys": len(made) + 1, "items": 2000, "repeated": []}


@pytest.mark.parametrize("shifted", ["controller", "n1", "laptop"])
def test_a_wall_clock_that_jumps_an_hour_forth_and_back_ends_nothing(
    shifted: str, lab: Laboratory, times: Times
) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        driver.do("launch", "job", 10.0)
        calls = driver.start("calls", "ledger", "x", 8.0)
        for seconds in (3600, -3600, 0):
            lab.hosts[shifted].set_clock(seconds)
            driver.do("create", f"after{seconds}")
            now = float(lab.hosts[shifted].output_of(sys.executable, "-c", "import time; print(time.time())"))
            assert abs(now - time.time() - seconds) < 60, "the clock was shifted"
        made = calls.value(60)
        times.check(f"a call while the clock of {shifted} jumps", longest_s(made), 1.5)
        driver.do("wait", "job")
        assert driver.do("nodes") == {"n1": "alive"}
        assert_effects(driver, "ledger", len(made))
