"""Results that arrive later."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from fray.futures import Future, as_completed, wait_any
from fray.runtime.services import open_services


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
        async with open_services() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise KeyError("mine")


async def test_the_failure_of_a_service_comes_out_as_it_is() -> None:
    async def fail() -> None:
        raise OSError("the service is broken")

    with pytest.raises(OSError, match="broken"):
        async with open_services() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()


async def test_a_group_of_the_body_stays_a_group() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_services():
            raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]
