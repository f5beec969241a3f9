"""ActorPool: the choice of the member of a call, and calls whose member is lost."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import fray
from fray.api.pools.actor_pool import ActorPool, AddressSource, RegistrySource
from fray.errors import ActorDied, DeadlineExceeded, InvalidRequest, NoSuchActor, OutcomeUnknown
from fray.runtime.runtime import Runtime
from tests.support import job_functions
from tests.support.calls import Stage, open_stage


class Member:
    """Says who it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen = 0

    async def who(self) -> str:
        self.seen += 1
        return self.name

    async def nap(self, seconds: float) -> str:
        self.seen += 1
        await trio.sleep(seconds)
        return self.name

    async def fail_on(self, name: str) -> str:
        if self.name == name:
            raise ValueError(f"not me, {name}")
        return self.name

    async def letters(self) -> Any:
        for letter in self.name:
            yield letter


class PoolFixture:
    """Pool whose members the test adds and removes."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.endpoints: dict[str, Any] = {}
        self.members: dict[str, Member] = {}
        self.runtime = cast(
            Runtime,
            SimpleNamespace(
                caller=stage.caller,
                client=SimpleNamespace(names=stage.directory),
                rng=stage.rng,
                nursery=stage.nursery,
            ),
        )
        self.pool = ActorPool("m", RegistrySource("ns"), self.runtime)

    async def join(self, *names: str) -> None:
        for name in names:
            self.members[name] = member = Member(name)
            host = await self.stage.host(name)
            self.endpoints[name] = self.stage.endpoint(host, host.register(member, "m", actor_id=name), name)
        self.tell()

    def tell(self, *without: str) -> None:
        for name in without:
            del self.endpoints[name]
        self.stage.directory.say("name:ns/m", *self.endpoints.values())


async def test_calls_go_round_robin_in_every_kind_of_call(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        await fixture.join("ab", "cd")
        pool = fixture.pool
        assert [await pool.call().who() for _ in range(4)] == ["ab", "cd", "ab", "cd"]
        assert [await pool.call().who.start() for _ in range(2)] == ["ab", "cd"]
        async with pool.call().letters.stream() as letters:
            assert [letter async for letter in letters] == ["a", "b"]
        with pytest.raises(DeadlineExceeded):
            await pool.call().nap.options(timeout_s=1)(10)
        with pytest.raises(AttributeError, match="underscore"):
            pool.call()._secret  # noqa: B018
        assert repr(pool.call()) == "<member of <ActorPool 'm' of 2>>"


async def test_the_least_loaded_member_gets_the_call(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        await fixture.join("a", "b", "c")
        pool = fixture.pool
        slow = [pool.call("least_loaded").nap.start(5) for _ in range(2)]
        assert [await pool.call("least_loaded").who() for _ in range(3)] == ["c", "c", "c"]
        assert sorted([await call for call in slow]) == ["a", "b"]
        assert sorted([await pool.call("least_loaded").who() for _ in range(3)]) == ["a", "b", "c"]
        napping = pool.call().nap.start(5)
        drawn = [pool.call("power_of_two").nap.start(1) for _ in range(8)]
        assert {await call for call in drawn} == {"a", "b", "c"}
        await napping
        with pytest.raises(InvalidRequest, match="least_loaded"):
            pool.call("random")  # type: ignore[arg-type]


async def test_a_broadcast_gives_each_members_result_or_exception(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        assert await fixture.pool.broadcast().who.gather() == []
        await fixture.join("a", "b", "c")
        pool = fixture.pool
        assert [await future for future in pool.broadcast().who()] == ["a", "b", "c"]
        one, two, three = await pool.broadcast().fail_on.gather("b")
        assert (one, type(two), three) == ("a", ValueError, "c")
        answers = await pool.broadcast().options(timeout_s=1).nap.gather(2)
        assert [type(answer) for answer in answers] == [DeadlineExceeded] * 3


async def test_a_member_that_dies_is_left_out_before_the_registry_reports_it(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        await fixture.join("a", "b")
        pool, sizes = fixture.pool, []
        stop = pool.on_size(sizes.append)
        delivered = pool.call().nap.start(5)
        await wait_all_tasks_blocked()
        stage.kill("a")
        with pytest.raises(OutcomeUnknown):
            await delivered
        assert pool.size == 1
        assert [endpoint.actor_id for endpoint in pool.endpoints] == ["b"]
        assert [await pool.call().who() for _ in range(3)] == ["b", "b", "b"]
        stop()
        await fixture.join("c")
        assert sizes == [1]
        assert {await pool.call().who() for _ in range(3)} == {"b", "c"}


async def test_a_call_that_was_not_delivered_goes_to_another_member(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        await fixture.join("a", "b")
        stage.kill("a")  # not reported yet
        assert [await call for call in [fixture.pool.call().who.start() for _ in range(4)]] == ["b"] * 4
        async with fixture.pool.call().letters.stream() as letters:
            assert [letter async for letter in letters] == ["b"]
        assert fixture.members["b"].seen == 4


async def test_a_call_that_may_be_repeated_goes_to_another_member_though_it_was_delivered(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        await fixture.join("a", "b")
        call = fixture.pool.call().nap.options(idempotent=True).start(5)
        await wait_all_tasks_blocked()
        stage.kill("a")
        assert await call == "b"
        assert (fixture.members["a"].seen, fixture.members["b"].seen) == (1, 1)


async def test_calls_of_an_unregistered_actor_go_to_another_member(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        await fixture.join("a", "b")
        stage.hosts["a"].unregister(fixture.endpoints["a"].number)
        assert [await fixture.pool.call().who() for _ in range(3)] == ["b", "b", "b"]
        stage.hosts["b"].unregister(fixture.endpoints["b"].number)
        with pytest.raises((NoSuchActor, ActorDied)):
            await fixture.pool.call().who()


async def test_an_empty_pool_waits_a_moment_for_a_member(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        with pytest.raises(NoSuchActor, match="wait_for_size"):
            fixture.pool.call().who.start()
        began = trio.current_time()
        with pytest.raises(NoSuchActor):
            await fixture.pool.call().who()
        assert trio.current_time() - began == 5

        async def join_later() -> None:
            await trio.sleep(2)
            await fixture.join("a")

        stage.nursery.start_soon(join_later)
        assert await fixture.pool.call().who() == "a"


async def test_a_call_to_a_pool_whose_only_member_restarts_finds_the_new_one(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture = PoolFixture(stage)
        await fixture.join("a")
        assert await fixture.pool.call().who() == "a"
        stage.kill("a")
        await wait_all_tasks_blocked()

        async def come_back() -> None:
            await trio.sleep(3)
            await fixture.join("a2")

        stage.nursery.start_soon(come_back)
        assert await fixture.pool.call().who() == "a2"


async def test_sizes_are_yielded_as_they_change(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        fixture, seen = PoolFixture(stage), []

        async def watch() -> None:
            async for size in fixture.pool.sizes():
                seen.append(size)  # noqa: PERF401 - looked at from outside meanwhile

        stage.nursery.start_soon(watch)
        await wait_all_tasks_blocked()
        await fixture.join("a")
        await wait_all_tasks_blocked()
        await fixture.join("b", "c")
        await wait_all_tasks_blocked()
        fixture.tell("a", "b")
        await wait_all_tasks_blocked()
        assert seen == [0, 1, 3, 1]
        with pytest.raises(DeadlineExceeded, match="1 of 2"):
            await fixture.pool.wait_for_size(2, timeout=3)
        fixture.pool.close()
        await fixture.join("d")
        assert fixture.pool.size == 1


def test_a_pool_is_pickled_as_its_name_and_source() -> None:
    for source in (RegistrySource("ns"), AddressSource(("localhost:1",), "key")):
        arrived = pickle.loads(pickle.dumps(ActorPool("m", source)))
        assert (arrived.name, arrived._source) == ("m", source)


# Over a cluster ------------------------------------------------------------------------------------------------------


async def ask(pool: ActorPool, k: int) -> int:
    await pool.wait_for_size(1)
    return int(await pool.call().add(k))


async def test_a_pool_unpickled_in_a_job_follows_the_same_name() -> None:
    with trio.fail_after(15):
        async with (
            fray.open_cluster("local", logs=False) as cluster,
            cluster.open_scope("run") as scope,
            fray.ActorServer(cluster) as server,
        ):
            await server.register("shared", job_functions.Counter(5))
            pool = fray.ClusterResolver(cluster).lookup("shared")
            assert await scope.run(ask, pool, 2) == 7
            fixed = fray.FixedResolver({"shared": server.address}, token=server.token).lookup("shared")
            assert await scope.run(ask, fixed, 2) == 9


async def test_an_actor_at_a_fixed_address_is_found_again() -> None:
    with trio.fail_after(15):
        async with fray.open_cluster("local", logs=False) as cluster, fray.ActorServer(cluster) as server:
            await server.register("mine", job_functions.Counter(1))
            pool = fray.FixedResolver({"mine": server.address}, token=server.token).lookup("mine")
            assert await pool.call().add(0) == 1
            await server.unregister("mine")
            with pytest.raises(fray.FrayError):
                await pool.call().add.options(timeout_s=0.2)(0)
            await server.register("mine", job_functions.Counter(2))
            await pool.wait_for_size(1, timeout=10)
            assert await pool.call().add(0) == 2
