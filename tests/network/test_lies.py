"""Daemons with valid credentials that lie, and certificates that expire while the controller is away."""

from __future__ import annotations

import time

import pytest

from fray.model.ids import attempt_id
from fray.net.tls.certificates import read_certificate
from fray.node.certificate import FILE
from tests.network.altered_daemon import CHANGED, SHORT_LIFE_S
from tests.network.cluster import open_test_cluster
from tests.network.conftest import Times
from tests.network.laboratory import Laboratory
from tests.network.test_silent_losses import assert_effects, longest_s


def test_calls_by_a_relay_that_changes_what_it_passes_on_have_one_effect_each(lab: Laboratory, times: Times) -> None:
    with open_test_cluster(lab, "n1", altered="changes-relayed-bytes") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        driver.do("create", "ledger")
        lab.cut("laptop", "n1")
        made = driver.do("calls", "ledger", "x", 20.0, timeout_s=120)
        times.check("a call by a relay that changes one part in ten", longest_s(made), 10.0)
        assert_effects(driver, "ledger", len(made))
        assert (lab.directory / "controller.programs.log").read_text().count(CHANGED) >= 5
        assert driver.do("send_array", "ledger", "array", 200_000, timeout_s=120)


def test_a_node_cannot_end_the_job_of_another_node(lab: Laboratory) -> None:
    with open_test_cluster(lab, "n1") as cluster:
        driver = cluster.open_driver(lab.host("laptop"))
        job = driver.do("launch", "job", 20.0)
        began = time.monotonic()
        ended = driver.start("wait", "job")
        forged = attempt_id(job, 0, 0)
        cluster.start_node(lab.host("liar"), altered=f"ends-attempt-of-another={forged}")
        cluster.wait_state(driver, "liar", "alive")
        ended.value(60)
        assert ended.ended_at - began >= 19.0, "it ended when its own node said so"
        text = (lab.directory / "controller.programs.log").read_text()
        assert f"{forged} of node n1: ignored" in text


@pytest.mark.within(240)
def test_nodes_whose_certificates_expire_while_the_controller_is_away_come_back(lab: Laboratory, times: Times) -> None:
    """A day of absence, with certificates of seconds."""
    with open_test_cluster(lab, "n1", controller_options=("--driver-grace-s", "120"), altered="short-certificates") as (
        cluster
    ):
        driver = cluster.open_driver(lab.host("laptop"))
        where = driver.do("create", "ledger")
        cluster.daemons["controller"].kill()
        time.sleep(2 * SHORT_LIFE_S)
        certificate = (lab.hosts["n1"].disk / "node" / FILE).read_bytes()
        assert read_certificate(certificate).not_after_s < time.time()
        began = time.monotonic()
        cluster.start_controller("--driver-grace-s", "120", altered="short-certificates")
        again = driver.do("create", "after", timeout_s=60)
        times.check("a launch after all certificates have expired", time.monotonic() - began, 10.0)
        assert again.split()[0] == "n1"
        assert driver.do("call", "ledger", "where") == where, "the same incarnation answers"
