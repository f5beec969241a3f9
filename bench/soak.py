"""Soak test: mixed load for minutes, and nothing may grow: ``python -m bench.soak --minutes 10``.

A cluster on `machine` is loaded for a while, then left alone until it is quiet, then counted (`bench.resource_count`),
again and again. Calls, streams, buffers, cancellations, errors, jobs, actors that come and go, restarts after SIGKILL,
a pool of workers, and calls through the relay take turns in a random order, several at a time.

It fails if the memory of the driver (controller and caller), the nodes or the processes below them grows faster than
``--slope-kb-per-minute`` after the warm-up, or if at a quiet moment there are more processes, descriptors, tasks,
files, segments or objects of Fray's than at the first ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import trio
from attrs import define, evolve, field

import fray
from bench import resource_count
from bench.measure import machine
from bench.resource_count import ResourceCount
from fray.controller import store
from fray.controller.serve import run_controller
from fray.deploy import embedded_controller
from fray.net.transport import Credential
from fray.runtime.calls.wire import CALLER_KEY_ID
from fray.runtime.runtime import current
from fray.scheduler.state.rows import SchedulerConfig

AT_A_TIME = 4
LOAD_S = 5.0
WARM_UP = 3
"""Samples before the first that counts (and a third of all, if that is more)."""
SETTLE_WITHIN_S = 10.0
SLOPE_KB_PER_MINUTE = 2048.0
SLOPE_FROM_S = 240.0
"""Shortest time for which a slope counts: the heap of Python grows by arenas, a few megabytes at once."""
OBJECTS_MORE = 100
"""Growth in objects of a class that is allowed, besides a tenth of the first count."""
FINISHED_LIMIT = 200
"""Ended jobs on record, in place of 10,000: what is bounded by design must have reached its bound in the warm-up."""
EVENTS_LIMIT = 2_000
"""Events of all jobs in the store, in place of 200,000 (some 50 MB where the store is in memory)."""


class Worker:
    """Actor that is called all the time."""

    def __init__(self) -> None:
        self.n = 0

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    def countdown(self, n: int) -> Iterator[int]:
        yield from range(n, 0, -1)

    def echo(self, data: Any) -> Any:
        return data

    async def doubles(self, stream: fray.Stream) -> None:
        async for number in stream:
            await stream.send(2 * number)

    def fail(self) -> None:
        raise ValueError("as asked")

    def pid(self) -> int:
        return os.getpid()


def square(x: int) -> int:
    return x * x


@define(eq=False)
class Stage:
    """State that the activities share."""

    cluster: Any
    scope: Any
    steady: Any
    mortal: Any
    relayed: Any
    pool: Any
    rng: random.Random
    mortal_busy: trio.Lock = field(factory=trio.Lock)
    done: Counter[str] = field(factory=Counter)


async def calls(stage: Stage) -> None:
    made = [stage.steady.add.start(1) for _ in range(200)]
    for call in made:
        await call
    for _ in range(10):
        await stage.steady.add(1)


async def streams(stage: Stage) -> None:
    async with stage.steady.countdown.stream(200) as items:
        assert [item async for item in items] == list(range(200, 0, -1))
    async with stage.steady.countdown.stream(10_000) as items:
        async for item in items:
            if item < 9_980:
                break


async def buffers(stage: Stage) -> None:
    data = stage.rng.randbytes(stage.rng.choice((10_000, 300_000, 3_000_000)))
    assert bytes(await stage.steady.echo(data)) == data
    array = bytearray(data)
    came = await stage.steady.echo([PickleBuffer(array), "beside"])
    assert bytes(came[0]) == data


async def two_ways(stage: Stage) -> None:
    async with stage.steady.doubles.open() as stream:
        for number in range(50):
            await stream.send(number)
            assert await stream.receive() == 2 * number


async def groups(stage: Stage) -> None:
    async with stage.cluster.open_scope("group") as scope:
        group = await scope.create_actor_group(Worker, count=2)
        first, _ = await group.wait_ready()
        async with fray.monitor(first) as watch:
            assert isinstance(await anext(watch), fray.Up)
        await group.shutdown()


async def cancellations(stage: Stage) -> None:
    with trio.move_on_after(0.01):
        await stage.steady.sleep(60)
    try:
        await stage.steady.sleep.options(timeout_s=0.01)(60)
    except fray.DeadlineExceeded:
        return


async def errors(stage: Stage) -> None:
    try:
        await stage.steady.fail()
    except ValueError:
        return


async def restarts(stage: Stage) -> None:
    async with stage.mortal_busy:
        try:
            os.kill(await stage.mortal.pid(), signal.SIGKILL)
            await stage.mortal.pid()
        except fray.ActorDied:
            await stage.mortal.pid()


async def short_lives(stage: Stage) -> None:
    async with stage.cluster.open_scope("short") as scope:
        actor = await scope.create_actor(Worker)
        assert await actor.add(1) == 1


async def jobs(stage: Stage) -> None:
    assert await stage.scope.run(square, 7) == 49


async def pools(stage: Stage) -> None:
    futures = stage.pool.map(square, range(200))
    assert [await future for future in futures] == [x * x for x in range(200)]


async def relays(stage: Stage) -> None:
    """Call over a tunnel that stays open, and over a new one."""
    caller, route = stage.relayed
    made = [route.start("echo", (b"x" * 10_000,)) for _ in range(20)]
    for call in made:
        assert len(await call) == 10_000
    endpoint = route.endpoint
    credential = Credential(CALLER_KEY_ID, endpoint.key)
    transport = await caller.network.dial(endpoint.addresses[0], credential, timeout_s=10)
    transport.abort()


ACTIVITIES: tuple[Callable[[Stage], Awaitable[None]], ...] = (
    *(calls, calls, streams, buffers, cancellations, errors),
    *(restarts, short_lives, jobs, pools, relays, two_ways, groups),
)


@asynccontextmanager
async def open_stage(seed: int) -> AsyncIterator[tuple[Stage, list[int]]]:
    async with fray.open_cluster("machine?nodes=2&cpu=16", logs=False) as cluster:
        nodes = [node.pid for node in await cluster.wait_for_nodes(2) if node.pid is not None]
        async with cluster.open_scope("soak") as scope, fray.WorkerPool(cluster, 2, name_prefix="soak") as pool:
            steady = await scope.create_actor(Worker, name="steady")
            mortal = await scope.create_actor(Worker, name="mortal", max_restarts=-1)
            await steady.add(0), await mortal.add(0)
            runtime = current()
            endpoint = steady._connection_route().endpoint
            assert endpoint is not None
            by_relay = tuple(address for address in endpoint.addresses if address.startswith("relay:"))
            route = runtime.caller.route_to(evolve(endpoint, addresses=by_relay))
            stage = Stage(cluster, scope, steady, mortal, (runtime.caller, route), pool, random.Random(seed))
            yield stage, nodes


async def load(stage: Stage, seconds: float) -> None:
    """Run several activities at a time, for about so long."""
    until = time.monotonic() + seconds

    async def one_after_another() -> None:
        while time.monotonic() < until:
            activity = stage.rng.choice(ACTIVITIES)
            await activity(stage)
            stage.done[activity.__name__] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(AT_A_TIME):
            nursery.start_soon(one_after_another)


async def quiet(nodes: Sequence[int], like: ResourceCount | None) -> ResourceCount:
    """Count once everything has settled: when nothing exceeds ``like``, or after `SETTLE_WITHIN_S`."""
    give_up = time.monotonic() + SETTLE_WITHIN_S
    while True:
        await trio.sleep(0.7)
        now = resource_count.take(nodes)
        if like is None or not left(like, now) or time.monotonic() > give_up:
            return now


def left(before: ResourceCount, after: ResourceCount) -> dict[str, Any]:
    """Return the growth from one quiet moment to another."""
    found = resource_count.growth(
        before, after, more_than={"descriptors": 6, "tasks": 6, "threads": 4, "files": 60, "segments": 8, "orphans": 8}
    )
    return {
        name: numbers
        for name, numbers in found.items()
        if not name.startswith("objects") or numbers["after"] > numbers["before"] * 1.1 + OBJECTS_MORE
    }


def slopes_kb_per_minute(samples: Sequence[tuple[float, ResourceCount]]) -> dict[str, float]:
    """Return the slopes of the memory of each role, by least squares."""
    minutes = [at_s / 60 for at_s, _ in samples]
    mean = sum(minutes) / len(minutes)
    spread = sum((minute - mean) ** 2 for minute in minutes) or 1.0

    def slope(role: str) -> float:
        return (
            sum((minute - mean) * one.pss_kb[role] for minute, (_, one) in zip(minutes, samples, strict=True)) / spread
        )

    return {role: slope(role) for role in samples[0][1].pss_kb}


async def soak(minutes: float, *, load_s: float = LOAD_S, seed: int = 1, progress: bool = False) -> dict[str, Any]:
    """Load for so long; return the counts, and under ``broken`` the violations."""
    samples: list[tuple[float, ResourceCount]] = []
    began = time.monotonic()
    with few_on_record():
        async with open_stage(seed) as (stage, nodes):
            while not samples or time.monotonic() - began < 60 * minutes:
                await load(stage, load_s)
                like = samples[WARM_UP - 1][1] if len(samples) >= WARM_UP else None
                samples.append((time.monotonic() - began, await quiet(nodes, like)))
                if progress:
                    at_s, latest = samples[-1]
                    print(
                        f"{at_s:6.0f} s  {latest.pss_kb}  {sum(stage.done.values())} done", file=sys.stderr, flush=True
                    )
    return verdict(samples, dict(stage.done))


def verdict(samples: Sequence[tuple[float, ResourceCount]], done: dict[str, int]) -> dict[str, Any]:
    counted = samples[min(max(WARM_UP, len(samples) // 3), len(samples) - 1) :]
    slopes = slopes_kb_per_minute(counted)
    return {
        "seconds": samples[-1][0],
        "done": done,
        "slopes_kb_per_minute": slopes,
        "slopes_count": counted[-1][0] - counted[0][0] >= SLOPE_FROM_S,
        "left": left(counted[0][1], counted[-1][1]),
        "samples": [{"at_s": at_s, **one.as_json(), "objects": None} for at_s, one in samples],
    }


@contextmanager
def few_on_record() -> Iterator[None]:
    """Make the embedded controller drop ended jobs after `FINISHED_LIMIT`, and events after `EVENTS_LIMIT`."""
    were = embedded_controller.run_controller, store.EVENTS_LIMIT
    embedded_controller.run_controller = partial(  # type: ignore[assignment]
        run_controller, rules=SchedulerConfig(finished_limit=FINISHED_LIMIT)
    )
    store.EVENTS_LIMIT = EVENTS_LIMIT
    try:
        yield
    finally:
        embedded_controller.run_controller, store.EVENTS_LIMIT = were


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slope-kb-per-minute", type=float, default=SLOPE_KB_PER_MINUTE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = trio.run(lambda: soak(options.minutes, seed=options.seed, progress=True))
    slopes = found["slopes_kb_per_minute"] if found["slopes_count"] else {}
    steep = {role: slope for role, slope in slopes.items() if slope > options.slope_kb_per_minute}
    print(json.dumps({key: found[key] for key in ("seconds", "done", "slopes_kb_per_minute", "left")}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "steep": steep, **found}, indent=1) + "\n")
    if steep or found["left"]:
        print(f"it grows: {steep or ''} {found['left'] or ''}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
