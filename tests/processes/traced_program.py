"""Drivers with traced jobs and calls, each in a function: ``python -m tests.processes.traced_program NAME``."""

from __future__ import annotations

import os
import signal
import sys
import threading

import trio

import fray
import fray.blocking
from fray import Entrypoint, JobRequest, ResourceConfig
from fray.model.ids import split_attempt
from fray.v2 import FrayClient

MACHINE = "machine?nodes=1&cpu=8"
SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="50MB")


def own_span(name: str):
    """Begin a span as users do. Imported late: OpenTelemetry may be missing."""
    from opentelemetry import trace

    return trace.get_tracer("program").start_as_current_span(name)


class Store:
    """Actor whose methods run on threads."""

    def __init__(self) -> None:
        with own_span("make store"):
            self.sum = 0

    def add(self, number: int) -> int:
        with own_span("in store"):
            if number < 0:
                raise ValueError("below zero")
            self.sum += number
            return self.sum


class Front:
    """Actor whose methods run in the loop, and call the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def add(self, number: int) -> int:
        with own_span("in front"):
            return await self.store.add(number)

    async def count(self, until: int):
        for number in range(until):
            with own_span(f"item {number}"):
                yield number


def work(number: int) -> int:
    with own_span("in child"):
        return number


def fail() -> None:
    raise ValueError("the job fails")


def die_first() -> None:
    if split_attempt(os.environ["FRAY_ATTEMPT_ID"])[1] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


async def launch_child(store: Store) -> int:
    cluster = fray.current_cluster()
    async with cluster.open_scope("children") as scope:
        child = await scope.launch(request("child", work, 1))
        first = await child.wait()
    return first + await store.add(1)


def request(name: str, function, *args, retries: int = 0) -> JobRequest:
    entrypoint = Entrypoint.from_callable(function, args)
    return JobRequest(name=name, entrypoint=entrypoint, resources=SMALL, max_retries_failure=retries)


async def run_async() -> None:
    async with fray.open_cluster(MACHINE, logs=False) as cluster, cluster.open_scope("work") as scope:
        with own_span("main"):
            store = await scope.create_actor(Store, name="store")
            front = await scope.create_actor(Front, store, name="front")
            assert await front.add(1) == 1
            try:
                await front.add(-1)
            except ValueError:
                print("refused", flush=True)
            async with front.count.stream(2) as items:
                assert [item async for item in items] == [0, 1]
            job = await scope.launch(request("parent", launch_child, store))
            assert await job.wait() == 3
            retried = await scope.launch(request("retried", die_first, retries=1))
            await retried.wait()
            try:
                async with cluster.open_scope("failing") as failing:
                    await failing.launch(request("failing", fail))
            except* ValueError:
                print("failed", flush=True)


async def run_pool() -> None:
    async with fray.open_cluster(MACHINE, logs=False) as cluster:
        with own_span("main"):
            async with fray.WorkerPool(cluster, num_workers=1, resources=SMALL, name_prefix="worker") as pool:
                assert [await future for future in pool.map(work, [1, 2])] == [1, 2]


def run_blocking() -> None:
    with fray.blocking.open_cluster(MACHINE, logs=False) as cluster, own_span("main"):
        store = cluster.create_actor(Store, name="store")
        assert store.add(1) == 1
        assert store.add.remote(1).result() == 2
        thread = threading.Thread(target=store.add, args=(1,))  # without the context of this one
        thread.start()
        thread.join()


def run_v2() -> None:
    with FrayClient(MACHINE, logs=False) as client, own_span("main"):
        store = client.create_actor(Store, name="store")
        assert store.add(1) == 1
        assert store.add.remote(1).result() == 2


class Plain:
    def double(self, number: int) -> int:
        return 2 * number


async def run_plain() -> None:
    """Print when the work is done: what is left is the end of the process."""
    async with fray.open_cluster(MACHINE, logs=True) as cluster, cluster.open_scope("work") as scope:
        plain = await scope.create_actor(Plain, name="plain")
        for number in range(3):
            assert await plain.double(number) == 2 * number
    print("done", "opentelemetry" in sys.modules, flush=True)


if __name__ == "__main__":
    name = sys.argv[1]
    loop = {"async": run_async, "pool": run_pool, "plain": run_plain}
    if name in loop:
        trio.run(loop[name])
    else:
        {"blocking": run_blocking, "v2": run_v2}[name]()
