"""`fray metrics` beside a real controller: its numbers, a controller that is away, tokens, TLS, wrong use."""

from __future__ import annotations

import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import trustme

from tests.monitoring.test_grafana import queries
from tests.processes.lab import Lab, open_lab
from tests.support.dashboards import running_server
from tests.support.ports import free_port

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yml"
NOT_OF_THIS_CLUSTER = re.compile(r"fray_machine_group|increase\(|fray_user_|fray_\w*jobs|rate\(fray_job_wait")
"""Queries whose result may be empty on a cluster without machine groups, on which nothing has run."""
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus: apt install prometheus"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), "alpha") as lab:
        yield lab


def exporter(lab: Lab, *options: str) -> AbstractContextManager[str]:
    return running_server(lab, "metrics", *options)


def get(url: str, token: str = "", context: ssl.SSLContext | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refused(lab: Lab, *options: str) -> str:
    command = [sys.executable, "-m", "fray.cli", "metrics", *options]
    ran = subprocess.run(command, env=lab.environ(), capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2, ran.stderr
    return ran.stderr


def test_numbers_of_a_cluster_and_a_controller_that_is_away(lab: Lab) -> None:
    with exporter(lab, "--listen", "127.0.0.1:0") as url:
        # The machine may join after the first answer.
        while 'fray_machines{state="ready"} 1.0' not in (answer := get(url))[1]:
            pass
        status, text = answer
        assert status == 200
        assert "fray_up 1.0" in text
        place = url.removesuffix("/metrics")
        assert get(f"{place}/readyz") == (200, "ok\n")
        lab.running["controller"].send_signal(signal.SIGSTOP)
        try:
            # The answer of a moment ago is used for a second.
            while (found := get(url)[1]) == text:
                pass
            assert [line for line in found.splitlines() if line[0] != "#"] == ["fray_up 0.0"]
            assert get(f"{place}/readyz") == (503, "the controller does not answer\n")
            assert get(f"{place}/healthz") == (200, "ok\n")
        finally:
            lab.running["controller"].send_signal(signal.SIGCONT)
        while "fray_up 1.0" not in get(url)[1]:
            pass


def test_beyond_this_machine_scrapes_have_a_token_and_tls(lab: Lab, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    token.write_text("0123456789abcdef\n")
    token.chmod(0o644)
    secured = ("--scrape-token", str(token), "--tls-cert", str(certificate), "--tls-key", str(key))
    assert "other users can read it; use chmod 600" in refused(lab, "--listen", "0.0.0.0:0", *secured)
    token.chmod(0o600)
    assert "--scrape-token FILE, --tls-cert FILE" in refused(lab, "--listen", "0.0.0.0:0", *secured[2:])
    with exporter(lab, "--listen", "0.0.0.0:0", *secured) as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        context = ssl.create_default_context()
        authority.configure_trust(context)
        assert get(url, context=context)[0] == 401
        assert get(url, "0123456789abcdeF", context)[0] == 401
        status, text = get(url, "0123456789abcdef", context)
        assert (status, "fray_up 1.0" in text) == (200, True)
        assert get(url.replace("/metrics", "/healthz"), context=context) == (200, "ok\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--listen", "9464"), "invalid --listen '9464'; expected HOST:PORT"),
        (("--listen", "127.0.0.1:65536"), "invalid --listen '127.0.0.1:65536'"),
        (("--listen", "0.0.0.0:0"), "other machines can reach it; add --scrape-token FILE"),
        (("--tls-cert", "a.pem"), "--tls-cert and --tls-key belong together"),
        (("--scrape-token", "/nonexistent"), "--scrape-token /nonexistent: No such file or directory"),
    ],
)
def test_wrong_use_is_explained(lab: Lab, options: tuple[str, ...], message: str) -> None:
    assert message in refused(lab, *options)


@needs_prometheus
def test_a_prometheus_scrapes_it_and_takes_the_rules(lab: Lab, tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, timeout=60, stdout=subprocess.DEVNULL)
    port = free_port()
    with exporter(lab, "--listen", "127.0.0.1:0") as url:
        target = urllib.parse.urlsplit(url).netloc
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": "fray", "static_configs": [{"targets": [target]}]}],
            "rule_files": [str(RULES)],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
        place = f"http://127.0.0.1:{port}"
        command = [
            *("prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"),
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
            try:
                assert asked(place, 'fray_machines{state="ready"}') == [1.0]
                assert asked(place, 'fray_resource_capacity{resource="cpu"} > 0')
                assert asked(place, "histogram_quantile(0.5, fray_controller_loop_pass_seconds_bucket) < 5")
                for query in queries():
                    # All that every cluster has; the others are only understood.
                    shown = query.replace("$instance", ".*")
                    if not NOT_OF_THIS_CLUSTER.search(query):
                        asked(place, shown)
                    status, text = get(f"{place}/api/v1/query?{urllib.parse.urlencode({'query': shown})}")
                    assert (status, json.loads(text)["status"]) == (200, "success"), text
                rules = json.loads(get(f"{place}/api/v1/rules")[1])["data"]["groups"][0]["rules"]
                assert {(rule["name"], rule["state"]) for rule in rules} >= {("FrayControllerDown", "inactive")}
                lab.running["controller"].send_signal(signal.SIGSTOP)
                # The queue of a frozen controller is unknown, and not zero.
                assert asked(place, "fray_up == 0")
                assert asked(place, 'ALERTS{alertname="FrayControllerDown", alertstate="pending"}')
            finally:
                lab.running["controller"].send_signal(signal.SIGCONT)
                prometheus.terminate()


def asked(place: str, query: str) -> list[float]:
    """Return the values of a query once it has any."""
    while True:
        try:
            _, text = get(f"{place}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
            found = json.loads(text)["data"]["result"]
        except (urllib.error.URLError, KeyError, ValueError):
            found = []  # it starts
        if found:
            return [float(each["value"][1]) for each in found]
        time.sleep(0.05)


@needs_prometheus
def test_the_rules_fire_for_what_they_are_for(tmp_path: Path) -> None:
    def series(text: str, values: str) -> dict[str, str]:
        return {"series": text, "values": values}

    given = [
        series('fray_queue_entries{instance="a"}', "3+0x60"),
        series('fray_accelerators{instance="a", state="free"}', "2+0x60"),
        series('fray_accelerators{instance="a", state="allocated"}', "6+0x60"),
        series('fray_accelerators{instance="a", state="busy"}', "0+0x60"),
        # Less than a tenth is free, so they have to wait.
        series('fray_queue_entries{instance="b"}', "3+0x60"),
        series('fray_accelerators{instance="b", state="free"}', "0+0x60"),
        series('fray_accelerators{instance="b", state="allocated"}', "8+0x60"),
        series('fray_machines{instance="a", state="ready"}', "3+0x15 2+0x45"),
        series('fray_machines{instance="a", state="lost"}', "0+0x60"),
        series('fray_machines{instance="b", state="ready"}', "3+0x60"),
        series('fray_machines{instance="b", state="lost"}', "0+0x60"),
        series('fray_machine_group_units{instance="a", group="spot", state="wanted"}', "4+0x60"),
        series('fray_machine_group_units{instance="a", group="spot", state="joined"}', "1+0x60"),
        series('fray_machine_group_units{instance="a", group="full", state="wanted"}', "4+0x60"),
        series('fray_machine_group_units{instance="a", group="full", state="joined"}', "4+0x60"),
    ]
    lost = {
        "exp_labels": {"severity": "warning", "instance": "a"},
        "exp_annotations": {"summary": "1 machines have been lost, or were removed within the last hour."},
    }
    given += [
        series('fray_reservations{instance="a", state="degraded"}', "2+0x60"),
        series('fray_reservations{instance="b", state="degraded"}', "0+0x60"),
        series('fray_jobs_ended_total{instance="a", cause="failure"}', "0+1x60"),
        series('fray_jobs_ended_total{instance="a", cause="succeeded"}', "0x60"),
        # Many fail, and more succeed; and few fail.
        series('fray_jobs_ended_total{instance="b", cause="failure"}', "0+1x60"),
        series('fray_jobs_ended_total{instance="b", cause="succeeded"}', "0+2x60"),
        series('fray_jobs_ended_total{instance="c", cause="failure"}', "0+0.1x60"),
        # What is stopped has not failed.
        series('fray_jobs_ended_total{instance="d", cause="stopped"}', "0+1x60"),
    ]
    short = {
        "exp_labels": {"severity": "warning", "instance": "a", "state": "degraded"},
        "exp_annotations": {"summary": "2 reservations have lost machines, and have fewer than their minimum."},
    }
    failing = {
        "exp_labels": {"severity": "warning", "instance": "a"},
        "exp_annotations": {"summary": "58 jobs have failed within an hour, more than half of all that ended."},
    }
    tests = [
        {"eval_time": "15m", "alertname": "FrayMachinesLost", "exp_alerts": []},
        {"eval_time": "30m", "alertname": "FrayMachinesLost", "exp_alerts": [lost]},
        {"eval_time": "20m", "alertname": "FrayQueueStuck", "exp_alerts": []},
        {
            "eval_time": "40m",
            "alertname": "FrayQueueStuck",
            "exp_alerts": [
                {
                    "exp_labels": {"severity": "warning", "instance": "a"},
                    "exp_annotations": {"summary": "3 entries wait in the queue, though accelerators are free."},
                }
            ],
        },
        {
            "eval_time": "40m",
            "alertname": "FrayMachineGroupShort",
            "exp_alerts": [
                {
                    "exp_labels": {"severity": "warning", "instance": "a", "group": "spot"},
                    "exp_annotations": {"summary": "Machine group spot has 1 units, fewer than wanted."},
                }
            ],
        },
    ]
    tests += [
        {"eval_time": "58m", "alertname": "FrayReservationShort", "exp_alerts": [short]},
        {"eval_time": "58m", "alertname": "FrayJobsFail", "exp_alerts": [failing]},
    ]
    plan = {"rule_files": [str(RULES)], "tests": [{"interval": "1m", "input_series": given, "alert_rule_test": tests}]}
    (tmp_path / "tests.yml").write_text(json.dumps(plan))
    ran = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "tests.yml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
