"""Generators of actors: items come one by one, no faster than they are taken."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from fray.errors import DeadlineExceeded, InvalidRequest, NotPicklable, OutcomeUnknown
from fray.net.transports.memory import MessageFault
from fray.runtime.calls.dedup import Admission, CallDeduplicator
from fray.runtime.calls.flow_control import WINDOW
from fray.runtime.calls.route import CallOptions
from fray.runtime.calls.streams import CallStream
from tests.support.calls import Stage, Way, inline, open_stage


class Sync:
    """Only sync methods: on a thread, or inline."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = False

    def count(self, n: int) -> Iterator[int]:
        try:
            for i in range(n):
                self.made += 1
                yield i
        finally:
            self.closed = True

    def fail_after(self, n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError("enough")

    def locks(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()

    def state(self) -> tuple[int, bool]:
        return self.made, self.closed


class InLoop(Sync):
    """The same in the loop, and async generators."""

    async def count_async(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                await trio.lowlevel.checkpoint()
                self.made += 1
                yield i
        finally:
            self.closed = True

    async def stuck(self) -> AsyncIterator[int]:
        yield 1
        await trio.sleep_forever()


PLACES = pytest.mark.parametrize(
    ("cls", "runner", "method"),
    [(Sync, inline, "count"), (Sync, None, "count"), (InLoop, inline, "count"), (InLoop, inline, "count_async")],
    ids=["inline", "thread", "sync in the loop", "async"],
)


def stream(way: Way, method: str, *args: Any, **options: Any) -> CallStream:
    return way.route.stream(method, args, {}, CallOptions(**options))


@asynccontextmanager
async def actor(instance: Any, runner: Any = inline) -> AsyncIterator[tuple[Stage, Way]]:
    async with open_stage() as stage:
        host = await stage.host("h1", make_runner=runner)
        yield stage, stage.way(stage.caller.route_to(stage.endpoint(host, host.register(instance, "a"))))


@PLACES
async def test_all_items_come_in_order(cls: Any, runner: Any, method: str) -> None:
    async with actor(cls(), runner) as (_, way), stream(way, method, 1000) as items:
        assert [item async for item in items] == list(range(1000))


@PLACES
async def test_a_generator_runs_no_further_ahead_than_the_window(cls: Any, runner: Any, method: str) -> None:
    instance = cls()
    async with actor(instance, runner) as (_, way), stream(way, method, 10_000) as items:
        assert await anext(items) == 0
        assert [await anext(items) for _ in range(5)] == [1, 2, 3, 4, 5]
        await way.call("state")
        await way.call("state")
        assert instance.made <= WINDOW + 1


async def test_the_window_grows_with_what_a_long_path_holds(autojump_clock: Any) -> None:
    """Read 10,000 items a second over a round trip of 50 ms; 64 at a time would be 1,280."""
    async with actor(InLoop()) as (stage, way):
        await way.call("state")
        stage.network.set_delay("driver", "h1", 0.025)
        began = trio.current_time()
        async with stream(way, "count_async", 30_000) as items:
            assert [item async for item in items] == list(range(30_000))
        assert trio.current_time() - began < 3


async def test_the_window_of_a_slow_generator_stays(autojump_clock: Any) -> None:
    class Slow:
        async def count(self, n: int) -> AsyncIterator[int]:
            for number in range(n):
                await trio.sleep(0.01)
                yield number

    async with actor(Slow()) as (_, way), stream(way, "count", 500) as items:
        assert [item async for item in items] == list(range(500))
        assert items._window.limit == WINDOW


@PLACES
async def test_leaving_early_closes_the_generator(cls: Any, runner: Any, method: str) -> None:
    instance = cls()
    async with actor(instance, runner) as (_, way):
        async with stream(way, method, 10_000) as items:
            async for item in items:
                if item == 3:
                    break
        assert (await way.call("state"))[1] is True
        assert instance.made <= WINDOW + 1


@PLACES
async def test_items_before_an_error_are_delivered(cls: Any, runner: Any, method: str) -> None:
    async with actor(cls(), runner) as (_, way):
        seen = []
        with pytest.raises(ValueError, match="enough"):
            async with stream(way, "fail_after", 3) as items:
                while True:
                    seen.append(await anext(items))
        assert seen == [0, 1, 2]


async def test_other_calls_pass_between_the_items(autojump_clock: Any) -> None:
    async with actor(Sync()) as (_, way), stream(way, "count", 10_000) as items:
        await anext(items)
        assert (await way.call("state"))[1] is False


async def test_an_item_that_cannot_travel_ends_the_stream(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way):
        with pytest.raises(NotPicklable, match=r"an item of a.locks\(\)"):
            async with stream(way, "locks") as items:
                assert await anext(items) == 1
                await anext(items)


async def test_a_deadline_holds_for_the_whole_stream(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way):
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            async with stream(way, "stuck", timeout_s=2) as items:
                assert [item async for item in items] == [1]
        assert trio.current_time() - began == pytest.approx(2)


async def test_generators_are_iterated_and_others_awaited(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way):
        with pytest.raises(InvalidRequest, match=r"is a generator: iterate over its stream\(\)"):
            await way.call("count", 1)
        with pytest.raises(InvalidRequest, match="is not a generator: await it"):
            async with stream(way, "state") as items:
                await anext(items)


async def test_a_stream_whose_host_dies_says_so(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (stage, way):
        with pytest.raises(OutcomeUnknown):
            async with stream(way, "stuck") as items:
                assert await anext(items) == 1
                stage.kill("h1")
                await anext(items)


@pytest.mark.parametrize("fate", [MessageFault.LOSE, MessageFault.LAST], ids=["lost", "arrived"])
async def test_a_lost_connection_loses_no_item(fate: MessageFault, autojump_clock: Any) -> None:
    for number in range(1, 40):
        async with actor(InLoop()) as (stage, way):
            hops = iter(range(1, 1_000_000))
            stage.network.on_message_sent = lambda hop, hops=hops, number=number: (
                fate if next(hops) == number else MessageFault.DELIVER
            )
            async with stream(way, "count_async", 300) as items:
                assert [item async for item in items] == list(range(300)), f"cut at message {number}"


async def test_items_lost_with_the_whole_conversation_are_reported_as_lost(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_again = []
    admit = CallDeduplicator.admit

    def record(self: CallDeduplicator, number: int, again: bool = False) -> Admission:
        sent_again.append(again)
        return admit(self, number, again)

    monkeypatch.setattr(CallDeduplicator, "admit", record)
    async with actor(InLoop()) as (stage, way):
        with pytest.raises(OutcomeUnknown, match=r"items of a\.stuck"):
            async with stream(way, "stuck") as items:
                await anext(items)
                (place,) = stage.hosts["h1"]._acceptor._sessions.values()
                place.record.instance = "another"
                stage.network.drop("driver")
                await anext(items)
        await trio.testing.wait_all_tasks_blocked()
        assert not stage.hosts["h1"].actors[1].active_calls, "the generator was closed"
        assert sent_again == [False]
        assert not way.route.binding.connection.table.open
