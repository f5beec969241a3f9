"""Progress, stalls and stacks of real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import (
    ActorConfig,
    ActorDied,
    Cluster,
    EndReason,
    Entrypoint,
    HealthCheck,
    InvalidRequest,
    Job,
    JobRequest,
    JobState,
    TerminationPolicy,
    blocking,
)
from fray.model.monitoring.progress_protocol import STACKS_SIGNAL
from fray.node.shim.stack_capture import CaptureTarget, capture, find_py_spy
from tests.support import monitored_jobs

LIMIT_S = 60


@asynccontextmanager
async def launched(cluster: Cluster, fn: Any, *args: Any, **options: Any) -> AsyncIterator[Job]:
    job = await cluster.launch(JobRequest(name=fn.__name__, entrypoint=Entrypoint.from_callable(fn, args), **options))
    yield job
    await job.terminate()


async def until(job: Job, is_so: Any) -> Any:
    """The job's info, as soon as it is so."""
    while not is_so(job.info) and not job.done():
        await job._record.changed.wait()
    return job.info


@pytest.mark.timed
async def test_progress_is_seen_while_the_job_runs_and_its_last_report_always_arrives() -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            async with launched(cluster, monitored_jobs.count_to, 200, 0.005) as job:
                seen = await until(job, lambda info: info.progress is not None)
                assert 1 <= seen.progress.done < 200
                assert await job.wait() == 200
                last = job.info.progress
                assert last is not None
                assert (last.done, last.total, last.unit) == (200, 200, "steps")
                assert abs(last.time - time.time()) < 30
            async with launched(cluster, monitored_jobs.count_in_loop, 5, 0.0) as job:
                await job.wait()
                assert job.info.progress is not None
                assert job.info.progress.done == 5
            (listed,) = [info for info in await cluster.list_jobs() if info.job_id == job.id]
            assert listed.progress == job.info.progress


async def test_threads_and_child_processes_tell_progress_too() -> None:
    with trio.fail_after(LIMIT_S):
        async with (
            fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster,
            launched(cluster, monitored_jobs.count_in_a_thread_and_a_process) as job,
        ):
            await job.wait()
            assert job.info.progress is not None
            assert job.info.progress.done == 20


@pytest.mark.parametrize("spec", ["machine?nodes=1&cpu=8", "local"])
async def test_programs_tell_progress_too_in_lines_that_any_shell_can_write(spec: str) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster(spec, logs=False) as cluster:
            script = "echo 1 3 files > $FRAY_PROGRESS; echo nonsense > $FRAY_PROGRESS; echo 3 3 files >$FRAY_PROGRESS"
            program = Entrypoint.from_binary("sh", ["-c", script])
            job = await cluster.launch(JobRequest(name="program", entrypoint=program))
            await job.wait()
            assert job.info.progress is not None
            assert (job.info.progress.done, job.info.progress.unit) == (3, "files")


def test_in_a_driver_progress_does_nothing_but_look_at_its_arguments() -> None:
    fray.progress(1)
    fray.progress(3, None, "steps")
    with pytest.raises(InvalidRequest):
        fray.progress(-1)
    with pytest.raises(InvalidRequest):
        fray.progress(1, 2, "a unit of more than forty characters fails")


async def test_the_log_shows_progress_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8") as cluster:
            job = await cluster.launch(
                JobRequest(name="c", entrypoint=Entrypoint.from_callable(monitored_jobs.count_to, (9,)))
            )
            await job.wait()
    *before, last = capsys.readouterr().err.splitlines()
    assert last == "(c) [fray] 9 of 9 steps (100%)"
    assert before in ([], ["(c) [fray] 1 of 9 steps (11%)"])


async def test_a_stall_is_captured_while_the_job_runs_and_stays_in_its_record() -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            async with launched(cluster, monitored_jobs.linger_here, 60, stall_s=0.3) as job:
                assert await until(job, lambda info: info.attempts and info.attempts[0].memory_bytes > 1_000_000)
                info = await until(job, lambda info: info.attempts and info.attempts[0].captured)
                (attempt,) = info.attempts
                assert (info.state, attempt.health) == (JobState.RUNNING, "stalled")
                assert "linger_here" in attempt.captured
            ended = await job.wait_ended()
            assert "linger_here" in ended.attempts[0].captured
            assert ended.attempts[0].health == ""
            (line,) = [event.text for event in await cluster.events(job) if event.what == "stalled"]
            assert "no progress for 0.3 s; the last was 1 of 2 (50%)" in line
            listed = [info for info in await cluster.list_jobs() if info.job_id == job.id]
            assert listed[0].attempts[0].captured == ""


async def test_a_stalled_job_restarts_if_requested_and_its_record_says_why(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            options: dict[str, Any] = {"stall_s": 0.5, "on_stall": "restart", "max_retries_failure": 1}
            async with launched(cluster, monitored_jobs.stall_the_first_time, str(tmp_path / "seen"), **options) as job:
                assert await job.wait() == "well"
                first = job.info.attempts[0]
                assert first.cause is fray.EndReason.FAILURE
                assert "stalled: no progress for 0.5 s since it started" in first.message
                assert "stall_the_first_time" in first.captured


async def test_stacks_come_of_a_job_that_is_stuck_in_c_with_the_interpreters_lock() -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            policy = TerminationPolicy(cancel_s=0.1, term_s=0.1)
            async with launched(cluster, monitored_jobs.hold_the_interpreter, 60, termination=policy) as job:
                await until(job, lambda info: info.progress is not None)
                (text,) = (await job.stacks()).values()
                assert "hold_the_interpreter" in text
                assert "its event loop did not answer" in text


STUCK = """
import ctypes, sys
from fray.runtime.process import stack_dump
stack_dump.enable_stack_dumps(sys.argv[1])
print("armed", flush=True)
def stuck_in_c():
    while True:
        ctypes.PyDLL(None).sleep(60)  # a sleep of C ends early when a signal comes; other waits begin again
stuck_in_c()
"""


@pytest.mark.timed
@pytest.mark.parametrize("with_py_spy", [True, False])
def test_stacks_come_by_py_spy_where_it_is_and_else_by_faulthandler(with_py_spy: bool, tmp_path: Path) -> None:
    py_spy = find_py_spy() if with_py_spy else ""
    if with_py_spy and not py_spy:
        pytest.skip("py-spy is not installed")
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05)  # into the call; what is shown before is right, too
        deaf = os.open(os.devnull, os.O_WRONLY)
        text = capture(CaptureTarget(process.pid, deaf, tmp_path, tmp_path / "captured", py_spy), time.monotonic() + 8)
        os.close(deaf)
        assert process.poll() is None
        assert "stuck_in_c" in text
        assert ("most recent call first" in text) == (not with_py_spy)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_stacks_show_trio_tasks_and_programs_what_the_kernel_knows() -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            async with launched(cluster, monitored_jobs.wait_in_a_task, 60) as job:
                await job.wait_running()
                while "patient_child" not in (text := (await cluster.stacks(job)).popitem()[1]):
                    assert "Process" in text
                assert "Trio tasks" in text
            program = JobRequest(name="sleep", entrypoint=Entrypoint.from_binary("sleep", ["60"]))
            sleeper = await cluster.launch(program)
            await sleeper.wait_running()
            (text,) = (await sleeper.stacks()).values()
            assert "not a Python process" in text or "not running" in text
            await sleeper.terminate()
            await sleeper.wait_ended()
            assert await sleeper.stacks() == {}
            with pytest.raises(fray.NoSuchJob):
                await cluster.stacks("unknown-job")


async def test_a_process_that_does_not_catch_the_signal_is_not_sent_it() -> None:
    """A signal would end it: number 40 ends a process without a handler for it."""
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            program = Entrypoint.from_binary("python3", ["-c", "import time; time.sleep(60)"])
            job = await cluster.launch(JobRequest(name="foreign", entrypoint=program))
            await job.wait_running()
            await job.stacks()
            assert job.info.state is JobState.RUNNING
            assert STACKS_SIGNAL == 40
            await job.terminate()
            assert (await job.wait_ended()).signal != STACKS_SIGNAL


# Health --------------------------------------------------------------------------------------------------------------


async def test_a_server_that_answers_badly_is_ended_as_a_failure_and_restarts(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            sick = tmp_path / "sick"
            check = HealthCheck(path="/healthz", period_s=0.4, failures=2)
            options: dict[str, Any] = {"health": check, "ports": ["http"], "max_retries_failure": 1, "replicas": 2}
            async with launched(cluster, monitored_jobs.serve_http, str(sick), **options) as job:
                await until(job, lambda info: [one.health for one in info.attempts] == ["well", "well"])
                assert not job.done(), job.info
                sick.touch()
                await until(job, lambda info: any(attempt.cause is EndReason.FAILURE for attempt in info.attempts))
                sick.unlink()
                info = await until(job, lambda info: [one.health for one in info.attempts[2:]] == ["well", "well"])
                assert not job.done(), info
                failed = next(one for one in info.attempts if one.cause is EndReason.FAILURE)
                wanted = "not healthy: GET /healthz on port 'http' failed 2 times in a row; last answer: status 503"
                assert failed.message.startswith(wanted)
                assert "serve_forever" in failed.captured


async def test_an_actor_whose_method_raises_fails_and_is_restarted(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            sick = tmp_path / "sick"
            config = ActorConfig(health=HealthCheck(actor="ping", period_s=0.25, failures=2), max_restarts=1)
            patient = await cluster.create_actor(monitored_jobs.Patient, str(sick), name="patient", actor_config=config)
            while await patient.count() < 3:  # noqa: ASYNC110 - the actor has no event for us
                await trio.sleep(0.02)
            sick.touch()
            info = (await cluster.list_jobs(prefix="patient"))[0]
            while not info.attempts[0].cause:
                info = (await cluster.list_jobs(prefix="patient"))[0]
                await trio.sleep(0.02)
            sick.unlink()
            message = "not healthy: the method ping() failed 2 times in a row; last answer: ValueError: it hurts"
            assert (info.attempts[0].cause, info.attempts[0].message) == (EndReason.FAILURE, message)
            assert await patient.count() >= 0


@pytest.mark.parametrize("cls", [monitored_jobs.Patient, monitored_jobs.AsyncPatient])
async def test_an_actor_that_is_stuck_fails_whether_on_its_thread_or_in_its_loop(cls: type) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
            config = ActorConfig(health=HealthCheck(actor="ping", period_s=0.25, failures=2))
            patient = await cluster.create_actor(cls, name="patient", actor_config=config)
            await patient.ping()
            while (await cluster.list_jobs(prefix="patient"))[0].attempts[0].health != "well":  # noqa: ASYNC110
                await trio.sleep(0.02)
            with contextlib.suppress(ActorDied):
                await patient.block(2.5)  # stuck for longer than it is given
            (listed,) = await cluster.list_jobs(prefix="patient")
            info = await cluster.wait(listed.job_id)
            assert info.cause is EndReason.FAILURE
            assert "no answer within 0.25 s" in (info.error_message or "")
            assert "block" in info.attempts[0].captured


async def test_an_impossible_health_check_is_refused_at_submission() -> None:
    async with fray.open_cluster("local", logs=False) as cluster:
        plain = Entrypoint.from_callable(monitored_jobs.count_to, (1,))
        with pytest.raises(InvalidRequest, match=r"is for actors.*create_actor"):
            await cluster.launch(JobRequest(name="plain", entrypoint=plain, health=HealthCheck(actor="ping")))
        bad = {
            "pong": "no public method 'pong'.*ping",
            "stream": "is a generator",
        }
        for method, why in bad.items():
            config = ActorConfig(health=HealthCheck(actor=method))
            with pytest.raises(InvalidRequest, match=why):
                await cluster.create_actor(monitored_jobs.Patient, actor_config=config)
        with pytest.raises(InvalidRequest, match="health checks of actors call a method"):
            await cluster.create_actor(monitored_jobs.Patient, actor_config=ActorConfig(health=HealthCheck(path="/")))
        host = await cluster.create_host()
        with pytest.raises(InvalidRequest, match="light"):
            await host.create_actor(monitored_jobs.Patient, actor_config=ActorConfig(health=HealthCheck(actor="ping")))


class Freezer:
    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def pid(self) -> int:
        return os.getpid()


async def test_a_frozen_process_of_light_actors_is_ended_and_started_again() -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine", logs=False) as cluster:
            host = await cluster.create_host("cells", max_restarts=1, health=HealthCheck(actor="ping", period_s=0.2))
            one = await host.create_actor(Freezer)
            frozen = await one.pid()
            with pytest.raises(ActorDied):
                await one.freeze()
            assert await one.pid() != frozen


async def test_questions_for_its_health_keep_no_idle_actor_alive() -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("local", logs=False) as cluster:
            config = ActorConfig(health=HealthCheck(actor="ping", period_s=0.05), idle_s=0.3)
            await cluster.create_actor(monitored_jobs.AsyncPatient, name="patient", actor_config=config)
            (info,) = await cluster.list_jobs(prefix="patient")
            assert (await cluster.wait(info.job_id)).state is JobState.SUCCEEDED


async def test_jobs_of_the_local_cluster_are_watched_too() -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("local", logs=False) as cluster:
            async with launched(cluster, monitored_jobs.count_to, 30, 0.02) as job:
                await until(job, lambda info: info.progress is not None)
                assert await job.wait() == 30
                assert job.info.progress is not None
                assert job.info.progress.done == 30
            async with launched(cluster, monitored_jobs.wait_in_a_task, 60, stall_s=0.1, on_stall="restart") as job:
                ended = await job.wait_ended()
                assert "stalled: no progress" in (ended.error_message or "")
                assert "patient_child" in ended.attempts[0].captured


@pytest.mark.timed
def test_sync_code_sees_progress_and_looks_into_its_jobs() -> None:
    with blocking.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster:
        request = JobRequest(name="slow", entrypoint=Entrypoint.from_callable(monitored_jobs.linger_here, (60,)))
        job = cluster.launch(request)
        job.wait_running(LIMIT_S)
        give_up_at = time.monotonic() + LIMIT_S
        while job.info.progress is None and time.monotonic() < give_up_at:
            time.sleep(0.02)
        assert job.info.progress is not None
        assert "linger_here" in job.stacks()[f"{job.id}:0:0"]
        assert list(cluster.stacks(job)) == [f"{job.id}:0:0"]
        job.terminate()  # or the cluster waits for its end
