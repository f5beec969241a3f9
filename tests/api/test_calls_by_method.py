"""``handle.call(Counter.add, 3)``: calls by the method itself, on the async and the blocking face."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import fray
from fray import InvalidRequest, NoSuchMethod, aio, blocking


class Counter:
    def __init__(self, start: int) -> None:
        self.n = start

    def add(self, k: int = 1) -> int:
        self.n += k
        return self.n

    async def double(self) -> int:
        self.n *= 2
        return self.n

    def countdown(self) -> Iterator[int]:
        yield from range(self.n, 0, -1)

    async def echo(self, stream: fray.Stream) -> str:
        async for item in stream:
            await stream.send(item)
        return "end"


class Phone:
    def call(self, *number: object) -> str:
        return f"calls {number}"


class Other:
    def subtract(self, k: int) -> int:
        return -k


async def test_a_call_by_its_method_is_the_call_by_its_name() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        counter = await scope.create_actor(Counter, 3)
        assert await counter.call(Counter.add, 4) == 7
        assert await counter.call(Counter.double) == 14
        assert await counter.call.start(Counter.add, k=-11) == 3
        assert await counter.call.options(timeout_s=60)(Counter.add) == 4
        async with counter.call.stream(Counter.countdown) as items:
            assert [item async for item in items] == [4, 3, 2, 1]
        async with counter.call.open(Counter.echo) as stream:
            await stream.send("item")
            await stream.done_sending()
            assert [item async for item in stream] == ["item"]
            assert stream.result() == "end"
        pool: fray.ActorPool[Counter] = fray.ClusterResolver(cluster).lookup("by-name")
        named = await scope.create_actor(Counter, 1, name="by-name")
        assert await pool.call().call(Counter.add, 2) == await named.add(0) == 3


async def test_a_call_by_a_method_that_the_actor_lacks_is_refused() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        counter: Any = await scope.create_actor(Counter, 3)
        with pytest.raises(NoSuchMethod, match="has no public method 'subtract'"):
            await counter.call(Other.subtract, 3)
        for wrong in (("add", 3), (), (Counter, 3)):
            with pytest.raises(InvalidRequest, match=r"write handle\.call\(Counter\.add, 3\)"):
                await counter.call(*wrong)


async def test_an_actor_with_a_method_of_this_name_keeps_it() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        phone: Any = await scope.create_actor(Phone, name="phone")
        assert await phone.call(110) == "calls (110,)"
        assert await phone.call.start(len) == f"calls ({len!r},)"
        by_name: Any = await cluster.get_actor("phone")
        assert await by_name.call() == "calls ()"
        assert await by_name.call(110, "x") == "calls (110, 'x')"


def test_sync_code_calls_by_the_method() -> None:
    with blocking.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        counter = scope.create_actor(Counter, 3)
        assert counter.call(Counter.add, 4) == 7
        assert counter.call(Counter.double) == 14
        assert counter.call.remote(Counter.add, -11).result() == 3
        assert counter.call.options(timeout_s=60).remote(Counter.add).result() == 4
        with counter.call.stream(Counter.countdown) as items:
            assert list(items) == [4, 3, 2, 1]
        with counter.call.open(Counter.echo) as stream:
            stream.send("item")
            stream.done_sending()
            assert list(stream) == ["item"]
        with pytest.raises(InvalidRequest, match=r"write handle\.call\(Counter\.add, 3\)"):
            counter.call("add", 3)  # type: ignore[call-overload]
        phone: Any = scope.create_actor(Phone, name="phone")
        assert phone.call(110) == "calls (110,)"
        assert phone.call.remote(len).result() == f"calls ({len!r},)"


async def test_generic_handles_are_pickled_and_compared_as_before() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        counter = await scope.create_actor(Counter, 3)
        job = await scope.launch(fray.JobRequest("j", entrypoint=fray.Entrypoint.from_callable(abs, args=(-3,))))
        for handle in (counter, job):
            again = pickle.loads(pickle.dumps(handle))
            assert type(again) is type(handle)
            assert repr(copy.copy(counter)) == repr(counter)
        assert pickle.loads(pickle.dumps(counter)) == counter
        assert await pickle.loads(pickle.dumps(job)) == 3
    request = fray.JobRequest[int]("j", entrypoint=fray.Entrypoint[int](callable=abs, args=(-3,)))
    assert pickle.loads(pickle.dumps(request)) == request
    assert not hasattr(counter, "__dict__")


def test_asyncio_code_calls_by_the_method() -> None:
    async def main() -> None:
        async with aio.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
            counter: aio.ActorHandle[Counter] = await scope.create_actor(Counter, 3)
            assert await counter.call(Counter.add, 4) == 7
            assert await counter.call.start(Counter.double) == 14
            assert await counter.call.options(timeout_s=60)(Counter.add, -11) == 3
            async with counter.call.stream(Counter.countdown) as items:
                assert [item async for item in items] == [3, 2, 1]
            phone: Any = await scope.create_actor(Phone)
            assert await phone.call(110) == "calls (110,)"
            with pytest.raises(NoSuchMethod):
                await counter.call(Other.subtract, 3)  # type: ignore[call-overload]

    asyncio.run(main())
    assert aio.Job[int].__origin__ is aio.Job  # type: ignore[attr-defined]
