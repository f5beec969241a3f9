"""Search for copies and near copies of functions in the standard library of this Python: Fray's demo job.

    python examples/corpus.py [--check | --compare] [--kill-worker] [--json PATH] [--cluster SPEC] [--workers N]
                              [--limit FILES]

A pool of worker processes tokenizes some 1,700 real files shard by shard and sends what it finds straight to one
stateful actor, the `Merger`. Then the pool searches for near copies: the merger hands out bands of functions of like
size, the workers send back pairs. The driver only assigns work, watches and prints.

`corpus_text` defines copies. The search is exact: two sets that are similar enough share one of their rarest shingles
(prefix filter). As a check, a sample of functions is compared with every other one, and the report has the result. The
nodes read the files themselves, so they need the same Python in the same place.

``--compare`` runs as many plain processes side by side as there were workers, each doing the whole job by the same
functions: their speed together is the number of them divided by their time, and Fray's is one divided by its time. Both
times are those of whole processes, with their start and end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import sysconfig
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import trio

import fray  # its modules are imported at the first use of a name: the screen is there before
from corpus_screen import Screen, differences, print_report, write_json
from corpus_text import (
    Found,
    Group,
    Packed,
    Tally,
    add_to_groups,
    in_order,
    pack,
    read_files,
    sample_of,
    search,
    summary,
    unpack,
)

Worker: TypeAlias = tuple[str, int, str]
"""Name, process id, machine."""
Shard: TypeAlias = tuple[int, list[str]]
"""Number and files."""

SHARD_BYTES = 400_000

# In the workers -----------------------------------------------------------------------------------------------------


def this_worker() -> Worker:
    """Return name, process id, and the machine of that id."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return os.environ.get("FRAY_JOB_NAME", "worker"), os.getpid(), machine


async def process_shards(batch: Sequence[Shard], root: str, merger: Any) -> None:
    """Task of a worker: read the files of each shard, send its result to the merger while the next one is read."""
    me = this_worker()
    async with trio.open_nursery() as sending:
        for number, files in batch:
            sending.start_soon(merger.begin, f"shard {number}", me)
            tally, functions = await trio.to_thread.run_sync(read_files, root, files)
            sending.start_soon(merger.add, f"shard {number}", me, tally, functions)


async def process_band(number: int, low: int, high: int, merger: Any) -> None:
    """Task of a worker: find all near pairs whose larger function has ``low`` to ``high`` shingles."""
    me = this_worker()
    await merger.begin(f"band {number}", me)
    sets = unpack(await merger.band(low, high))
    pairs, sample = await trio.to_thread.run_sync(search, sets, low)
    await merger.add_pairs(f"band {number}", me, pairs, sample)


class Merger:
    """Stores the results of the workers. Every message names its task, so a repeated message changes nothing."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Worker]] = []
        self.done: dict[str, Worker] = {}
        self.tally = Tally()
        self.groups: dict[bytes, Group] = {}
        self.ordered: list[Group] = []
        self.pairs: list[tuple[int, int]] = []
        self.sample: Counter[str] = Counter()

    def begin(self, task: str, worker: Worker) -> None:
        self.begun.append((task, worker))

    def add(self, task: str, worker: Worker, tally: Tally, functions: Iterable[Found]) -> None:
        if task in self.done:
            return
        self.done[task] = worker
        self.tally.add(tally)
        add_to_groups(self.groups, functions)

    def plan(self) -> list[tuple[int, int]]:
        """Return bands of sizes, the heaviest first. All shards must have arrived.

        A partner has at least 0.8 of the size, so a band that ends at 1.5 times its beginning needs only itself and the
        upper part of its lower neighbour: everything is sent twice at most, and half of it once.
        """
        self.ordered = in_order(self.groups.values())
        weights: Counter[tuple[int, int]] = Counter()
        bounds = [1]
        while bounds[-1] <= max((len(group.shingles) for group in self.ordered), default=0):
            bounds.append(bounds[-1] * 3 // 2 + 1)
        for group in self.ordered:
            size = len(group.shingles)
            place = bisect_right(bounds, size)
            weights[bounds[place - 1], bounds[place]] += size
        return [band for band, _ in sorted(weights.items(), key=lambda item: (-item[1], item[0]))]

    def band(self, low: int, high: int) -> Packed:
        least = -(-4 * low // 5)
        sets = {key: group.shingles for key, group in enumerate(self.ordered)}
        return pack({key: members for key, members in sets.items() if least <= len(members) < high})

    def add_pairs(self, task: str, worker: Worker, pairs: Sequence[tuple[int, int]], sample: Mapping[str, int]) -> None:
        if task in self.done:
            return
        self.done[task] = worker
        self.pairs.extend(pairs)
        self.sample.update(sample)

    def progress(self) -> dict[str, Any]:
        bands = sum(task.startswith("band") for task in self.done)
        return {
            "files": self.tally.counts["files"],
            "bytes": self.tally.counts["bytes"],
            "shards": len(self.done) - bands,
            "bands": bands,
            "near_pairs": len(self.pairs),
            "busy": [(task, worker) for task, worker in dict(self.begun).items() if task not in self.done],
        }

    def history(self) -> tuple[list[tuple[str, Worker]], dict[str, Worker]]:
        """Return the workers that started each task, in order, and the worker whose answer was used."""
        return self.begun, self.done

    def result(self) -> tuple[dict[str, Any], dict[str, int]]:
        return summary(self.tally, self.ordered, self.pairs), sample_of(self.ordered, self.sample)


# The driver ----------------------------------------------------------------------------------------------------------


def library_files(limit: int | None = None) -> tuple[str, list[str]]:
    """Return the directory of this Python's standard library and its source files, in order.

    ``limit`` selects that many, evenly spread.
    """
    root = sysconfig.get_path("stdlib")
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = set(subdirectories) - {"site-packages", "dist-packages"}
        within = os.path.relpath(directory, root)
        files += [os.path.normpath(os.path.join(within, name)) for name in names if name.endswith(".py")]
    files.sort()
    if limit is not None:
        files = files[:: max(1, len(files) // limit)][:limit]
    return root, files


def shards_of(root: str, files: Iterable[str]) -> Iterator[list[str]]:
    """Yield shards of neighbouring files, about 400 kB each."""
    shard: list[str] = []
    size = 0
    for file in files:
        shard.append(file)
        size += (Path(root) / file).stat().st_size
        if size >= SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def batches_of(shards: Sequence[Shard], workers: int) -> Iterator[Sequence[Shard]]:
    """Yield batches for one task each: large ones first, as within a batch no worker waits until a result is sent;
    single shards at the end, so that all workers end together.
    """
    at = 0
    while at < len(shards):
        size = max(1, (len(shards) - at) // (4 * workers))
        yield shards[at : at + size]
        at += size


async def run(options: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    """Run the whole job on a cluster; return the report."""
    clock = Stages()
    root, files = library_files(options.limit)
    shards = list(shards_of(root, files))
    screen.say(f"{len(files)} files of {root} in {len(shards)} shards for {options.workers} workers")
    screen.stage("start")
    resources = fray.ResourceConfig.with_cpu(cpu=0.5, memory="512MB")
    async with fray.open_cluster(options.cluster) as cluster, cluster.open_scope("corpus") as scope:
        merger = await scope.create_actor(Merger, name="merger")
        async with (
            fray.WorkerPool(cluster, num_workers=options.workers, resources=resources, name_prefix="tokenizer") as pool,
            trio.open_nursery() as nursery,
        ):
            clock.ended("start")
            nursery.start_soon(watch, merger, pool, screen)
            killing = Killing()
            if options.kill_worker:
                nursery.start_soon(killing.run, merger, len(shards), screen)
            screen.stage("tokenize", "bytes", sum((Path(root) / file).stat().st_size for file in files), len(files))
            batches = batches_of(list(enumerate(shards)), options.workers)
            for future in [pool.submit(process_shards, batch, root, merger) for batch in batches]:
                await future
            screen.update(await merger.progress(), pool.size)
            clock.ended("tokenize")
            bands = await merger.plan()
            screen.stage("near copies", "bands", len(bands), len(files))
            heaviest_first = iter(enumerate(bands))
            async with trio.open_nursery() as submitters:
                for _ in range(options.workers):
                    submitters.start_soon(submit_bands, pool, heaviest_first, merger)
            screen.update(await merger.progress(), pool.size)
            clock.ended("near copies")
            nursery.cancel_scope.cancel()
        result, sample = await merger.result()
        killed = killing.events(*await merger.history())
        clock.ended("report")
    clock.ended("stop")
    report = {"result": result, "sample": sample, "killed": killed, "seconds": clock.seconds}
    return {**report, "workers": options.workers, "process_s": process_age_s()}


def process_age_s() -> float:
    """Return the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return round(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 2)


async def submit_bands(pool: Any, bands: Iterator[tuple[int, tuple[int, int]]], merger: Any) -> None:
    """Submit one band after the other: a pool assigns tasks ahead, where a heavy one would wait behind another."""
    for number, band in bands:
        await pool.submit(process_band, number, *band, merger)


async def watch(merger: Any, pool: Any, screen: Screen) -> None:
    """Poll the progress of the merger a few times a second."""
    while True:
        screen.update(await merger.progress(), pool.size)
        await trio.sleep(0.2)


class Stages:
    """Durations of the stages, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def ended(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._began, 3)
        self._began = now


class Killing:
    """``--kill-worker``: SIGKILL to a worker during a shard, and the fate of its work."""

    def __init__(self) -> None:
        self.victim: Worker | None = None
        self.task = ""

    async def run(self, merger: Any, shards: int, screen: Screen) -> None:
        while self.victim is None:
            progress = await merger.progress()
            if progress["shards"] >= shards:
                raise fray.FrayError("--kill-worker found no busy worker half-way; try with more files")
            if progress["busy"] and progress["shards"] >= shards // 2:
                self._kill(*progress["busy"][-1], screen)
            await trio.sleep(0.01)

    def _kill(self, task: str, worker: Worker, screen: Screen) -> None:
        name, pid, machine = worker
        if machine != this_worker()[2] or pid == os.getpid():
            raise fray.FrayError(f"--kill-worker: {name} is not on this machine; use it with --cluster machine")
        os.kill(pid, signal.SIGKILL)
        self.task, self.victim = task, worker
        screen.say(f"SIGKILL to {name} (pid {pid}), busy with {task}")

    def events(self, begun: Sequence[tuple[str, Worker]], done: Mapping[str, Worker]) -> dict[str, Any] | None:
        """Return the events for the report; None if no worker was killed."""
        if self.victim is None:
            return None
        lost = [task for task, worker in begun if worker == self.victim and done.get(task) != worker]
        again = {task: "{} (pid {})".format(*done[task][:2]) for task in lost if task in done}
        return {"worker": self.victim[0], "pid": self.victim[1], "task": self.task, "done_again": again}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="corpus.py",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cluster", default="machine", help="machine, local, or fray://HOST:PORT with FRAY_TOKEN")
    parser.add_argument("--workers", type=int, default=min(8, max(2, os.cpu_count() or 2)), help="worker processes")
    parser.add_argument("--limit", type=int, help="maximum number of files, evenly spread")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the whole report there too")
    plain = parser.add_mutually_exclusive_group()
    plain.add_argument("--check", action="store_true", help="compute it again in one plain process and compare")
    plain.add_argument(
        "--compare", action="store_true", help="do so in as many plain processes as workers, and compare the speed too"
    )
    parser.add_argument("--kill-worker", action="store_true", help="SIGKILL a busy worker half-way")
    options = parser.parse_args(argv)
    for name in ("workers", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.kill_worker and options.cluster == "local":
        parser.error("--kill-worker needs workers that are processes: use --cluster machine")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if a result is wrong, 2 if the job could not be done, 130 after Ctrl-C."""
    options = arguments(argv)
    status = 0
    try:
        status = run_and_report(options)
    except* fray.FrayError as group:
        print(f"corpus: {first_of(group)}", file=sys.stderr)
        status = 2
    except* KeyboardInterrupt:
        print("corpus: interrupted; everything it started has ended", file=sys.stderr)
        status = 130
    return status


def run_and_report(options: argparse.Namespace) -> int:
    with Screen() as screen:
        report = trio.run(run, options, screen)
    print_report(report)
    if options.json:
        write_json(options.json, report)
    wrong = report["sample"]["missed"] + report["sample"]["wrong"]
    if options.check or options.compare:
        wrong += compare(options, report)
    return int(wrong > 0)


def first_of(error: BaseException) -> BaseException:
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def compare(options: argparse.Namespace, report: Mapping[str, Any]) -> int:
    """Compute the result again in plain processes, side by side; return the number of results that differ."""
    count = options.workers if options.compare else 1
    job = json.dumps(library_files(options.limit)).encode()
    with Screen() as screen:
        outputs, plain_s = trio.run(run_plain, count, job, screen)
    mine = json.dumps([report["result"], report["sample"]])
    differing = [json.loads(output) for output in outputs if output.decode() != mine]
    for result, sample in differing[:1]:
        found = differences(report["result"], result) + differences(report["sample"], sample, "sample")
        for line in found[:20]:
            print(f"  differs: {line}")
    verdict = f"{len(differing)} of {count} results differ" if differing else "the same"
    if options.check:
        print(f"check in one plain process ({plain_s:.1f} s): {verdict}")
        return len(differing)
    fray_s = report["process_s"]
    print("speed, compared with plain processes side by side that do the whole job each:")
    print(f"{f'{count} plain processes':>20} {plain_s:6.1f} s  {60 * count / plain_s:6.2f} jobs a minute")
    print(f"{f'Fray, {count} workers':>20} {fray_s:6.1f} s  {60 / fray_s:6.2f} jobs a minute", end="")
    print(f" = {plain_s / count / fray_s:.2f} x their speed; results: {verdict}")
    return len(differing)


async def run_plain(count: int, job: bytes, screen: Screen) -> tuple[list[bytes], float]:
    """Run ``corpus_text`` in so many processes side by side; return what each printed, and the seconds of all."""
    command = [sys.executable, str(Path(__file__).with_name("corpus_text.py"))]
    outputs: list[bytes] = []
    seconds: list[float] = []
    began = time.perf_counter()

    async def run_one() -> None:
        done = await trio.run_process(command, stdin=job, capture_stdout=True)
        outputs.append(done.stdout)
        seconds.append(time.perf_counter() - began)

    screen.say(f"the whole job again in {count} plain process{'es' * (count > 1)}")
    screen.stage("plain")
    async with trio.open_nursery() as processes:
        for _ in range(count):
            processes.start_soon(run_one)
        while len(outputs) < count:
            screen.note(f"{time.perf_counter() - began:.0f} s")
            await trio.sleep(0.2)
    return outputs, max(seconds)


if __name__ == "__main__":
    sys.exit(main())
