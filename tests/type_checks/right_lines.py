"""Lines that are right, with their types: no type checker reports anything here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Any, assert_type

import fray
import fray.aio
import fray.blocking
from fray import ActorHandle, Entrypoint, Job, JobRequest, ResourceConfig, v2


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        self.n = start * step

    def add(self, k: int) -> int:
        return self.n + k

    async def slow_add(self, k: int, *, delay_s: float = 1.0) -> str:
        return str(k + delay_s)

    def where(self, ctx: fray.ActorContext, k: int) -> bytes:
        return ctx.job_id.encode() * k

    def countdown(self, n: int) -> Generator[int, None, str]:
        yield n
        return "end"

    async def ticks(self, period_s: float) -> AsyncIterator[float]:
        yield period_s

    async def talk(self, words: fray.Stream, count: int) -> int:
        return count


class FastCounter(Counter):
    pass


def square(x: int, scale: int = 1) -> int:
    return x * x * scale


async def fetch(x: int) -> str:
    return str(x)


def numbers(n: int) -> Iterator[int]:
    yield n


async def actors(scope: fray.Scope, host: fray.ActorHost, cluster: fray.Cluster) -> None:
    counter = await scope.create_actor(Counter, 10)
    assert_type(counter, ActorHandle[Counter])
    assert_type(await scope.create_actor(Counter, start=10), ActorHandle[Counter])
    assert_type(await scope.create_actor(Counter, 10, name="counter", lifetime="detached"), ActorHandle[Counter])
    assert_type(await scope.create_actor(Counter, 10, name="counter", lifetime="job"), ActorHandle[Counter])
    assert_type(await scope.create_actor(Counter, start=10, name="counter"), ActorHandle[Counter])
    assert_type(await scope.create_actor(Counter, start=10, resources=ResourceConfig()), ActorHandle[Counter])
    assert_type(await scope.create_actor(Counter, 10, step=2, name="counter"), ActorHandle[Counter])
    assert_type(await host.create_actor(Counter, 10, name="counter"), ActorHandle[Counter])
    group = await scope.create_actor_group(Counter, 10, count=3, light=True)
    assert_type(group, fray.ActorGroup[Counter])
    assert_type([member async for member in _ready(group)], list[ActorHandle[Counter]])
    assert_type(group[0], ActorHandle[Counter])
    assert_type(await host.create_actors(Counter, start=10, count=3), fray.ActorGroup[Counter])
    assert_type(await scope.supervise([fray.child(Counter, 1, name="one")]), list[ActorHandle[Counter]])
    found: ActorHandle[Counter] = await cluster.get_actor("counter")
    assert_type(await found.call(Counter.add, 1), int)
    untyped: ActorHandle = await cluster.get_actor("counter")
    await untyped.anything(1, "x")

    assert_type(await counter.call(Counter.add, 3), int)
    assert_type(await counter.call(Counter.slow_add, 3, delay_s=0.1), str)
    assert_type(await counter.call(Counter.where, 3), bytes)
    assert_type(await counter.call.start(Counter.slow_add, 3), str)
    assert_type(await counter.call.options(timeout_s=5)(Counter.add, 3), int)
    async with counter.call.stream(Counter.countdown, 3) as countdown:
        assert_type([item async for item in countdown], list[int])
    assert_type(countdown.result(), str)
    async with counter.call.stream(Counter.ticks, 0.1) as ticks:
        assert_type([item async for item in ticks], list[float])
    async with counter.call.open(Counter.talk, count=3) as stream:
        await stream.send("word")
    assert_type(stream.result(), int)
    fast = await scope.create_actor(FastCounter, 10)
    base: ActorHandle[Counter] = fast
    assert_type(await base.call(Counter.add, 3), int)
    pool: fray.ActorPool[Counter] = fray.ClusterResolver(cluster).lookup("counter")
    assert_type(await pool.call().call(Counter.add, 3), int)


async def _ready(group: fray.ActorGroup[Counter]) -> AsyncIterator[ActorHandle[Counter]]:
    for member in await group.wait_ready():
        yield member


async def jobs(scope: fray.Scope, cluster: fray.Cluster) -> None:
    assert_type(await scope.run(square, 3), int)
    assert_type(await scope.run(fetch, 3), str)
    assert_type(await scope.run(square, 3, name="square"), int)
    assert_type(await scope.run(fetch, 3, resources=ResourceConfig()), str)
    assert_type(await scope.run(square, x=3, name="square"), int)
    assert_type(await scope.run(fetch, x=3, name="fetch"), str)
    entrypoint = Entrypoint.from_callable(square, args=(3,))
    assert_type(entrypoint, Entrypoint[int])
    assert_type(Entrypoint.from_callable(fetch, args=(3,)), Entrypoint[str])
    assert_type(Entrypoint.from_callable(fetch, args=[3]), Entrypoint[str])
    assert_type(Entrypoint.from_callable(square, kwargs={"x": 3}), Entrypoint[int])
    assert_type(Entrypoint.from_binary("ls"), Entrypoint[None])
    request = JobRequest("square", entrypoint=entrypoint)
    assert_type(request, JobRequest[int])
    assert_type(await scope.launch(request), Job[int])
    assert_type(await scope.launch(request, count=3), list[Job[int]])
    assert_type(await scope.launch_all([request]), list[Job[int]])
    job = await cluster.launch(JobRequest("fetch", entrypoint=Entrypoint.from_callable(fetch, args=(3,))))
    assert_type(await job, str)
    assert_type(await job.wait(), str)
    assert_type(job.result(), str)
    assert_type(await scope.launch(JobRequest("f", entrypoint=_no_arguments)), Job[bool])
    unknown: Job = await cluster.get_job("job")
    assert_type(await unknown, Any)
    plain: JobRequest = JobRequest("x", ResourceConfig.with_cpu())
    await cluster.launch(plain)


async def _no_arguments() -> bool:
    return True


async def pools(pool: fray.WorkerPool) -> None:
    future = pool.submit(square, 3)
    assert_type(future, fray.Future[int])
    assert_type(await future, int)
    assert_type(await pool.submit(fetch, 3), str)
    assert_type(await pool.map(fetch, [1, 2])[0], str)
    assert_type([each async for each in pool.imap(square, [1, 2])], list[int])
    assert_type([each async for each in pool.options(timeout_s=5).imap(fetch, [1, 2])], list[str])
    async for done in fray.as_completed([future]):
        assert_type(done, fray.Future[int])


def sync_code(scope: fray.blocking.Scope, pool: fray.blocking.WorkerPool, host: fray.blocking.ActorHost) -> None:
    counter = scope.create_actor(Counter, 10, name="counter")
    assert_type(counter, fray.blocking.ActorHandle[Counter])
    assert_type(host.create_actor(Counter, 10), fray.blocking.ActorHandle[Counter])
    assert_type(scope.create_actor_group(Counter, 10, count=3)[0], fray.blocking.ActorHandle[Counter])
    assert_type(counter.call(Counter.add, 3), int)
    assert_type(counter.call(Counter.slow_add, 3), str)
    assert_type(counter.call.remote(Counter.slow_add, 3), fray.blocking.ActorFuture[str])
    with counter.call.stream(Counter.countdown, 3) as items:
        assert_type(list(items), list[int])
    assert_type(scope.run(square, 3), int)
    assert_type(scope.run(fetch, 3, name="fetch"), str)
    job = scope.launch(JobRequest("fetch", entrypoint=Entrypoint.from_callable(fetch, args=(3,))))
    assert_type(job, fray.blocking.Job[str])
    assert_type(job.wait(), str)
    assert_type(pool.submit(fetch, 3).result(), str)
    assert_type(list(pool.imap(square, [1, 2])), list[int])
    assert_type([each.result() for each in fray.blocking.as_completed(pool.map(square, [1]))], list[int])


async def asyncio_code(scope: fray.aio.Scope) -> None:
    counter = await scope.create_actor(Counter, 10)
    assert_type(counter, fray.aio.ActorHandle[Counter])
    assert_type(await counter.call(Counter.add, 3), int)
    assert_type(await scope.run(fetch, 3), str)


EVERY: list[Callable[..., Awaitable[None]]] = [actors, jobs, pools, asyncio_code]


def lite_code(client: v2.Client, on_fray: v2.FrayClient) -> None:
    counter = client.create_actor(Counter, 10, name="counter")
    assert_type(counter, v2.ActorHandle[Counter])
    assert_type(
        client.create_actor_group(Counter, start=10, name="c", count=2).wait_ready()[0], v2.ActorHandle[Counter]
    )
    assert_type(client.host_actor(Counter, 10, name="counter").handle, v2.ActorHandle[Counter])
    assert_type(v2.current_client(), v2.Client)
    assert_type(client.submit(v2.JobRequest("x", v2.Entrypoint.from_callable(square, args=[3]))).wait(), v2.JobStatus)
    handles: list[v2.ActorHandle] = [on_fray.create_actor(Counter, 10, name="counter"), counter]
    print(handles)
