"""Every state explains itself: in a `repr`, in an error, in few words."""

from __future__ import annotations

from typing import Any

import pytest

from fray.api.jobs.job import error_of
from fray.model.job_text import end_text, summary_text
from fray.model.monitoring.health import Progress
from fray.model.specs import AttemptInfo, EndReason, JobInfo, JobState
from fray.runtime.controller_client.jobs import JobRecord


def info(state: str = "running", *nodes: str, generation: int = 0, **more: Any) -> JobInfo:
    attempts = tuple(AttemptInfo(attempt_id=f"j:{generation}:{n}", node=node) for n, node in enumerate(nodes))
    return JobInfo(job_id="j", name="j", state=JobState(state), attempts=attempts, **more)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (info("pending", reason="waits for 2 CPUs"), "pending: waits for 2 CPUs"),
        (info("running", "a"), "running on a"),
        (info("running", "a", "b", "a", "c", "d"), "running on a, b, c and 1 more"),
        (info("running", "a", progress=Progress(done=3, total=10, unit="files")), "running on a: 3 of 10 files (30%)"),
        (info("running", "a", progress=Progress(done=3)), "running on a: 3"),
        (info("succeeded", "a", cause=EndReason.SUCCEEDED), "succeeded on a"),
        (info("failed", "a", cause=EndReason.FAILURE, error_message="no luck\nmore"), "failed on a: no luck"),
        (info("failed", "a", cause=EndReason.OUT_OF_MEMORY), "failed (out_of_memory) on a"),
        (info("stopped", cause=EndReason.OWNER_ENDED, error_message="x" * 200), f"stopped (owner_ended): {'x' * 119}…"),
    ],
)
def test_a_state_is_one_line_of_text(job: JobInfo, text: str) -> None:
    assert summary_text(job) == text


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            info("failed", "a", cause=EndReason.KILLED, signal=9, error_message="killed"),
            "failed on a: killed (SIGKILL)",
        ),
        (info("failed", "a", cause=EndReason.KILLED, signal=40), "failed on a: killed (signal 40)"),
        (
            info("failed", "b", generation=2, cause=EndReason.FAILURE, error_message="oops", retries={"failure": 2}),
            "failed on b at its third attempt: oops",
        ),
        (
            info("stopped", "a", cause=EndReason.STOPPED, error_message="wrong rate", ended_by="a tool of alice"),
            "was stopped on a by a tool of alice: wrong rate",
        ),
        (
            info(
                "stopped", cause=EndReason.OWNER_ENDED, error_message="its owner s ended", ended_by="its owner s ended"
            ),
            "was stopped: its owner s ended",
        ),
    ],
)
def test_an_error_says_where_after_how_many_attempts_and_by_whom(job: JobInfo, text: str) -> None:
    assert end_text(job) == text
    error = error_of(JobRecord(job))
    assert str(error) == f"job j {text}"
    assert {"cause", "nodes", "attempts", "ended_by"} <= error.details.keys()  # type: ignore[attr-defined]
