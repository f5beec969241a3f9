"""WorkerPool over real processes, one of which is killed for real."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

import fray

SMALL = fray.ResourceConfig.with_cpu(cpu=0.5, memory="100MB")


@pytest.fixture
async def cluster() -> AsyncIterator[fray.Cluster]:
    with trio.fail_after(30):
        async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
            yield cluster


def note(book: str, n: int, seconds: float) -> tuple[int, str, int]:
    """Write down that the task has begun, and where; then take a while."""
    worker = os.environ["FRAY_JOB_ID"]
    with open(book, "a") as file:
        file.write(f"{n} {worker}\n")
    time.sleep(seconds)
    return n, worker, os.getpid()


def begun(book: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in book.read_text().splitlines():
        n, worker = line.split()
        found.setdefault(int(n), []).append(worker)
    return found


def die(n: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def spin(seconds: float) -> bool:
    """Pure Python that ends early when it is cancelled; returns whether it was."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if fray.current_actor().cancelled:
            return True
    return False


def deaf(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


async def test_each_task_has_one_outcome_when_a_worker_is_killed(cluster: fray.Cluster, tmp_path: Path) -> None:
    book, total = tmp_path / "book", 2000
    async with fray.WorkerPool(cluster, 4, SMALL, environment=fray.EnvironmentConfig(env_vars={"A": "b"})) as pool:
        await pool.wait_for_workers()
        settled: Counter[int] = Counter()
        futures = [pool.submit(note, str(book), n, 0.001) for n in range(total)]
        for n, future in enumerate(futures):
            future.add_done_callback(lambda _, n=n: settled.update([n]))  # type: ignore[misc]
        await futures[total // 4]
        victim = next(worker for worker in pool.workers() if worker.running)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        results = [await future for future in futures]
        assert [n for n, _, _ in results] == list(range(total))
        assert set(settled.values()) == {1}
        assert len(settled) == total
        stats = pool.stats()
        assert (stats.done, stats.failed) == (total, 0)
        assert stats.retried >= 1
        repeated = {n: workers for n, workers in begun(book).items() if len(workers) > 1}
        assert all(workers.count(victim.job_id) <= 1 for workers in repeated.values()), "the rule of exclusion"
        assert all(victim.job_id in workers for workers in repeated.values()), "no other worker lost anything"
        await pool.wait_for_workers()  # the dead one is back
        assert await pool.submit(os.getenv, "A") == "b"


async def test_a_task_that_kills_its_workers_fails_alone(cluster: fray.Cluster) -> None:
    async with fray.WorkerPool(cluster, 3, SMALL, max_retries=2) as pool:
        await pool.wait_for_workers()
        good = pool.map(abs, range(50))
        bad = pool.submit(die, 0)
        more = pool.map(abs, range(50))
        with pytest.raises(fray.ActorDied, match="task 'die' was lost with its worker"):
            await bad
        assert [await future for future in (*good, *more)] == [*range(50), *range(50)]
        assert (pool.stats().failed, pool.stats().done) == (1, 100)


async def test_workers_that_cannot_live_fail_their_tasks(cluster: fray.Cluster) -> None:
    async with fray.WorkerPool(cluster, 1, SMALL, max_restarts=0) as pool:
        futures = [pool.submit(die, n) for n in range(3)]
        for future in futures:
            with pytest.raises(fray.FrayError, match=r"SIGKILL|gone"):
                await future
        with pytest.raises(fray.FrayError):
            await pool.wait_for_workers()
        with pytest.raises(fray.FrayError):
            await pool.submit(abs, 1)


async def test_a_busy_thread_is_cancelled_and_its_worker_can_be_replaced(cluster: fray.Cluster) -> None:
    async with fray.WorkerPool(cluster, 1, SMALL, kill_after_s=2.0) as pool:
        await pool.wait_for_workers()
        before = await pool.submit(os.getpid)
        timed = pool.options(timeout_s=0.2)
        with pytest.raises(fray.DeadlineExceeded, match="'spin' ran longer"):
            await timed.submit(spin, 20)
        assert await pool.submit(os.getpid) == before, "it was cancelled, and ended"
        with pytest.raises(fray.DeadlineExceeded, match="'deaf' ran longer"):
            await timed.submit(deaf, 20)
        assert await pool.submit(os.getpid) != before
        with trio.move_on_after(0.2):
            await pool.submit(spin, 20)
        assert await pool.submit(abs, -3) == 3


async def test_a_task_that_was_cancelled_as_its_worker_died_is_not_run_again(
    cluster: fray.Cluster, tmp_path: Path
) -> None:
    book = tmp_path / "book"
    async with fray.WorkerPool(cluster, 2, SMALL) as pool:
        await pool.wait_for_workers()
        future = pool.submit(note, str(book), 1, 1000.0)
        while not book.exists() or not begun(book):  # noqa: ASYNC110 - another process's file
            await trio.sleep(0.01)
        (worker,) = begun(book)[1]
        pid = next(info.pid for info in pool.workers() if info.job_id == worker)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it does not hear of it
        future.cancel()
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(10), pytest.raises(fray.CallCancelled):
            await future
        assert len(begun(book)[1]) == 1
        assert (pool.stats().cancelled, pool.stats().retried) == (1, 0)


async def test_tasks_of_a_dead_worker_wait_for_no_worker_that_finds_no_room(cluster: fray.Cluster) -> None:
    """One of two workers has a place; it dies with tasks, and gets them again when it is back."""
    async with fray.WorkerPool(cluster, 2, fray.ResourceConfig.with_cpu(cpu=3, memory="100MB")) as pool:
        await pool.wait_for_workers(1)
        victim = await pool.submit(os.getpid)
        futures = pool.map(deaf, [0.05] * 10)
        os.kill(victim, signal.SIGKILL)
        with trio.fail_after(15):
            assert victim not in [await future for future in futures]
        says = r"1 of 2 workers run after 0.1 s\nworker-.* is pending\nneeds 3 CPUs"
        with pytest.raises(fray.DeadlineExceeded, match=says):
            await pool.wait_for_workers(2, timeout=0.1)
