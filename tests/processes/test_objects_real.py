"""Objects that were put, between real processes: copies, owners, and what is left when a process dies."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from fray.blocking import Entrypoint, JobRequest
from fray.errors import ObjectLost
from fray.job import FrayContext, ObjectRef, get_default_job_ctx
from fray.net.buffers import shared_memory

MB = 1_000_000


@pytest.fixture(scope="module")
def ctx() -> Iterator[FrayContext]:
    with FrayContext("machine?nodes=1&cpu=4", num_workers=2) as ctx:
        yield ctx


def until(done: Callable[[], bool], within_s: float = 10) -> None:
    give_up_at = time.monotonic() + within_s
    while not done():
        gc.collect()
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def kept(ctx: FrayContext) -> tuple[int, int]:
    return ctx._objects.stats()


def in_use() -> int:
    pool = shared_memory.known_pool()
    return 0 if pool is None else pool.used


class Holder:
    """A process that holds, and one that owns."""

    def __init__(self) -> None:
        self.refs: list[ObjectRef] = []

    def keep(self, refs: list[ObjectRef]) -> int:
        self.refs += refs
        return os.getpid()

    def give(self) -> list[ObjectRef]:
        return self.refs

    def sums(self) -> list[Any]:
        return [float(get_default_job_ctx().get(ref).sum()) for ref in self.refs]

    def make(self, megabytes: int) -> ObjectRef:
        """Put an object of its own, whose owner it is."""
        ref = get_default_job_ctx().put(numpy.ones(megabytes * MB // 8))
        assert isinstance(ref, ObjectRef)
        return ref

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def where(refs: list[ObjectRef]) -> tuple[str, bool, float]:
    """Return the file in which a referenced array lies, whether it is writable, and the seconds it took."""
    began = time.perf_counter()
    array = get_default_job_ctx().get(refs[0])
    seconds = time.perf_counter() - began
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[-1], array.flags.writeable, seconds
    return "", array.flags.writeable, seconds


@pytest.mark.timed
def test_100_mb_are_read_in_the_owners_own_memory_and_go_with_the_last_reference(ctx: FrayContext) -> None:
    ref = ctx.put(numpy.ones(100 * MB // 8))
    ctx.get(ctx.run(where, [ref]))
    file, writeable, seconds = ctx.get(ctx.run(where, [ref]))
    pool = shared_memory.known_pool()
    assert pool is not None
    assert (file.startswith(pool.directory), writeable) == (True, False)
    print(f"100 MB in {seconds * 1e3:.2f} ms")
    assert seconds < 0.1
    assert (in_use(), kept(ctx)[0]) == (1, 1)
    del ref
    until(lambda: (in_use(), kept(ctx)) == (0, (0, 0)))


def total(refs: list[ObjectRef]) -> float:
    return float(get_default_job_ctx().get(refs[0]).sum())


def test_a_job_of_the_cluster_reads_what_its_launcher_has_put(ctx: FrayContext) -> None:
    ref = ctx.put(numpy.ones(MB))
    entry = Entrypoint.from_callable(total, args=([ref],))
    job = ctx.cluster.launch(JobRequest(name="reader", entrypoint=entry))
    del ref, entry
    assert job.wait() == MB
    until(lambda: kept(ctx) == (0, 0))


def test_a_holder_keeps_an_object_alive_until_it_dies(ctx: FrayContext) -> None:
    holder = ctx.create_actor(Holder, max_restarts=0)
    ref = ctx.put(numpy.ones(MB))
    pid = holder.keep([ref])
    del ref
    for _ in range(3):
        gc.collect()
        assert holder.sums() == [MB]
    (back,) = holder.give()
    assert ctx.get(back).sum() == MB
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert kept(ctx)[0] == 1  # it is ours, too
    del back
    until(lambda: kept(ctx) == (0, 0))
    second = ctx.create_actor(Holder, max_restarts=0)
    pid = second.keep([ctx.put(numpy.ones(MB))])
    assert (second.sums(), kept(ctx)[0]) == ([MB], 1)
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept(ctx) == (0, 0))  # the registry hears of its end; else it would take a minute
    until(lambda: in_use() == 0)  # and what was lent to it comes back, as its process is gone


@pytest.mark.timed
def test_with_its_owner_an_object_is_lost_and_waiters_get_an_error_soon(ctx: FrayContext) -> None:
    owner = ctx.create_actor(Holder, max_restarts=0)
    ref = owner.make(1)
    assert ctx.get(ref).sum() == MB // 8
    waiting = [ref, ref]
    owner.end.remote()
    began = time.monotonic()
    with pytest.raises(ObjectLost, match="the job or driver that owned it has ended"):
        while time.monotonic() - began < 20:
            ctx.get(waiting)
    with pytest.raises(ObjectLost):
        ctx.get(ctx.run(total, [ref]))
    assert time.monotonic() - began < 20


def once_more(refs: list[ObjectRef], marker: str) -> float:
    """Kill its worker the first time."""
    found = total(refs)
    if not os.path.exists(marker):
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def test_a_function_that_is_run_again_still_finds_its_arguments(ctx: FrayContext, tmp_path: Path) -> None:
    future = ctx.run(once_more, [ctx.put(numpy.ones(10))], f"{tmp_path}/died")
    gc.collect()
    assert ctx.get(future, timeout=60) == 10
    until(lambda: kept(ctx) == (0, 0))


def some(n: int, marker: str) -> Iterator[int]:
    for number in range(n):
        if number == n // 2 and not os.path.exists(marker):
            Path(marker).touch()
            time.sleep(0.2)  # what was made is received
            os.kill(os.getpid(), signal.SIGKILL)
        yield number


def test_a_generator_whose_worker_dies_continues_without_repeating_items(ctx: FrayContext, tmp_path: Path) -> None:
    assert list(ctx.run(some, 20, f"{tmp_path}/died")) == list(range(20))


def large(n: int) -> Any:
    return numpy.ones(n)


def test_large_results_are_put_and_removed_without_holders(ctx: FrayContext) -> None:
    result = ctx.get(ctx.run(large, 40 * MB // 8))  # more than a task may return
    assert (result.sum(), result.flags.writeable) == (40 * MB // 8, False)
    small = ctx.get(ctx.run(large, 10))
    small += 1
    del result
    until(lambda: kept(ctx) == (0, 0))
    assert in_use() == 0


class Model:
    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def total(self) -> float:
        return float(self.weights.sum())

    def pid(self) -> int:
        return os.getpid()


def test_an_actor_that_is_restarted_gets_its_large_arguments_again(ctx: FrayContext) -> None:
    model = ctx.create_actor(Model, ctx.put(numpy.ones(MB)))
    assert model.total() == MB
    os.kill(model.pid(), signal.SIGKILL)
    until(lambda: ctx.cluster.list_actors(prefix=repr(model).split()[1])[0].restarts == 1)
    assert model.total() == MB
    ctx.delete_actor(model)
    until(lambda: kept(ctx) == (0, 0))
