"""Processes that are requested to end while they import the user's module, or construct their actor."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest

SLOW_MODULE = """
import os, time
from pathlib import Path

if "FRAY_JOB_ID" in os.environ:  # in the process of the job, not in the driver
    Path(os.environ["PLACE"], "begun").touch()
    try:
        time.sleep(60)
    finally:
        Path(os.environ["PLACE"], "left").touch()

async def job(): ...

def sync_job(): ...

class Actor:
    async def ping(self): ...
"""


class SlowToConstruct:
    """Actor of async methods, whose constructor blocks the loop."""

    def __init__(self, place: Path) -> None:
        (place / "begun").touch()
        try:
            time.sleep(60)
        finally:
            (place / "left").touch()

    async def ping(self) -> None: ...

    async def __fray_cleanup__(self) -> None: ...


class Deaf(SlowToConstruct):
    """The same, which loses the KeyboardInterrupt."""

    def __init__(self, place: Path) -> None:
        while True:
            try:
                super().__init__(place)
            except KeyboardInterrupt:
                pass


@pytest.fixture
def slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "slow_to_import.py").write_text(SLOW_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("slow_to_import")
    del sys.modules["slow_to_import"]


async def message_of_end(place: Path, begin: Callable[[fray.Cluster, fray.Scope], Awaitable[object]]) -> str:
    """Launch something in a process, end it when it has begun to start; return what ended the process."""
    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster:
        with trio.fail_after(60):
            async with cluster.open_scope("starting", env_vars={"PLACE": str(place)}) as scope:
                await begin(cluster, scope)
                while not (place / "begun").exists():  # noqa: ASYNC110 - another process makes it
                    await trio.sleep(0.01)
                for info in await cluster.list_jobs():
                    await cluster.terminate(info.job_id)
            (info,) = await cluster.list_jobs()
    return info.attempts[-1].message


@pytest.mark.parametrize("name", ["job", "sync_job", "Actor"])
async def test_the_import_of_the_users_module_is_interrupted(name: str, slow_module: Any, tmp_path: Path) -> None:
    found = getattr(slow_module, name)

    async def begin(cluster: fray.Cluster, scope: fray.Scope) -> None:
        if isinstance(found, type):
            await scope.create_actor(found, on_failure="absorb")
        else:
            await scope.launch(JobRequest(name="slow", entrypoint=Entrypoint.from_callable(found)), on_failure="absorb")

    assert await message_of_end(tmp_path, begin) == "stopped on request: ended after it was cancelled"
    assert (tmp_path / "left").exists()


@pytest.mark.parametrize("cls", [SlowToConstruct, Deaf])
async def test_a_constructor_that_blocks_the_loop_is_interrupted(cls: type, tmp_path: Path) -> None:
    async def begin(cluster: fray.Cluster, scope: fray.Scope) -> None:
        await scope.create_actor(cls, tmp_path, on_failure="absorb")

    assert await message_of_end(tmp_path, begin) == "stopped on request: ended after it was cancelled"
    assert (tmp_path / "left").exists()
