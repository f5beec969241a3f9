"""Futures of the async API."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import fray
from fray import Entrypoint, FrayError, JobRequest
from fray.api.futures import Future, as_completed, wait_any
from fray.runtime.background import open_background_nursery


async def test_a_future_is_settled_once_and_awaited_any_number_of_times() -> None:
    future = Future("a test")
    assert (future.done(), future.exception()) == (False, None)
    future.resolve(lambda: 7)
    future.fail(ValueError("too late"))
    assert [await future, await future] == [7, 7]
    failed = Future("another")
    failed.fail(ValueError("boom"))
    with pytest.raises(ValueError, match="boom"):
        await failed
    assert "failed" in repr(failed)


async def test_futures_come_in_the_order_in_which_they_settle() -> None:
    futures = [Future(str(number)) for number in range(3)]
    futures[2].resolve(lambda: 2)

    async def settle() -> None:
        futures[1].resolve(lambda: 1)
        await trio.testing.wait_all_tasks_blocked()
        futures[0].fail(KeyError("0"))

    async with trio.open_nursery() as nursery:
        assert await wait_any(futures) is futures[2]
        nursery.start_soon(settle)
        assert [future async for future in as_completed(futures)] == [futures[2], futures[1], futures[0]]
    with pytest.raises(ValueError, match="at least one"):
        await wait_any([])


async def test_services_end_with_their_body_and_do_not_show_in_its_error() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_background_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise KeyError("mine")


async def test_the_failure_of_a_service_is_raised_unchanged() -> None:
    async def fail() -> None:
        raise OSError("the service is broken")

    with pytest.raises(OSError, match="broken"):
        async with open_background_nursery() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()


class Napping:
    async def nap(self, seconds: float) -> float:
        await trio.sleep(seconds)
        return seconds


async def napping(seconds: float) -> float:
    await trio.sleep(seconds)
    return seconds


async def test_jobs_and_calls_are_waited_for_together(autojump_clock: Any) -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        actor = await scope.create_actor(Napping)
        mixed: list[Any] = []
        for seconds in (1.0, 3.0):
            request = JobRequest(name=f"nap{seconds}", entrypoint=Entrypoint.from_callable(napping, (seconds,)))
            mixed.append(await scope.launch(request))
            mixed.append(actor.nap.start(seconds + 1))
        first = await wait_any(mixed)
        assert first is mixed[0]
        assert first.result() == 1.0
        with pytest.raises(FrayError, match="has not ended: await it"):
            mixed[2].result()
        assert [await each async for each in as_completed(mixed)] == [1.0, 2.0, 3.0, 4.0]
        assert mixed[0].exception() is None
        late: list[Any] = []
        mixed[0].add_done_callback(late.append)
        assert late == [mixed[0]]


async def test_repeated_wait_any_leaves_no_callbacks(autojump_clock: Any) -> None:
    futures = [Future(str(number)) for number in range(3)]
    futures[0].resolve(lambda: 0)
    for _ in range(5):
        assert await wait_any(futures) is futures[0]
    assert not futures[1]._callbacks
    with pytest.raises(ValueError, match="at least one"):
        await wait_any([])


async def test_a_group_of_the_body_stays_a_group() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_background_nursery():
            raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]
