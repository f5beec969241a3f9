"""Functions and actors that the jobs of the tests run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import trio

import fray


class Counter:
    """State, sync and async methods: all of it in the loop."""

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def slow_add(self, k: int, seconds: float = 30.0) -> int:
        await trio.sleep(seconds)
        return self.add(k)

    def countdown(self) -> Iterator[int]:
        yield from range(self.n, 0, -1)

    async def fail(self) -> None:
        raise ValueError("the counter is broken")


class Witness(Counter):
    """Tells its own process when it was first called."""

    def __init__(self) -> None:
        super().__init__(0)
        self.moved = trio.Event()

    def add(self, k: int) -> int:
        self.moved.set()
        return super().add(k)


class SyncCounter:
    """Only sync methods: a thread of its own."""

    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(3)


class Unmakeable:
    """Actor whose constructor raises."""

    def __init__(self) -> None:
        raise LookupError("no such model")

    def add(self, k: int) -> int:
        return k


class Contextual:
    """A method that takes the context, and one that does not."""

    def where(self, ctx: fray.ActorContext, suffix: str) -> str:
        return f"{ctx.namespace}|{ctx.job_id}|{suffix}"

    def plain(self, suffix: str) -> str:
        return suffix


def double(x: int) -> int:
    return 2 * x


async def double_async(x: int) -> int:
    await trio.lowlevel.checkpoint()
    return 2 * x


def shout(text: str) -> None:
    print(text)
    print(text.upper(), file=sys.stderr)
    sys.stdout.write("no newline at the end")


def fail(text: str) -> None:
    raise ValueError(text)


def fail_oddly() -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    raise Odd(1, 2)


def exit_with(code: int) -> None:
    sys.exit(code)


async def hang() -> None:
    await trio.sleep_forever()


def hang_sync() -> None:
    while True:
        time.sleep(3600)


async def call_actor(counter: Any, k: int) -> int:
    return int(await counter.add(k))


async def call_by_name(name: str, k: int) -> int:
    pool = fray.ClusterResolver(fray.current_cluster()).lookup(name)
    await pool.wait_for_size(1, timeout=20)
    return int(await pool.call().add(k))


async def launch_child(k: int) -> Any:
    cluster = fray.current_cluster()
    async with cluster.open_scope("inner") as scope:
        return await scope.run(double, k)


async def launch_hanging_child(started: Any) -> None:
    cluster = fray.current_cluster()
    async with cluster.open_scope("inner") as scope:
        job = await scope.launch(fray.JobRequest(name="child", entrypoint=fray.Entrypoint.from_callable(hang)))
        await job.wait_running()
        await started.add(1)


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def whoami() -> tuple[str, str]:
    return os.environ["FRAY_JOB_ID"], os.environ["FRAY_NAMESPACE"]


async def serve_counter(name: str) -> None:
    async with fray.ActorServer(fray.current_cluster()) as server:
        await server.register(name, Counter(100), {"kind": "counter"})
        await trio.sleep_forever()


async def wait_for(counter: Any, n: int) -> int:
    """Poll an actor until it has counted to ``n``."""
    while (seen := await counter.add(0)) < n:  # noqa: ASYNC110 - the actor is elsewhere and has no event for us
        await trio.sleep(0.05)
    return int(seen)


async def second_time(name: str) -> int:
    """Hang when run for the first time; the driver's actor counts."""
    pool = fray.ClusterResolver(fray.current_cluster()).lookup(name)
    await pool.wait_for_size(1)
    n = int(await pool.call().add(1))
    if n == 1:
        await trio.sleep_forever()
    return n


def big(size_bytes: int) -> bytes:
    return b"x" * size_bytes


async def tell_until(counter: Any, lines: int) -> int:
    """Say so many lines, slowly, then wait until the actor has counted to 1,000."""
    for number in range(lines):
        print(f"line {number}", flush=True)
        await counter.add(0)
    await wait_for(counter, 1000)
    return lines


async def print_and_return(text: str, after_s: float = 0.5) -> str:
    print(text, flush=True)
    await trio.sleep(after_s)
    return text


async def hold_child() -> None:
    """A job with one child, until it is ended."""
    async with fray.current_cluster().open_scope("inner") as scope:
        resources = fray.ResourceConfig.with_cpu(cpu=0.1, memory="50MB")
        entrypoint = fray.Entrypoint.from_callable(hang)
        await scope.launch(fray.JobRequest(name="child", entrypoint=entrypoint, resources=resources))


def fail_loudly() -> None:
    print("about to fail", flush=True)
    raise RuntimeError("no luck")


async def fail_in_scope(text: str) -> None:
    async with fray.current_cluster().open_scope("in the job") as scope:
        await scope.run(fail, text)


def fail_with_group() -> None:
    errors: list[Exception] = []
    try:
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("first") from error
    except ValueError as error:
        errors.append(error)
    try:
        try:
            raise OSError("before")
        except OSError:
            raise TypeError("second")  # noqa: B904 - with a context
    except TypeError as error:
        errors.append(error)
    raise ExceptionGroup("two of the user's", errors)
