"""Groups, monitors and links: in a local cluster on a virtual clock, some also over processes."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import ActorConfig, ActorStatus
from tests.support import current_actors


@pytest.fixture
async def cluster() -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(1_000):
        async with fray.open_cluster("local", logs=False) as cluster:
            yield cluster


@pytest.fixture(params=["local", "machine?nodes=2&cpu=4"])
async def any_cluster(request: pytest.FixtureRequest) -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(30):
        async with fray.open_cluster(request.param, logs=False) as cluster:
            yield cluster


class Member(current_actors.Knowing):
    """The first ``slow`` members take long to be made; those from ``bad`` on never are."""

    def __init__(self, gate: Any = None, bad: int = 1_000) -> None:
        super().__init__()
        if fray.current_actor().index >= bad:
            raise LookupError("no luck")

    async def twice(self, k: int) -> int:
        return 2 * k + fray.current_actor().index


# Groups --------------------------------------------------------------------------------------------------------------


async def test_the_members_of_a_group_know_their_place(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Member, count=3, name="team")
        ready = await group.wait_ready()
        assert ready == group.handles == list(group)
        facts = [await handle.now() for handle in ready]
        assert [(each["name"], each["group"], each["index"]) for each in facts] == [
            (f"team-{index}", "team", index) for index in range(3)
        ]
        assert [await call for call in [handle.twice.start(10) for handle in group]] == [20, 21, 22]
        assert group.statuses() == [ActorStatus.READY] * 3
        assert (group.ready_count, group.is_done(), len(group)) == (3, True, 3)
        assert await any_cluster.get_actor("team-1") == group[1]


async def test_handles_can_be_used_before_the_members_are_ready(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Member, count=4)
        assert [await handle.twice(1) for handle in group] == [2, 3, 4, 5]


async def test_members_are_discovered_once(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Member, count=3)
        assert group.discover_new() == []
        assert await group.wait_ready() == group.handles
        assert group.discover_new() == []
        again = pickle.loads(pickle.dumps(group))
        await again.wait_ready(0)
        await again.wait_ready(1)
        new = again.discover_new()
        assert again.discover_new() == []
        assert set(new) <= set(group)


async def test_wait_ready_with_a_count_waits_for_a_part_of_the_group(
    cluster: fray.Cluster, autojump_clock: Any
) -> None:
    async with cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Member, bad=2, count=4, on_failure="absorb")
        assert await group.wait_ready(2) == group.handles[:2]
        with pytest.raises(fray.GroupFailed, match=r"can never have 3 members ready: .* of 4 have ended") as never:
            await group.wait_ready(3)
        assert isinstance(never.value, RuntimeError)
        assert isinstance(never.value.__cause__, LookupError)
        with pytest.raises(fray.GroupFailed):
            await group.wait_ready()
        assert group.is_done()
        assert group.statuses() == [ActorStatus.READY] * 2 + [ActorStatus.FAILED] * 2
        with pytest.raises(LookupError, match="no luck"):
            await group[3].now()


async def test_waiting_for_a_group_that_is_late_ends_as_a_timeout(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        huge = fray.ResourceConfig(cpu=3, memory="1MB")
        group = await scope.create_actor_group(Member, count=20, resources=huge)
        with pytest.raises(TimeoutError, match=r"of 20 members of group 'Member-.*' are ready after 7 s"):
            await group.wait_ready(timeout=7)
        assert not group.is_done()
        await group.shutdown()


@pytest.mark.parametrize("count", [0, -1, 10_001, 1.5])
async def test_an_impossible_count_is_refused_before_the_launch(
    count: Any, cluster: fray.Cluster, autojump_clock: Any
) -> None:
    async with cluster.open_scope("run") as scope:
        with pytest.raises(fray.InvalidRequest, match="must be a whole number from 1 to 10,000"):
            await scope.create_actor_group(Member, count=count)
        group = await scope.create_actor_group(Member, count=1)
        with pytest.raises(fray.InvalidRequest, match="has 1 members"):
            await group.wait_ready(2)


async def test_a_group_is_created_all_or_none(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        await scope.create_actor(current_actors.Knowing, name="team-1")
        with pytest.raises(fray.NameInUse):
            await scope.create_actor_group(Member, count=3, name="team")
        assert [info.name for info in await cluster.list_actors("team")] == ["team-1"]


async def test_a_group_that_is_shut_down_finishes_its_calls_and_may_be_shut_down_again(
    any_cluster: fray.Cluster, tmp_path: Path
) -> None:
    async with any_cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(current_actors.Knowing, str(tmp_path / "journal"), count=2, name="team")
        await group.wait_ready()
        waiting = group[0].wait_shutdown.start()
        hanging = group[1].hang.start()
        for handle in group:
            await handle.now()
        await group.shutdown(grace_s=1)
        assert await waiting == "shutdown"
        with pytest.raises(fray.ActorDied):
            await hanging
        with pytest.raises(fray.ActorDied, match="shut down"):
            await group[0].now()
        assert group.statuses() == [ActorStatus.ENDED] * 2
        assert sorted(current_actors.lines(tmp_path / "journal")) == ["cleaned team-0", "cleaned team-1"]
        await group.shutdown()


async def tell(group: fray.ActorGroup) -> list[int]:
    ready = await group.wait_ready()
    return [(await handle.now())["index"] for handle in ready]


async def test_an_unpickled_group_works(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Member, count=3)
        assert await scope.run(tell, group) == [0, 1, 2]


# Monitors ------------------------------------------------------------------------------------------------------------


async def test_a_monitor_reports_every_loss_and_restart(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.Knowing, max_restarts=1, on_failure="absorb")
        watch = fray.monitor(knowing)
        up = await watch.__anext__()
        assert isinstance(up, fray.Up)
        assert up.incarnation == (await knowing.now())["incarnation"]
        knowing.fail.start("first")
        down = await watch.__anext__()
        assert isinstance(down, fray.Down)
        assert (down.actor, down.incarnation, down.will_restart) == (knowing, up.incarnation, True)
        again = await watch.__anext__()
        assert isinstance(again, fray.Up)
        assert again.incarnation != up.incarnation
        knowing.fail.start("second")
        last = [event async for event in watch]
        assert last[-1] == await watch
        assert (last[-1].incarnation, last[-1].will_restart) in {(again.incarnation, False), ("", False)}
        assert isinstance(last[-1].error.__cause__, fray.ActorFailed)


async def test_a_monitor_of_an_ended_actor_reports_it_at_once(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.Knowing)
        await knowing.leave()
        assert not (await fray.monitor(knowing)).will_restart
        late = fray.monitor(knowing)
        (only,) = [event async for event in late]
        assert isinstance(only, fray.Down)
        assert "shut itself down" in str(only.error)


async def test_closing_a_monitor_ends_its_readers(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.Knowing)
        async with fray.monitor(knowing) as watch:
            assert isinstance(await watch.__anext__(), fray.Up)
        assert [event async for event in watch] == []
        with pytest.raises(fray.FrayError, match="closed"):
            await watch


async def test_a_monitor_needs_a_handle(cluster: fray.Cluster, autojump_clock: Any) -> None:
    with pytest.raises(fray.InvalidRequest, match="need the handle of an actor, not 'counter'"):
        fray.monitor("counter")  # type: ignore[arg-type]


# Links ---------------------------------------------------------------------------------------------------------------


class Linked(current_actors.Knowing):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    async def tie(self, other: fray.ActorHandle, trap: bool = False) -> None:
        def on_down(down: fray.Down) -> None:
            self.heard.append(str(down.error))

        self.link = fray.link(other, on_down=on_down if trap else None)

    def untie(self) -> None:
        self.link.unlink()

    def trapped(self) -> list[str]:
        return self.heard


async def test_an_actor_ends_with_the_actor_to_which_it_is_linked(any_cluster: fray.Cluster) -> None:
    async with any_cluster.open_scope("run") as scope:
        a, b, c = [await scope.create_actor(Linked, name=name, on_failure="absorb") for name in "abc"]
        await a.tie(b)
        await b.tie(a)
        await c.tie(b)
        hanging = c.hang.start()
        a.fail.start("the first")
        with pytest.raises(fray.LinkedActorDied, match="actor c ends because it is linked to b") as caught:
            await hanging
        assert "because it is linked to a" in str(caught.value)
        assert not (await fray.monitor(b)).will_restart


async def test_a_restart_of_the_other_breaks_no_link(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        a = await scope.create_actor(Linked)
        b = await scope.create_actor(Linked, max_restarts=1)
        await a.tie(b)
        b.fail.start("once")
        await b.now()
        await trio.sleep(10)
        assert (await a.now())["method"] == "now"


async def test_on_down_is_called_in_place_of_ending_the_linked_actor(
    cluster: fray.Cluster, autojump_clock: Any
) -> None:
    async with cluster.open_scope("run") as scope:
        a, b, c = [await scope.create_actor(Linked, on_failure="absorb") for _ in range(3)]
        await a.tie(b, trap=True)
        await c.tie(b)
        await c.untie()
        await b.leave()
        await fray.monitor(b)
        await trio.sleep(1)
        (heard,) = await a.trapped()
        assert "shut itself down" in heard
        await c.now()


async def test_links_to_itself_and_from_outside_of_actors_are_refused(
    cluster: fray.Cluster, autojump_clock: Any
) -> None:
    async with cluster.open_scope("run") as scope:
        a = await scope.create_actor(Linked)
        with pytest.raises(fray.InvalidRequest, match="cannot be linked to itself"):
            await a.tie(a)
        with pytest.raises(fray.FrayError, match="belongs to none"):
            fray.link(a)


async def test_a_member_that_ended_idle_counts_as_ended(cluster: fray.Cluster, autojump_clock: Any) -> None:
    async with cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Member, count=2, actor_config=ActorConfig(idle_s=5))
        await group.wait_ready()
        for _ in range(3):
            await trio.sleep(4)
            await group[0].now()
        assert group.statuses() == [ActorStatus.READY, ActorStatus.ENDED]


async def test_members_that_have_ended_are_not_watched(any_cluster: fray.Cluster) -> None:
    link = any_cluster._runtime.client
    before = len(link.names.watched)
    async with any_cluster.open_scope("run") as scope:
        group = await scope.create_actor_group(Member, count=2, name="brief")
        for handle in await group.wait_ready():
            assert await handle.twice(2) >= 4
        await group.shutdown()
    with trio.fail_after(10):
        while len(link.names.watched) > before:  # noqa: ASYNC110 - news of the controller's
            await trio.sleep(0.01)
    assert group.is_done()
