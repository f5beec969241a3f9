"""Exit codes, templates and records with real processes, on one embedded node."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import trio

import fray
from fray import EndReason, Entrypoint, JobRequest, JobState, ResourceConfig

TINY = ResourceConfig(cpu=0.1, memory="64MB")


def leaves_by(how: str) -> str:
    """The ways out of a Python job."""
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    raise ValueError("this is not an exit code")


def own_number(path: str) -> tuple[str, str]:
    """Return the index in the template and the user; fails the first time."""
    mark = f"{path}/{os.environ['FRAY_JOB_INDEX']}"
    if not os.path.exists(mark):
        with open(mark, "w"):
            raise RuntimeError("the first time")
    return os.environ["FRAY_JOB_INDEX"], os.environ["FRAY_USER"]


def work(name: str, fn: object, *args: object, **more: Any) -> JobRequest:
    return JobRequest(name, TINY, Entrypoint.from_callable(fn, args), **more)  # type: ignore[arg-type]


def test_exit_codes_mean_what_the_request_says_and_each_job_of_a_template_is_separate(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAY_USER", "alice")
    rules: dict[str, Any] = {"exit_codes": {3: "ignore", 1: "ignore", 143: "ignore", 4: "fail"}}

    async def main() -> None:
        async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
            programs = {"three": "exit 3", "by-term": "kill -TERM $$", "four": "exit 4", "five": "exit 5"}
            jobs = {
                name: await cluster.launch(
                    JobRequest(name, TINY, Entrypoint.from_binary("sh", ["-c", text]), max_retries_failure=1, **rules)
                )
                for name, text in programs.items()
            }
            for how in ("sys.exit", "os._exit", "raise"):
                jobs[how] = await cluster.launch(work(f"by-{how}", leaves_by, how, **rules))
            many = await cluster.launch(
                work("many", own_number, str(tmp_path), max_retries_failure=1), count=3, name="{user}/many/{index}"
            )
            infos = {name: await job.wait_ended() for name, job in jobs.items()}
            good = ("three", "by-term", "sys.exit", "os._exit")
            assert [infos[name].state for name in good] == [JobState.SUCCEEDED] * 4, infos
            assert (infos["three"].exit_code, infos["by-term"].signal, infos["os._exit"].exit_code) == (3, 15, 3)
            assert await jobs["sys.exit"].wait() is None
            assert (infos["four"].cause, infos["four"].retries) == (EndReason.FAILURE, {})
            assert (infos["five"].exit_code, infos["five"].retries) == (5, {"failure": 1})
            with pytest.raises(ValueError, match="not an exit code"):
                await jobs["raise"].wait()

            assert [job.name for job in many] == [f"alice/many/{index}" for index in range(3)]
            assert [await job.wait() for job in many] == [(str(index), "alice") for index in range(3)]
            info = many[0].info
            assert (info.user, info.retries) == ("alice", {"failure": 1})
            assert all(attempt.node and attempt.duration_s > 0 and attempt.start_time for attempt in info.attempts)

    trio.run(main)
