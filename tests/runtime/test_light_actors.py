"""Light actors: many in one process, each for itself; on a virtual clock, and where noted in processes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import ActorConfig, ActorStatus
from fray.api.actors.host import BATCHES_KEPT
from fray.model.restart_policy import RestartCounter
from fray.runtime.actors.light import LightActorHost
from fray.runtime.actors.server import host_of
from fray.runtime.calls.range_set import ENDS_KEPT, RangeSet
from fray.runtime.runtime import current
from tests.support import current_actors

ONE_NODE = "machine?nodes=1&cpu=4"


@pytest.fixture
async def cluster() -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(10_000):
        async with fray.open_cluster("local", logs=False) as cluster:
            yield cluster


@pytest.fixture(params=["local", ONE_NODE])
async def any_cluster(request: pytest.FixtureRequest) -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(40):
        async with fray.open_cluster(request.param, logs=False) as cluster:
            yield cluster


class Light(current_actors.Knowing):
    def __init__(self, start: int = 0, journal: str | None = None) -> None:
        super().__init__(journal)
        self.n = start

    async def add(self, k: int = 1) -> int:
        self.n += k
        return self.n

    def pid(self) -> int:
        return os.getpid()

    async def meet(self, other: fray.ActorHandle) -> int:
        return int(await other.add(100))


class SyncLight(current_actors.SyncKnowing):
    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.n = start

    def add(self, k: int = 1) -> int:
        self.n += k
        return self.n


class Refusing:
    def __init__(self, word: str) -> None:
        raise LookupError(word)

    async def add(self) -> None: ...


@pytest.mark.parametrize("cls", [Light, SyncLight])
async def test_light_actors_are_called_like_others_and_share_a_process(cls: type, any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        host = await scope.create_host("crowd")
        group = await host.create_actors(cls, 10, count=50, name="light")
        assert [await call for call in [handle.add.start(1) for handle in group]] == [11] * 50
        assert await group[3].add(1) == 12
        assert await group.wait_ready() == group.handles
        facts = await group[7].now()
        assert (facts["name"], facts["group"], facts["index"], facts["handle"]) == ("light-7", "light", 7, group[7])
        assert facts["incarnation"].startswith("crowd-")
        born = await group[7].born()
        assert (born["name"], born["index"], born["method"]) == ("light-7", 7, None)
        calls = [group[9].add.start(1) for _ in range(100)]
        assert [await call for call in calls] == list(range(12, 112))


async def test_a_light_actor_keeps_streams_errors_and_calls_to_others(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        host = await scope.create_host()
        a, b = await host.create_actor(Light, 1), await host.create_actor(Light, start=2)
        assert await a.meet(b) == 102
        async with a.each.stream() as items:
            assert [item["handle"] async for item in items] == [a]
        with pytest.raises(fray.NoSuchMethod, match="did you mean add"):
            a.ad  # noqa: B018
        with pytest.raises(TypeError):
            await a.add(1, 2, 3)


async def test_a_light_actor_can_be_called_before_it_and_its_host_are_there(
    cluster: fray.Cluster, autojump_clock: Any
) -> None:
    async with cluster.open_scope("run") as scope:
        host = await scope.create_host()
        light = await host.create_actor(Light, 5)
        assert await light.add() == 6


async def test_a_constructor_that_raises_fails_the_first_call_and_the_scope(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        host = await scope.create_host(on_failure="absorb")
        bad, good = await host.create_actor(Refusing, "no luck"), await host.create_actor(Light)
        errors = []
        for _ in range(2):
            with pytest.raises(LookupError, match="no luck") as caught:
                await bad.add()
            errors.append(caught.value)
        assert errors[0] is not errors[1]
        assert any("raised by the constructor of actor" in note for note in errors[1].__notes__)
        assert await good.add() == 1
        group = await host.create_actors(Refusing, "again", count=2)
        with pytest.raises(fray.GroupFailed, match="number 0: its constructor raised"):
            await group.wait_ready()
        assert group.statuses() == [ActorStatus.FAILED] * 2
    with pytest.raises(ExceptionGroup) as escalated:
        async with cluster.open_scope("run") as scope:
            await (await scope.create_host()).create_actor(Refusing, "no luck")
            await trio.sleep_forever()
    assert escalated.group_contains(LookupError, match="no luck")


async def test_each_light_actor_fails_and_restarts_by_itself(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        host = await scope.create_host(on_failure="absorb")
        config = ActorConfig(max_restarts=1)
        a, b = [await host.create_actor(Light, 10, actor_config=config) for _ in range(2)]
        assert [await a.add(), await b.add()] == [11, 11]
        hanging = a.hang.start()
        await a.add()
        a.fail.start("first")
        with pytest.raises(fray.ActorFailed, match="first"):
            await hanging
        assert [await a.add(), await b.add()] == [11, 12]
        a.fail.start("second")
        with pytest.raises(fray.ActorDied, match=r"it has failed .ActorFailed: second"):
            while True:
                await a.add()
        down = await fray.monitor(a)
        assert isinstance(down.error.__cause__, fray.ActorFailed)
        assert await b.add() == 13


async def test_a_repeatable_call_goes_on_in_the_next_incarnation_of_a_light_actor(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        host = await scope.create_host(on_failure="absorb")
        actor = await host.create_actor(Light, actor_config=ActorConfig(max_restarts=1))
        call = actor.hang.options(idempotent=True).start()
        await actor.add()
        actor.fail.start("first")
        assert await actor.add() == 1
        assert not call.done()
        actor.fail.start("second")
        with pytest.raises(fray.ActorDied, match=r"it has failed .ActorFailed: second"):
            await call


async def test_calls_wait_out_the_back_off_of_a_restart(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        host = await scope.create_host()
        config = ActorConfig(max_restarts=-1, backoff_s=20, backoff_max_s=100)
        light = await host.create_actor(Light, actor_config=config)
        for wait_s in (20, 40, 80):
            light.fail.start("again")
            await trio.sleep(1)
            began = trio.current_time()
            assert await light.add() == 1
            assert wait_s - 2 <= trio.current_time() - began <= wait_s


async def test_a_light_actor_ends_itself_cleans_up_and_is_not_missed(any_cluster: fray.Cluster, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with any_cluster.open_scope("run") as scope:
        host = await scope.create_host()
        a, b = await host.create_actors(Light, 0, str(journal), count=2, name="light")
        waiting = a.wait_shutdown.start()
        assert await a.leave() == "left"
        assert await waiting == "shutdown"
        with pytest.raises(fray.ActorDied, match="shut itself down"):
            await a.add()
        assert await b.add() == 1
        await fray.monitor(a)
        assert current_actors.lines(journal) == ["cleaned light-0"]
    assert current_actors.lines(journal) == ["cleaned light-0", "cleaned light-1"]


async def test_an_idle_light_actor_ends(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        host = await scope.create_host()
        idle = await host.create_actor(Light, actor_config=ActorConfig(idle_s=10))
        await idle.add()
        await trio.sleep(10.1)
        with pytest.raises(fray.ActorDied, match="after 10 s without a call"):
            await idle.add()


async def test_a_light_actor_may_have_a_name_of_its_own(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        host = await scope.create_host(max_restarts=1)
        light = await host.create_actor(Light, 1, name="bright")
        with pytest.raises(fray.NameInUse):
            await host.create_actor(Light, name="bright")
        with pytest.raises(fray.NameInUse, match="'bright' is taken"):
            await scope.create_actor(Light, name="bright")
        assert await scope.create_actor(Light, name="bright", get_if_exists=True) == light
        found = await any_cluster.get_actor("bright")
        assert found == light
        assert await found.add() == 2
        await light.leave()
        await fray.monitor(light)
        again = await host.create_actor(Light, 5, name="bright")
        assert await again.add() == 6


async def tell(group: fray.ActorGroup) -> list[int]:
    ready = await group.wait_ready()
    return [await handle.add(2) for handle in ready]


async def test_a_light_group_has_a_host_of_its_own_and_travels(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Light, 1, count=5, name="team", light=True)
        assert len({await handle.pid() for handle in group}) == 1
        assert await scope.run(tell, group) == [3] * 5
        hanging = group[2].hang.start()
        await group[2].add()
        await group.shutdown(grace_s=0.2)
        with pytest.raises(fray.ActorDied):
            await hanging
        assert group.statuses() == [ActorStatus.ENDED] * 5
        with pytest.raises(fray.ActorDied, match="its group 'team' was shut down"):
            await group[0].add()


async def test_an_unknown_number_is_refused_after_a_while(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        host = await scope.create_host()
        light = await host.create_actor(Light)
        await light.add()
        runtime = cluster._runtime
        home = light._actor_id.partition("~")[0]
        unknown = fray.ActorHandle(f"{home}~{(1 << 20) + 77}", "unknown", None, runtime)
        began = trio.current_time()
        with pytest.raises(fray.NoSuchActor):
            await unknown.add()
        assert 9 < trio.current_time() - began < 11


@pytest.mark.parametrize(
    ("what", "message"),
    [({"cls": 3}, "needs a class"), ({"count": 0}, "must be a whole number"), ({"name": "a b"}, "a-b")],
)
async def test_an_invalid_light_actor_is_refused_before_it_is_sent(
    what: dict[str, Any], message: str, cluster: fray.Cluster, autojump_clock: Any
) -> None:
    async with cluster.open_scope("run") as scope:
        host = await scope.create_host()
        with pytest.raises(fray.InvalidRequest, match=message):
            await host.create_actors(**{"cls": Light, "count": 1, **what})


async def test_a_sync_light_actor_that_blocks_holds_up_no_other(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        host = await scope.create_host()
        group = await host.create_actors(SyncLight, count=20)
        blocked = [handle.sleep.start(60) for handle in group.handles[:10]]
        with trio.fail_after(20):
            assert [await handle.add() for handle in group.handles[10:]] == [1] * 10
        assert not any(call.done() for call in blocked)  # the end of the scope sets their shutdown event


async def test_a_host_that_was_killed_comes_back_with_all_its_actors() -> None:
    with trio.fail_after(40):
        async with (
            fray.open_cluster(ONE_NODE, logs=False) as cluster,
            cluster.open_scope("run") as scope,
        ):
            host = await scope.create_host(max_restarts=1, on_failure="absorb")
            group = await host.create_actors(Light, 10, count=100)
            named = await host.create_actor(Light, 50, name="named")
            await group[0].leave()
            await fray.monitor(group[0])
            assert [await handle.add() for handle in group.handles[1:]] == [11] * 99
            hanging = group[5].hang.start()
            pid = await group[5].pid()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(fray.OutcomeUnknown):
                await hanging
            assert [await handle.add() for handle in group.handles[1:]] == [11] * 99
            assert await named.add() == 51
            assert await (await cluster.get_actor("named")).add() == 52
            with pytest.raises(fray.ActorDied, match="the reason is no longer stored"):
                await group[0].add()
            os.kill(await group[5].pid(), signal.SIGKILL)
            down = await fray.monitor(group[5])
            assert not down.will_restart
            with pytest.raises(fray.ActorDied):
                await group[7].add()
            with pytest.raises(fray.ActorDied, match="has ended"):
                await host.create_actor(Light)


async def test_a_thousand_light_actors_are_ordinary() -> None:
    with trio.fail_after(40):
        async with (
            fray.open_cluster(ONE_NODE, logs=False) as cluster,
            cluster.open_scope("run") as scope,
        ):
            host = await scope.create_host()
            for cls in (Light, SyncLight):
                group = await host.create_actors(cls, 1, count=1_000)
                assert [await call for call in [handle.add.start() for handle in group]] == [2] * 1_000


def test_restarts_are_counted_within_their_period_and_wait_longer_each_time() -> None:
    account = RestartCounter(ActorConfig(max_restarts=2, restart_period_s=10, backoff_s=1, backoff_max_s=3))
    assert [account.on_failure(now, 0.1) for now in (0.0, 1.0, 2.0)] == [1, 2, None]
    assert account.on_failure(11.5, 0.1) == 3
    assert account.on_failure(30.0, lived_s=15.0) == 1
    endless = RestartCounter(ActorConfig(max_restarts=-1))
    assert [endless.on_failure(0.0, 0.0) for _ in range(50)] == [0.0] * 50
    assert RestartCounter(ActorConfig()).on_failure(0.0, 0.0) is None


class Fleeting:
    async def leave(self) -> None:
        fray.current_actor().shutdown()

    async def tables(self) -> list[int]:
        """Sizes of the tables of this actor's `LightActorHost`."""
        host = host_of(current())
        (light,) = (actor.instance for actor in host.actors.values() if isinstance(actor.instance, LightActorHost))
        return [len(light._events), len(light._actors), len(host.pending.end_errors), len(host.pending.ended.ranges)]


async def test_light_actors_that_come_and_go_leave_nothing_but_that_they_did(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        host = await scope.create_host()
        first = await host.create_actor(Fleeting)
        await first.leave()
        for _ in range(50):
            group = await host.create_actors(Fleeting, count=100)
            for left in [handle.leave.start() for handle in group]:
                await left
        witness = await host.create_actor(Fleeting)
        assert max(await witness.tables()) <= 2 * ENDS_KEPT + 200
        assert (await witness.tables())[3] < 10
        assert len(host._handles) <= 200
        assert len(host._batches) <= 2 * BATCHES_KEPT
        with pytest.raises(fray.ActorDied, match="the reason is no longer stored"):
            await first.leave()
        assert not (await fray.monitor(first)).will_restart


def test_numbers_that_follow_one_another_are_one_range() -> None:
    numbers = RangeSet()
    for number in (5, 3, 9, 4, 4, 8):
        numbers.add(number)
    assert numbers.ranges == ((3, 5), (8, 9))
    numbers.update([(6, 6), (20, 30)])
    assert [number for number in range(40) if number in numbers] == [3, 4, 5, 6, 8, 9, *range(20, 31)]
    numbers.update([(1, 25), (7, 7)])
    assert numbers.ranges == ((1, 30),)
