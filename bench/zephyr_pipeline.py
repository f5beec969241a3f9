"""Pipelines of `bench.zephyr`, as a program that runs with Fray or with marin-fray: prints one line of JSON.

    python -P bench/zephyr_pipeline.py SHARDS WORKERS GROUPS DIRECTORY

It uses names of Marin's flat modules only, and the client of ``FRAY_CLIENT_SPEC``.
"""

from __future__ import annotations

import collections
import hashlib
import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from zephyr.context import ZephyrContext
from zephyr.dataset import Dataset
from zephyr.runners import InlineRunner

from fray.current_client import current_client
from fray.types import ResourceConfig


def shards_of_sources(count: int) -> list[list[str]]:
    """Return the paths of the standard library's sources, dealt to ``count`` shards."""
    found = Path(collections.__file__).parents[1].rglob("*.py")
    paths = sorted(str(path) for path in found if "site-packages" not in path.parts)
    return [paths[first::count] for first in range(count)]


def count_words(paths: list[str]) -> Iterator[dict[str, Any]]:
    words = collections.Counter(word for path in paths for word in Path(path).read_bytes().split())
    for word, count in words.items():
        yield {"key": word.decode("latin-1"), "count": count}


def find_lines(paths: list[str]) -> Iterator[dict[str, Any]]:
    lengths = collections.Counter(len(line) for path in paths for line in Path(path).read_bytes().splitlines())
    for length, count in lengths.items():
        yield {"key": length, "count": count}


def add_up(key: Any, items: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return {"key": key, "count": sum(item["count"] for item in items)}


class TimedRunner(InlineRunner):
    """Runs shards in Zephyr's workers, and appends to a file which worker ran which shard from when to when."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def execute(self, task: Any, chunk_prefix: str, execution_id: str) -> Any:
        began = time.perf_counter()
        found = super().execute(task, chunk_prefix, execution_id)
        worker = threading.current_thread().name.rpartition("-")[0]  # zephyr-task-WORKER-sSHARD
        with self.file.open("a") as out:
            out.write(json.dumps([worker, began, time.perf_counter(), execution_id, task.stage_name]) + "\n")
        return found


def stage_of(row: list[Any]) -> tuple[Any, ...]:
    worker, _, _, *stage = row
    return worker, *stage


def times_of_shards(file: Path, workers: int) -> dict[str, float]:
    """Return ``shards_s``, the seconds that a worker has run shards, and ``gap_ms``, the median time between two shards
    of a stage on a worker."""
    ran = sorted(map(json.loads, file.read_text().splitlines()))
    gaps = [after[1] - before[2] for before, after in pairwise(ran) if stage_of(before) == stage_of(after)]
    return {
        "shards_s": sum(end - began for _, began, end, *_ in ran) / workers,
        "gap_ms": 1000 * statistics.median(gaps),
    }


def digest(rows: Any) -> str:
    return hashlib.sha256(repr(sorted((row["key"], row["count"]) for row in rows)).encode()).hexdigest()[:16]


def loop(shards: list[list[str]]) -> list[str]:
    """Return the digests of both results by plain loops."""
    found = []
    for function in (count_words, find_lines):
        counts: dict[Any, int] = collections.Counter()
        for paths in shards:
            for item in function(paths):
                counts[item["key"]] += item["count"]
        found.append(digest({"key": key, "count": count} for key, count in counts.items()))
    return found


def cpu_s() -> float:
    """Return the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    count, workers, groups = map(int, sys.argv[1:4])
    shards, clock = shards_of_sources(count), time.perf_counter
    client = current_client()
    starts, times, shard_times, digests = [], [], [], []
    for group in range(groups):
        ran = Path(sys.argv[4], f"shards-{group}")
        # A context for each group of workers; the client, and so the cluster, stays.
        context = ZephyrContext(
            client=client,
            max_workers=workers,
            resources=ResourceConfig(cpu=0.5, ram="1g"),
            chunk_storage_prefix=sys.argv[4],
            stage_runner_factory=partial(TimedRunner, ran),
        )
        began = clock()
        context.start()
        context._coordinator.worker_handles.remote(workers, 300.0).result()
        starts.append(clock() - began)
        began = clock()
        for function in (count_words, find_lines):
            data = Dataset.from_list(shards).flat_map(function).group_by(key=lambda item: item["key"], reducer=add_up)
            digests.append(digest(context.execute(data).results))
        times.append(clock() - began)
        shard_times.append(times_of_shards(ran, workers))
        context.shutdown()
    client.shutdown()
    began, before = clock(), cpu_s()
    same = digests == groups * loop(shards)
    plain = {"loop_s": clock() - began, "loop_cpu_s": cpu_s() - before}
    _, best = min(zip(times, shard_times, strict=True), key=lambda pair: pair[0])
    found = {"starts_s": starts, "pipelines_s": min(times), "same": same, **best, **plain}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
