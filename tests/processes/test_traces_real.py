"""Traces of real processes: drivers, actors and jobs send their spans to a collector."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.otlp_collector import Collector, open_collector
from tests.support.ports import free_port

ROOT = Path(__file__).parent.parent.parent
ENDS_WITHIN_S = 120.0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with open_collector() as collector:
        yield collector


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one driver of `traced_program` to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACEPARENT"))}
    return subprocess.run(
        [sys.executable, "-m", "tests.processes.traced_program", program],
        cwd=ROOT,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
    )


def traced(program: str, collector: Collector, **variables: str) -> subprocess.CompletedProcess[str]:
    ended = run(program, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_SERVICE_NAME="lab", **variables)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def whole() -> Iterator[Collector]:
    """All spans of the async program."""
    with open_collector() as collector:
        ended = traced("async", collector, OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer of-the-lab")
        assert ended.stdout.split() == ["refused", "failed"]
        yield collector


def ancestries(collector: Collector, name: str) -> list[list[str]]:
    return [collector.ancestry(span) for span in collector.spans if span.name == name]


def test_jobs_calls_and_spans_of_users_are_one_trace_across_processes(whole: Collector) -> None:
    assert len({span.trace_id for span in whole.spans}) == 1
    main = ["internal main"]
    front = ["internal in front", "server front.add", "client front.add", *main]
    from_front = ["internal in store", "server store.add", "client store.add", *front]
    parent = ["consumer attempt parent", "producer job parent", *main]
    from_job = ["internal in store", "server store.add", "client store.add", *parent]
    assert sorted(ancestries(whole, "in store")) == sorted([from_front, from_front, from_job])
    assert ancestries(whole, "make store") == [
        ["internal make store", "consumer attempt store", "producer job store", *main]
    ]
    assert ancestries(whole, "in child") == [
        ["internal in child", "consumer attempt child", "producer job child", *parent]
    ]
    assert ancestries(whole, "item 1") == [["internal item 1", "server front.count", "client front.count", *main]]
    # Each span is of the process in which it was: the driver, two actors and four jobs.
    assert len({span.resource["process.pid"] for span in whole.spans}) == 7
    assert {span.resource["service.name"] for span in whole.spans} == {"lab"}
    assert set(whole.authorizations) == {"Bearer of-the-lab"}


def test_spans_say_how_calls_and_jobs_have_ended(whole: Collector) -> None:
    # Each call twice: with a number, and with a negative one.
    for kind in ("client", "server"):
        calls = [span for span in whole.spans if span.name == "front.add" and span.kind == kind]
        assert sorted(span.is_error for span in calls) == [False, True]
        (failed,) = [span for span in calls if span.is_error]
        assert failed.message == "ValueError: below zero"
        assert failed.attributes["error.type"] == "ValueError"
    for name in ("job failing", "attempt failing"):
        (job,) = [span for span in whole.spans if span.name == name]
        assert job.is_error
        assert job.attributes["fray.outcome"] == "failure"
        assert "the job fails" in job.message
    (job,) = [span for span in whole.spans if span.name == "job child"]
    (attempt,) = [span for span in whole.spans if span.name == "attempt child"]
    assert not job.is_error
    assert not attempt.is_error
    assert job.attributes["fray.job.id"] == attempt.attributes["fray.job.id"] == attempt.resource["fray.job.id"]
    for span in (job, attempt):
        assert span.attributes["fray.outcome"] == "succeeded"
        assert span.attributes["fray.attempt"] == 0
        assert span.attributes["fray.node"]


def test_the_span_of_a_job_counts_the_attempts_also_those_that_were_killed(whole: Collector) -> None:
    (job,) = [span for span in whole.spans if span.name == "job retried"]
    (attempt,) = [span for span in whole.spans if span.name == "attempt retried"]
    assert job.attributes["fray.attempt"] == attempt.attributes["fray.attempt"] == 1
    assert attempt.parent_id == job.span_id
    assert not job.is_error


@pytest.mark.parametrize("program", ["blocking", "v2"])
def test_calls_of_sync_code_are_traced(collector: Collector, program: str) -> None:
    traced(program, collector)
    call = ["internal in store", "server store.add", "client store.add"]
    alone = [call] if program == "blocking" else []
    inside = [*call, "internal main"]
    assert sorted(ancestries(collector, "in store")) == sorted([*alone, inside, inside])


def test_tasks_of_a_pool_are_part_of_its_worker(collector: Collector) -> None:
    traced("pool", collector)
    (worker,) = [span.name for span in collector.spans if span.kind == "consumer"]
    job = worker.replace("attempt", "job")
    task = ["internal in child", f"consumer {worker}", f"producer {job}", "internal main"]
    assert ancestries(collector, "in child") == [task, task]
    assert [span.name for span in collector.spans if span.kind in ("client", "server")] == []


def test_a_driver_continues_the_trace_of_the_program_that_started_it(collector: Collector) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced("plain", collector, TRACEPARENT=f"00-{trace_id}-{span_id}-01")
    assert {span.trace_id for span in collector.spans} == {trace_id}
    assert {span.parent_id for span in collector.spans if span.kind == "client"} == {span_id}


def test_what_is_not_sampled_is_not_sent(collector: Collector) -> None:
    traced("async", collector, OTEL_TRACES_SAMPLER="parentbased_always_off")
    assert collector.spans == []


def test_without_a_collector_the_work_is_done_and_each_process_says_so_once() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    # The exporter tries again for a minute, then.
    ended = run("plain", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_TIMEOUT="300")
    took_s = time.monotonic() - began
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "done True"
    # The driver, and the actor's process, whose lines are printed by the driver.
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "exporter of traces" in line]
    assert sorted(line.startswith("(plain) ") for line in said) == [False, True], said
    assert took_s < 60


@pytest.mark.parametrize("variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
def test_unless_it_is_configured_opentelemetry_is_not_imported(variables: dict[str, str]) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"} if variables else {}
    ended = run("plain", **variables, **endpoint)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "done False"


def test_a_missing_package_is_one_warning_of_each_process(tmp_path: Path) -> None:
    # What Python finds first has no SDK, as where fray is installed without its extra.
    package = tmp_path / "opentelemetry"
    package.mkdir()
    (package / "__init__.py").write_text("")
    ended = run("plain", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    said = [line.split()[0] for line in ended.stderr.splitlines() if "fray[otel]" in line]
    assert said == ["fray:", "(plain)"], ended.stderr  # the driver and the process of the actor
