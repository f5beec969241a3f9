"""The API for asyncio: the same nouns, errors, cancellation, blocks and streams, across two loops."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest
import trio

import fray
from fray import aio, blocking
from fray.aio.nouns import _WITHOUT
from tests.support import job_functions


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def countdown(self) -> Iterator[int]:
        yield from range(self.n, 0, -1)

    def kind_of(self, value: Any) -> str:
        return f"{type(value).__module__}.{type(value).__name__}"

    def call(self, other: blocking.ActorHandle, k: int) -> int:
        return int(other.add(k))


class Gate:
    """Lives in the loop of its process."""

    def __init__(self) -> None:
        self.opened = trio.Event()
        self.cancelled = self.closed = 0

    async def wait(self) -> int:
        try:
            await self.opened.wait()
        finally:
            self.cancelled += not self.opened.is_set()
        return 7

    async def open(self) -> None:
        self.opened.set()

    async def counts(self) -> tuple[int, int]:
        return self.cancelled, self.closed

    async def forever(self) -> AsyncIterator[int]:
        try:
            n = 0
            while True:
                yield (n := n + 1)
        finally:
            self.closed += 1

    async def shout(self, words: fray.Stream) -> AsyncIterator[str]:
        async for word in words:
            yield word.upper()

    async def kind_of(self, value: Any) -> str:
        return f"{type(value).__module__}.{type(value).__name__}"


def job(name: str, fn: Callable[..., Any], *args: Any) -> fray.JobRequest:
    return fray.JobRequest(name=name, entrypoint=fray.Entrypoint.from_callable(fn, args=args))


def in_cluster(body: Callable[[aio.Cluster], Awaitable[None]], spec: str = "local") -> None:
    """Run ``body(cluster)`` in an asyncio loop."""

    async def main() -> None:
        async with aio.open_cluster(spec, logs=False) as cluster:
            await body(cluster)

    asyncio.run(main())


@pytest.mark.parametrize("spec", ["local", "machine?nodes=1&cpu=8"])
def test_jobs_actors_streams_and_pools_are_those_of_fray(spec: str) -> None:
    async def body(cluster: aio.Cluster) -> None:
        async with cluster.open_scope("x") as scope:
            assert scope.name == "x"
            double = await scope.launch(job("double", job_functions.double, 21))
            assert isinstance(double, aio.Job)
            assert (await double.wait(), await double, double.info.state) == (42, 42, fray.JobState.SUCCEEDED)
            assert (await cluster.wait([double]))[0].job_id == double.id == (await cluster.poll(double)).job_id
            assert await asyncio.gather(
                *await scope.launch_all([job(f"double-{n}", job_functions.double, n) for n in (1, 2)])
            ) == [
                2,
                4,
            ]
            counter = await scope.create_actor(Counter, 10, name="counter")
            assert isinstance(counter, aio.ActorHandle)
            assert await counter.add(3) == 13
            future = counter.add.start(1)
            assert isinstance(future, asyncio.Future)
            assert (await asyncio.wait_for(future, 20), await (await cluster.get_actor("counter")).add(1)) == (14, 15)
            async with counter.countdown.stream() as items:
                assert [item async for item in items] == list(range(15, 0, -1))
            gate = await scope.create_actor(Gate)
            async with gate.shout.open() as stream:
                await stream.send("hello")
                assert await stream.receive() == "HELLO"
            async with gate.forever.stream() as items:
                assert await anext(items) == 1
            assert await gate.counts() == (0, 1)
            group = await scope.create_actor_group(Counter, count=2)
            assert len(await group.wait_ready()) == len(group) == group.ready_count == 2
            assert await asyncio.gather(*(member.add(1) for member in group)) == [1, 1]
        async with aio.WorkerPool(cluster, 2) as pool:
            assert await asyncio.gather(*pool.map(job_functions.double, range(5))) == [0, 2, 4, 6, 8]
            assert [result async for result in pool.imap(job_functions.double, range(3))] == [0, 2, 4]

    in_cluster(body, spec)


def test_calls_of_one_loop_start_in_the_order_in_which_they_are_made() -> None:
    async def body(cluster: aio.Cluster) -> None:
        counter = await cluster.create_actor(Counter)
        for _ in range(5):
            answers = await asyncio.gather(*(counter.add(1) for _ in range(100)))
            assert answers == sorted(answers)

    in_cluster(body)


def test_errors_keep_their_type_and_their_remote_traceback() -> None:
    async def body(cluster: aio.Cluster) -> None:
        counter = await cluster.create_actor(Counter)
        for failing in (
            counter.fail("no"),
            counter.fail.start("no"),
            await cluster.launch(job("b", job_functions.fail, "no")),
        ):
            with pytest.raises(ValueError, match="no") as caught:
                await failing
            assert isinstance(caught.value.__cause__, fray.errors.RemoteTraceback)
            assert "raise ValueError" in caught.value.__cause__.text
        with pytest.raises(fray.NoSuchMethod, match="did you mean add"):
            counter.ad(1)

    in_cluster(body)


def test_a_cancelled_task_cancels_its_call_and_waits_for_the_end_of_it() -> None:
    async def body(cluster: aio.Cluster) -> None:
        gate = await cluster.create_actor(Gate)
        for times in (1, 2):
            waiting = asyncio.create_task(gate.wait())
            await asyncio.sleep(0)  # it has sent its call, and the answer to a later one means that it has begun
            await gate.counts()
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            assert (await gate.counts())[0] == times, "the method had ended when the task was cancelled"

    in_cluster(body)


def test_timeouts_of_asyncio_and_anyio_end_a_wait_and_nothing_else() -> None:
    async def body(cluster: aio.Cluster) -> None:
        gate = await cluster.create_actor(Gate)
        hanging = await cluster.launch(job("hang", job_functions.hang))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await hanging.wait()
        assert hanging.info.state is not fray.JobState.STOPPED
        await gate.counts()
        with anyio.move_on_after(0.05) as scope:
            await gate.wait()
        assert scope.cancelled_caught
        assert await gate.counts() == (1, 0), "level cancellation does not cut the wait for the end of the call"
        async with anyio.create_task_group() as group:
            group.start_soon(gate.wait)
            await gate.open()
        await hanging.terminate()
        with pytest.raises(fray.JobStopped):
            await hanging

    in_cluster(body)


def test_a_failed_child_cancels_the_body_of_its_scope_and_is_raised() -> None:
    async def body(cluster: aio.Cluster) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with cluster.open_scope("run") as scope:
                hanging = await scope.launch(job("hang", job_functions.hang))
                await scope.launch(job("bad", job_functions.fail, "boom"))
                await asyncio.Event().wait()
        assert caught.group_contains(ValueError, match="boom", depth=1)
        assert hanging.info.state is fray.JobState.STOPPED
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        await asyncio.sleep(0)

    in_cluster(body)


def test_an_error_or_a_cancellation_of_the_body_ends_the_children() -> None:
    async def body(cluster: aio.Cluster) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with cluster.open_scope("run") as scope:
                first = await scope.launch(job("hang", job_functions.hang))
                raise LookupError("mine")
        assert caught.group_contains(LookupError, match="mine", depth=1)
        launched: list[aio.Job] = []

        async def hold() -> None:
            async with cluster.open_scope("run") as scope:
                launched.append(await scope.launch(job("hang", job_functions.hang)))
                began.set()
                await launched[0].wait()

        began = asyncio.Event()
        holding = asyncio.create_task(hold())
        await began.wait()
        holding.cancel()
        await asyncio.wait([holding])
        assert holding.cancelled()
        assert {first.info.state, launched[0].info.state} == {fray.JobState.STOPPED}

    in_cluster(body)


def test_output_of_jobs_and_events_of_actors_are_async_iterators() -> None:
    async def body(cluster: aio.Cluster) -> None:
        talking = await cluster.launch(job("talk", print, "one line"))
        lines: list[tuple[str, bool]] = []
        info = await cluster.monitor(
            talking, lambda line: lines.append((line.text, threading.current_thread() is threading.main_thread()))
        )
        assert info.state is fray.JobState.SUCCEEDED
        assert ("one line", True) in lines
        assert "one line" in [line.text async for line in talking.logs()]

    in_cluster(body, "machine?nodes=1&cpu=2")


def test_handles_arrive_in_the_form_that_the_code_there_uses() -> None:
    async def body(cluster: aio.Cluster) -> None:
        counter, gate = await cluster.create_actor(Counter), await cluster.create_actor(Gate)
        assert await counter.call(await cluster.create_actor(Counter, 5), 2) == 7
        assert await counter.kind_of(counter) == "fray.blocking.actors.ActorHandle"
        assert await gate.kind_of(gate) == "fray.api.actors.handle.ActorHandle"
        assert await gate.kind_of(await cluster.launch(job("d", job_functions.double, 1))) == "fray.api.jobs.job.Job"
        with pytest.raises(fray.NotPicklable):
            await counter.kind_of(cluster)

    in_cluster(body)


def calls_from_asyncio_in_a_job() -> tuple[int, bool, int]:
    async def main() -> tuple[int, bool]:
        async with aio.open_cluster() as cluster:
            inner = await cluster.launch(job("inner", job_functions.double, 4))
            return await inner, cluster == aio.current_cluster()

    loops = [thread for thread in threading.enumerate() if thread.name == "fray-loop"]
    return *asyncio.run(main()), len(loops)


@pytest.mark.parametrize("spec", ["local", "machine?nodes=1&cpu=2"])
def test_a_sync_job_may_run_an_asyncio_loop_on_its_own_cluster(spec: str) -> None:
    async def body(cluster: aio.Cluster) -> None:
        result, is_same, _ = await (await cluster.launch(job("outer", calls_from_asyncio_in_a_job)))
        assert (result, is_same) == (8, True)

    in_cluster(body, spec)


def test_wrong_lines_say_which_line_was_meant() -> None:
    async def unentered() -> None:
        line = r"write `async with fray\.aio\.open_cluster\(\.\.\.\) as cluster:`"
        with pytest.raises(TypeError, match=line), aio.open_cluster("local"):  # type: ignore[attr-defined]
            pass
        async with aio.open_cluster("local", logs=False) as cluster:
            with pytest.raises(AttributeError, match=r"was not entered; write `async with cluster\.open_scope"):
                cluster.open_scope("x").run(len)  # type: ignore[attr-defined]

    asyncio.run(unentered())

    async def on_trio() -> None:
        async with aio.open_cluster("local"):
            pass

    with pytest.raises(fray.FrayError, match=r"on Trio write `async with fray\.open_cluster"):
        trio.run(on_trio)
    with pytest.raises(AttributeError, match=r"write fray\.JobRequest"):
        aio.JobRequest  # noqa: B018


def test_a_closed_cluster_leaves_what_is_known_and_refuses_the_rest() -> None:
    kept: list[Any] = []

    async def body(cluster: aio.Cluster) -> None:
        kept.extend([await cluster.launch(job("d", job_functions.double, 1)), await cluster.create_actor(Counter)])
        await kept[0]

    in_cluster(body)
    ended, counter = kept
    assert (ended.info.state, ended.name) == (fray.JobState.SUCCEEDED, "d")
    assert pickle.loads(pickle.dumps(ended)).id == ended.id

    async def call() -> None:
        with pytest.raises(fray.errors.ChannelClosed, match="open a cluster again"):
            await counter.add(1)

    asyncio.run(call())


def test_the_classes_have_the_public_methods_of_fray() -> None:
    for name in aio.__all__:
        native = getattr(fray, name, None)
        if isinstance(native, type) and "Stream" not in name:
            public = {each for each in dir(native) if not each.startswith("_")} - {*_WITHOUT, "count", "index"}
            assert public - set(dir(getattr(aio, name))) == set(), name
