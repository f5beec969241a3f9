"""Cancellation and deadlines pass from actor to actor; threads see them, and a thread that ignores them is left."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
import trio.testing

import fray
from fray import blocking
from fray.errors import CallCancelled, DeadlineExceeded, FrayError
from fray.runtime.actors.lifecycle import ActorLifecycle
from fray.runtime.current_call import current_actor
from tests.support.calls import Stage, Way, open_stage


class Hop:
    """Calls the next one, or sleeps; writes down when it was cancelled."""

    def __init__(self, next_way: Way | None) -> None:
        self.next_way = next_way
        self.log: list[tuple[str, float]] = []

    async def go(self) -> float:
        self.log.append(("began", trio.current_time()))
        try:
            if self.next_way is not None:
                return float(await self.next_way.call("go"))
            await trio.sleep_forever()
        except trio.Cancelled:
            self.log.append(("cancelled", trio.current_time()))
            raise
        raise AssertionError

    async def left_s(self) -> list[float]:
        """Return the seconds left until the deadline here and in the next actors; a second passes in each."""
        deadline = current_actor().deadline
        assert deadline is not None
        here = deadline - trio.current_time()
        await trio.sleep(1)
        return [here, *(await self.next_way.call("left_s") if self.next_way is not None else [])]


async def three(stage: Stage) -> tuple[Way, list[Hop]]:
    way: Way | None = None
    hops: list[Hop] = []
    for number in (3, 2, 1):
        hops.insert(0, Hop(way))
        host = await stage.host(f"h{number}")
        place = host.register(hops[0], f"hop{number}", actor_id=f"hop{number}")
        way = stage.way(stage.caller.route_to(stage.endpoint(host, place, f"hop{number}")))
    assert way is not None
    return way, hops


async def test_a_cancelled_call_is_cancelled_hop_by_hop(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, hops = await three(stage)
        with trio.move_on_after(5):
            await way.call("go")
        assert [[what for what, _ in hop.log] for hop in hops] == [["began", "cancelled"]] * 3
        assert trio.current_time() < 5.1, "and its caller has waited for the last of them"


async def test_a_cancelled_future_is_cancelled_hop_by_hop(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, hops = await three(stage)
        future = way.start("go")
        await trio.testing.wait_all_tasks_blocked()
        future.cancel()
        with pytest.raises(CallCancelled):
            await future
        assert all(hop.log[-1][0] == "cancelled" for hop in hops)


async def test_a_deadline_is_enforced_at_each_hop_by_itself(autojump_clock: Any) -> None:
    """The driver's machine is cut off: the actors are not notified, and end at the deadline all the same."""
    async with open_stage() as stage:
        way, hops = await three(stage)
        future = way.start("go", timeout_s=5)
        await trio.testing.wait_all_tasks_blocked()
        stage.network.cut("driver", "h1")
        stage.network.drop("driver")
        with pytest.raises(DeadlineExceeded):
            await future
        await trio.sleep(0.1)
        assert [hop.log[-1][0] for hop in hops] == ["cancelled"] * 3
        assert all(hop.log[-1][1] == pytest.approx(5, abs=0.1) for hop in hops)


async def test_the_rest_of_a_deadline_is_passed_along_the_chain(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await three(stage)
        assert await way.call("left_s", timeout_s=10) == pytest.approx([10, 9, 8], abs=0.1)


# Threads -------------------------------------------------------------------------------------------------------------


class Thread:
    def __init__(self) -> None:
        self.began = threading.Event()
        self.cancelled = threading.Event()
        self.release = threading.Event()
        self.log: list[str] = []

    def wait_until_cancelled(self) -> bool:
        self.began.set()
        cancelled = current_actor().wait_cancelled(10)
        self.cancelled.set()
        return cancelled

    def impatient(self) -> bool:
        return current_actor().wait_cancelled(0.01)

    def deaf(self) -> None:
        self.began.set()
        self.release.wait(10)
        self.log.append("ended")

    def add(self) -> int:
        return 1


class InLoop:
    async def wrong(self) -> bool:
        return current_actor().wait_cancelled(1)


async def on_thread(stage: Stage, instance: Any, **options: Any) -> tuple[Way, ActorLifecycle]:
    host = await stage.host("h1", make_runner=None)
    life = ActorLifecycle("a", "a", type(instance), incarnation="h1")
    number = host.register(instance, "a", lifecycle=life, **options)
    return stage.way(stage.caller.route_to(stage.endpoint(host, number))), life


async def wait(event: threading.Event) -> None:
    assert await trio.to_thread.run_sync(event.wait, 10)


async def test_a_thread_may_sleep_until_it_is_cancelled() -> None:
    async with open_stage() as stage:
        instance = Thread()
        way, _ = await on_thread(stage, instance)
        assert await way.call("impatient") is False
        future = way.start("wait_until_cancelled")
        await wait(instance.began)
        future.cancel()
        await wait(instance.cancelled)
        assert await way.call("add") == 1


async def test_the_loop_never_sleeps_until_it_is_cancelled(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way = await stage.actor(InLoop())
        with pytest.raises(FrayError, match="is for methods on threads"):
            await way.call("wrong")


async def test_a_thread_sees_its_cancellation_at_its_deadline_though_its_caller_is_cut_off() -> None:
    async with open_stage() as stage:
        instance = Thread()
        way, _ = await on_thread(stage, instance)
        future = way.start("wait_until_cancelled", timeout_s=0.05)
        later = way.start("wait_until_cancelled", timeout_s=60)
        await wait(instance.began)
        stage.network.cut("driver", "h1")
        stage.network.drop("driver")
        await wait(instance.cancelled)
        with pytest.raises(DeadlineExceeded):
            await future
        later.cancel()


async def test_by_default_a_thread_that_ignores_its_cancellation_is_left_alone() -> None:
    async with open_stage() as stage:
        instance = Thread()
        way, life = await on_thread(stage, instance)
        future = way.start("deaf")
        await wait(instance.began)
        future.cancel()
        behind = way.start("add")
        instance.release.set()
        assert await behind == 1
        assert instance.log == ["ended"]
        assert life.ending is None


async def test_with_kill_after_s_a_thread_that_ignores_its_cancellation_ends_its_actor() -> None:
    async with open_stage() as stage:
        instance = Thread()
        way, life = await on_thread(stage, instance, kill_after_s=0.02)
        asked = trio.Event()
        life.set_on_ending(asked.set)
        future = way.start("deaf")
        await wait(instance.began)
        assert not asked.is_set()
        future.cancel()
        await asked.wait()
        assert life.ending is not None
        assert isinstance(life.ending.error, fray.CancelIgnored)
        assert "a.deaf() was cancelled and did not end within kill_after_s=0.02" in str(life.ending.error)
        instance.release.set()


async def test_a_thread_that_ends_in_time_keeps_its_actor() -> None:
    async with open_stage() as stage:
        instance = Thread()
        way, life = await on_thread(stage, instance, kill_after_s=0.02)
        future = way.start("wait_until_cancelled")
        await wait(instance.began)
        future.cancel()
        await wait(instance.cancelled)
        await trio.sleep(0.04)
        assert life.ending is None


@pytest.mark.parametrize(
    ("cls", "kill_after_s", "said"), [(Thread, -1, "must be 0 seconds or more"), (InLoop, 1, "has async methods")]
)
async def test_a_policy_that_cannot_be_enforced_is_refused(cls: type, kill_after_s: float, said: str) -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        with pytest.raises(fray.InvalidRequest, match=said):
            await scope.create_actor(cls, actor_config=fray.ActorConfig(kill_after_s=kill_after_s))


class Relay:
    def __init__(self) -> None:
        self.began = threading.Event()

    def go(self, other: Any) -> Any:
        return other.wait_until_cancelled()


async def test_a_chain_through_threads_keeps_its_deadline() -> None:
    """The outer thread is blocked in its call, which ends at the deadline it inherits."""
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        inner, outer = await scope.create_actor(Thread), await scope.create_actor(Relay)
        with pytest.raises(DeadlineExceeded):
            await outer.go.options(timeout_s=0.1)(blocking.ActorHandle(inner))
        assert await inner.add() == 1, "the inner one was cancelled"
