"""HTML of jobs, handles, scopes and clusters in a notebook: state, reason or progress, and no markup of users."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import trio

import fray
import fray.blocking
from fray.api.job_html import ROWS_LIMIT, job_html, jobs_html
from fray.model.monitoring.health import Progress
from fray.model.specs import AttemptInfo, EndReason, JobInfo, JobState
from tests.support.job_functions import Counter

NAME = "<script>alert(1)</script>&"
TINY = fray.ResourceConfig.with_cpu(cpu=0.1, memory="50MB")


class Reader(HTMLParser):
    """Text of a page, and its tags; every tag must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.open = "", set[str](), list[str]()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def info(state: JobState, **more: object) -> JobInfo:
    attempts = (AttemptInfo(attempt_id="train:1:0", node="vm-2"),) if state is not JobState.PENDING else ()
    return JobInfo(job_id="train", name="train", state=state, attempts=attempts, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (info(JobState.PENDING, reason="needs 2 CPUs"), "train pending needs 2 CPUs"),
        (info(JobState.RUNNING), "train running on vm-2 "),
        (
            info(JobState.RUNNING, progress=Progress(done=30, total=120, unit="steps")),
            "train running on vm-2  30 of 120 steps (25%)",
        ),
        (
            info(JobState.RUNNING, progress=Progress(done=30, total=None, unit="steps")),
            "train running on vm-2 30 steps",
        ),
        (info(JobState.SUCCEEDED, cause=EndReason.SUCCEEDED), "train succeeded on vm-2 "),
        (info(JobState.FAILED, cause=EndReason.FAILURE, error_message="no luck\nmore"), "train failed on vm-2 no luck"),
    ],
)
def test_a_job_is_one_line_with_state_and_reason(job: JobInfo, text: str) -> None:
    assert Reader(job_html(job)).text == text


def test_a_known_total_has_a_bar() -> None:
    page = job_html(info(JobState.RUNNING, progress=Progress(done=30, total=120, unit="steps")))
    assert '<progress value="30" max="120"></progress>' in page
    assert "<progress" not in job_html(info(JobState.RUNNING, progress=Progress(done=30)))


def test_text_of_users_is_escaped_everywhere() -> None:
    hostile = JobInfo(
        job_id=NAME,
        name=NAME,
        state=JobState.RUNNING,
        progress=Progress(done=1, total=2, unit=NAME),
        attempts=(AttemptInfo(attempt_id="x:1:0", node=NAME),),
    )
    failed = JobInfo(job_id="x", name="x", state=JobState.FAILED, error_message=NAME)
    waiting = JobInfo(job_id="y", name="y", state=JobState.PENDING, reason=NAME)
    page = Reader(jobs_html(NAME, [hostile, failed, waiting]))
    assert "script" not in page.tags
    assert page.text.count(NAME) == 6


def test_a_table_shows_what_lives_or_failed_and_counts_the_rest() -> None:
    running = [info(JobState.RUNNING)] * (ROWS_LIMIT + 2)
    page = Reader(jobs_html("Scope run", [*running, info(JobState.SUCCEEDED)]))
    assert page.text.startswith(f"Scope run: {len(running)} running, 1 succeeded")
    assert page.text.endswith("and 2 more")
    assert page.text.count("train") == ROWS_LIMIT
    assert Reader(jobs_html("Scope run", [])).text == "Scope run: no jobs"


def test_each_object_of_the_async_api_shows_its_state() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
            job = await scope.launch(fray.JobRequest("seven", TINY, fray.Entrypoint.from_callable(abs, args=(-7,))))
            actor = await scope.create_actor(Counter, name="counter", resources=TINY)
            await actor.add(1)
            assert await job.wait() == 7
            assert Reader(job._repr_html_()).text == f"{job.id} succeeded on local "
            assert re.fullmatch(r"counter-\w+ running on local ", Reader(actor._repr_html_()).text)
            assert Reader(scope._repr_html_()).text.startswith("Scope run: 1 running")
            assert repr(scope) == "<Scope 'run': 1 child>"
            assert Reader(cluster._repr_html_()).text.startswith("Cluster memory:controller: 1 running, 1 succeeded")

    trio.run(main)


def test_each_object_of_the_blocking_api_shows_its_state() -> None:
    with fray.blocking.open_cluster("local") as cluster:
        entered = cluster.open_scope("run")
        assert Reader(entered._repr_html_()).text == "<Scope, not entered>"
        with entered as scope:
            job = scope.launch(fray.JobRequest("seven", TINY, fray.Entrypoint.from_callable(abs, args=(-7,))))
            actor = scope.create_actor(Counter, name="counter", resources=TINY)
            actor.add(1)
            assert job.wait() == 7
            assert Reader(job._repr_html_()).text == f"{job.id} succeeded on local "
            assert re.fullmatch(r"counter-\w+ running on local ", Reader(actor._repr_html_()).text)
            assert Reader(scope._repr_html_()).text.startswith("Scope run: 1 running")
            assert Reader(cluster._repr_html_()).text.startswith("Cluster memory:controller: 1 running, 1 succeeded")
    assert "Cluster" in cluster._repr_html_()
