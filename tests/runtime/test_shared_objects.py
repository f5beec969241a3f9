"""Futures, jobs and pools that are pickled: they work where they arrive, and end with their author."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

import fray
from fray.runtime.objects import exports
from fray.runtime.runtime import current
from tests.support import job_functions

SMALL = fray.ResourceConfig.with_cpu(cpu=0.5, memory="100MB")


@pytest.fixture(params=["local", "machine?nodes=1&cpu=4"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(20):
        async with fray.open_cluster(request.param, logs=False) as cluster:
            yield cluster


class Gate(job_functions.Counter):
    """Actor that answers when an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = trio.Event()

    async def wait(self) -> str:
        await self.opened.wait()
        return "open"

    async def open(self) -> None:
        self.opened.set()

    async def ping(self) -> str:
        return "pong"


class Maker:
    """Makes futures and gives them away."""

    async def call(self, gate: fray.ActorHandle, method: str) -> list[Any]:
        return [getattr(gate, method).start()]

    async def pid(self) -> int:
        return os.getpid()


async def wait_for(future: Any) -> Any:
    return await future


async def first_of(*futures: Any) -> int:
    first = await fray.wait_any(futures)
    return futures.index(first)


async def pass_on(future: Any) -> Any:
    """Pass it to another job before it was used anywhere."""
    return await fray.current_cluster().launch(job(wait_for, future))


def job(fn: Any, *args: Any) -> fray.JobRequest:
    return fray.JobRequest(name="j", entrypoint=fray.Entrypoint.from_callable(fn, args=args), resources=SMALL)


async def double_all(pool: Any, upto: int) -> list[int]:
    many = [n async for n in pool.imap(job_functions.double, range(upto))]
    with pytest.raises(ValueError, match="bad"):
        await pool.options(max_retries=0).submit(job_functions.fail, "bad")
    stats = await pool.stats()
    assert stats.failed == 1
    return many


async def test_a_future_comes_to_the_same_wherever_it_is_awaited(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        gate = await scope.create_actor(Gate)
        opening, failing = gate.wait.start(), gate.fail.start()
        elsewhere = await scope.launch(job(wait_for, opening))
        assert await scope.run(first_of, opening, failing) == 1
        with pytest.raises(ValueError, match="broken") as caught:
            await scope.run(wait_for, failing)
        assert "job_functions.py" in caught.value.__cause__.text
        await gate.open()
        assert await elsewhere == await opening == "open"
        assert await scope.run(wait_for, opening) == "open", "also when it was settled and opened before"


async def test_a_future_may_be_returned_and_passed_on(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        gate, maker = await scope.create_actor(Gate), await scope.create_actor(Maker)
        (future,) = await maker.call(gate, "wait")
        assert not future.done()
        with trio.move_on_after(0.05):
            await future  # an impatient await costs nothing
        seen: list[object] = []
        future.add_done_callback(seen.append)
        await gate.open()
        assert await future == "open"
        assert seen == [future]
        mine = gate.add.start(7)
        assert pickle.loads(pickle.dumps(mine)) is mine, "back where it was made it is itself"


async def test_a_future_ends_with_its_author(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        gate = await scope.create_actor(Gate)
        maker = await scope.create_actor(Maker, on_failure="absorb")
        (future,) = await maker.call(gate, "wait")
        (untouched,) = await maker.call(gate, "wait")
        assert not future.done()
        (ping,) = await maker.call(gate, "ping")
        assert await ping == "pong", "its author's exports are registered"
        pid = await maker.pid()
        if pid == os.getpid():
            await cluster.terminate(fray.api.actors.handle.actor_id_of(maker))
        else:
            os.kill(pid, signal.SIGKILL)
        for gone in (future, untouched):
            with pytest.raises(fray.ActorDied, match="the process that made this future is gone"):
                await gone


async def test_cancelling_an_arrived_future_reaches_its_author(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        gate, maker = await scope.create_actor(Gate), await scope.create_actor(Maker)
        (future,) = await maker.call(gate, "wait")
        assert not future.done()
        future.cancel()
        with pytest.raises(fray.FrayError, match="cancelled"):
            await future


async def test_a_job_handle_means_the_same_job_everywhere(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        done = await scope.launch(job(job_functions.double, 4))
        assert await done == 8
        assert await scope.run(wait_for, done) == 8
        failed = await cluster.launch(job(job_functions.fail, "boom"))
        with pytest.raises(ValueError, match="boom"):
            await scope.run(wait_for, failed)
        gate = await scope.create_actor(Gate)
        inner = await scope.run(pass_on, gate.add.start(5))
        assert inner.id.startswith("j-")
        with pytest.raises(fray.JobStopped):
            await inner  # it belonged to the job that launched it, and ended with it


async def test_a_worker_pool_is_used_from_afar(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope, fray.WorkerPool(cluster, 2, SMALL) as pool:
        assert await scope.run(double_all, pool, 50) == [2 * n for n in range(50)]
        assert await scope.run(wait_for, pool.submit(job_functions.double, 21)) == 42
        assert pickle.loads(pickle.dumps(pool)) is pool
        assert pool.stats().done == 51


async def test_settled_futures_are_retained_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "SETTLED_LIMIT", 2)
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter)
        futures = [counter.add.start(1) for _ in range(3)]
        sent = [pickle.dumps(future) for future in futures]
        assert [await future for future in futures] == [1, 2, 3]
        shared = exports.exports_of(current())
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(sent) == 3
        number = shared.export(futures[2])
        assert shared.find(number) is futures[2]
        with pytest.raises(fray.FutureExpired, match="2 others"):
            await shared.service.wait(1)
        assert "_fray" not in str(await cluster.list_actors())


def test_a_future_cannot_leave_without_a_cluster() -> None:
    with pytest.raises(fray.FrayError, match="no cluster"):
        pickle.dumps(fray.Future("nothing"))
