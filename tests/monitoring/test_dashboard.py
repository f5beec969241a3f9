"""`fray dashboard` beside a real controller: its routes, its live tables, who may open it and what it refuses."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from tests.processes.lab import TOKEN, Lab, open_lab
from tests.support.dashboards import run_fray, running_dashboard

MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), "alpha") as lab:
        yield lab


class Browser:
    """Requests of a browser: with its cookie, its origin, and the token that the page was given."""

    def __init__(self, url: str) -> None:
        place = urllib.parse.urlsplit(url)
        self.place, self.origin = place.netloc, f"http://{place.netloc}"
        self.cookie = self.token = ""
        status, headers, _ = self.ask("GET", f"/?{place.query}")
        assert (status, headers["location"]) == (303, "/")
        self.cookie = headers["set-cookie"].partition(";")[0]
        self.token = self.rows("status")[0][1]["token"]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, str]:
        connection = http.client.HTTPConnection(self.place, timeout=30)
        sent = {"Cookie": self.cookie, "Origin": self.origin, "X-Fray-Token": self.token} | headers
        sent = {name.replace("_", "-"): value for name, value in sent.items() if value}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text

    def rows(self, table: str) -> Any:
        status, _, text = self.ask("GET", f"/api/tables/{table}")
        assert status == 200, text
        return json.loads(text)["rows"]

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[Any]]:
        """Yield the events of a stream."""
        connection = http.client.HTTPConnection(self.place, timeout=60)
        connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        try:
            lines = (line.decode().rstrip("\n") for line in iter(answer.readline, b""))
            yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        finally:
            connection.close()


def launched(lab: Lab, name: str, *command: str) -> str:
    options = ("--detach", "--name", name, "--cpu", "0.1", "--memory", "50MB", "--")
    return run_fray(lab, "run", *options, *command).strip()


def test_tables_have_what_the_command_line_prints(lab: Lab) -> None:
    job = launched(lab, "failing", "sh", "-c", f"echo '{MARKUP}' >&2; exit 3")
    subprocess.run([sys.executable, "-m", "fray.cli", "wait", job], env=lab.environ(), check=False, timeout=60)
    with running_dashboard(lab) as url:
        browser = Browser(url)
        (printed,) = json.loads(run_fray(lab, "jobs", "--prefix", job, "--json"))
        (row,) = (row for row in browser.rows("jobs") if row[0] == job)
        names = json.loads(browser.ask("GET", "/api/tables/jobs")[2])["columns"]
        shown = dict(zip(names, row, strict=True))
        assert shown["state"] == printed["state"] == "failed"
        assert (shown["started"], shown["ended"]) == (printed["start_time"], printed["end_time"])
        assert shown["text"] == f"ended with exit code 3; last lines of stderr: {MARKUP}"
        document = json.loads(browser.ask("GET", f"/api/jobs/{job}")[2])
        assert document["info"] == json.loads(run_fray(lab, "show", job, "--json"))
        assert document["events"] == json.loads(run_fray(lab, "events", job, "--json"))
        assert document["explanation"] == json.loads(run_fray(lab, "explain", job, "--json"))["text"]
        (node,) = json.loads(run_fray(lab, "nodes", "--json"))
        (machine,) = browser.rows("nodes")
        assert machine[:6] == ["alpha", True, "", "", node["cpu_milli"], node["cpu_milli_free"]]
        for table in ("queue", "usage", "samples", "reservations", "groups", "job_groups", "users", "audit"):
            browser.rows(table)
        status, _, text = browser.ask("GET", "/api/jobs/nosuch-1")
        assert (status, json.loads(text)["error"].startswith("no job 'nosuch-1'")) == (404, True)


def test_a_stream_has_all_rows_once_and_then_those_that_change(lab: Lab) -> None:
    first = launched(lab, "first", "true")
    with running_dashboard(lab) as url, Browser(url).events("/api/live?tables=jobs") as events:
        assert "now" in next(events)
        whole = next(event for event in events if event["table"] == "jobs")
        assert first in [row[0] for row in whole["rows"]]
        second = launched(lab, "second", "sleep", "600")
        seen = []
        while not any(row[:3] == [second, "second", "running"] for event in seen for row in event["rows"]):
            seen.append(next(events))
        assert all(row[0] in (first, second) for event in seen if event["table"] == "jobs" for row in event["rows"])


async def test_a_list_kept_by_changes_is_the_list_of_all_jobs(lab: Lab) -> None:
    for name in ("a", "b", "c"):
        await trio.to_thread.run_sync(launched, lab, name, "true")
    async with fray.open_cluster(lab.spec, token=TOKEN) as cluster:
        kept, change, has_more = set(), 0, True
        while has_more:
            reply = await cluster.job_changes(change, limit=2, namespace="*")
            assert len(reply.jobs) <= 2
            kept |= {info.job_id for info in reply.jobs}
            change, has_more = reply.change, reply.has_more
        ids = [info.job_id for info in await cluster.list_jobs("*")]
        assert kept == set(ids)
        some = await cluster.job_changes(jobs=[ids[1], "unknown-1", ids[0]], namespace="*")
        assert [info.job_id for info in some.jobs] == [ids[1], ids[0]]


def test_a_log_is_followed_to_its_end(lab: Lab) -> None:
    job = launched(lab, "printing", "sh", "-c", "echo one; echo two >&2; echo one more")
    with running_dashboard(lab) as url:
        browser = Browser(url)
        with browser.events(f"/api/jobs/{job}/logs?follow=1&contains=one") as events:
            lines = [line for event in iter(lambda: next(events), None) for line in event]
        assert [(line[1], line[4]) for line in lines] == [("out", "one"), ("out", "one more")]
        assert browser.ask("GET", f"/api/jobs/{job}/logs?stream=none")[0] == 400


def test_a_page_that_is_left_ends_its_stream(lab: Lab) -> None:
    with running_dashboard(lab) as url:
        browser = Browser(url)
        with browser.events("/api/live?tables=jobs") as events:
            next(events)
        # 200 streams are the most at a time: if those of pages that have left stayed, the last would be refused.
        for _ in range(220):
            with browser.events("/api/live?tables=") as events:
                assert "now" in next(events)
        with ExitStack() as pages:
            for _ in range(200):
                next(pages.enter_context(browser.events("/api/live?tables=")))
            status, _, text = browser.ask("GET", "/api/live?tables=")
            assert (status, "200 pages and logs are open" in text) == (503, True)


def test_actions_need_the_page_its_origin_and_its_token(lab: Lab) -> None:
    job = launched(lab, "long", "sleep", "600")
    with running_dashboard(lab) as url:
        browser = Browser(url)
        path = f"/api/jobs/{job}/stop"
        assert browser.ask("POST", path, {}, Origin="http://evil.example")[0] == 403
        assert browser.ask("POST", path, {}, Origin="")[0] == 403
        assert browser.ask("POST", path, {}, X_Fray_Token="wrong")[0] == 403
        assert browser.ask("POST", path, {}, Cookie="")[0] == 401
        assert browser.ask("GET", path)[0] == 405
        assert json.loads(run_fray(lab, "show", job, "--json"))["state"] != "stopped"
        give_up_at = time.monotonic() + 60
        while json.loads(run_fray(lab, "show", job, "--json"))["state"] != "running":
            assert time.monotonic() < give_up_at
        status, _, text = browser.ask("POST", f"/api/jobs/{job}/requeue", {"reason": "room"})
        assert (status, json.loads(text)) == (200, {"jobs": [job]})
        assert ": room (by " in run_fray(lab, "explain", job)
        status, _, text = browser.ask("POST", path, {"reason": "enough"})
        assert (status, json.loads(text)) == (200, {"jobs": [job]})
        run = subprocess.run(
            [sys.executable, "-m", "fray.cli", "wait", job], env=lab.environ(), check=False, timeout=60
        )
        assert run.returncode != 0
        message = json.loads(run_fray(lab, "show", job, "--json"))["error_message"]
        assert "`fray dashboard` by " in message
        assert message.endswith(": enough")
        assert browser.ask("POST", "/api/nodes/alpha/cordon", {"reason": "loud fan"})[0] == 200
        assert browser.rows("nodes")[0][2] == "cordoned"
        assert browser.ask("POST", "/api/nodes/alpha/uncordon", {})[0] == 200
        assert browser.ask("POST", "/api/nodes/alpha/explode", {})[0] == 400


def test_malformed_requests_are_refused_and_end_nothing(lab: Lab) -> None:
    job = launched(lab, "asked", "sleep", "100")
    with running_dashboard(lab) as url:
        browser = Browser(url)
        with browser.events("/api/live?tables=jobs,jobs,status,") as events:
            assert "now" in next(events)
            assert {next(events)["table"], next(events)["table"]} == {"status", "jobs"}
        for path, body, code in (
            (f"/api/jobs/{job}/stop", ["no object"], 400),
            (f"/api/jobs/{job}/explode", {}, 400),
            ("/api/reservations/no-such/renew", {}, 404),
            (f"/api/jobs/{job}/stop", {"reason": "x" * 20_000}, 400),
            ("/login", "x" * 20_000, 413),
        ):
            assert browser.ask("POST", path, body)[0] == code, path
        assert browser.ask("GET", f"/api/jobs/{job}/logs?tail=many")[0] == 400
        assert browser.ask("GET", "/api/live?tables=nosuch")[0] == 404
        # A surrogate, which no encoding has.
        status, _, text = browser.ask("POST", f"/api/jobs/{job}/stop", {"reason": "\ud800"})
        assert (status, "is not valid Unicode text" in json.loads(text)["error"]) == (400, True)


def test_without_its_key_nothing_is_shown(lab: Lab) -> None:
    with running_dashboard(lab) as url:
        browser = Browser(url)
        for path in ("/api/tables/jobs", "/api/live?tables=jobs", "/api/jobs/x/logs"):
            assert browser.ask("GET", path, Cookie="fray=guess")[0] == 401
        status, headers, text = browser.ask("GET", "/", Cookie="")
        assert (status, 'name="key"' in text) == (401, True)
        assert browser.ask("GET", "/?key=wrong", Cookie="")[0] == 401
        key = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)["key"][0]
        assert browser.ask("GET", "/api/tables/jobs", Cookie="", Authorization=f"Bearer {key}")[0] == 200
        _, headers, _ = browser.ask("GET", "/")
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert browser.ask("GET", "/page/../dashboard.py")[0] == 404


def test_a_controller_that_is_away_is_said_and_found_again(lab: Lab) -> None:
    with running_dashboard(lab) as url, Browser(url).events("/api/live?tables=jobs") as events:

        def away() -> Iterator[float]:
            return (row[1]["away_s"] for event in events if event.get("table") == "status" for row in event["rows"])

        lab.running["controller"].send_signal(signal.SIGSTOP)
        try:
            assert next(seconds for seconds in away() if seconds > 0) >= 3
        finally:
            lab.running["controller"].send_signal(signal.SIGCONT)
        assert next(seconds for seconds in away() if seconds == 0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--listen", "0.0.0.0:0"), "other machines can reach it; add --key FILE, --tls-cert FILE and --tls-key FILE"),
        (("--key", "/nonexistent"), "--key /nonexistent: No such file or directory"),
    ],
)
def test_wrong_use_of_the_dashboard_is_explained(lab: Lab, options: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "fray.cli", "dashboard", *options]
    ran = subprocess.run(command, env=lab.environ(), capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, message in ran.stderr) == (2, True), ran.stderr


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = Path(__file__).parents[2] / "fray/monitoring/page"
    for file in page.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, file
        assert "https://" not in text, file
        assert "innerHTML" not in text, file
