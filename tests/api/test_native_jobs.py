"""The async API on every embedded cluster: in this process, and over processes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import numpy
import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, ResourceConfig
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from tests.support import job_functions

SPECS = ["local", "machine?nodes=2&cpu=4"]


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def cluster(spec: str) -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(15):
        async with fray.open_cluster(spec, logs=False) as cluster:
            yield cluster


def job(name: str, fn: object, *args: object, **more: object) -> JobRequest:
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(fn, args=args), **more)  # type: ignore[arg-type]


async def test_a_job_returns_what_its_callable_returned(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        sync_job = await scope.launch(job("sync", job_functions.double, 21))
        async_job = await scope.launch(job("async", job_functions.double_async, 4))
        assert await sync_job.wait() == 42
        assert await async_job.wait() == 8
        assert sync_job.info.state is fray.JobState.SUCCEEDED


async def test_a_failure_keeps_its_type_and_its_remote_traceback(cluster: fray.Cluster) -> None:
    failed = await cluster.launch(job("bad", job_functions.fail, "boom"))
    with pytest.raises(ValueError, match="boom") as caught:
        await failed.wait()
    assert "job_functions.py" in caught.value.__cause__.text
    info = await cluster.wait(failed)
    assert (info.state, info.cause) == (fray.JobState.FAILED, fray.EndReason.FAILURE)


async def test_a_failed_child_cancels_its_siblings_and_fails_the_scope(cluster: fray.Cluster) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with cluster.open_scope("run") as scope:
            hanging = await scope.launch(job("hang", job_functions.hang))
            await hanging.wait_running()
            await scope.launch(job("bad", job_functions.fail, "boom"))
            await trio.sleep_forever()
    assert caught.group_contains(ValueError, match="boom", depth=1)
    assert hanging.info.state is fray.JobState.STOPPED


async def test_leaving_a_scope_waits_for_jobs_and_then_ends_actors(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter, 10)
        done = await scope.launch(job("caller", job_functions.call_actor, counter, 5))
    assert await done.wait() == 15
    with pytest.raises(fray.ActorDied):
        await counter.add(1)


async def test_run_is_one_remote_call(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        assert await scope.run(job_functions.double, 3, resources=ResourceConfig.with_cpu(cpu=0.5, memory="100MB")) == 6
        with pytest.raises(ValueError, match="boom"):
            await scope.run(job_functions.fail, "boom")


async def test_cancelling_a_run_ends_its_job(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        with trio.move_on_after(0.5) as scope_of_call:
            await scope.run(job_functions.hang, name="slow")
        assert scope_of_call.cancelled_caught
        (info,) = [info for info in await cluster.list_jobs() if info.name == "slow"]
        assert info.state is fray.JobState.STOPPED


async def test_an_actor_keeps_state_and_its_errors_keep_their_type(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        for cls in (job_functions.Counter, job_functions.SyncCounter):
            counter = await scope.create_actor(cls, 10)
            assert [await counter.add(1), await counter.add(2)] == [11, 13]
            futures = [counter.add.start(1) for _ in range(100)]
            assert [await future for future in futures] == list(range(14, 114))
        broken = await scope.create_actor(job_functions.Counter)
        with pytest.raises(ValueError, match="broken"):
            await broken.fail()


async def test_a_generator_method_is_a_stream(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter, 300)
        async with counter.countdown.stream() as items:
            assert [item async for item in items] == list(range(300, 0, -1))
        async with counter.countdown.stream() as items:
            async for item in items:
                assert item == 300
                break
        assert await counter.add(1) == 301


async def test_a_payload_over_the_limit_is_refused_before_the_launch(cluster: fray.Cluster) -> None:
    """A block of untouched zero pages costs nothing."""
    with pytest.raises(fray.MessageTooLarge, match=r"job 'big': the code with its arguments: 4,294,967,.* storage"):
        await cluster.launch(job("big", job_functions.double, numpy.zeros(SIZE_LIMIT_BYTES, "u1")))


async def test_a_name_with_a_blank_is_refused_with_a_valid_one_suggested(cluster: fray.Cluster) -> None:
    with pytest.raises(ValueError, match="my-first-job"):
        job("my first job", job_functions.double, 1)
    with pytest.raises(fray.InvalidRequest, match="no entrypoint"):
        await cluster.launch(JobRequest(name="nothing"))


async def test_a_missing_method_suggests_a_similar_one(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter)
        with pytest.raises(AttributeError, match="slow_add"):
            counter.slow_ad  # noqa: B018


async def test_a_cancelled_call_is_cancelled_where_it_runs(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter)
        assert await counter.add(0) == 0
        with trio.move_on_after(0.2):
            await counter.slow_add(1, 0.4)
        assert await counter.slow_add(0, 0.5) == 0
        with pytest.raises(fray.DeadlineExceeded):
            await counter.slow_add.options(timeout_s=0.2)(1)


async def test_a_constructor_that_raises_is_the_first_calls_error(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        actor = await scope.create_actor(job_functions.Unmakeable, on_failure="absorb")
        with pytest.raises(LookupError, match="no such model"):
            await actor.add(1)


async def test_an_actors_name_is_exclusive(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        await scope.create_actor(job_functions.Counter, name="counter")
        with pytest.raises(fray.NameInUse, match="counter"):
            await scope.create_actor(job_functions.Counter, name="counter")


async def test_a_job_launches_children_in_its_own_namespace(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        assert await scope.run(job_functions.launch_child, 5) == 10


async def test_waiting_returns_infos_and_a_list_for_a_sequence(cluster: fray.Cluster) -> None:
    good, bad = (
        await cluster.launch(job("good", job_functions.double, 1)),
        await cluster.launch(job("bad", job_functions.fail, "x")),
    )
    info = await cluster.wait(good.id)
    assert (info.job_id, info.name, info.state) == (good.id, "good", fray.JobState.SUCCEEDED)
    assert info.error_message is None
    assert info.start_time is not None
    assert info.end_time is not None
    infos = await cluster.wait([good, bad])
    assert [info.state.value for info in infos] == ["succeeded", "failed"]
    with pytest.raises(ValueError, match="x"):
        await cluster.wait([good, bad], raise_on_failure=True)


async def test_terminate_ends_a_job_without_failing_its_scope(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        hanging = await scope.launch(job("hang", job_functions.hang))
        await hanging.wait_running()
        await cluster.terminate(hanging)
        with pytest.raises(fray.JobStopped):
            await hanging.wait()


async def test_servers_share_a_name_and_a_pool_follows_them(cluster: fray.Cluster) -> None:
    pool = fray.ClusterResolver(cluster).lookup("counters")
    assert pool.size == 0
    async with cluster.open_scope("run") as scope:
        jobs = [await scope.launch(job(f"server-{i}", job_functions.serve_counter, "counters")) for i in range(2)]
        await pool.wait_for_size(2, timeout=20)
        assert sorted([await pool.call().add(1) for _ in range(4)]) == [101, 101, 102, 102]
        assert sorted([await future for future in pool.broadcast().add(10)]) == [112, 112]
        assert [endpoint.metadata for endpoint in pool.endpoints] == [{"kind": "counter"}] * 2
        for server in jobs:
            await server.terminate()
    assert pool.size == 0


async def test_an_actor_server_of_the_driver_serves_jobs_and_fixed_addresses(cluster: fray.Cluster) -> None:
    async with fray.ActorServer(cluster) as server:
        actor_id = await server.register("mine", job_functions.Contextual(), {"a": "b"})
        pool = fray.ClusterResolver(cluster).lookup("mine")
        await pool.wait_for_size(1, timeout=5)
        assert pool.endpoints[0].actor_id == actor_id
        assert await pool.call().where("x") == f"{cluster.namespace}||x"
        assert await pool.call().plain("y") == "y"
        fixed = fray.FixedResolver({"mine": server.address}, token=server.token).lookup("mine")
        await fixed.wait_for_size(1, timeout=5)
        assert await fixed.call().plain("z") == "z"
        await server.unregister("mine")
        with trio.fail_after(5):
            while pool.size:
                await pool._changed.wait()


async def test_a_worker_pool_runs_sync_and_async_tasks(cluster: fray.Cluster) -> None:
    small = ResourceConfig.with_cpu(cpu=0.5, memory="100MB")
    async with cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter)
        async with fray.WorkerPool(cluster, num_workers=2, resources=small) as pool:
            await pool.wait_for_workers()
            assert pool.size == 2
            assert [await future for future in pool.map(job_functions.double, range(20))] == [2 * i for i in range(20)]
            merged = [pool.submit(job_functions.call_actor, counter, 1) for _ in range(10)]
            seen = [await future async for future in fray.as_completed(merged)]
            assert sorted(seen) == list(range(1, 11))
            with pytest.raises(ValueError, match="bad task"):
                await pool.submit(job_functions.fail, "bad task")


async def test_an_async_task_that_waits_for_a_sync_one_calls_actors(cluster: fray.Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter)
        async with fray.WorkerPool(cluster, num_workers=1) as pool:
            # The second is started by the end of the first, which its thread reports.
            first, second = pool.submit(time.sleep, 0.3), pool.submit(job_functions.call_actor, counter, 1)
            assert [await first, await second] == [None, 1]


async def test_an_unpicklable_argument_is_named(cluster: fray.Cluster) -> None:
    import threading

    with pytest.raises(fray.NotPicklable, match="lock"):
        await cluster.launch(job("bad", job_functions.double, {"model": {"lock": threading.Lock()}}))


async def test_resources_that_no_machine_has_are_refused_at_launch(cluster: fray.Cluster) -> None:
    with pytest.raises(fray.NeverSchedulable, match="CPU"):
        await cluster.launch(job("huge", job_functions.double, 1, resources=ResourceConfig.with_cpu(cpu=10_000)))


async def test_a_gang_starts_whole_and_its_first_member_gives_the_result(cluster: fray.Cluster) -> None:
    small = ResourceConfig(cpu=0.5, memory="50MB", replicas=4)
    assert await (await cluster.launch(job("gang", job_functions.double, 5, resources=small))).wait() == 10


async def test_a_program_is_an_entrypoint(cluster: fray.Cluster) -> None:
    good = await cluster.launch(JobRequest(name="true", entrypoint=Entrypoint.from_binary("true")))
    assert await good.wait() is None
    bad = await cluster.launch(JobRequest(name="sh", entrypoint=Entrypoint.from_binary("sh", ["-c", "exit 7"])))
    with pytest.raises(fray.JobFailed, match="7"):
        await bad.wait()
    assert (await cluster.poll(bad)).exit_code == 7


async def test_every_job_has_events_and_an_explanation(cluster: fray.Cluster) -> None:
    good = await cluster.launch(job("good", job_functions.double, 1))
    await good.wait()
    words = [event.what for event in await cluster.events(good)]
    assert words
    assert await cluster.explain(good)
    with pytest.raises(fray.NoSuchJob):
        await cluster.poll("missing")


async def test_the_reason_of_a_waiting_job_is_current_when_asked_and_soon_by_itself() -> None:
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
        (machine,) = await cluster.nodes()
        whole = ResourceConfig.with_cpu(cpu=machine.cpu_milli / 1000, memory="50MB")
        await (await scope.launch(job("holder", job_functions.hang, resources=whole))).wait_running()
        waiting = await scope.launch(job("waiting", job_functions.double, 1, resources=whole))
        assert "number 1 of 1 in the queue" in (await cluster.poll(waiting)).reason
        await scope.launch(job("second", job_functions.double, 1, resources=whole))
        assert "number 1 of 2 in the queue" in (await cluster.poll(waiting)).reason
        await scope.launch(job("third", job_functions.double, 1, resources=whole))
        with trio.fail_after(5):
            while "number 1 of 3 in the queue" not in waiting.info.reason:
                await waiting._record.changed.wait()
        assert "number 1 of 3" in repr(waiting)
        await cluster.terminate([info.job_id for info in await cluster.list_jobs()])


async def test_changes_of_jobs_and_machines_are_answered_when_they_happen() -> None:
    async with fray.open_cluster("local", logs=False) as cluster:
        (machine,) = await cluster.nodes()
        jobs, nodes = await cluster.job_changes(namespace="*"), await cluster.node_changes()
        assert [each.name for each in nodes.nodes] == [machine.name]
        # Without a change the answer comes in the end, and has none.
        assert (await cluster.node_changes(nodes.change, wait_s=0.1)).nodes == ()
        assert (await cluster.job_changes(jobs.change, wait_s=0.1, namespace="*")).jobs == ()
        found: list[object] = []

        async def wait_for_cordon() -> None:
            reply = await cluster.node_changes(nodes.change, wait_s=10)
            assert not reply.is_reset
            found.extend(node.standing for node in reply.nodes)

        async def wait_for_job() -> None:
            reply = await cluster.job_changes(jobs.change, wait_s=10, namespace="*")
            assert not reply.is_reset
            found.extend(info.name for info in reply.jobs)

        with trio.fail_after(9):
            async with trio.open_nursery() as waiting:
                waiting.start_soon(wait_for_cordon)
                await cluster.cordon(machine.name)
            async with trio.open_nursery() as waiting:
                waiting.start_soon(wait_for_job)
                await cluster.launch(job("launched", job_functions.double, 1))
        assert found == ["cordoned", "launched"]
        await cluster.terminate([info.job_id for info in await cluster.list_jobs()])


async def test_a_machine_that_is_taken_and_released_has_changed() -> None:
    async with fray.open_cluster("local", logs=False) as cluster:
        (machine,) = await cluster.nodes()
        nodes = await cluster.node_changes()
        whole = ResourceConfig.with_cpu(cpu=machine.cpu_milli / 1000, memory="50MB")
        holder = await cluster.launch(job("holder", job_functions.hang, resources=whole))
        await holder.wait_running()
        taken = await cluster.node_changes(nodes.change)
        assert [(node.cpu_milli_free, node.attempts) for node in taken.nodes] == [(0, 1)]
        await cluster.terminate([holder.info.job_id])
        with trio.fail_after(10):
            released = await cluster.node_changes(taken.change, wait_s=10)
            while released.nodes[-1].attempts:
                released = await cluster.node_changes(released.change, wait_s=10)
        assert released.nodes[-1].cpu_milli_free == machine.cpu_milli
