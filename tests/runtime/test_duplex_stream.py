"""Conversations: a method and its caller send to one another, neither further ahead than the other wants."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from fray import BlockingStream, Stream
from fray.errors import DeadlineExceeded, InvalidRequest, NoSuchMethod, NotPicklable, OutcomeUnknown
from fray.model.messages.client import ActorEndpoint
from fray.model.specs import EndReason
from fray.net.transports.memory import MessageFault
from fray.runtime.calls.flow_control import (
    WINDOW,
    WINDOW_BYTES,
    ReceiveWindow,
    SendWindow,
)
from fray.runtime.calls.route import CallOptions
from fray.runtime.calls.streams import DuplexStream
from tests.support.calls import Stage, Way, inline, open_stage


class InLoop:
    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.ended = False
        self.gate = trio.Event()

    async def echo(self, stream: Stream) -> int:
        """Sum the items, as a function."""
        count = 0
        async for item in stream:
            self.taken.append(item)
            await stream.send(item)
            count += 1
        return count

    async def echo_times(self, times: int, stream: Stream, *, plus: int = 0) -> AsyncIterator[int]:
        """Yield items, as a generator with the stream between other parameters."""
        try:
            async for item in stream:
                for _ in range(times):
                    yield item + plus
        finally:
            self.ended = True

    async def add_up(self, stream: Stream) -> int:
        return sum([item async for item in stream])

    async def first(self, stream: Stream) -> Any:
        return await stream.receive()

    async def deaf(self, stream: Stream) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.ended = True

    async def flood(self, stream: Stream) -> None:
        for number in range(10_000):
            self.taken.append(number)
            await stream.send(number)

    async def fail_at(self, stream: Stream, bad: int) -> AsyncIterator[int]:
        async for item in stream:
            if item == bad:
                raise ValueError(f"{item} is bad")
            yield item

    def blocks(self, stream: Stream) -> None:
        raise AssertionError

    async def misfit(self, stream: BlockingStream) -> None:
        raise AssertionError

    async def plain(self, stream: list[int]) -> int:
        return len(stream)


class OnThread:
    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.left: list[str] = []
        self.full = threading.Event()

    def echo(self, stream: BlockingStream) -> int:
        count = 0
        for item in stream:
            self.taken.append(item)
            stream.send(item)
            count += 1
        return count

    def echo_times(self, times: int, stream: BlockingStream, *, plus: int = 0) -> Iterator[int]:
        for item in stream:
            for _ in range(times):
                yield item + plus

    def add_up(self, stream: BlockingStream) -> int:
        return sum(stream)

    def first(self, stream: BlockingStream) -> Any:
        return stream.receive()

    def deaf(self, stream: BlockingStream) -> None:
        self.full.set()
        try:
            stream.receive()
        except Exception as error:
            self.left.append(type(error).__name__)
            raise

    def flood(self, stream: BlockingStream) -> None:
        for number in range(10_000):
            self.taken.append(number)
            if number == WINDOW:
                self.full.set()
            stream.send(number)

    def fail_at(self, stream: BlockingStream, bad: int) -> Iterator[int]:
        for item in stream:
            if item == bad:
                raise ValueError(f"{item} is bad")
            yield item

    def impatient(self, stream: BlockingStream) -> None:
        stream.receive(timeout_s=0.01)

    def misfit(self, stream: Stream) -> None:
        raise AssertionError


PLACES = pytest.mark.parametrize(("cls", "runner"), [(InLoop, inline), (OnThread, None)], ids=["loop", "thread"])


@asynccontextmanager
async def actor(instance: Any, runner: Any = inline) -> AsyncIterator[tuple[Stage, Way]]:
    async with open_stage() as stage:
        host = await stage.host("h1", make_runner=runner)
        yield stage, stage.way(stage.caller.route_to(stage.endpoint(host, host.register(instance, "a"))))


def talk(way: Way, method: str, *args: Any, kwargs: dict[str, Any] | None = None, **options: Any) -> DuplexStream:
    return way.route.open(method, args, kwargs or {}, CallOptions(**options))


# Both ways -----------------------------------------------------------------------------------------------------------


@PLACES
async def test_items_come_back_one_by_one(cls: Any, runner: Any) -> None:
    async with actor(cls(), runner) as (_, way), talk(way, "echo") as stream:
        for number in range(100):
            await stream.send(number)
            assert await stream.receive() == number
        await stream.done_sending()
        with pytest.raises(trio.EndOfChannel):
            await stream.receive()
        assert stream.result() == 100


@PLACES
async def test_many_items_both_ways_at_once_keep_their_order(cls: Any, runner: Any) -> None:
    async with (
        actor(cls(), runner) as (_, way),
        talk(way, "echo_times", 2, kwargs={"plus": 5}) as stream,
        trio.open_nursery() as nursery,
    ):

        async def send() -> None:
            for number in range(1000):
                await stream.send(number)
            await stream.done_sending()

        nursery.start_soon(send)
        assert [item async for item in stream] == [n + 5 for n in range(1000) for _ in range(2)]


@PLACES
async def test_a_method_may_only_take_and_return(cls: Any, runner: Any) -> None:
    async with actor(cls(), runner) as (_, way), talk(way, "add_up") as stream:
        for number in range(1000):
            await stream.send(number)
        await stream.done_sending()
        assert await stream == 499_500


@PLACES
async def test_items_sent_before_there_is_a_connection_arrive(cls: Any, runner: Any) -> None:
    """`open` and the first window need no answer of the host."""
    async with actor(cls(), runner) as (_, way):
        stream = talk(way, "add_up")
        for number in range(WINDOW):
            await stream.send(number)
        await stream.done_sending()
        assert await stream == sum(range(WINDOW))


# Back-pressure -------------------------------------------------------------------------------------------------------


async def test_a_method_that_takes_nothing_holds_its_caller(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way), talk(way, "deaf") as stream:
        sent = 0
        with trio.move_on_after(10):
            while True:
                await stream.send(sent)
                sent += 1
        assert sent == WINDOW


async def test_large_items_are_held_by_their_bytes(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way), talk(way, "deaf") as stream:
        sent = 0
        with trio.move_on_after(10):
            while True:
                await stream.send(bytes(1024 * 1024))
                sent += 1
        assert sent == 4


@PLACES
async def test_a_caller_that_takes_nothing_holds_the_method(cls: Any, runner: Any) -> None:
    instance = cls()
    async with actor(instance, runner) as (_, way), talk(way, "flood") as stream:
        assert await stream.receive() == 0
        if runner is None:
            await trio.to_thread.run_sync(instance.full.wait, 10)
        else:
            await trio.testing.wait_all_tasks_blocked()
        assert len(instance.taken) == WINDOW + 1, "and one that waits to be sent"


@PLACES
async def test_both_wait_for_one_another_and_neither_starves(cls: Any, runner: Any) -> None:
    """The caller sends all before it takes anything: more than a window would be a deadlock of its own."""
    async with actor(cls(), runner) as (_, way), talk(way, "echo") as stream:
        for number in range(WINDOW):
            await stream.send(number)
        await stream.done_sending()
        assert [item async for item in stream] == list(range(WINDOW))


@given(
    sizes=st.lists(st.integers(0, WINDOW_BYTES * 2), max_size=300),
    lags=st.lists(st.integers(1, 100), min_size=1, max_size=20),
)
def test_a_window_bounds_the_items_in_flight_and_never_stalls(sizes: list[int], lags: list[int]) -> None:
    ahead, taken = SendWindow(), ReceiveWindow()
    wire: list[int] = []
    waiting = list(reversed(sizes))
    turn = 0
    while waiting or wire:
        while waiting and ahead.is_open:
            ahead.sent(waiting[-1])
            wire.append(waiting.pop())
        assert len(wire) + taken.items <= WINDOW
        assert sum(wire[:-1]) + taken.size < WINDOW_BYTES or not wire[:-1]
        assert wire, "the sender may continue whenever the receiver has taken all"
        for _ in range(min(len(wire), lags[turn % len(lags)])):
            granted = taken.took(wire.pop(0))
            if granted:
                ahead.on_credit(granted)
        turn += 1


# Ends ----------------------------------------------------------------------------------------------------------------


@PLACES
async def test_an_error_of_the_method_comes_after_its_items(cls: Any, runner: Any) -> None:
    async with actor(cls(), runner) as (_, way):
        with pytest.raises(ValueError, match="3 is bad"):
            async with talk(way, "fail_at", 3) as stream:
                for number in range(5):
                    await stream.send(number)
                seen = [await stream.receive() for _ in range(3)]
                assert seen == [0, 1, 2]
                await stream.receive()


@PLACES
async def test_a_method_that_has_ended_takes_nothing_more(cls: Any, runner: Any) -> None:
    async with actor(cls(), runner) as (_, way), talk(way, "first") as stream:
        await stream.send("x")
        assert await stream == "x"
        with pytest.raises(trio.BrokenResourceError, match=r"first\(\) has returned"):
            await stream.send("y")
        with pytest.raises(trio.EndOfChannel):
            await stream.receive()


async def test_sending_to_a_method_that_failed_raises_its_error(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way), talk(way, "fail_at", 0) as stream:
        await stream.send(0)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ValueError, match="0 is bad"):
            await stream.send(1)


async def test_nothing_is_sent_after_done_sending(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way), talk(way, "echo") as stream:
        await stream.done_sending()
        await stream.done_sending()
        with pytest.raises(trio.ClosedResourceError):
            await stream.send(1)


async def test_leaving_early_cancels_the_method(autojump_clock: Any) -> None:
    instance = InLoop()
    async with actor(instance) as (_, way):
        async with talk(way, "deaf") as stream:
            await stream.send(1)
            await trio.testing.wait_all_tasks_blocked()
        assert instance.ended
        instance.ended = False
        async with talk(way, "echo_times", 1) as stream:
            await stream.send(1)
            assert await stream.receive() == 1
        assert instance.ended


async def test_leaving_early_frees_a_thread_that_waits_for_items() -> None:
    instance = OnThread()
    async with actor(instance, None) as (_, way):
        async with talk(way, "deaf"):
            await trio.to_thread.run_sync(instance.full.wait, 10)
        async with talk(way, "flood") as stream:
            await stream.receive()
        async with talk(way, "first") as stream:
            await stream.send("the thread is free")
            assert await stream == "the thread is free"
        assert instance.left == ["CallCancelled"]


async def test_a_cancelled_receive_leaves_the_conversation_as_it_was(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way), talk(way, "echo") as stream:
        for number in range(3):
            with trio.move_on_after(1) as scope:
                await stream.receive()
            assert scope.cancelled_caught
            await stream.send(number)
            assert await stream.receive() == number


async def test_a_deadline_holds_for_the_whole_conversation(autojump_clock: Any) -> None:
    instance = InLoop()
    async with actor(instance) as (_, way):
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            async with talk(way, "deaf", timeout_s=2) as stream:
                await stream.receive()
        assert trio.current_time() - began == pytest.approx(2)
        await trio.testing.wait_all_tasks_blocked()
        assert instance.ended


async def test_a_thread_may_wait_for_an_item_for_so_long_only() -> None:
    async with actor(OnThread(), None) as (_, way):
        with pytest.raises(DeadlineExceeded, match=r"sent nothing within 0.01 s"):
            async with talk(way, "impatient") as stream:
                await stream.receive()


async def test_an_item_that_cannot_be_sent_is_rejected_before_it_is_sent(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way), talk(way, "echo") as stream:
        with pytest.raises(NotPicklable, match=r"an item for a.echo\(\)"):
            await stream.send(threading.Lock())
        await stream.send(1)
        assert await stream.receive() == 1


# The way it is called ------------------------------------------------------------------------------------------------


async def test_methods_are_called_the_way_they_are_written(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (_, way):
        with pytest.raises(InvalidRequest, match=r"a.echo\(\) takes a stream: call it with open\(\)"):
            await way.call("echo")
        for method, said in [
            ("plain", "takes no stream: await it"),
            ("blocks", "would block the loop, where its class lives: make it async"),
            ("misfit", "runs in the loop: annotate its stream fray.Stream"),
        ]:
            with pytest.raises(InvalidRequest, match=said):
                await talk(way, method)
        with pytest.raises(NoSuchMethod, match="did you mean echo"):
            await talk(way, "ech")
        assert await way.call("plain", [1, 2]) == 2


async def test_on_a_thread_the_stream_is_a_blocking_one() -> None:
    async with actor(OnThread(), None) as (_, way):
        with pytest.raises(InvalidRequest, match=r"runs on a thread: annotate its stream fray\.BlockingStream"):
            await talk(way, "misfit")


# Loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", [MessageFault.LOSE, MessageFault.LAST], ids=["lost", "arrived"])
async def test_a_lost_connection_loses_no_item_either_way(fate: MessageFault, autojump_clock: Any) -> None:
    for number in range(1, 30):
        async with actor(InLoop()) as (stage, way):
            hops = iter(range(1, 1_000_000))
            stage.network.on_message_sent = lambda hop, hops=hops, number=number: (
                fate if next(hops) == number else MessageFault.DELIVER
            )
            async with talk(way, "echo") as stream, trio.open_nursery() as nursery:

                async def send(stream: DuplexStream = stream) -> None:
                    for item in range(200):
                        await stream.send(item)
                    await stream.done_sending()

                nursery.start_soon(send)
                assert [item async for item in stream] == list(range(200)), f"cut at message {number}"


async def test_a_conversation_whose_host_dies_says_so(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (stage, way):
        with pytest.raises(OutcomeUnknown):
            async with talk(way, "echo") as stream:
                await stream.send(1)
                assert await stream.receive() == 1
                stage.kill("h1")
                await stream.receive()


async def test_a_caller_blocked_in_send_gets_the_error_of_the_death(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (stage, way):
        with pytest.raises(OutcomeUnknown):
            async with talk(way, "deaf") as stream:
                for number in range(WINDOW):
                    await stream.send(number)
                await trio.testing.wait_all_tasks_blocked()
                stage.nursery.start_soon(stage_kill, stage)
                await stream.send("one too many")


async def test_a_caller_that_still_sends_gets_the_error_of_the_death_and_not_that_of_the_connection(
    autojump_clock: Any,
) -> None:
    async with open_stage() as stage:
        host = await stage.host("h1")
        stage.directory.say("actor:a", stage.endpoint(host, host.register(InLoop(), "a", actor_id="a")))
        way = stage.way(stage.caller.route("actor:a"))
        with pytest.raises(OutcomeUnknown, match="signal 9"):
            async with talk(way, "echo") as stream:
                await stream.send(1)
                assert await stream.receive() == 1
                stage.kill("h1")
                assert way.route.binding is not None
                await way.route.binding.connection.closed.wait()
                await stream.send(2)
                stage.directory.end("actor:a", EndReason.FAILURE, "its process was killed by signal 9")
                await stream.receive()


async def stage_kill(stage: Stage) -> None:
    await trio.sleep(1)
    stage.kill("h1")


async def test_items_lost_with_the_whole_conversation_are_reported_as_lost(autojump_clock: Any) -> None:
    async with actor(InLoop()) as (stage, way):
        with pytest.raises(OutcomeUnknown, match=r"items of a\.echo"):
            async with talk(way, "echo") as stream:
                await stream.send(1)
                await stream.receive()
                (place,) = stage.hosts["h1"]._acceptor._sessions.values()
                place.record.instance = "another"
                stage.network.drop("driver")
                await stream.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert not stage.hosts["h1"].actors[1].active_calls


async def test_a_conversation_refused_by_one_host_restarts_at_the_next(autojump_clock: Any) -> None:
    """Items sent before the host's first answer go to the next incarnation, too."""
    async with open_stage() as stage:
        first, second = await stage.host("h1"), await stage.host("h2")
        stale: ActorEndpoint = stage.endpoint(first, 77)
        stage.directory.say("actor:a", stale)
        route = stage.caller.route("actor:a", "a")
        async with talk(stage.way(route), "add_up") as stream:
            for number in range(10):
                await stream.send(number)
            await stream.done_sending()
            await trio.testing.wait_all_tasks_blocked()
            stage.directory.say("actor:a", stage.endpoint(second, second.register(InLoop(), "a")))
            assert await stream == 45


async def test_a_thread_that_floods_loses_nothing() -> None:
    async with actor(OnThread(), None) as (_, way), talk(way, "flood") as stream:
        assert [item async for item in stream] == list(range(10_000))


async def test_a_postponed_annotation_is_understood_in_a_class_that_came_without_the_names_around_it(
    autojump_clock: Any,
) -> None:
    """Class like one of a script, which is pickled by value."""
    bare: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n"
        "class Doubler:\n"
        "    async def run(self, stream: fray.Stream) -> None:\n"
        "        async for n in stream:\n"
        "            await stream.send(2 * n)\n",
        bare,
    )
    async with open_stage() as stage:
        way = await stage.actor(bare["Doubler"]())
        async with way.route.open("run", (), {}, CallOptions()) as stream:
            await stream.send(4)
            assert await stream.receive() == 8
