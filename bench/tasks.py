"""Many small tasks on a pool of workers, beside the standard library: ``python -m bench.tasks``.

5,000 tiny tasks (``n + 1``) by 4 workers, as a list of futures (`map`), one `submit` each, and as a stream (`imap`);
the same with arguments and results of some size; one task at a time. The function is the script's own, which is pickled
by value, except in one line. Beside them, by 4 processes of `multiprocessing`: a
pool that is given large chunks, one that is given single tasks, and, as a floor, pickled batches over plain pipes.
Target: 20,000 tiny tasks a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import operator
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import trio

import fray
from bench.compare import add_peer_option, run_peers
from bench.measure import Probe, by_the_lot, one_by_one, report, take_turns

TASKS = 5_000
WORKERS = 4
FLOOR_BATCH = 100
SIZES = {"1 KB": 1_000, "64 KB": 64_000}


def increment(n: int) -> int:
    """Tiny task."""
    return n + 1


def echo(data: bytes) -> bytes:
    """Task with data in both directions."""
    return data


# Baselines -----------------------------------------------------------------------------------------------------------


def serve_pipe(pipe: Any) -> None:
    """Process of the lower bound: a batch of numbers in, a batch of results out."""
    try:
        while True:
            batch = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps([increment(n) for n in batch], 5))
    except EOFError:
        pass


@contextmanager
def open_pipes() -> Iterator[list[Any]]:
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(WORKERS)]
    processes = [spawn.Process(target=serve_pipe, args=(theirs,), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    for _, theirs in pairs:
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.close()
        for process in processes:
            process.join(5)


def probe_pipes(pipes: list[Any]) -> Probe:
    batches = [list(range(first, first + FLOOR_BATCH)) for first in range(0, TASKS, FLOOR_BATCH)]

    async def lot() -> int:
        left = iter(batches)
        for pipe in pipes * 2:  # each has the next batch while it works
            pipe.send_bytes(pickle.dumps(next(left), 5))
        done, due = 0, len(pipes) * 2
        while due:
            for pipe in multiprocessing.connection.wait(pipes):
                done += len(pickle.loads(pipe.recv_bytes()))
                due -= 1
                if (batch := next(left, None)) is not None:
                    pipe.send_bytes(pickle.dumps(batch, 5))
                    due += 1
        return done

    return lambda seconds: by_the_lot(lot, seconds)


def probe_multiprocessing(pool: Pool, chunk: int | None) -> Probe:
    async def lot() -> int:
        return len(pool.map(increment, range(TASKS), chunk))

    return lambda seconds: by_the_lot(lot, seconds)


# Fray ----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_pool() -> AsyncIterator[fray.WorkerPool]:
    small = fray.ResourceConfig.with_cpu(cpu=1, memory="256MB")
    async with (
        fray.open_cluster("machine?nodes=1&cpu=8", logs=False) as cluster,
        fray.WorkerPool(cluster, WORKERS, small) as pool,
    ):
        await pool.wait_for_workers()
        yield pool


def probe_map(pool: fray.WorkerPool) -> Probe:
    async def lot() -> int:
        return len([await future for future in pool.map(increment, range(TASKS))])

    return lambda seconds: by_the_lot(lot, seconds)


def probe_submit(pool: fray.WorkerPool, function: Callable[[int], object] = increment) -> Probe:
    async def lot() -> int:
        return len([await future for future in [pool.submit(function, n) for n in range(TASKS)]])

    return lambda seconds: by_the_lot(lot, seconds)


def probe_imap(pool: fray.WorkerPool, ordered: bool) -> Probe:
    async def lot() -> int:
        return len([result async for result in pool.imap(increment, range(TASKS), ordered=ordered)])

    return lambda seconds: by_the_lot(lot, seconds)


def probe_sized(pool: fray.WorkerPool, size: int) -> Probe:
    data, count = bytes(size), max(100, min(TASKS, 20_000_000 // size))

    async def lot() -> int:
        return len([await future for future in pool.map(echo, [data] * count)])

    async def probe(seconds: float) -> dict[str, float]:
        numbers = await by_the_lot(lot, seconds)
        return {**numbers, "mb_per_s": numbers["per_s"] * size / 1e6}

    return probe


def probe_one(pool: fray.WorkerPool) -> Probe:
    async def step() -> None:
        await pool.submit(increment, 1)

    return lambda seconds: one_by_one(step, seconds)


async def measure(pipes: list[Any], pool: Pool, seconds: float, rounds: int, json_file: Path | None) -> None:
    async with open_pool() as ours:
        probes: dict[str, Probe] = {
            "plain pipes, batches of 100": probe_pipes(pipes),
            "multiprocessing.Pool.map": probe_multiprocessing(pool, None),
            "multiprocessing.Pool.map, tasks one by one": probe_multiprocessing(pool, 1),
            "fray map": probe_map(ours),
            "fray submit": probe_submit(ours),
            "fray submit, a function of a module": probe_submit(ours, operator.neg),
            "fray imap": probe_imap(ours, ordered=True),
            "fray imap, as done": probe_imap(ours, ordered=False),
            **{f"fray map, {label} both ways": probe_sized(ours, size) for label, size in SIZES.items()},
            "fray, one task at a time": probe_one(ours),
        }
        results = await take_turns(probes, rounds, seconds / rounds / len(probes))
        single, floor = "multiprocessing.Pool.map, tasks one by one", "plain pipes, batches of 100"
        ratios = {
            f"{name} / {other}": results.ratio("per_s", name, other)
            for name in ("fray map", "fray submit", "fray imap")
            for other in (single, floor)
        }
        report("5,000 tiny tasks, 4 workers", results, ratios, json_file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tasks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of all probes together (default 30)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of all probes in turn (default 5)")
    add_peer_option(parser)
    options = parser.parse_args()
    spawn: Any = multiprocessing.get_context("spawn")
    with open_pipes() as pipes, spawn.Pool(WORKERS) as pool:
        trio.run(measure, pipes, pool, options.seconds, options.rounds, options.json)
    run_peers(options, "tasks")


if __name__ == "__main__":
    main()
