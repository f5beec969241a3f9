"""Names, statuses and lifetimes of actors: `create_actor(name=)` and the queries of `Cluster` by name, in ``local``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel

import fray
from fray import ActorStatus, InvalidRequest, NameInUse, NoSuchActor, NoSuchMethod


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.n = start

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def die(self) -> None:
        raise SystemExit(1)


class Broken:
    def __init__(self) -> None:
        raise ValueError("not today")

    async def add(self, k: int) -> int:
        return k


def running(test: Callable[[fray.Cluster], Awaitable[None]], **options: str) -> None:
    async def main() -> None:
        async with fray.open_cluster("local", logs=False, **options) as cluster:  # type: ignore[arg-type]
            with trio.fail_after(20):
                await test(cluster)

    trio.run(main)


@asynccontextmanager
async def two_drivers(namespaces: tuple[str | None, str | None] = ("ns", "ns")) -> AsyncIterator[list[fray.Cluster]]:
    """Two drivers of one controller."""
    import random

    from fray.api.cluster import cluster_of
    from fray.deploy.embedded_controller import (
        CONTROLLER,
        embedded_network,
        open_driver,
        serve_controller,
    )
    from fray.deploy.local import _node, local_capacity
    from fray.deploy.local_processes import JobProcesses
    from fray.node.config import NodeConfig

    rng, token = random.Random(3), "t"
    network = embedded_network(rng)
    config = NodeConfig(name="local", controller=CONTROLLER, token=token, capacity=local_capacity(), state_dir="")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_controller, network, (), token, rng, [config])
        await nursery.start(_node, config, network, rng, JobProcesses("names"))
        first = open_driver(network, token, rng, namespace=namespaces[0], on_log=None)
        second = open_driver(network, token, rng, namespace=namespaces[1], on_log=None)
        async with first as one, second as two:
            yield [cluster_of(one), cluster_of(two)]
        nursery.cancel_scope.cancel()


def test_an_actor_is_found_by_its_name_and_a_missing_method_suggests_a_similar_one() -> None:
    async def test(cluster: fray.Cluster) -> None:
        await cluster.create_actor(Counter, 5, name="counter")
        found = await cluster.get_actor("counter")
        assert await found.add(1) == 6
        with pytest.raises(NoSuchMethod, match="did you mean add"):
            await found.ad(1)

    running(test)


def test_an_unknown_name_raises_no_such_actor() -> None:
    async def test(cluster: fray.Cluster) -> None:
        for ask in (cluster.get_actor, cluster.actor_status, cluster.delete_actor):
            with pytest.raises(NoSuchActor, match="'missing' in namespace"):
                await ask("missing")
        with pytest.raises(InvalidRequest, match="without blanks"):
            await cluster.get_actor("no body")

    running(test)


def test_the_status_follows_an_actor_through_its_life() -> None:
    async def test(cluster: fray.Cluster) -> None:
        counter = await cluster.create_actor(Counter, name="counter", max_restarts=1)
        assert await cluster.actor_status(counter) in (ActorStatus.CREATING, ActorStatus.READY)
        await counter.add(1)
        info = await cluster.actor_info("counter")
        assert (info.status, info.restarts, info.node, info.detached) == (ActorStatus.READY, 0, "local", False)
        with pytest.raises(fray.RemoteError, match="SystemExit"):
            await counter.die()
        assert await counter.add(1) == 1
        assert (await cluster.actor_info(counter)).restarts == 1
        with pytest.raises(fray.RemoteError, match="SystemExit"):
            await counter.die()
        with pytest.raises(fray.ActorDied, match="SystemExit"):
            await counter.add(1)
        assert await cluster.actor_status("counter") is ActorStatus.FAILED
        assert "SystemExit" in (await cluster.actor_info(counter)).reason
        with pytest.raises(NoSuchActor, match="the last one failed: SystemExit"):
            await cluster.get_actor("counter")

    running(test)


def test_an_actor_whose_constructor_raises_has_failed_with_that_error() -> None:
    async def test(cluster: fray.Cluster) -> None:
        broken = await cluster.create_actor(Broken, name="broken")
        with pytest.raises(ValueError, match="not today"):
            await broken.add(1)
        assert await cluster.actor_status(broken) is ActorStatus.FAILED

    running(test)


def test_a_deleted_actor_has_ended_and_its_name_is_free_at_once() -> None:
    async def test(cluster: fray.Cluster) -> None:
        async with cluster.open_scope("s") as scope:
            first = await scope.create_actor(Counter, 1, name="counter")
            with pytest.raises(NameInUse):
                await scope.create_actor(Counter, name="counter")
            await cluster.delete_actor("counter")
            assert await cluster.actor_status(first) is ActorStatus.ENDED
            second = await scope.create_actor(Counter, 7, name="counter")
            assert await second.add(0) == 7
            await cluster.delete_actor(second)
            await cluster.delete_actor(second)
            with pytest.raises(NoSuchActor):
                await cluster.delete_actor("counter")

    running(test)


def test_actors_are_listed_by_prefix() -> None:
    async def test(cluster: fray.Cluster) -> None:
        for name in ("worker-1", "worker-2", "server"):
            await cluster.create_actor(Counter, name=name)
        async with fray.ActorServer(cluster) as server:
            await server.register("worker-3", Counter())
            found = await cluster.list_actors("worker")
            assert [(info.name, info.served) for info in found] == [
                ("worker-1", False),
                ("worker-2", False),
                ("worker-3", True),
            ]
            with pytest.raises(InvalidRequest, match="unregister it there"):
                await cluster.delete_actor("worker-3")
        assert len(await cluster.list_actors()) == 3

    running(test)


def test_creators_that_race_on_two_drivers_get_one_actor() -> None:
    async def main() -> None:
        async with two_drivers() as drivers:
            handles: list[fray.ActorHandle] = []

            async def create(cluster: fray.Cluster, start: int) -> None:
                handles.append(await cluster.create_actor(Counter, start, name="one", get_if_exists=True))

            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(create, drivers[number % 2], 100 * number)
            assert len(set(handles)) == 1
            seen = [await handle.add(1) for handle in handles]
            assert [count - seen[0] for count in seen] == list(range(6))

    trio.run(main)


def test_the_scope_that_did_not_create_it_does_not_own_it() -> None:
    async def test(cluster: fray.Cluster) -> None:
        mine = await cluster.create_actor(Counter, 5, name="shared")
        async with cluster.open_scope("visitor") as scope:
            theirs = await scope.create_actor(Broken, name="shared", get_if_exists=True)
            assert theirs == mine
            assert await theirs.add(1) == 6
        assert await mine.add(1) == 7

    running(test)


def test_get_if_exists_needs_a_name_and_means_actors_only() -> None:
    async def test(cluster: fray.Cluster) -> None:
        with pytest.raises(InvalidRequest, match="name= is required"):
            await cluster.create_actor(Counter, get_if_exists=True)
        with pytest.raises(InvalidRequest, match="name= is required"):
            await cluster.create_actor(Counter, lifetime="detached")
        with pytest.raises(InvalidRequest, match="'non_detached', 'job', 'detached'"):
            await cluster.create_actor(Counter, name="x", lifetime="forever")
        job = fray.JobRequest(name="busy", entrypoint=fray.Entrypoint.from_callable(os.getpid), replicas=1)
        launched = await cluster.launch(job)
        if not (await cluster.poll(launched)).state.finished:
            with pytest.raises(NameInUse):
                await cluster.create_actor(Counter, name="busy", get_if_exists=True)

    running(test)


async def add_once_and_fail(unless: int) -> int:
    """Count in an actor that the job owns, and fail unless that is the count."""
    async with fray.current_cluster().open_scope("s") as scope:
        made = await scope.create_actor(Counter, name="own", lifetime="job", get_if_exists=True)
    count = await made.add(1)
    if count < unless:
        raise ValueError(count)
    return count


def add_in_blocking_code() -> int:
    cluster = fray.blocking.current_cluster()
    with pytest.raises(InvalidRequest, match='name= is required for create_actor with lifetime="job"'):
        cluster.create_actor(Counter, lifetime="job")
    with cluster.open_scope("s") as scope:
        made = scope.create_actor(Counter, name="own", lifetime="job")
    return made.add(1)


def test_an_actor_of_a_job_is_found_by_its_next_attempt_and_ends_with_it() -> None:
    async def test(cluster: fray.Cluster) -> None:
        for fn, arguments in ((add_once_and_fail, (3,)), (add_in_blocking_code, ())):
            entry = fray.Entrypoint.from_callable(fn, arguments)  # type: ignore[arg-type]
            job = await cluster.launch(fray.JobRequest("counts", entrypoint=entry, max_retries_failure=2))
            assert await job.wait() == (3 if arguments else 1)
            while await cluster.list_actors():  # noqa: ASYNC110 - of another connection's actors nothing is sent
                await trio.sleep(0.02)

    running(test)


def test_a_driver_has_no_job_to_which_an_actor_could_belong() -> None:
    async def test(cluster: fray.Cluster) -> None:
        with pytest.raises(InvalidRequest, match="lifetime='job' needs a job to which the actor can belong"):
            await cluster.create_actor(Counter, name="own", lifetime="job")

    running(test)


@pytest.mark.parametrize("namespaces", [("lab", "lab"), (None, None)])
def test_a_detached_actor_outlives_its_driver_and_is_found_by_another(
    namespaces: tuple[str | None, str | None],
) -> None:
    async def main() -> None:
        async with two_drivers(namespaces) as (one, two):
            async with one.open_scope("s") as scope:
                made = await scope.create_actor(Counter, 5, name="store", lifetime="detached")
                assert await made.add(1) == 6
            await one._runtime.client.close("driver left", 5)
            found = await two.get_actor("store")
            assert await found.add(1) == 7
            assert (await two.actor_info("store")).detached
            again = await two.create_actor(Counter, name="store", lifetime="detached", get_if_exists=True)
            assert again == found
            await two.delete_actor("store")
            with pytest.raises(NoSuchActor):
                await two.get_actor("store")

    trio.run(main)


def test_namespaces_separate_names() -> None:
    async def main() -> None:
        async with two_drivers(("a", "b")) as (one, two):
            await one.create_actor(Counter, 1, name="x")
            await two.create_actor(Counter, 2, name="x")
            with pytest.raises(NoSuchActor):
                await two.get_actor("x", "c")
            assert await (await two.get_actor("x", "a")).add(0) == 1
            assert await (await two.get_actor("x")).add(0) == 2
            assert [info.namespace for info in await one.list_actors(namespace="*")] == ["a", "b"]

    trio.run(main)
