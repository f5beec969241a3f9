"""Code written with AnyIO runs unchanged on its Trio backend: in drivers, async jobs and async methods of actors."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

import fray
from fray import Entrypoint, JobRequest

EXPECTED = {"received": [0, 1, 2, 3, 4], "timed out": True, "other thread": True, "back": 42, "errors": ["no"]}


async def doubled(number: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * number


async def fail() -> None:
    raise ValueError("no")


async def use_anyio() -> dict[str, Any]:
    """Use memory streams, task groups, cancel scopes and threads of AnyIO; return what came of it."""
    sender, receiver = anyio.create_memory_object_stream[int](2)
    received: list[int] = []

    async def produce() -> None:
        async with sender:
            for number in range(5):
                await sender.send(number)

    async with receiver, anyio.create_task_group() as group:
        group.start_soon(produce)
        received.extend([number async for number in receiver])
    with anyio.move_on_after(0.01) as scope:
        await anyio.sleep_forever()
    errors: list[str] = []
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            group.start_soon(anyio.sleep_forever)
    except* ValueError as raised:
        errors.extend(map(str, raised.exceptions))
    here = threading.get_ident()
    return {
        "received": received,
        "timed out": scope.cancelled_caught,
        "other thread": await anyio.to_thread.run_sync(threading.get_ident) != here,
        "back": await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(doubled, 21)),
        "errors": errors,
    }


class User:
    def __init__(self) -> None:
        self.started = anyio.Event()
        self.cancelled = anyio.Event()

    async def use(self) -> dict[str, Any]:
        return await use_anyio()

    async def hang(self) -> None:
        self.started.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                self.cancelled.set()
            raise

    async def wait_started(self) -> None:
        await self.started.wait()

    async def wait_cancelled(self) -> None:
        with anyio.fail_after(30):
            await self.cancelled.wait()

    async def items(self) -> AsyncIterator[int]:
        for number in range(3):
            await anyio.lowlevel.checkpoint()
            yield number


@pytest.mark.parametrize("spec", ["local", "machine?nodes=1&cpu=2"])
def test_drivers_jobs_and_methods_may_be_written_with_anyio(spec: str) -> None:
    async def driver() -> None:
        assert await use_anyio() == EXPECTED
        async with fray.open_cluster(spec, logs=False) as cluster, cluster.open_scope("run") as scope:
            job = await scope.launch(JobRequest("use", entrypoint=Entrypoint.from_callable(use_anyio)))
            user = await scope.create_actor(User)
            answers: list[Any] = []

            async def call() -> None:
                answers.append(await user.use())

            async with anyio.create_task_group() as group:
                group.start_soon(call)
                answers.append(await job)
            assert answers == [EXPECTED, EXPECTED]
            async with user.items.stream() as items:
                assert [item async for item in items] == [0, 1, 2]

    anyio.run(driver, backend="trio")


def test_cancelling_a_task_group_of_the_driver_cancels_the_method() -> None:
    async def driver() -> None:
        async with fray.open_cluster("local", logs=False) as cluster:
            user = await cluster.create_actor(User)
            async with anyio.create_task_group() as group:
                group.start_soon(user.hang)
                await user.wait_started()
                group.cancel_scope.cancel()
            await user.wait_cancelled()

    anyio.run(driver, backend="trio")


def test_an_error_of_a_job_leaves_the_task_groups_of_the_driver() -> None:
    async def driver() -> None:
        with pytest.raises(ExceptionGroup) as caught, anyio.fail_after(30):
            async with (
                anyio.create_task_group() as group,
                fray.open_cluster("local", logs=False) as cluster,
                cluster.open_scope("run") as scope,
            ):
                group.start_soon(anyio.sleep_forever)
                await scope.launch(JobRequest("bad", entrypoint=Entrypoint.from_callable(fail)))
                await anyio.sleep_forever()
        assert caught.group_contains(ValueError, match="no")

    anyio.run(driver, backend="trio")
