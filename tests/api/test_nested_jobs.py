"""Trees of jobs that wait for one another, with fewer CPUs than jobs: on every face, whatever they wait with."""

from __future__ import annotations

import os
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, ResourceConfig, blocking, v2

DEPTH = 20
ALL_CPUS = max(4, len(os.sched_getaffinity(0)))
"""CPUs of `local`; each level of a tree takes all of them."""


def request(name: str, fn: Any, *args: Any, cpu: float = ALL_CPUS) -> JobRequest:
    return JobRequest(
        name=name,
        entrypoint=Entrypoint.from_callable(fn, args=args),
        resources=ResourceConfig(cpu=cpu, memory="64MB"),
    )


async def descend(levels: int, cpu: float = ALL_CPUS) -> int:
    """Launch the next level and wait for it."""
    if not levels:
        return 0
    async with fray.current_cluster().open_scope(f"level {levels}") as scope:
        job = await scope.launch(request(f"level-{levels}", descend, levels - 1, cpu, cpu=cpu))
        return int(await job.wait()) + 1


async def leave(levels: int) -> None:
    """Launch the next level, and only leave the scope."""
    if levels:
        async with fray.current_cluster().open_scope(f"level {levels}") as scope:
            await scope.launch(request(f"level-{levels}", leave, levels - 1))


async def first_of_two(levels: int) -> int:
    if not levels:
        return 0
    async with fray.current_cluster().open_scope(f"level {levels}") as scope:
        jobs = [await scope.launch(request(f"job-{number}", descend, 1)) for number in range(2)]
        return sum([int(await job) async for job in fray.as_completed(jobs)])


async def use_pool(items: int) -> int:
    resources = ResourceConfig(cpu=ALL_CPUS, memory="64MB")
    cluster = fray.current_cluster()
    async with fray.WorkerPool(cluster, num_workers=1, resources=resources, name_prefix="worker") as pool:
        return sum([await future for future in pool.map(abs, range(items))])


async def call_actor() -> int:
    async with fray.current_cluster().open_scope("actor") as scope:
        counter = await scope.create_actor(Counter, resources=ResourceConfig(cpu=ALL_CPUS, memory="64MB"))
        return int(await counter.add(5))


class Counter:
    def __init__(self) -> None:
        self.count = 0

    async def add(self, number: int) -> int:
        self.count += number
        return self.count


def descend_blocking(levels: int) -> int:
    if not levels:
        return 0
    with blocking.current_cluster().open_scope(f"level {levels}") as scope:
        job = scope.launch(request(f"level-{levels}", descend_blocking, levels - 1))
        return int(job.wait()) + 1


def call_blocking() -> int:
    with blocking.current_cluster().open_scope("actor") as scope:
        counter = scope.create_actor(Counter, resources=ResourceConfig(cpu=ALL_CPUS, memory="64MB"))
        return int(counter.add.remote(5).result())


def descend_v2(levels: int) -> None:
    if levels:
        client = v2.current_client()
        resources = v2.ResourceConfig(device=v2.CpuConfig(), cpu=ALL_CPUS, ram="64m")
        entry = v2.Entrypoint.from_callable(descend_v2, args=[levels - 1])
        jobs = [client.submit(v2.JobRequest(name=f"v2-{levels}", entrypoint=entry, resources=resources))]
        v2.wait_all(jobs)


@pytest.mark.parametrize(
    ("fn", "args", "value"),
    [
        (descend, (DEPTH,), DEPTH),
        (leave, (DEPTH,), None),
        (first_of_two, (1,), 2),
        (use_pool, (10,), 45),
        (call_actor, (), 5),
        (descend_blocking, (5,), 5),
        (call_blocking, (), 5),
        (descend_v2, (3,), None),
    ],
)
async def test_a_job_that_waits_for_what_it_launched_lends_its_cpus(fn: Any, args: tuple[Any, ...], value: Any) -> None:
    with trio.fail_after(60):
        async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("tree") as scope:
            job = await scope.launch(request("top", fn, *args))
            assert await job.wait() == value


async def test_a_tree_of_processes_runs_on_one_cpu() -> None:
    with trio.fail_after(60):
        async with (
            fray.open_cluster("machine?nodes=1&cpu=1", logs=False) as cluster,
            cluster.open_scope("tree") as scope,
        ):
            job = await scope.launch(request("top", descend, DEPTH, 1, cpu=1))
            assert await job.wait() == DEPTH


async def test_explain_of_the_waiting_parent_says_what_it_lends() -> None:
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("tree") as scope:
        top = await scope.launch(request("top", hold_child))
        child = None
        while child is None:
            child = next((info for info in await cluster.list_jobs() if info.name == "held"), None)
            await trio.sleep(0.01)
        await (await cluster.get_job("held")).wait_running()
        page = await cluster.explain(top)
        await top.terminate()
    assert f"waits for jobs below it and lends its {ALL_CPUS} CPUs (0 CPUs left, used by" in page


async def hold_child() -> None:
    async with fray.current_cluster().open_scope("children") as scope:
        await scope.launch(request("held", trio.sleep_forever))


async def test_what_cannot_be_lent_is_an_error_that_names_holder_and_waiter() -> None:
    with trio.fail_after(10):
        async with fray.open_cluster("local", logs=False) as cluster:
            job = await cluster.launch(
                JobRequest("top", entrypoint=large_child, resources=ResourceConfig(cpu=1, memory="600GB"))
            )
            with pytest.raises(ExceptionGroup) as caught:
                await job.wait()
            assert caught.group_contains(fray.JobFailed, match=r"large-.* needs 1 CPU, 600 GB memory.*top-.*of local")


async def large_child() -> None:
    async with fray.current_cluster().open_scope("children") as scope:
        resources = ResourceConfig(cpu=1, memory="600GB")
        job = await scope.launch(JobRequest("large", entrypoint=trio.sleep_forever, resources=resources))
        await job.wait()
