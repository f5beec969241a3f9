"""Limits of the calls in progress of one actor, and the isolation of their context variables."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import pytest
import trio
import trio.testing

import fray
from fray.errors import InvalidRequest
from fray.runtime.actors.methods import check_concurrency
from tests.support.calls import Stage, Way, open_stage

trace: ContextVar[str] = ContextVar("trace", default="none")


class Desk:
    """Actor in the loop whose ``io`` methods have a limit of their own."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gate = trio.Event()

    @fray.method(concurrency_group="io")
    async def fetch(self, what: Any) -> None:
        self.log.append(what)
        await self.gate.wait()

    async def work(self, what: Any) -> None:
        self.log.append(what)
        await self.gate.wait()

    def note(self, what: Any) -> None:
        self.log.append(what)


class Hands:
    """All sync: each group has threads of its own."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.began = threading.Event()

    def hold(self) -> bool:
        self.began.set()
        return self.release.wait(10)

    @fray.method(concurrency_group="io")
    def thread(self) -> str:
        return threading.current_thread().name

    @fray.method(concurrency_group="io")
    def let_go(self) -> None:
        self.release.set()


class BarrierActor:
    """Actor of Fray-Zero's elastic example."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.arrived: dict[int, set[str]] = {}
        self.changed = threading.Condition()

    def wait_for_barrier(self, ctx: fray.ActorContext, slice_id: str, step: int) -> int:
        with self.changed:
            here = self.arrived.setdefault(step, set())
            here.add(slice_id)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(here) == self.slices, timeout=10)
        return step


async def thread_actor(stage: Stage, instance: Any, **options: Any) -> Way:
    host = await stage.host("h1", make_runner=None)
    return stage.way(stage.caller.route_to(stage.endpoint(host, host.register(instance, "a", **options))))


# Groups --------------------------------------------------------------------------------------------------------------


async def test_a_group_has_a_limit_of_its_own(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        desk = Desk()
        way = await stage.actor(desk, max_concurrency=1, concurrency_groups={"io": 2})
        made = [way.start(method, f"{method}{number}") for number in range(3) for method in ("fetch", "work")]
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(desk.log) == ["fetch0", "fetch1", "work0"]
        desk.gate.set()
        for call in made:
            await call
        assert sorted(desk.log) == sorted([f"{m}{n}" for m in ("fetch", "work") for n in range(3)])


async def test_calls_of_one_group_start_in_order_whatever_others_do(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        desk = Desk()
        way = await stage.actor(desk, max_concurrency=1, concurrency_groups={"io": 3})
        desk.gate.set()
        made = [way.start("fetch" if number % 2 else "work", number) for number in range(40)]
        for call in made:
            await call
        assert [n for n in desk.log if n % 2] == list(range(1, 40, 2))
        assert [n for n in desk.log if not n % 2] == list(range(0, 40, 2))


async def test_a_group_of_an_all_sync_class_runs_while_its_thread_is_busy() -> None:
    async with open_stage() as stage:
        way = await thread_actor(stage, Hands(), concurrency_groups={"io": 1})
        held = way.start("hold")
        assert await way.call("thread") == "fray-a-io"
        await way.call("let_go")
        assert await held is True


async def test_four_callers_meet_in_a_sync_barrier() -> None:
    async with open_stage() as stage:
        way = await thread_actor(stage, BarrierActor(4), max_concurrency=4)
        for step in range(3):
            made = [way.start("wait_for_barrier", f"slice-{n}", step) for n in range(4)]
            assert [await call for call in made] == [step] * 4


def test_an_unknown_group_is_rejected_with_the_list_of_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"Desk.fetch\(\) is of the concurrency group 'io'.* known groups: disk"):
        check_concurrency(Desk, None, {"disk": 2})


@pytest.mark.parametrize(("limit", "groups"), [(0, {"io": 1}), (1, {"io": 0}), (-1, {"io": 1}), (2, {"io": "many"})])
def test_a_limit_below_one_is_refused(limit: int, groups: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be 1 or more calls"):
        check_concurrency(Desk, limit, groups)


def test_a_group_needs_a_name() -> None:
    with pytest.raises(InvalidRequest, match="has a name"):
        fray.method(concurrency_group="")


async def test_create_actor_tells_an_unknown_group_at_the_door(autojump_clock: Any) -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        with pytest.raises(InvalidRequest, match="known groups: none"):
            await scope.create_actor(Desk)


# Context variables ---------------------------------------------------------------------------------------------------


class Loop:
    """Context variables that a method sets are invisible to other calls."""

    def sets(self, value: str) -> str:
        before = trace.get()
        trace.set(value)
        return before

    async def sets_async(self, value: str) -> str:
        before = trace.get()
        trace.set(value)
        return before

    async def sets_and_waits(self, value: str) -> tuple[str, str]:
        before = trace.get()
        trace.set(value)
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            assert trace.get() == value
        return before, trace.get()

    async def child(self, value: str) -> str:
        """Start tasks, which run in the context of the call."""
        trace.set(value)
        seen: list[str] = []

        async def look() -> None:
            await trio.lowlevel.checkpoint()
            seen.append(trace.get())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
        return seen[0]

    async def items(self, value: str) -> Any:
        for _ in range(3):
            yield trace.get()
            trace.set(value)


class Threads:
    def sets(self, value: str) -> str:
        before = trace.get()
        trace.set(value)
        return before

    def items(self, value: str) -> Any:
        for _ in range(200):
            yield trace.get()
            trace.set(value)


async def test_calls_in_the_loop_see_only_the_actors_own_context(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        token = trace.set("the actor's")
        way = await stage.actor(Loop())
        trace.reset(token)
        made = [way.start(m, f"{m}{n}") for n in range(20) for m in ("sets", "sets_async", "sets_and_waits", "child")]
        for call in made:
            said = await call
            if call.method == "sets_and_waits":
                assert said[0] == "the actor's"
                assert said[1].startswith("sets_and_waits")
            else:
                assert said == "the actor's" or said.startswith("child")


async def test_calls_on_a_thread_see_only_the_actors_own_context() -> None:
    async with open_stage() as stage:
        token = trace.set("the actor's")
        way = await thread_actor(stage, Threads())
        trace.reset(token)
        assert [await call for call in [way.start("sets", str(n)) for n in range(5)]] == ["the actor's"] * 5


@pytest.mark.parametrize(("cls", "n"), [(Loop, 3), (Threads, 200)])
async def test_a_generator_keeps_its_context_from_item_to_item(cls: Any, n: int) -> None:
    async with open_stage() as stage:
        way = await thread_actor(stage, cls())
        for _ in range(2):
            async with way.route.stream("items", ("mine",)) as items:
                assert [item async for item in items] == ["none"] + ["mine"] * (n - 1)


# What is counted -----------------------------------------------------------------------------------------------------


async def test_an_actor_counts_its_calls(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        desk = Desk()
        clock = trio.current_time
        host = await stage.host("h1", clock=clock)
        number = host.register(desk, "a", max_concurrency=1, concurrency_groups={"io": 1})
        way = stage.way(stage.caller.route_to(stage.endpoint(host, number)))
        first, second = way.start("work", 1), way.start("work", 2)
        with pytest.raises(fray.NoSuchMethod):
            await way.call("nothing")
        with pytest.raises(TypeError):
            await way.call("fetch")
        seen = await way.route.metrics()
        assert (seen.running, seen.queued, seen.calls, seen.errors) == (1, 1, 2, 2)
        await trio.sleep(3)
        desk.gate.set()
        await first
        await second
        seen = await way.route.metrics()
        assert (seen.running, seen.queued, seen.calls, seen.errors, seen.cancelled) == (0, 0, 4, 2, 0)
        assert seen.latency_s(1.0) == 4.0, "three seconds are below the power of two above"
        assert seen.latency_s(0.1) < 0.001


async def test_cancelled_calls_are_counted_apart(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way = await stage.actor(Desk(), max_concurrency=1, concurrency_groups={"io": 1})
        for call in (way.start("work", 1), way.start("work", 2)):
            await trio.testing.wait_all_tasks_blocked()
            call.cancel()
        await trio.testing.wait_all_tasks_blocked()
        seen = await way.route.metrics()
        assert (seen.calls, seen.errors, seen.cancelled, seen.running, seen.queued) == (2, 0, 2, 0, 0)


async def test_a_busy_thread_does_not_block_requests_for_its_counters() -> None:
    async with open_stage() as stage:
        hands = Hands()
        way = await thread_actor(stage, hands, concurrency_groups={"io": 1})
        held = [way.start("hold"), way.start("hold")]
        await way.call("thread")
        await trio.to_thread.run_sync(hands.began.wait, 10)
        seen = await way.route.metrics()
        assert (seen.running, seen.queued, seen.calls) == (1, 1, 1)
        hands.release.set()
        for call in held:
            await call


async def test_metrics_of_returns_the_counters_of_a_handle(autojump_clock: Any) -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        config = fray.ActorConfig(concurrency_groups={"io": 1})
        desk = await scope.create_actor(Desk, actor_config=config)
        await desk.note("x")
        assert (await fray.metrics_of(desk)).calls == 1


async def test_the_counters_of_a_pool_are_those_of_each_member(autojump_clock: Any) -> None:
    async with fray.open_cluster("local") as cluster, fray.ActorServer(cluster) as server:
        await server.register("desk", Desk(), max_concurrency=2, concurrency_groups={"io": 1})
        pool = fray.ClusterResolver(cluster).lookup("desk")
        await pool.wait_for_size(1)
        await pool.call().note("x")
        assert [(await fray.metrics_of(endpoint)).calls for endpoint in pool.endpoints] == [1]
        with pytest.raises(InvalidRequest, match="known groups: none"):
            await server.register("other", Desk())
