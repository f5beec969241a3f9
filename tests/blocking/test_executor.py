"""`Executor`: the contract of `concurrent.futures.Executor`, on a cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Iterator

import pytest

import fray
from fray import blocking
from fray.blocking import Cluster, Executor
from tests.support import job_functions


@pytest.fixture(scope="module", params=["local", "machine?nodes=1&cpu=4"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with blocking.open_cluster(request.param, logs=False) as cluster:
        yield cluster


def test_calls_run_on_workers_and_libraries_may_take_it(cluster: Cluster) -> None:
    with Executor(2, cluster=cluster) as executor:
        assert isinstance(executor, concurrent.futures.Executor)
        future = executor.submit(job_functions.double, 21)
        assert concurrent.futures.wait([future], 30).done == {future}
        assert future.result() == 42
        with pytest.raises(ValueError, match="boom"):
            executor.submit(job_functions.fail, "boom").result()
        assert executor.submit(dict, a=1).result() == {"a": 1}

        async def main() -> int:
            return await asyncio.get_running_loop().run_in_executor(executor, lambda: os.getpid())

        assert (asyncio.run(main()) == os.getpid()) == isinstance(cluster, blocking.LocalCluster)
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(len, ())
    executor.shutdown()


def test_map_keeps_the_order_and_has_timeouts_and_chunks(cluster: Cluster) -> None:
    with Executor(cluster=cluster, resources=fray.ResourceConfig(memory="64MB")) as executor:
        assert list(executor.map(pow, range(6), [2] * 6)) == [0, 1, 4, 9, 16, 25]
        assert list(executor.map(pow, range(7), [2] * 7, chunksize=3)) == [0, 1, 4, 9, 16, 25, 36]
        assert list(executor.map(pow, [], [], chunksize=3)) == []
        with pytest.raises(ValueError, match="chunksize"):
            executor.map(len, [], chunksize=0)
        with pytest.raises(TimeoutError):
            list(executor.map(time.sleep, [0.5], timeout=0.01))
        results = executor.map(int, ["1", "x", "3"])
        assert next(results) == 1
        with pytest.raises(ValueError, match="invalid literal"):
            next(results)


async def forever() -> None:
    import trio

    await trio.sleep_forever()


def test_shutdown_waits_or_not_and_may_cancel(cluster: Cluster) -> None:
    executor = Executor(1, cluster=cluster)
    first = executor.submit(time.sleep, 0.2)
    executor.shutdown(wait=False)
    assert not first.done()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(len, ())
    assert first.result(30) is None, "what was submitted is finished"
    for thread in threading.enumerate():
        if thread.name == "fray-executor-shutdown":
            thread.join()

    executor = Executor(1, cluster=cluster)
    futures = [executor.submit(forever) for _ in range(3)]
    executor.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in futures)


def test_an_executor_of_a_closed_cluster_ends_quietly() -> None:
    with blocking.open_cluster("local", logs=False) as cluster:
        executor = Executor(1, cluster=cluster)
        executor.submit(len, ()).result()
    executor.shutdown()
