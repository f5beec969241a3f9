"""Async code of another framework: errors name the cause, and what to write instead."""

from __future__ import annotations

import asyncio

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest
from fray.runtime.serialization import errors
from fray.runtime.serialization.asyncio_note import NOTE


def test_a_cluster_cannot_be_opened_in_asyncio() -> None:
    async def main() -> None:
        async with fray.open_cluster("local"):
            pass

    with pytest.raises(fray.FrayError) as caught:
        asyncio.run(main())
    blocking, aio = "with fray.blocking.open_cluster() as cluster", "async with fray.aio.open_cluster() as cluster"
    for words in ("outside of Trio", "trio.run(main)", blocking, aio):
        assert words in str(caught.value)


async def slow() -> None:
    await asyncio.sleep(1)


class Slow:
    async def sleep(self) -> None:
        await asyncio.sleep(1)

    async def nursery(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow)

    async def stream(self):  # type: ignore[no-untyped-def]
        yield asyncio.get_running_loop()

    async def own(self) -> None:
        raise RuntimeError("no running event loop in the simulation")


async def test_an_async_method_or_job_that_awaits_asyncio_gets_a_note() -> None:
    async with fray.open_cluster("local", logs=False) as cluster:
        actor = await cluster.create_actor(Slow)
        with pytest.raises(RuntimeError) as caught:
            await actor.sleep()
        assert caught.value.__notes__[0] == NOTE
        with pytest.raises(ExceptionGroup) as group:
            await actor.nursery()
        assert group.value.exceptions[0].__notes__[0] == NOTE
        with pytest.raises(RuntimeError) as caught:
            async with actor.stream.stream() as items:
                await anext(items)
        assert caught.value.__notes__[0] == NOTE
        job = await cluster.launch(JobRequest("slow", entrypoint=Entrypoint.from_callable(slow)))
        with pytest.raises(RuntimeError) as caught:
            await job
        assert caught.value.__notes__[0] == NOTE


def test_a_note_is_added_once() -> None:
    error = errors.load_error(errors.dump_error(_raised_in_a_coroutine()))

    async def again() -> None:
        raise error

    with pytest.raises(RuntimeError) as caught:
        again().send(None)
    assert errors.load_error(errors.dump_error(caught.value)).__notes__ == [NOTE]


def _raised_in_a_coroutine() -> BaseException:
    try:
        slow().send(None)
    except RuntimeError as error:
        return error
    raise AssertionError


async def test_other_errors_get_no_note() -> None:
    def sync() -> None:
        asyncio.get_running_loop()

    async with fray.open_cluster("local", logs=False) as cluster:
        actor = await cluster.create_actor(Slow)
        with pytest.raises(RuntimeError) as caught:
            await actor.own()
        assert not hasattr(caught.value, "__notes__")
        job = await cluster.launch(JobRequest("sync", entrypoint=Entrypoint.from_callable(sync)))
        with pytest.raises(RuntimeError) as caught:
            await job
        assert NOTE not in caught.value.__notes__
