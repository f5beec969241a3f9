"""Processes started by code of jobs on ``local`` end with their job, and with a driver that is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest
from fray.deploy.local_processes import with_marks

ENDS_WITHIN_S = 30.0
"""Longest wait for an end, in which case the test fails."""
NAMES = ("child", "grandchild", "daemon")
TREE = "setsid sleep 1000 & (sleep 1000 & echo $! > {out}/grandchild); echo $! > {out}/daemon; echo $$ > {out}/child"


def wait_started(out: str) -> None:
    while not all(Path(out, name).is_file() and Path(out, name).read_text() for name in NAMES):
        time.sleep(0.01)
    Path(out, "ready").touch()


def start_tree(out: str, *, wait: bool) -> int:
    """Start a process with a child that is an orphan at once, and another in a session of its own."""
    tree = subprocess.Popen(["sh", "-c", TREE.format(out=out) + "; exec sleep 1000"])
    wait_started(out)
    return tree.wait() if wait else tree.pid


def pids_in(out: Path) -> list[int]:
    return [int((out / name).read_text()) for name in NAMES]


def wait_ended(pids: list[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(ENDS_WITHIN_S * 1000), f"process {pid} is still there"
        os.close(descriptor)


async def start_tree_async(out: str) -> None:
    process = await trio.lowlevel.open_process(["sh", "-c", TREE.format(out=out) + "; exec sleep 1000"])
    await trio.to_thread.run_sync(wait_started, out)
    await process.wait()


@pytest.mark.parametrize("way", ["returns", "is cancelled", "async"])
def test_what_a_job_has_started_ends_with_it(way: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope() as scope:
            if way == "returns":
                await scope.run(start_tree, str(tmp_path), wait=False)
            else:
                fn = start_tree_async if way == "async" else start_tree
                kwargs = {} if way == "async" else {"wait": True}
                entrypoint = Entrypoint.from_callable(fn, (str(tmp_path),), kwargs)
                job = await scope.launch(JobRequest("tree", entrypoint=entrypoint))
                with trio.fail_after(ENDS_WITHIN_S):
                    while not (tmp_path / "ready").is_file():  # noqa: ASYNC110 (no event of another process)
                        await trio.sleep(0.01)
                await job.terminate()
                await job.wait_ended()
            wait_ended(pids_in(tmp_path))
            own = await trio.lowlevel.open_process(["sleep", "1000"])
        assert own.poll() is None, "a process of the driver's own code"
        own.kill()
        await own.wait()

    trio.run(main)


DRIVER = """
import sys, trio, fray
from tests.deploy.test_local_processes import start_tree

async def main():
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope() as scope:
        await scope.run(start_tree, sys.argv[1], wait=True)

trio.run(main)
"""


def test_what_jobs_have_started_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    try:
        give_up_at = time.monotonic() + ENDS_WITHIN_S
        while not (tmp_path / "ready").exists():
            assert driver.poll() is None
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        pids = pids_in(tmp_path)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        wait_ended(pids)
    finally:
        driver.kill()
        driver.wait()


def test_marks_are_added_to_those_that_an_environment_has() -> None:
    assert with_marks([b"A=1"], ["x", "y/1"]) == [b"A=1", b"FRAY_NODE_STATE=x:y/1"]
    assert with_marks([b"FRAY_NODE_STATE=/n1", b"A=1"], ["x"]) == [b"A=1", b"FRAY_NODE_STATE=/n1:x"]
    assert b"FRAY_NODE_STATE=x" in with_marks(None, ["x"])
