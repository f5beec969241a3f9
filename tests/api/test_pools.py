"""WorkerPool as a user sees it, in one process, on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from unittest import mock

import numpy
import pytest
import trio

import fray
import fray.runtime.open
from fray.errors import ChannelFull
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls.futures import CallCancelled
from fray.runtime.threads.executor import InlineExecutor
from tests.support import job_functions

SMALL = fray.ResourceConfig.with_cpu(cpu=0.5, memory="100MB")


@pytest.fixture
async def cluster() -> AsyncIterator[fray.Cluster]:
    """A ``local`` cluster without threads: the clock jumps whenever everybody waits."""
    inline = partial(ActorHostServer, clock=lambda: 0.0, make_executor=lambda name, threads: InlineExecutor())
    with mock.patch.object(fray.runtime.open, "ActorHostServer", inline):
        async with fray.open_cluster("local", logs=False) as cluster:
            yield cluster


@pytest.fixture
async def pool(cluster: fray.Cluster) -> AsyncIterator[fray.WorkerPool]:
    async with fray.WorkerPool(cluster, 2, SMALL, name_prefix="w") as pool:
        await pool.wait_for_workers()
        yield pool


async def nap(seconds: float) -> float:
    await trio.sleep(seconds)
    return seconds


async def count_up(to: int) -> AsyncIterator[int]:
    for n in range(to):
        await trio.sleep(0.01)
        yield n


def refuse(n: int) -> int:
    if n % 2:
        raise OSError(f"{n} is odd")
    return n


class Flaky:
    """Fails until it was tried so many times; the tries are counted in an actor."""

    def __init__(self, tries: int) -> None:
        self.tries, self.tried = tries, 0

    async def attempt(self, error: type[Exception]) -> int:
        self.tried += 1
        if self.tried < self.tries:
            raise error(f"try {self.tried}")
        return self.tried


async def try_it(flaky: fray.ActorHandle, error: type[Exception]) -> int:
    return int(await flaky.attempt(error))


async def test_results_come_in_order_on_any_workers(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    assert [await future for future in pool.map(job_functions.double, range(3000))] == [2 * i for i in range(3000)]
    futures = [pool.submit(nap, n / 10) for n in (3, 1)]
    assert [await future async for future in fray.as_completed(futures)] == [0.1, 0.3]
    stats = pool.stats()
    assert (stats.queued, stats.running, stats.done, stats.failed, stats.submitted) == (0, 0, 3002, 0, 3002)
    assert sum(worker.done for worker in stats.workers) == 3002
    assert "2 workers, 0 queued" in repr(pool)


async def test_no_task_waits_behind_a_long_task_while_a_worker_is_idle(
    pool: fray.WorkerPool, autojump_clock: Any
) -> None:
    began = trio.current_time()
    long = pool.submit(nap, 10)
    short = pool.map(nap, [0.01] * 100)
    for future in short:
        await future
    assert trio.current_time() - began < 2
    assert not long.done()
    assert await long == 10


async def test_large_batches_of_quick_tasks_do_not_wait_behind_a_long_task(
    pool: fray.WorkerPool, autojump_clock: Any
) -> None:
    for future in pool.map(job_functions.double, range(1000)):
        await future  # the pool knows now that tasks are quick, and gives hundreds ahead
    began = trio.current_time()
    futures = [pool.submit(nap, 10), *pool.map(job_functions.double, range(1000))]
    for future in futures[1:]:
        await future
    assert trio.current_time() - began < 1
    assert not futures[0].done()


async def test_an_error_keeps_its_type_and_its_traceback(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    with pytest.raises(ValueError, match="bad task") as caught:
        await pool.submit(job_functions.fail, "bad task")
    assert "job_functions.py" in caught.value.__cause__.text
    with pytest.raises(fray.RemoteError, match="SystemExit"):
        await pool.submit(leave, 3)
    with pytest.raises(fray.NotPicklable, match="result of 'make_generator'"):
        await pool.submit(make_generator)
    assert pool.stats().failed == 3


def leave(code: int) -> None:
    raise SystemExit(code)


def make_generator() -> object:
    return (n for n in ())


async def test_unpicklable_and_large_arguments_are_refused_by_submit(
    pool: fray.WorkerPool, autojump_clock: Any
) -> None:
    """A block of untouched zero pages costs nothing."""
    with pytest.raises(fray.NotPicklable, match="argument 1 of double"):
        pool.submit(job_functions.double, (n for n in ()))
    with pytest.raises(fray.InvalidRequest, match="callable"):
        pool.submit(7)  # type: ignore[arg-type]
    with pytest.raises(fray.MessageTooLarge, match="the arguments of task 'len': 4,294,967,"):
        pool.submit(len, numpy.zeros(SIZE_LIMIT_BYTES, "u1"))
    with pytest.raises(fray.InvalidRequest, match="timeout_s"):
        pool.options(timeout_s=0)
    with pytest.raises(fray.InvalidRequest, match="OSError"):
        pool.options(retry_exceptions=["OSError"])  # type: ignore[list-item]
    with pytest.raises(fray.InvalidRequest, match="max_in_flight"):
        pool.imap(job_functions.double, [], max_in_flight=0)


async def test_a_pool_accepts_no_tasks_before_it_is_entered_and_after_it_is_left(
    cluster: fray.Cluster, autojump_clock: Any
) -> None:
    pool = fray.WorkerPool(cluster, 1, SMALL)
    with pytest.raises(fray.InvalidRequest, match="async with"):
        pool.submit(job_functions.double, 1)
    async with pool:
        future = pool.submit(job_functions.double, 1)
    assert await future == 2
    with pytest.raises(fray.InvalidRequest, match="before it is shut down"):
        pool.submit(job_functions.double, 1)


async def test_shutdown_without_waiting_fails_what_is_left(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with fray.WorkerPool(cluster, 1, SMALL) as pool:
        futures = pool.map(nap, [1000, 1000])
        await pool.wait_for_workers()
        await pool.shutdown(wait=False)
        for future in futures:
            with pytest.raises(fray.FrayError, match="shut down"):
                await future


async def test_an_error_in_the_body_ends_the_workers_at_once(cluster: fray.Cluster, autojump_clock: Any) -> None:
    began = trio.current_time()
    with pytest.raises(KeyError, match="mine"):
        async with fray.WorkerPool(cluster, 1, SMALL) as pool:
            future = pool.submit(nap, 1000)
            await pool.wait_for_workers()
            raise KeyError("mine")
    assert trio.current_time() - began < 30
    assert isinstance(future.exception(), fray.FrayError)


# Cancelling and timing out -------------------------------------------------------------------------------------------


async def test_a_cancelled_future_ends_its_task_wherever_it_is(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    futures = pool.map(nap, [1000.0] * 10)
    await trio.sleep(1)
    for future in futures:
        future.cancel()
    for future in futures:
        with pytest.raises(CallCancelled):
            await future
    assert pool.stats().cancelled == 10
    assert await pool.submit(nap, 0.5) == 0.5


async def test_a_cancelled_await_cancels_the_task(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    with trio.move_on_after(1):
        await pool.submit(nap, 1000)
    assert pool.stats().cancelled == 1


async def test_the_timeout_of_a_task_counts_from_its_start(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    quick = pool.options(timeout_s=2)
    futures = quick.map(nap, [1.5] * 10)
    assert [await future for future in futures] == [1.5] * 10
    with pytest.raises(fray.DeadlineExceeded, match=r"task 'nap' ran longer than its 2 s"):
        await quick.submit(nap, 3)
    assert await quick.submit(job_functions.double, 3) == 6


async def fail_when_cancelled() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("the connection is closed")


async def test_a_task_that_raises_while_it_is_cancelled_does_not_end_its_worker(
    pool: fray.WorkerPool, autojump_clock: Any
) -> None:
    with pytest.raises(fray.DeadlineExceeded):
        await pool.options(timeout_s=1).submit(fail_when_cancelled)
    future = pool.submit(fail_when_cancelled)
    await trio.sleep(1)
    future.cancel()
    with pytest.raises(CallCancelled):
        await future
    assert await pool.submit(job_functions.double, 3) == 6
    assert [len(worker.record.info.attempts) for worker in pool._workers] == [1, 1]


# Repeating -----------------------------------------------------------------------------------------------------------


async def test_only_the_errors_in_retry_exceptions_repeat_a_task(
    cluster: fray.Cluster, pool: fray.WorkerPool, autojump_clock: Any
) -> None:
    async with cluster.open_scope("run") as scope:
        flaky = await scope.create_actor(Flaky, 3)
        assert await pool.options(retry_exceptions=OSError).submit(try_it, flaky, OSError) == 3
        assert pool.stats().retried == 2
        flaky = await scope.create_actor(Flaky, 3)
        with pytest.raises(ValueError, match="try 1"):
            await pool.options(retry_exceptions=[OSError, KeyError]).submit(try_it, flaky, ValueError)
        flaky = await scope.create_actor(Flaky, 3)
        with pytest.raises(OSError, match="try 2"):
            await pool.options(retry_exceptions=OSError, max_retries=1).submit(try_it, flaky, OSError)


# Streams of tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
async def test_imap_takes_no_more_than_it_may_from_an_endless_source(
    pool: fray.WorkerPool, ordered: bool, autojump_clock: Any
) -> None:
    taken = 0

    def forever() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    seen = []
    async with pool.imap(job_functions.double, forever(), ordered=ordered, max_in_flight=10) as results:  # type: ignore[arg-type]
        async for result in results:
            seen.append(result)
            assert taken <= len(seen) + 10
            if len(seen) == 100:
                break
    assert len(set(seen)) == 100
    assert not ordered or seen == [2 * n for n in range(1, 101)]


async def test_imap_yields_in_order_or_as_done(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    naps = [0.3, 0.1, 0.2]
    assert [n async for n in pool.imap(nap, naps)] == naps
    assert [n async for n in pool.imap(nap, [0.5, 0.1], ordered=False)] == [0.1, 0.5]
    assert [n async for n in pool.imap(job_functions.double, count_up(5))] == [0, 2, 4, 6, 8]


async def test_imap_raises_an_error_at_its_place_and_continues(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    results = pool.imap(refuse, range(4))
    assert await anext(results) == 0
    with pytest.raises(OSError, match="1 is odd"):
        await anext(results)
    assert await anext(results) == 2
    both = [r async for r in pool.imap(refuse, range(4), return_exceptions=True)]
    assert [type(r) for r in both] == [int, OSError, int, OSError]


async def test_an_error_of_the_source_comes_after_the_results_before_it(
    pool: fray.WorkerPool, autojump_clock: Any
) -> None:
    def broken() -> object:
        yield 1
        yield 2
        raise KeyError("the source")

    results, seen = pool.imap(job_functions.double, broken()), []  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="the source"):
        seen.append(await anext(results))
        seen.append(await anext(results))
        await anext(results)
    assert seen == [2, 4]


async def test_an_unpicklable_item_fails_at_its_place(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    items = [1, (n for n in ()), 3]
    got = [r async for r in pool.imap(job_functions.double, items, return_exceptions=True)]
    assert (got[0], type(got[1]), got[2]) == (2, fray.NotPicklable, 6)


async def test_imap_reports_its_progress(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    progress: list[tuple[int, int | None]] = []
    async for _ in pool.imap(job_functions.double, [1, 2, 3], on_progress=lambda *seen: progress.append(seen)):
        pass
    async for _ in pool.imap(job_functions.double, iter([1]), on_progress=lambda *seen: progress.append(seen)):
        pass
    assert progress == [(1, 3), (2, 3), (3, 3), (1, None)]


async def test_a_cancelled_read_of_imap_loses_no_result(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    results, seen = pool.imap(nap, [0.5, 0.25, 1.0]), []
    while len(seen) < 3:
        with trio.move_on_after(0.1):
            seen.append(await anext(results))
    assert seen == [0.5, 0.25, 1.0]


async def test_leaving_imap_early_cancels_running_tasks(pool: fray.WorkerPool, autojump_clock: Any) -> None:
    async with pool.imap(nap, [0.1, 1000, 1000]) as results:
        assert await anext(results) == 0.1
    await trio.sleep(1)
    assert pool.stats().cancelled == 2
    with pytest.raises(StopAsyncIteration):
        await anext(results)


# Where it runs -------------------------------------------------------------------------------------------------------


async def squares(upto: int) -> list[int]:
    async with fray.WorkerPool(fray.current_cluster(), 2, SMALL) as pool:
        return [await future for future in pool.map(job_functions.double, range(upto))]


async def test_a_job_can_have_a_pool(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        assert await scope.run(squares, 5) == [0, 2, 4, 6, 8]


async def test_a_pool_that_can_never_be_placed_raises_the_reason(cluster: fray.Cluster, autojump_clock: Any) -> None:
    huge = fray.ResourceConfig.with_cpu(cpu=10_000, memory="1GB")
    with pytest.raises(fray.NeverSchedulable):
        async with fray.WorkerPool(cluster, 1, huge):
            pass


def doubled_in_place(array: Any) -> Any:
    array *= 2
    return array


async def test_arrays_are_copied_when_a_task_is_submitted_and_belong_to_their_receiver(
    pool: fray.WorkerPool, autojump_clock: Any
) -> None:
    array = numpy.ones(200_000)
    future = pool.submit(doubled_in_place, array)
    array[:] = 7
    found = await future
    assert (found == 2).all()
    assert found.flags.writeable
    assert (array == 7).all()
    text = bytes(3_000_000)
    assert await pool.submit(max, [text]) == text


async def test_imap_waits_for_room_in_the_pool(
    pool: fray.WorkerPool, monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    monkeypatch.setattr("fray.api.pools.worker_pool.BYTES_LIMIT", 3_500_000)
    blocks = [numpy.full(125_000, number, "f8") for number in range(10)]
    futures = []
    with pytest.raises(ChannelFull, match=r"with 3000\d+ bytes of arguments"):
        for block in blocks:
            futures.append(pool.submit(doubled_in_place, block))  # noqa: PERF401 - those before the error are awaited
    assert len(futures) == 3
    for future in futures:
        await future
    found = [block[0] async for block in pool.imap(doubled_in_place, blocks, max_in_flight=10)]
    assert found == [2.0 * number for number in range(10)]
