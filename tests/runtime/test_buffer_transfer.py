"""Arrays and other large arguments, results and items, over a network in memory."""

from __future__ import annotations

import pickle
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy
import pytest
import trio

from fray.errors import ChannelFull, MessageTooLarge, OutcomeUnknown
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.net.transports.memory import MessageFault
from fray.runtime.calls import flow_control
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import BUFFERS_LIMIT, PickledObject
from tests.support.calls import cut_at, open_stage

MB = 1 << 20


def ramp(size_bytes: int) -> Any:
    return numpy.arange(size_bytes // 8, dtype="int64")


class Store:
    """Actor in the loop."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.log: list[str] = []

    def echo(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> None:
        self.kept = value

    def get(self) -> Any:
        return self.kept

    def add(self, k: float) -> None:
        self.kept += k

    def what(self, value: Any) -> tuple[str, bool]:
        return type(value).__name__, getattr(getattr(value, "flags", None), "writeable", True)

    def say(self, what: str, value: Any = None) -> None:
        self.log.append(what)

    def said(self) -> list[str]:
        return self.log

    def items(self, count: int, size: int) -> Iterator[Any]:
        array = ramp(size)
        for number in range(count):
            array[0] = number
            yield array

    async def async_items(self, count: int, size: int) -> AsyncIterator[Any]:
        for item in self.items(count, size):
            yield item


class ThreadStore:
    """The same on a thread: no async method."""

    def __init__(self) -> None:
        self.kept: Any = None

    echo = Store.echo
    keep = Store.keep
    get = Store.get
    add = Store.add
    items = Store.items


@pytest.mark.parametrize("size", [16, 1024, 100_000, 300_000, 3 * MB])
async def test_arrays_come_back_equal_and_writable(size: int, autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        array = ramp(size)
        back = await store.call("echo", {"a": [array, array.reshape(2, -1)], "f": numpy.asfortranarray(array)})
        assert (back["a"][0] == array).all()
        assert back["a"][1].shape == (2, size // 16)
        back["a"][0][:] = 0
        back["f"][0] = 7
        assert array[-1] == size // 8 - 1
        assert await store.call("what", array) == ("ndarray", True)


async def test_more_arrays_than_may_travel_beside_the_pickle_arrive_in_it(autojump_clock: Any) -> None:
    count = BUFFERS_LIMIT + 1
    many = [numpy.full(1, number % 251, numpy.uint8) for number in range(count)]
    async with open_stage() as stage:
        store = await stage.actor(Store())
        back = await store.call("echo", many)
        assert len(back) == count
        assert (numpy.concatenate(back) == numpy.concatenate(many)).all()


async def test_arrays_in_objects_that_only_cloudpickle_can_send_arrive_writable(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        array = ramp(MB)
        function, back = await store.call("echo", (lambda: 42, array))
        assert function() == 42
        back += 1
        assert (back == array + 1).all()


@pytest.mark.parametrize("size", [10, 100_000, 2 * MB])
async def test_bytes_and_bytearrays_keep_their_types(size: int, autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        for value in (bytes(range(250)) * (size // 250), bytearray(size)):
            back = await store.call("echo", value)
            assert type(back) is type(value)
            assert back == value
            nested = await store.call("echo", [value])
            assert type(nested[0]) is type(value)


async def test_a_large_pickle_travels_as_a_buffer_and_passes_64_megabytes(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        words = ["x" * 1_000_000 for _ in range(70)]
        words = [f"{number}{word}" for number, word in enumerate(words)]
        assert await store.call("echo", words) == words


async def test_an_array_with_gaps_arrives_too(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        array = ramp(MB)[::3]
        assert (await store.call("echo", array) == array).all()


@pytest.mark.parametrize("make", [Store, ThreadStore])
async def test_caller_and_callee_share_no_memory(make: Any, autojump_clock: Any) -> None:
    """Also where both live in one process: what one does to its array, the other does not see."""
    async with open_stage() as stage:
        instance = make()
        store = await stage.actor(instance)
        array = ramp(MB)
        await store.call("keep", array)
        array[:] = -1
        mine = await store.call("get")
        assert mine[-1] == MB // 8 - 1
        mine[:] = -2
        assert (await store.call("get"))[5] == 5


async def test_a_call_carries_its_arguments_as_they_were_when_it_was_made(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        array = ramp(MB)
        call = store.start("echo", array)
        array[:] = -1
        assert (await call == ramp(MB)).all()


async def test_a_result_is_a_snapshot_of_when_the_method_returned(autojump_clock: Any) -> None:
    """The weights of a parameter server keep changing while they are on their way."""
    async with open_stage() as stage:
        store = await stage.actor(Store())
        await store.call("keep", ramp(3 * MB).astype("float64"))
        calls = [store.start("get"), store.start("add", 1.0), store.start("get")]
        before, _, after = [await call for call in calls]
        assert (before == ramp(3 * MB)).all()
        assert (after == ramp(3 * MB) + 1).all()


@pytest.mark.parametrize("make", [Store, ThreadStore])
async def test_items_of_streams_carry_arrays_in_order(make: Any, autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(make())
        for size in (1024, 300_000):
            async with store.route.stream("items", (5, size)) as items:
                firsts = [int(item[0]) async for item in items]
            assert firsts == list(range(5))


async def test_items_of_async_streams_carry_arrays_too(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        async with store.route.stream("async_items", (3, 300_000)) as items:
            assert [int(item[0]) async for item in items] == [0, 1, 2]


async def test_a_call_waits_for_the_buffers_of_those_before_it_and_other_actors_do_not(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        host = await stage.host("h1")
        first, second = Store(), Store()
        ways = [
            stage.way(stage.caller.route_to(stage.endpoint(host, host.register(each, name), name)))
            for each, name in ((first, "a"), (second, "b"))
        ]
        await ways[0].call("said")
        stage.network.set_delay("driver", "h1", 0.01)
        large = ways[0].start("say", "large", ramp(8 * MB))
        behind = ways[0].start("say", "behind")
        beside = ways[1].start("say", "beside")
        await beside
        assert first.log == []
        assert second.log == ["beside"]
        await behind
        assert large.done()
        assert first.log == ["large", "behind"]


async def test_small_calls_overtake_large_ones_of_other_actors_at_any_time(autojump_clock: Any) -> None:
    """Each small call takes two journeys, as if nothing else were on the way."""
    async with open_stage() as stage:
        host = await stage.host("h1")
        large, small = (
            stage.way(stage.caller.route_to(stage.endpoint(host, host.register(Store(), name), name))) for name in "ab"
        )
        await small.call("said")
        stage.network.set_delay("driver", "h1", 0.01)
        call = large.start("echo", ramp(40 * MB))
        for _ in range(3):
            began = trio.current_time()
            await small.call("said")
            assert trio.current_time() - began < 0.05
        assert not call.done()
        assert (await call)[-1] == 40 * MB // 8 - 1


@pytest.mark.parametrize("fate", [MessageFault.LOSE, MessageFault.LAST])
async def test_a_cut_at_any_message_loses_no_buffer_and_repeats_none(fate: MessageFault, autojump_clock: Any) -> None:
    array = ramp(MB)
    for number in range(3, 22):
        async with open_stage(number) as stage:
            instance = Store()
            store = await stage.actor(instance)
            await store.call("said")
            stage.network.on_message_sent = cut_at(number, fate)
            assert (await store.call("echo", array) == array).all()
            await store.call("say", "once", array)
            assert await store.call("said") == ["once"]


async def test_after_the_host_forgot_the_caller_a_large_call_is_sent_again_and_runs_once(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Store()
        store = await stage.actor(instance)
        await store.call("said")
        host = stage.hosts["h1"]
        stage.network.set_delay("driver", "h1", 0.02)
        call = store.start("say", "once", ramp(30 * MB))
        await trio.sleep(0.05)
        host._acceptor._sessions.clear()  # as if it had been away for too long
        stage.network.drop("driver", "h1")
        await call
        assert instance.log == ["once"]


async def test_a_cancelled_large_call_sends_no_more_and_does_not_hold_up_others(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Store()
        store = await stage.actor(instance)
        await store.call("said")
        stage.network.set_delay("driver", "h1", 0.02)
        with trio.move_on_after(0.05):
            await store.call("say", "large", ramp(64 * MB))
        began = trio.current_time()
        assert await store.call("said") == []
        assert trio.current_time() - began < 0.5
        channel = store.route.binding.connection._channel  # type: ignore[union-attr]
        assert channel is not None
        assert channel.bulk_out.waiting_bytes == 0
        assert stage.caller.buffer_budget.held_bytes == 0


async def test_a_host_that_dies_amid_the_buffers_ends_the_call(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        store = await stage.actor(Store())
        await store.call("said")
        stage.network.set_delay("driver", "h1", 0.02)
        call = store.start("echo", ramp(64 * MB))
        await trio.sleep(0.05)
        stage.kill("h1")
        with pytest.raises(OutcomeUnknown):
            await call
        assert stage.caller.buffer_budget.held_bytes == 0


async def test_one_byte_past_the_limit_is_rejected_before_it_is_sent(autojump_clock: Any) -> None:
    """A block of untouched zero pages costs nothing."""
    async with open_stage() as stage:
        store = await stage.actor(Store())
        with pytest.raises(MessageTooLarge, match="storage"):
            await store.call("echo", numpy.zeros(SIZE_LIMIT_BYTES + 1, "u1"))
        assert await store.call("said") == []
        assert stage.caller.buffer_budget.held_bytes == 0


async def test_too_much_under_way_is_refused_at_once_or_waited_for(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    monkeypatch.setattr(flow_control, "BULK_LIMIT_BYTES", 3 * MB)
    async with open_stage() as stage:
        store = await stage.actor(Store())
        first = store.start("echo", ramp(2 * MB))
        with pytest.raises(ChannelFull, match="await some of those first"):
            store.start("echo", ramp(2 * MB))
        assert (await store.call("echo", ramp(2 * MB)))[1] == 1
        assert first.done()


class Picky:
    """Object whose state is one buffer, as in libraries for tables."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Picky, (pickle.PickleBuffer(self.data),)


async def test_reducers_that_give_buffers_keep_them_out_of_the_pickle(autojump_clock: Any) -> None:
    packed = pickling.pack(Picky(bytearray(MB)))
    assert isinstance(packed, PickledObject)
    assert len(packed.pickle) < 1000
    async with open_stage() as stage:
        store = await stage.actor(Store())
        content = random.Random(1).randbytes(MB)
        back = await store.call("echo", Picky(content))
        assert bytes(back.data) == content
