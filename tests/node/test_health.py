"""Health checks and stall detection: counting as tables, waiting on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define, field
from trio.testing import MockClock

from fray.controller.connections.client_requests import LIST_LIMIT_BYTES, RECORD_BYTES, bounded_list
from fray.controller.metrics.attempt_metrics import LISTED_LIMIT_BYTES, AttemptMetricsStore
from fray.errors import InvalidRequest
from fray.model.messages.node import AttemptMetricsReport
from fray.model.monitoring.attempt_metrics import AttemptMetrics, truncate_middle
from fray.model.monitoring.health import HealthCheck, OnStall, Progress
from fray.model.monitoring.progress_protocol import (
    HealthReport,
    UsageReport,
    check_progress,
    format_line,
    parse,
    progress_text,
)
from fray.model.requests import Entrypoint, JobRequest
from fray.model.specs import AttemptInfo, EndReason, EntryKind, JobInfo, JobSpec, JobState
from fray.node.health.counters import HealthCounter, HealthState, StallDetector
from fray.node.health.http_check import BadAnswer, check_path, status_of
from fray.node.health.metrics_report import MetricsReporter
from fray.node.health.monitor import CAPTURE_TIMEOUT_S, HealthMonitor
from fray.node.shim.progress_pipe import ProgressLog, ProgressPipeReader, parse_report
from fray.node.shim.usage_report import is_significant

# Counting ------------------------------------------------------------------------------------------------------------


def asked(**options: Any) -> HealthCounter:
    return HealthCounter(HealthCheck(path="/", **options), began=0.0)


def test_so_many_bad_answers_in_a_row_are_a_failure_and_a_good_one_resets_the_count() -> None:
    health = asked(failures=3)
    health.record_good()
    assert [health.record_bad("503", 1.0) for _ in range(2)] == [HealthState.UNWELL, HealthState.UNWELL]
    assert health.status_text() == "unwell (2 of 3): 503"
    assert health.record_good() is HealthState.WELL
    assert [health.record_bad("503", 2.0) for _ in range(3)] == [
        HealthState.UNWELL,
        HealthState.UNWELL,
        HealthState.FAILED,
    ]
    assert "failed 3 times in a row; last answer: 503" in health.failure_text()


def test_no_answer_counts_while_it_may_still_be_starting_unless_it_has_been_well() -> None:
    starting, well = asked(failures=1, start_s=60), asked(failures=1, start_s=60)
    assert starting.record_bad("refused", 59.0) is HealthState.STARTING
    assert starting.status_text() == "starting: refused"
    assert starting.record_bad("refused", 60.0) is HealthState.FAILED
    well.record_good()
    assert well.record_bad("refused", 1.0) is HealthState.FAILED


def test_what_has_failed_stays_failed() -> None:
    health = asked(failures=1, start_s=0)
    health.record_bad("no", 0.0)
    assert health.record_good() is HealthState.FAILED


def test_a_stall_is_noticed_once_and_the_next_beat_ends_it() -> None:
    detector = StallDetector(10.0, since=0.0)
    assert not detector.check(9.9)
    assert detector.check(10.0)
    assert not detector.check(30.0)
    assert detector.on_progress(31.0)
    assert not detector.on_progress(32.0)
    assert detector.stalls_at() == 42.0


# Words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"30", Progress(done=30)),
        (b"30 100", Progress(done=30, total=100)),
        (b" 30   100 big steps ", Progress(done=30, total=100, unit="big steps")),
        (b"1.5 - GB", Progress(done=1.5, unit="GB")),
        (b"1234567890.123456 1e300", Progress(done=1234567890.123456, total=1e300)),
        (b"well", HealthReport(True)),
        (b"unwell ValueError: no", HealthReport(False, "ValueError: no")),
        (b"unwell \x1b]0;title\x07no", HealthReport(False, "]0;title no")),
        (b"nan 3", None),
        (b"-1", None),
        (b"30 of 100", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_a_line_says_one_thing_or_nothing(line: bytes, said: object) -> None:
    assert parse(line) == said
    if said is not None:
        assert parse(format_line(said)) == said  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [(-1, None), (float("nan"), None), (1, -2), (float("inf"), 1), ("3", 4), (None, None)])
def test_progress_that_is_no_amount_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match="0 or more"):
        check_progress(*bad, "")


def test_progress_reads_as_people_say_it() -> None:
    assert progress_text(Progress(done=30, total=100, unit="steps")) == "30 of 100 steps (30%)"
    assert progress_text(Progress(done=2.5, unit="GB")) == "2.5 GB"


@pytest.mark.parametrize(
    "bad",
    [
        {"stall_s": 0},
        {"stall_s": float("nan")},
        {"on_stall": "explode"},
        {"health": lambda: HealthCheck()},
        {"health": lambda: HealthCheck(path="/a b")},
        {"health": lambda: HealthCheck(path="healthz")},
        {"health": lambda: HealthCheck(path="/", failures=0)},
        {"health": lambda: HealthCheck(path="/", period_s=1e-9)},
        {"health": lambda: HealthCheck(path="/" * 2001)},
        {"exit_codes": [75]},
        {"exit_codes": {75: []}},
        {"entrypoint": lambda: Entrypoint.from_binary("true", ["a\0b"])},
        {"health": lambda: HealthCheck(path="/healthz")},  # on a port it does not ask for
    ],
)
def test_what_cannot_be_watched_is_refused_when_it_is_written(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        JobRequest(name="j", **{key: value() if callable(value) else value for key, value in bad.items()})


def test_too_many_stacks_lose_their_middle() -> None:
    text = truncate_middle("a" * 1000 + "b" * 1000, 500)
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "bytes omitted" in text
    assert len(text) <= 500


# What a shim receives -------------------------------------------------------------------------------------------------


def test_of_a_flood_of_progress_the_node_hears_the_last_and_the_log_shows_little() -> None:
    received: list[Any] = []
    logged: list[str] = []
    reader = ProgressPipeReader(-1, received.append, logged.append)
    for start in range(0, 5000, 1000):
        reader._feed(b"".join(b"%d 5000 steps\n" % done for done in range(start, start + 1000)), float(start) / 1000)
        reader.on_timer(100.0 + start / 100_000)
    assert [parse_report(news) for news in received] == [[Progress(done=999, total=5000, unit="steps")]]
    reader.on_acknowledged(1)
    reader.on_timer(200.0)
    assert parse_report(received[-1]) == [Progress(done=4999, total=5000, unit="steps")]
    assert logged == ["[fray] 999 of 5000 steps (20%)"]


def test_what_is_no_line_of_progress_is_not_listened_to() -> None:
    received: list[Any] = []
    reader = ProgressPipeReader(-1, received.append, lambda line: None)
    reader._feed(b"x" * 100_000, 0.0)
    reader._feed(b"hello\n{}\n12 \n" + b"9" * 600 + b"\n", 0.0)
    reader.on_timer(1.0)
    assert parse_report(received[0]) == [Progress(done=12)]


def test_the_log_has_the_first_word_one_now_and_then_and_the_last() -> None:
    logged = ProgressLog()
    lines = [logged.line(Progress(done=done, total=100), now=float(done)) for done in range(1, 26)]
    shown = [line for line in [*lines, logged.last_line(26.0), logged.last_line(27.0)] if line]
    assert shown == [
        "[fray] 1 of 100 (1%)",
        "[fray] 11 of 100 (11%), about 89 s left",
        "[fray] 21 of 100 (21%), about 79 s left",
        "[fray] 25 of 100 (25%), about 78 s left",
    ]


# Asking over HTTP ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status"), [(b"HTTP/1.1 200 OK", 200), (b"HTTP/1.0 404", 404), (b"SSH-2.0-x", None), (b"", None)]
)
def test_the_status_is_in_the_first_line(line: bytes, status: int | None) -> None:
    assert status_of(line) == status


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    questions: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        questions.append(await stream.receive_some(1000))
        await stream.send_all(answer)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1], questions
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nfine", None),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", None),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "status 503 Service Unavailable"),
        (b"+PONG\r\n", "not an HTTP response"),
        (b"", "not an HTTP response"),
        (b"HTTP/1.1\t500\r\n\r\n", "^status 500$"),
        (b"HTTP/1.1 500 \x1b[2Jgone\x07\r\n\r\n", r"^status 500 \[2Jgone$"),
        (b"HTTP/1.1 " + b"9" * 4000, "^status 9{60}$"),
        (b"X" * 10_000_000, "not an HTTP response"),
    ],
)
async def test_a_path_is_asked_for_and_the_status_decides(answer: bytes, wrong: str | None) -> None:
    async with answering(answer) as (port, questions):
        if wrong is None:
            await check_path(port, "/healthz?a=1")
            assert questions[0].startswith(b"GET /healthz?a=1 HTTP/1.1\r\nHost: 127.0.0.1:")
        else:
            with pytest.raises(BadAnswer, match=wrong):
                await check_path(port, "/")


async def test_an_answer_says_that_nothing_listens() -> None:
    async with answering(b"") as (port, _):
        pass
    with pytest.raises(BadAnswer, match=f"connection refused at port {port} .*refused"):
        await check_path(port, "/")


# Waiting -------------------------------------------------------------------------------------------------------------


@define(eq=False)
class Fake:
    """A launcher and its health actions in one."""

    answers: list[str] = field(factory=list)
    """Answers by path; empty: good."""
    never_captures: bool = False
    failed: list[tuple[float, str]] = field(factory=list)
    notes: list[tuple[str, str]] = field(factory=list)
    on_report: Any = None

    async def capture(self, attempt_id: str) -> str:
        if self.never_captures:
            await trio.sleep_forever()
        await trio.sleep(0.5)
        return f"stacks at {trio.current_time():g}"

    async def check_path(self, attempt_id: str, port: int, path: str) -> None:
        answer = self.answers.pop(0) if self.answers else ""
        if answer == "hang":
            await trio.sleep_forever()
        if answer:
            raise BadAnswer(answer)

    def fail_attempt(self, attempt_id: str, message: str) -> None:
        self.failed.append((trio.current_time(), message))

    def annotate(self, attempt_id: str, what: str, text: str) -> None:
        self.notes.append((what, text))


@asynccontextmanager
async def monitored(fake: Fake, **spec: Any) -> AsyncIterator[tuple[HealthMonitor, MetricsReporter]]:
    metrics = MetricsReporter()
    watched = HealthMonitor(fake, fake, metrics)
    async with trio.open_nursery() as nursery:
        await nursery.start(watched.run)
        watched.on_running("a:0:0", JobSpec(job_id="a", name="a", namespace="n", entry=EntryKind.CALLABLE, **spec), 80)
        yield watched, metrics
        nursery.cancel_scope.cancel()


async def test_a_stall_is_captured_while_the_job_goes_on_and_ends_with_the_next_beat(autojump_clock: MockClock) -> None:
    fake = Fake()
    async with monitored(fake, stall_s=10.0) as (watched, metrics):
        await trio.sleep(9)
        watched.on_report("a:0:0", Progress(done=1, total=3))
        await trio.sleep(9.5)
        assert fake.notes == []
        await trio.sleep(1.5)
        assert (metrics.last_capture("a:0:0"), metrics.latest["a:0:0"].health) == ("stacks at 19.5", "stalled")
        await trio.sleep(100)
        watched.on_report("a:0:0", Progress(done=2, total=3))
        assert metrics.latest["a:0:0"].health == ""
        assert fake.notes == [
            ("stalled", "no progress for 10 s; the last was 1 of 3 (33%)"),
            ("recovered", "after 111 s: 2 of 3 (67%)"),
        ]
        assert fake.failed == []
        await trio.sleep(10.6)
        assert metrics.last_capture("a:0:0") == "stacks at 130.5"


async def test_a_stall_that_shall_restart_condemns_once_the_stacks_are_there(autojump_clock: MockClock) -> None:
    fake = Fake()
    async with monitored(fake, stall_s=10.0, on_stall=OnStall.RESTART) as (_, metrics):
        await trio.sleep(60)
        assert fake.failed == [(10.5, "stalled: no progress for 10 s since it started")]
        assert metrics.last_capture("a:0:0") == "stacks at 10.5"


async def test_a_beat_that_comes_while_stacks_are_taken_saves_the_job(autojump_clock: MockClock) -> None:
    fake = Fake()
    async with monitored(fake, stall_s=10.0, on_stall=OnStall.RESTART) as (watched, _):
        await trio.sleep(10.2)
        watched.on_report("a:0:0", Progress(done=1))
        await trio.sleep(5)
        assert fake.failed == []


async def test_a_capture_that_does_not_come_holds_nothing_up(autojump_clock: MockClock) -> None:
    fake = Fake(never_captures=True)
    async with monitored(fake, stall_s=10.0, on_stall=OnStall.RESTART) as (_, metrics):
        await trio.sleep(10.1 + CAPTURE_TIMEOUT_S)
        assert len(fake.failed) == 1
        assert "no stacks came within" in metrics.last_capture("a:0:0")


async def test_nothing_is_found_of_an_attempt_whose_end_has_begun(autojump_clock: MockClock) -> None:
    fake = Fake(answers=["500"] * 99)
    check = HealthCheck(path="/", start_s=0, failures=1, period_s=10)
    async with monitored(fake, stall_s=10.0, on_stall=OnStall.RESTART, health=check) as (watched, _):
        watched.on_ending("a:0:0")
        await trio.sleep(100)
        assert (fake.failed, fake.notes) == ([], [])


async def test_a_path_is_asked_every_period_and_no_answer_within_one_is_a_bad_one(autojump_clock: MockClock) -> None:
    fake = Fake(answers=["", "hang", "", "500", "hang", "500"])
    check = HealthCheck(path="/healthz", period_s=10, failures=3, start_s=0)
    async with monitored(fake, health=check) as (_, metrics):
        await trio.sleep(25)
        assert metrics.latest["a:0:0"].health == "well"
        await trio.sleep(100)
        # asked at 0, 10 (till 20), 20, 30, 40 (till 50), 50; stacks take half a second
        message = "not healthy: GET /healthz on port 'http' failed 3 times in a row; last answer: 500"
        assert fake.failed == [(50.5, message)]
        assert [what for what, _ in fake.notes] == ["unwell", "well", "unwell"]


async def test_a_path_is_asked_once_after_the_machine_was_suspended(mock_clock: MockClock) -> None:
    fake = Fake(answers=["", "500", "500"])
    check = HealthCheck(path="/healthz", period_s=10, failures=2, start_s=0)
    async with monitored(fake, health=check):
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(300)
        await trio.testing.wait_all_tasks_blocked()
        assert fake.answers == ["500"], "the second question is due a period after the first"
        assert fake.failed == []


async def test_an_actor_that_says_it_is_unwell_and_one_that_says_nothing_fail_alike(autojump_clock: MockClock) -> None:
    check = HealthCheck(actor="ping", period_s=10, failures=2, start_s=0)
    speaks, silent = Fake(), Fake()
    async with monitored(speaks, health=check) as (loud, _), monitored(silent, health=check) as (quiet, _):
        for _ in range(2):
            await trio.sleep(10)
            loud.on_report("a:0:0", HealthReport(True))
            quiet.on_report("a:0:0", HealthReport(True))
        for _ in range(2):
            await trio.sleep(10)
            loud.on_report("a:0:0", HealthReport(False, "ValueError: no"))
        await trio.sleep(50)
    assert speaks.failed == [
        (40.5, "not healthy: the method ping() failed 2 times in a row; last answer: ValueError: no")
    ]
    ((at, why),) = silent.failed
    assert at == 50.5  # its last word was at 20: one period to the next question, one for the answer, one more
    assert "and no report from its process" in why


# What an attempt takes -----------------------------------------------------------------------------------------------


def test_memory_and_cpu_time_are_reported_when_they_have_changed() -> None:
    known = UsageReport(memory_bytes=1000, peak_memory_bytes=1000, cpu_s=10.0)
    assert is_significant(UsageReport(), known)
    assert not is_significant(known, UsageReport(memory_bytes=1040, peak_memory_bytes=1040, cpu_s=10.5))
    assert is_significant(known, UsageReport(memory_bytes=900, peak_memory_bytes=1000, cpu_s=10.0))
    assert is_significant(known, UsageReport(memory_bytes=1000, peak_memory_bytes=1000, cpu_s=11.1))


def test_lists_of_jobs_have_the_ends_of_long_messages_and_no_stacks() -> None:
    over = AttemptInfo(
        attempt_id="j:0:0", node="n", cause=EndReason.FAILURE, message="a" + "x" * 8000 + "z", captured="stacks"
    )
    (listed,) = (
        AttemptMetricsStore().listed(JobInfo(job_id="j", name="j", state=JobState.FAILED, attempts=(over,))).attempts
    )
    assert (listed.message[0], listed.message[-1], listed.captured) == ("a", "z", "")
    assert len(listed.message) <= LISTED_LIMIT_BYTES


def test_a_list_that_no_reply_carries_is_refused_before_it_is_written() -> None:
    info = JobInfo(
        job_id="j", name="j", state=JobState.FAILED, attempts=(AttemptInfo(attempt_id="j:0:0", node="n"),) * 100
    )
    fits = LIST_LIMIT_BYTES // RECORD_BYTES // 100
    assert bounded_list((info,) * fits)
    with pytest.raises(InvalidRequest, match="ask for fewer, with limit="):
        bounded_list((info,) * (fits + 1))


def test_what_is_measured_of_an_attempt_completes_its_record_and_never_replaces_it() -> None:
    running = AttemptInfo(attempt_id="j:1:0", node="n")
    over = AttemptInfo(attempt_id="j:0:0", node="n", cause=EndReason.FAILURE, peak_memory_bytes=5, captured="its own")
    info = JobInfo(job_id="j", name="j", state=JobState.RUNNING, attempts=(over, running))
    received = {
        "j:0:0": AttemptMetrics(
            attempt_id="j:0:0", progress=Progress(done=9), memory_bytes=3, captured="other", health="stalled"
        ),
        "j:1:0": AttemptMetrics(attempt_id="j:1:0", memory_bytes=7, peak_memory_bytes=8, health="well"),
    }
    first, second = info.with_metrics(received).attempts
    assert (first.captured, first.health, first.memory_bytes, first.peak_memory_bytes) == ("its own", "", 0, 5)
    assert (second.health, second.memory_bytes, second.peak_memory_bytes) == ("well", 7, 8)
    assert info.with_metrics(received).progress == Progress(done=9)  # until its new life says something
    received["j:1:0"] = AttemptMetrics(attempt_id="j:1:0", progress=Progress(done=1))
    assert info.with_metrics(received).progress == Progress(done=1)
    assert info.with_metrics({}) is info


class Heard:
    """A channel that only listens."""

    def __init__(self) -> None:
        self.metrics: list[AttemptMetrics] = []

    def notice(self, message: AttemptMetricsReport) -> None:
        self.metrics += message.metrics


async def test_stacks_go_up_once_and_once_more_to_a_controller_that_has_forgotten(autojump_clock: MockClock) -> None:
    metrics, heard = MetricsReporter(), Heard()

    def reported(attempt_id: str) -> list[AttemptMetrics]:
        heard.metrics = []
        metrics.send(heard, [attempt_id])  # type: ignore[arg-type]
        return heard.metrics

    metrics.on_progress("a:0:0", Progress(done=1))
    metrics.add_capture("a:0:0", "stacks")
    await trio.sleep(2)
    assert reported("a:0:0") == [
        AttemptMetrics(attempt_id="a:0:0", progress=Progress(done=1), age_s=2.0, captured="stacks")
    ]
    assert reported("a:0:0") == []  # it has not moved
    metrics.on_progress("a:0:0", Progress(done=2))
    assert reported("a:0:0") == [AttemptMetrics(attempt_id="a:0:0", progress=Progress(done=2))]
    metrics.resend_all()
    assert reported("a:0:0") == [AttemptMetrics(attempt_id="a:0:0", progress=Progress(done=2), captured="stacks")]
    metrics.forget("a:0:0")
    metrics.resend_all()
    assert reported("a:0:0") == []
