"""Conversations between callers and hosts, over a network in memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
import trio.testing

from fray.errors import (
    ActorDied,
    CallCancelled,
    DeadlineExceeded,
    FrayError,
    MessageTooLarge,
    NoSuchMethod,
    NotPicklable,
    RemoteError,
    RemoteTraceback,
)
from fray.model.messages.client import ActorEndpoint
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.runtime.calls.futures import CANCEL_WAIT_S
from fray.runtime.current_call import current_actor
from fray.runtime.threads.executor import ThreadExecutor
from tests.support.actors import ActorContext, Counter, Plain
from tests.support.calls import Stage, open_stage

# Calls and answers ---------------------------------------------------------------------------------------------------


async def test_a_call_is_answered(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        assert await counter.call("add", 2) == 2
        assert await counter.call("add_async", 3) == 5
        assert await counter.call("decorated") == 6
        assert await counter.call("still", 9) == 9
        assert await counter.call("name_of_class") == "Counter"


async def test_keyword_arguments_travel(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        assert await counter.route.call("keywords", (1,), {"b": 2}) == (1, 2)


async def test_calls_start_in_the_order_they_were_made(autojump_clock: Any) -> None:
    """Also where sync and async methods take turns, and Trio shuffles its tasks."""
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        made = [counter.start("note" if number % 3 else "note_now", number) for number in range(50)]
        await counter.call("open_gate")
        for call in made:
            await call
        assert await counter.call("notes") == list(range(50))


async def test_an_async_call_that_waits_does_not_hold_up_others(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        waiting = counter.start("wait_for_gate")
        assert await counter.call("add") == 1
        assert not waiting.done()
        await counter.call("open_gate")
        assert await waiting == "open"


async def test_max_concurrency_limits_the_calls_under_way(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance, max_concurrency=2)
        made = [counter.start("note", number) for number in range(4)]
        await trio.testing.wait_all_tasks_blocked()
        assert instance.log == [0, 1]
        instance.gate.set()
        for call in made:
            await call
        assert instance.log == [0, 1, 2, 3]


async def test_a_future_may_be_awaited_by_many_and_again(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        call = counter.start("wait_for_gate")
        seen: list[str] = []

        async def wait() -> None:
            seen.append(await call)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await counter.call("open_gate")
        assert seen == ["open", "open"]
        assert await call == "open"


async def test_a_callback_is_called_when_the_answer_has_arrived(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        results: list[Any] = []
        call = counter.start("add")
        call.add_done_callback(lambda done: results.append(done.result()))
        await call
        call.add_done_callback(lambda done: results.append(done.result()))
        assert results == [1, 1]


async def test_results_are_copies(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance)
        mine = [1]
        theirs = await counter.call("echo", mine)
        assert theirs == mine
        assert theirs is not mine


# Errors of user code -------------------------------------------------------------------------------------------------


async def test_an_error_keeps_its_type_and_its_remote_traceback(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(ValueError, match="sync") as caught:
            await counter.call("fail", "sync")
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "in fail" in caught.value.__cause__.text
        with pytest.raises(LookupError, match="async"):
            await counter.call("fail_async", "async")


async def test_wrong_arguments_are_a_type_error(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(TypeError, match="positional argument"):
            await counter.call("add", 1, 2, 3)
        assert await counter.call("add") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ad", "no public method 'ad'; did you mean add"),
        ("zzz", "no public method 'zzz'; it has "),
        ("_private", "begins with an underscore"),
        ("__class__", "begins with an underscore"),
        ("n", "is an attribute, not a method"),
        ("size", "is an attribute, not a method"),
        ("é" * 128, "its name has 256 bytes"),
    ],
)
async def test_only_public_methods_can_be_called(name: str, message: str, autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(NoSuchMethod, match=message):
            await counter.call(name)


async def test_an_argument_that_cannot_be_pickled_is_rejected_before_it_is_sent(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(NotPicklable, match=r"argument 1 of echo\(\)"):
            counter.start("echo", threading.Lock())
        assert await counter.call("add") == 1


async def test_a_result_that_cannot_be_pickled_fails_that_call(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(NotPicklable, match=r"the result of a.lock\(\) cannot be sent: item 'held'"):
            await counter.call("lock")
        assert await counter.call("add") == 1


async def test_a_message_over_the_limit_is_rejected_before_it_is_sent(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(MessageTooLarge, match="write the data to storage and send the path") as caught:
            counter.start("echo", bytearray(SIZE_LIMIT_BYTES + 1))  # untouched zero pages cost nothing
        assert caught.value.details["limit_bytes"] == SIZE_LIMIT_BYTES
        assert await counter.call("add") == 1


async def test_large_messages_arrive_whole_and_in_order(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        sizes = [10, 4096, 300_000, 5_000_000, 1]
        made = [counter.start("echo", bytes([size % 251]) * size) for size in sizes]
        assert [await call for call in made] == [bytes([size % 251]) * size for size in sizes]


async def test_an_argument_that_cannot_be_rebuilt_fails_the_call_with_that_error(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(ZeroDivisionError):
            await counter.call("echo", Bomb())


class Bomb:
    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise ZeroDivisionError("rebuilt")


@pytest.mark.parametrize(("method", "name"), [("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt")])
async def test_user_code_that_would_end_the_process_leaves_no_caller_waiting(
    method: str, name: str, autojump_clock: Any
) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        with pytest.raises(RemoteError, match=name):
            await counter.call(method)
        life = stage.hosts["h1"].actors[1].lifecycle
        assert life is not None
        assert life.ending is not None
        assert name.removeprefix("System").lower() in life.ending.text.lower()


# Where the code runs -------------------------------------------------------------------------------------------------


async def test_a_method_finds_its_actor(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        assert await counter.call("who") == ("a", "who")
        with pytest.raises(FrayError, match="no actor here"):
            current_actor()


async def test_a_method_that_asks_for_the_context_gets_it(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        stage.hosts["h1"].make_context = lambda call: ActorContext()
        assert await counter.call("with_context", 3) == ("ActorContext", 3)
        assert await counter.call("with_annotation", 4) == ("ActorContext", 4)


async def test_an_all_sync_class_keeps_one_thread() -> None:
    async with open_stage() as stage:
        host = await stage.host("h1", make_runner=None)
        way = stage.way(stage.caller.route_to(stage.endpoint(host, host.register(Plain(), "plain"))))
        names = {await call for call in [way.start("thread") for _ in range(20)]}
        assert names == {"fray-plain"}
        assert [await call for call in [way.start("add") for _ in range(100)]] == list(range(1, 101))


async def test_an_all_sync_class_may_have_more_threads() -> None:
    class Meeting:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(3, timeout=10)

        def meet(self) -> int:
            return self.barrier.wait()

    async with open_stage() as stage:
        host = await stage.host("h1", make_runner=None)
        number = host.register(Meeting(), "meeting", max_concurrency=3)
        way = stage.way(stage.caller.route_to(stage.endpoint(host, number)))
        assert sorted([await call for call in [way.start("meet") for _ in range(3)]]) == [0, 1, 2]


async def test_an_actor_may_live_on_a_thread_that_is_there_already() -> None:
    executor = ThreadExecutor()
    thread = threading.Thread(target=executor.run_on_this_thread, name="mine")
    thread.start()
    async with open_stage() as stage:
        host = await stage.host("h1")
        instance = await executor.run(Plain)
        number = host.register(instance, "plain", executor=executor)
        way = stage.way(stage.caller.route_to(stage.endpoint(host, number)))
        assert await way.call("thread") == "mine"
        with pytest.raises(ZeroDivisionError):
            await executor.run(explode)
        with pytest.raises(RemoteError, match="SystemExit"):
            await way.call("exit")
        assert await way.call("add") == 1, "the thread continues"
        executor.stop()
        with pytest.raises(ActorDied):
            await executor.run(Plain)
    await trio.to_thread.run_sync(thread.join)


async def test_a_blocked_thread_holds_up_no_other_actor() -> None:
    async with open_stage() as stage:
        host = await stage.host("h1", make_runner=None)
        plain = Plain()
        held = stage.way(stage.caller.route_to(stage.endpoint(host, host.register(plain, "held"))))
        other = stage.way(stage.caller.route_to(stage.endpoint(host, host.register(Plain(), "other"))))
        waiting = held.start("hold")
        assert await other.call("add") == 1
        plain.release.set()
        assert await waiting is False


# Cancelling and deadlines --------------------------------------------------------------------------------------------


async def test_a_cancelled_caller_cancels_the_remote_task_and_waits_for_it(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance)
        with trio.move_on_after(1) as scope:
            await counter.call("wait_for_gate")
        assert scope.cancelled_caught
        assert instance.log == ["waiting", "cancelled"], "it has ended before the caller continues"


async def test_a_cancelled_caller_waits_no_longer_than_it_must(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        began = trio.current_time()
        with trio.move_on_after(1):
            await counter.call("stubborn", 1000)
        assert trio.current_time() - began == pytest.approx(1 + CANCEL_WAIT_S)


async def test_a_cancelled_call_that_has_not_begun_never_does(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance, max_concurrency=1)
        first = counter.start("note", "first")
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await counter.call("note", "second")
        instance.gate.set()
        await first
        await counter.call("add")
        assert instance.log == ["first"]


async def test_a_method_in_a_thread_sees_its_cancellation_and_the_caller_leaves_at_once() -> None:
    async with open_stage() as stage:
        host = await stage.host("h1", make_runner=None)
        plain = Plain()
        number = host.register(plain, "plain")
        way = stage.way(stage.caller.route_to(stage.endpoint(host, number)))
        call = way.start("hold")
        behind = way.start("note_now", "behind")
        # Both under way is not enough: a call that its thread has not taken yet would never begin.
        while (count := host.actors[number].metrics()).running < 1 or count.queued < 1:
            await trio.lowlevel.checkpoint()
        call.cancel()
        behind.cancel()
        with pytest.raises(CallCancelled):
            await call
        with pytest.raises(CallCancelled):
            await behind
        (cancelled, _) = host.actors[number].active_calls
        assert cancelled.cancelled
        plain.release.set()
        assert await way.call("add") == 1
        assert plain.log == []


async def test_a_call_past_its_deadline_ends_on_both_sides(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance)
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await counter.call("wait_for_gate", timeout_s=2)
        assert trio.current_time() - began == pytest.approx(2)
        await trio.testing.wait_all_tasks_blocked()
        assert instance.log == ["waiting", "cancelled"]


async def test_a_call_that_waits_in_the_queue_past_its_deadline_is_never_run(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance, max_concurrency=1)
        first = counter.start("note", "first")
        await trio.testing.wait_all_tasks_blocked()
        late = counter.start("note", "late", timeout_s=1)
        await trio.sleep(2)
        instance.gate.set()
        await first
        with pytest.raises(DeadlineExceeded):
            await late
        assert instance.log == ["first"]


async def test_deadlines_and_the_chain_of_calls_are_inherited(autojump_clock: Any) -> None:
    class Relay:
        def __init__(self, stage: Stage, endpoint: ActorEndpoint) -> None:
            self.stage, self.endpoint = stage, endpoint

        async def relay(self) -> tuple[str, ...]:
            way = self.stage.way(self.stage.caller.route_to(self.endpoint))
            return tuple(await way.call("chain"))

        async def relay_for_ever(self) -> None:
            way = self.stage.way(self.stage.caller.route_to(self.endpoint))
            await way.call("sleep")

    class Inner:
        def __init__(self) -> None:
            self.cancelled_at = 0.0

        def chain(self) -> tuple[str, ...]:
            return current_actor().chain

        async def sleep(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled_at = trio.current_time()

    async with open_stage() as stage:
        inner = Inner()
        host = await stage.host("h2")
        endpoint = stage.endpoint(host, host.register(inner, "inner", actor_id="inner"), "inner")
        relay = await stage.actor(Relay(stage, endpoint))
        assert await relay.call("relay") == ("a",)
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await relay.call("relay_for_ever", timeout_s=3)
        await trio.testing.wait_all_tasks_blocked()
        assert inner.cancelled_at - began == pytest.approx(3)


async def test_calls_of_a_caller_that_left_are_cancelled(autojump_clock: Any) -> None:
    """P1: a goodbye ends the calls at once."""
    async with open_stage() as stage:
        instance = Counter()
        host = await stage.host("h1")
        number = host.register(instance, "a")
        async with open_stage() as other:
            other.caller.network = stage.network.at("other")
            way = stage.way(other.caller.route_to(stage.endpoint(host, number)))
            way.caller = other.caller
            way.start("wait_for_gate")
            await trio.testing.wait_all_tasks_blocked()
            assert instance.log == ["waiting"]
        await trio.testing.wait_all_tasks_blocked()
        assert instance.log == ["waiting", "cancelled"]


async def test_calls_of_a_vanished_caller_are_cancelled_after_a_while(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance)
        counter.start("wait_for_gate")
        await trio.testing.wait_all_tasks_blocked()
        stage.network.cut("driver", "h1")
        stage.network.drop("driver")
        began = trio.current_time()
        await instance.left.wait()
        assert 30 < trio.current_time() - began < 130
