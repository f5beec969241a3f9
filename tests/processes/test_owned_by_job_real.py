"""An actor that its job owns outlives the processes of that job, and ends with the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, InvalidRequest, JobRequest, ResourceConfig

TINY = ResourceConfig(cpu=0.1, memory="64MB")


class Store:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    async def add(self, caller: int) -> list[tuple[int, int]]:
        """Return, of all calls so far, the process of this actor and that of the caller."""
        self.seen.append((os.getpid(), caller))
        return self.seen


async def killed_once() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Leave a scope with an actor of either lifetime, and be killed; the second time return what both have seen."""
    pid, cluster = os.getpid(), fray.current_cluster()
    async with cluster.open_scope() as scope:
        store = await scope.create_actor(Store, name="store", lifetime="job", get_if_exists=True)
        scoped = await scope.create_actor(Store, name="scoped", get_if_exists=True)
        of_scoped = await scoped.add(pid)
    found = await store.add(pid)
    if len(found) == 1:
        os.kill(pid, signal.SIGKILL)
    return found, of_scoped


def test_the_next_attempt_finds_the_same_process_which_ends_with_the_job() -> None:
    async def main() -> None:
        async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
            with pytest.raises(InvalidRequest, match="lifetime='job' needs a job to which the actor can belong"):
                await cluster.create_actor(Store, name="store", lifetime="job")
            request = JobRequest("run", TINY, Entrypoint.from_callable(killed_once), max_retries_failure=1)
            job = await cluster.launch(request)
            value: Any = await job.wait()
            ((first, killed), (second, retried)), of_scoped = value
            assert first == second
            assert killed != retried
            assert [caller for _, caller in of_scoped] == [retried]
            assert job.info.retries == {"killed": 1}
            with trio.fail_after(60):
                while is_alive(first):  # noqa: ASYNC110 - no event of a process that is not a child
                    await trio.sleep(0.05)
            assert await cluster.list_actors() == []

    trio.run(main)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
