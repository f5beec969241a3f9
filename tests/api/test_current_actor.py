"""`current_actor` in actors of this process and of other processes, and how actors end themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

import fray
from fray import ActorConfig
from tests.support import current_actors


@pytest.fixture(params=["local", "machine?nodes=1&cpu=4"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(20):
        async with fray.open_cluster(request.param, logs=False) as cluster:
            yield cluster


async def test_current_actor_works_in_constructor_methods_generators_tasks_and_threads(
    cluster: fray.Cluster,
) -> None:
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.Knowing, name="knowing")
        born = await knowing.born()
        assert (born["handle"], born["name"], born["method"]) == (knowing, "knowing", None)
        assert (born["index"], born["group"], born["deadline"], born["cancelled"]) == (0, "", False, False)
        assert born["incarnation"].startswith(born["id"])
        async with knowing.each.stream() as items:
            seen = [item async for item in items]
        for method in ("now", "later", "in_thread", "in_task"):
            seen.append(await getattr(knowing, method).options(timeout_s=5)())
            assert seen[-1]["method"] == method
            assert seen[-1]["deadline"]
        for each in seen:
            assert {key: each[key] for key in ("handle", "id", "name", "incarnation")} == {
                key: born[key] for key in ("handle", "id", "name", "incarnation")
            }


async def test_all_code_of_a_sync_actor_runs_on_one_thread(cluster: fray.Cluster, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.SyncKnowing, str(journal), name="knowing")
        born, now = await knowing.born(), await knowing.now()
        assert born["handle"] == now["handle"] == knowing
        assert (born["method"], now["method"]) == (None, "now")
        assert await knowing.threads()
    assert current_actors.lines(journal) == ["cleaned knowing on the same thread"]


async def test_an_async_method_with_a_ctx_parameter_receives_the_native_actor_context(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        user = await scope.create_actor(current_actors.ContextUser, name="user")
        other = await scope.create_actor(current_actors.ContextUser, name="other")
        module, job_id, namespace, pid = await user.lookup("other")
        assert (module, namespace) == ("fray.api.actor_context", cluster.namespace)
        assert pid == await other.pid()
        assert job_id == (await cluster.get_job("user")).id
        assert await user.same()


async def test_current_actor_raises_outside_of_actors(cluster: fray.Cluster) -> None:
    with pytest.raises(fray.FrayError, match="belongs to none"):
        fray.current_actor()


async def test_others_can_call_the_handle_of_the_current_actor(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.Knowing)
        itself = (await knowing.now())["handle"]
        assert (await itself.now())["handle"] == knowing
        with pytest.raises(fray.NoSuchMethod, match="did you mean now"):
            itself.nov  # noqa: B018


@pytest.mark.parametrize("cls", [current_actors.Knowing, current_actors.SyncKnowing])
async def test_an_actor_that_shuts_itself_down_ends_in_order_and_for_good(
    cls: type, cluster: fray.Cluster, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(cls, str(journal), name="knowing", max_restarts=5)
        assert await knowing.leave() == "left"
        with pytest.raises(fray.ActorDied, match="shut itself down") as late:
            await knowing.born()
        assert not isinstance(late.value, fray.OutcomeUnknown)
        assert current_actors.lines(journal)[0].startswith("cleaned knowing")
    assert len(current_actors.lines(journal)) == 1


async def test_calls_under_way_finish_when_an_actor_shuts_itself_down(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.Knowing)
        waiting = knowing.wait_shutdown.start()
        assert await knowing.leave() == "left"
        assert await waiting == "shutdown"


@pytest.mark.parametrize(
    ("cls", "error"), [(current_actors.Knowing, fray.ActorFailed), (current_actors.SyncKnowing, ValueError)]
)
async def test_an_actor_that_fails_itself_ends_its_calls_with_the_error_and_restarts(
    cls: type, error: type[Exception], cluster: fray.Cluster, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    async with cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(cls, str(journal), max_restarts=1)
        first = await knowing.now()
        hanging = knowing.hang.start() if cls is current_actors.Knowing else None
        await knowing.now()
        with suppress(error):  # this call ends with the error, or with what it returned
            await knowing.fail("out of luck")
        if hanging is not None:
            with pytest.raises(error, match="out of luck"):
                await hanging
        again = await knowing.now()
        assert again["incarnation"] != first["incarnation"]
        assert len(current_actors.lines(journal)) == 1


async def test_an_actor_that_fails_for_good_gives_its_error_to_its_scope(cluster: fray.Cluster) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with cluster.open_scope("run") as scope:
            knowing = await scope.create_actor(current_actors.Knowing)
            await knowing.now()
            knowing.fail.start("out of luck")
            await trio.sleep_forever()
    assert caught.group_contains(fray.ActorFailed, match="out of luck")


async def test_a_cancelled_actor_sees_the_shutdown_event_and_cleans_up(cluster: fray.Cluster, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with trio.CancelScope() as outer:
        async with cluster.open_scope("run") as scope:
            knowing = await scope.create_actor(current_actors.Knowing, str(journal), name="knowing")
            hanging = knowing.hang.start()
            await knowing.now()
            outer.cancel()
            await trio.lowlevel.checkpoint()
    with pytest.raises(fray.ActorDied):
        await hanging
    assert current_actors.lines(journal) == ["cleaned knowing"]


async def test_a_plain_thread_belongs_to_the_only_actor_of_its_process() -> None:
    with trio.fail_after(20):
        async with fray.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster:
            knowing = await cluster.create_actor(current_actors.SyncKnowing)
            assert (await knowing.in_plain_thread())["handle"] == knowing


async def test_the_shutdown_event_ends_a_sync_method_and_its_actor_cleans_up_after_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with trio.fail_after(20):
        async with fray.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster:
            async with cluster.open_scope("run") as scope:
                knowing = await scope.create_actor(current_actors.SyncKnowing, str(journal), name="knowing")
                await knowing.now()
                sleeping = knowing.sleep.start(60)
                await trio.sleep(0.1)
            with pytest.raises(fray.ActorDied):
                await sleeping
    assert current_actors.lines(journal) == ["cleaned knowing on the same thread"]


# Idle end ------------------------------------------------------------------------------------------------------------


async def test_an_idle_actor_ends_in_order_after_its_time(autojump_clock: trio.testing.MockClock) -> None:
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
        config = ActorConfig(idle_s=10, max_restarts=3)
        knowing = await scope.create_actor(current_actors.Knowing, actor_config=config)
        for _ in range(3):
            await trio.sleep(8)
            await knowing.now()
        waiting = knowing.wait_at_gate.start()
        await trio.sleep(100)
        await knowing.open_gate()
        assert await waiting == "through"
        began = trio.current_time()
        with trio.move_on_after(9.9):
            await trio.sleep_forever()
        await knowing.now()
        await trio.sleep(10.1)
        with pytest.raises(fray.ActorDied, match="after 10 s without a call") as late:
            await knowing.now()
        assert not isinstance(late.value, fray.OutcomeUnknown)
        assert trio.current_time() - began < 30


@pytest.mark.parametrize("around", [0, 0.0001, 0.001, 0.005, 0.02])
async def test_a_call_at_the_very_moment_of_an_idle_end_is_served_or_refused_but_never_lost(
    around: float, autojump_clock: trio.testing.MockClock
) -> None:
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
        knowing = await scope.create_actor(current_actors.Knowing, actor_config=ActorConfig(idle_s=1))
        await knowing.now()
        await trio.sleep(1 + around)
        with pytest.raises(fray.ActorDied) as ended:
            while True:
                await knowing.now()
                await trio.sleep(1 + around)
        assert not isinstance(ended.value, fray.OutcomeUnknown)
