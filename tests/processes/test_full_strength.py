"""Actors at full strength over ``fray://``: one fray-controller, two fray-nodes, drivers; killed for real."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio

import fray
from fray import ActorStatus
from fray.blocking import ActorServer, ClusterResolver, WorkerPool, as_completed
from fray.blocking import open_cluster as open_blocking
from tests.processes.lab import (
    SMALL,
    TOKEN,
    Lab,
    connected,
    start_script,
)
from tests.processes.strength_functions import (
    Blocking,
    Cell,
    Link,
    Member,
    Stateful,
    square,
    whereabouts,
)
from tests.support import job_functions

pytestmark = pytest.mark.timed

LIGHT = 200
"""Light actors in one process."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The daemons of all tests of this file."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.start_controller()
        for name in ("alpha", "beta"):
            lab.start_node(name)
        trio.run(connected, lab)
        yield lab
    finally:
        lab.close()


@pytest.fixture
async def cluster(lab: Lab) -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(60):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            await cluster.wait_for_nodes(2)
            yield cluster


@pytest.fixture
async def scope(cluster: fray.Cluster) -> AsyncIterator[fray.Scope]:
    with trio.fail_after(40):
        async with cluster.open_scope("run") as scope:
            yield scope


async def chain(cluster: fray.Cluster, scope: fray.Scope) -> tuple[Any, Any]:
    """Two actors, each on a machine of its own; the first asks the second."""
    last = await scope.create_actor(Link, on_failure="absorb")
    first = await scope.create_actor(Link, last, on_failure="absorb")
    assert await first.add(0) == 1
    assert {(await cluster.actor_info(one)).node for one in (first, last)} == {"alpha", "beta"}
    return first, last


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def until_down(monitor: fray.Monitor) -> fray.Down:
    async for event in monitor:
        if isinstance(event, fray.Down):
            return event
    raise AssertionError("the monitor ended without a Down")


# Calls ---------------------------------------------------------------------------------------------------------------


async def test_calls_go_from_actor_to_actor_over_machines(cluster: fray.Cluster, scope: fray.Scope) -> None:
    first, _ = await chain(cluster, scope)
    futures = [first.add.start(1) for _ in range(100)]
    assert [await future for future in futures] == list(range(2, 102))
    with pytest.raises(LookupError, match="no such page") as caught:
        await first.fail()
    assert caught.value.__cause__.text.count("strength_functions.py") >= 2  # both hops
    with pytest.raises(fray.NoSuchMethod, match="did you mean add"):
        await first.ad(1)


async def test_streams_hold_their_producer_and_talk_both_ways(cluster: fray.Cluster, scope: fray.Scope) -> None:
    first, _ = await chain(cluster, scope)
    async with first.numbers.stream(100_000) as numbers:
        assert [await anext(numbers) for _ in range(10)] == list(range(10))
        assert 10 <= await first.how_many_given() <= 200
    async with first.shout.open() as talk:
        for word in ("good", "day"):
            await talk.send(word)
            assert await talk.receive() == word.upper()
        await talk.done_sending()
        assert await talk == 2


async def test_cancelling_goes_hop_by_hop(cluster: fray.Cluster, scope: fray.Scope) -> None:
    first, last = await chain(cluster, scope)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.hang)
        await last.wait_entered()
        nursery.cancel_scope.cancel()
    await first.wait_woken()
    await last.wait_woken()
    with pytest.raises(fray.DeadlineExceeded):
        await first.hang.options(timeout_s=0.05)()
    assert await first.add(5) == 6


async def test_arrays_arrive_writable_on_both_machines(cluster: fray.Cluster, scope: fray.Scope) -> None:
    first, _ = await chain(cluster, scope)
    array = numpy.arange(1_000_000.0)
    for _ in range(3):
        got = await first.mark(array)
        assert (got[0], array[0]) == (2, 0)
        assert got.flags.writeable
        assert (got[1:] == array[1:]).all()


async def test_a_future_is_awaited_by_an_actor_on_another_machine(cluster: fray.Cluster, scope: fray.Scope) -> None:
    first, last = await chain(cluster, scope)
    assert await last.double(first.add.start(20)) == 42
    entered = first.hang.start()
    doubled = last.double.start(entered)
    await last.wait_entered()
    kill(await first.pid())
    with pytest.raises(fray.OutcomeUnknown):
        await doubled


# Many actors ---------------------------------------------------------------------------------------------------------


async def test_a_group_comes_member_by_member_and_loses_one(cluster: fray.Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    group = await cluster.create_actor_group(Member, str(gate), count=3, name="group")
    assert await group.wait_ready(2) == group.handles[:2]
    assert (group.discover_new(), group.is_done()) == ([], False)
    gate.write_text("now")
    async with fray.monitor(group[2]) as monitor:
        assert isinstance(await anext(monitor), fray.Up)
    assert (group.discover_new(), group.is_done()) == ([group[2]], True)
    pids = dict([await member.whoami() for member in group])
    kill(pids[1])
    await fray.monitor(group[1])
    assert group.statuses() == [ActorStatus.READY, ActorStatus.FAILED, ActorStatus.READY]
    with pytest.raises(fray.GroupFailed, match="number 1"):
        await group.wait_ready()
    there = pickle.loads(pickle.dumps(group))
    assert [await member.whoami() for member in await there.wait_ready(2)] == [(0, pids[0]), (2, pids[2])]
    await group.shutdown()


async def test_two_hundred_light_actors_answer_again_when_their_process_was_killed(scope: fray.Scope) -> None:
    host = await scope.create_host(max_restarts=1)
    group = await host.create_actors(Cell, count=LIGHT)
    before = [await future for future in [cell.whoami.start() for cell in group]]
    assert [index for index, _ in before] == list(range(LIGHT))
    (pid,) = {pid for _, pid in before}
    async with fray.monitor(group[7]) as monitor:
        assert isinstance(await anext(monitor), fray.Up)
        kill(pid)
        assert (await until_down(monitor)).will_restart
    futures = [cell.whoami.options(idempotent=True).start() for cell in group]
    after = [await future for future in futures]
    assert [index for index, _ in after] == list(range(LIGHT))
    assert {pid for _, pid in after}.isdisjoint({pid})


# Lives ---------------------------------------------------------------------------------------------------------------


async def test_one_for_all_restarts_together(scope: fray.Scope) -> None:
    one, other = await scope.supervise([fray.child(Link), fray.child(Link)], strategy="one_for_all", max_restarts=1)
    pids = [await member.pid() for member in (one, other)]
    assert await other.add(7) == 7
    async with fray.monitor(other) as monitor:
        kill(pids[0])
        assert (await until_down(monitor)).will_restart
    assert await other.add.options(idempotent=True)(1) == 1
    assert {await member.pid() for member in (one, other)}.isdisjoint(pids)


async def test_a_checkpoint_survives_the_actor_and_the_controller(lab: Lab, scope: fray.Scope) -> None:
    actor = await scope.create_actor(Stateful, max_restarts=3)
    await actor.add(3)
    assert await actor.keep() == 3
    kill(await actor.pid())
    assert await actor.add.options(idempotent=True)(1) == 4
    assert await actor.keep() == 4
    pid = await actor.pid()
    assert lab.kill("controller") == -signal.SIGKILL
    kill(pid)
    lab.start_controller()
    assert await actor.add.options(idempotent=True)(1) == 5
    assert await actor.pid() != pid


async def test_an_actor_answers_elsewhere_when_its_node_was_killed(lab: Lab, cluster: fray.Cluster) -> None:
    actor = await cluster.create_actor(Link, max_restarts=1)
    hanging = actor.hang.start()
    await actor.wait_entered()
    node = (await cluster.actor_info(actor)).node
    lab.kill(node)
    with pytest.raises(fray.OutcomeUnknown):
        await hanging
    assert await actor.add.options(idempotent=True)(1) == 1
    assert {node, (await cluster.actor_info(actor)).node} == {"alpha", "beta"}
    lab.start_node(node)
    await cluster.wait_for_nodes(2)


async def test_monitors_see_each_life_and_links_share_the_end(cluster: fray.Cluster) -> None:
    leader = await cluster.create_actor(Link, max_restarts=1)
    follower = await cluster.create_actor(Link)
    await follower.follow(leader)
    watch, followed = fray.monitor(leader), fray.monitor(follower)
    kill(await leader.pid())
    assert (await until_down(watch)).will_restart
    assert isinstance(await anext(watch), fray.Up)
    assert await follower.add(1) == 1  # a restart breaks no link
    leader.stumble.start()
    assert not (await watch).will_restart
    assert isinstance((await followed).error.__cause__, fray.LinkedActorDied)


NAMER = """
import fray, trio
from tests.processes.strength_functions import Stateful
async def main():
    async with fray.open_cluster({spec!r}, namespace="lab", logs=False) as cluster:
        print("ready", flush=True)
        input()
        actor = await cluster.create_actor(Stateful, name="shared", get_if_exists=True, lifetime="detached")
        await actor.add(1)
        print(await actor.pid(), flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


async def test_a_name_has_one_actor_for_all_drivers_and_outlives_them(lab: Lab) -> None:
    other = start_script(NAMER.format(spec=lab.spec))
    assert other.stdout is not None
    assert other.stdin is not None
    with trio.fail_after(40):
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="lab", logs=False) as cluster:
            assert await trio.to_thread.run_sync(other.stdout.readline) == b"ready\n"
            other.stdin.write(b"go\n")
            other.stdin.close()
            mine = await cluster.create_actor(Stateful, name="shared", get_if_exists=True, lifetime="detached")
            await mine.add(1)
            pid = int(await trio.to_thread.run_sync(other.stdout.readline))
            assert await mine.pid() == pid
            assert await mine.add(0) == 2
        other.kill()
        other.wait()
        other.stdout.close()
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="lab", logs=False) as cluster:
            found = await cluster.get_actor("shared")
            assert (await found.pid(), await found.add(0)) == (pid, 2)
            await cluster.delete_actor("shared")
            with pytest.raises(fray.NoSuchActor):
                await cluster.get_actor("shared")
            with pytest.raises(fray.ActorDied):
                await found.add(0)


# Pools ---------------------------------------------------------------------------------------------------------------


async def test_pools_of_workers_lose_one_and_do_all_tasks(cluster: fray.Cluster) -> None:
    most = min(node.cpu_milli for node in await cluster.nodes()) / 1000
    async with fray.WorkerPool(cluster, 2, fray.ResourceConfig.with_cpu(cpu=0.6 * most, memory="100MB")) as pool:
        await pool.wait_for_workers(2, timeout=30)  # less than the fixture's time: its error says what it waits for
        assert {worker.node for worker in pool.workers()} == {"alpha", "beta"}
        victim = await pool.submit(os.getpid)
        futures = pool.map(square, range(2_000))
        kill(victim)
        assert [await future for future in futures] == [n * n for n in range(2_000)]
        async with pool.imap(square, itertools.count(), max_in_flight=20) as results:
            async for result in results:
                if result > 1_000:
                    break
        caller = await cluster.create_actor(Link)
        assert await caller.hand_in(pool, 12) == 144
        await pool.wait_for_workers(2, timeout=30)
        assert {await future for future in pool.map(whereabouts, range(2_000))} <= {w.job_id for w in pool.workers()}


async def test_jobs_call_what_the_driver_serves(cluster: fray.Cluster, scope: fray.Scope) -> None:
    async with fray.ActorServer(cluster) as server:
        await server.register("home", job_functions.Counter(5))
        assert await scope.run(job_functions.call_by_name, "home", 2, resources=SMALL) == 7


async def test_pools_of_actors_follow_who_comes_and_goes(cluster: fray.Cluster, scope: fray.Scope) -> None:
    jobs = []
    for name in ("left", "right"):
        entrypoint = fray.Entrypoint.from_callable(job_functions.serve_counter, ("counters",))
        request = fray.JobRequest(name=name, entrypoint=entrypoint, resources=SMALL)
        jobs.append(await scope.launch(request, on_failure="absorb"))
    pool = fray.ClusterResolver(cluster).lookup("counters")
    await pool.wait_for_size(2)
    assert [await pool.call().add(1) for _ in range(4)] == [101, 101, 102, 102]
    assert await pool.broadcast().add.gather(1) == [103, 103]
    (attempt,) = (await jobs[0].wait_running()).members
    assert attempt.pid is not None
    kill(attempt.pid)
    async for size in pool.sizes():
        if size == 1:
            break
    assert [await pool.call(policy="least_loaded").add(1) for _ in range(2)] == [104, 105]
    await jobs[1].terminate()


# Sync code -----------------------------------------------------------------------------------------------------------


def test_sync_code_has_the_same(lab: Lab) -> None:
    with open_blocking(lab.spec, token=TOKEN, logs=False) as cluster, cluster.open_scope("run") as scope:
        counter = scope.create_actor(Blocking, 0, name="counter")
        futures = [counter.add.remote(1) for _ in range(100)]
        assert sorted(future.result() for future in as_completed(futures)) == list(range(1, 101))
        with pytest.raises(LookupError, match="no such page"):
            counter.fail()
        with counter.countdown.stream() as numbers:
            assert next(numbers) == 100
        with counter.sum_up.open() as talk:
            for number in range(100):
                talk.send(number)
            talk.done_sending()
            assert talk.result() == 4950
        assert cluster.get_actor("counter").add(0) == 100
        assert scope.create_actor(Blocking, 0).double(counter.add.remote(0)) == 200
        assert scope.run(square, 12, resources=SMALL) == 144


def test_sync_futures_and_pools_work_where_they_arrive(lab: Lab) -> None:
    with open_blocking(lab.spec, token=TOKEN, logs=False) as cluster, cluster.open_scope("run") as scope:
        counter, other = scope.create_actor(Blocking, 10), scope.create_actor(Blocking, 0)
        late, settled, failed = counter.add.remote(11), counter.add.remote(0), counter.fail.remote()
        assert settled.result() == 21
        assert [other.double(future) for future in (late, settled, late)] == [42, 42, 42]
        with pytest.raises(LookupError, match="no such page"):
            other.double(failed)
        with WorkerPool(cluster, 1, SMALL) as pool:
            assert other.hand_in(pool, 10) == 285
            assert other.double(pool.submit(square, 3)) == 18
        with ActorServer(cluster) as server:
            server.register("home", Blocking(1))
            assert other.ask(ClusterResolver(cluster).lookup("home"), 1) == [2, 3]
