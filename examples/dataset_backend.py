"""Count of imports in this Python's standard library, with Fray-Zero's `FrayBackend`.

    python examples/dataset_backend.py [--cluster SPEC] [--workers N] [--limit FILES] [--input DIR] [--output URL]
                                       [--kill-worker] [--check] [--json]

Lazy rows (`dataset`) are planned into shards, and a `WorkerPool` runs them: sync code from end to end, on threads, on
processes, or on a running cluster. Workers have no state: rows are brought together in storage, and the shard of a
worker that dies goes to another one. On a cluster of several machines --input, --output and --scratch must be reachable
from all of them, and the directory of these files, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from dataset import Dataset, plan, read_jsonl, run_here, run_task
from fray import FrayError
from fray.blocking import Cluster, ResourceConfig, WorkerPool, current_cluster, open_cluster

try:
    from rich.console import Console
    from rich.progress import Progress, TaskID
except ImportError:  # optional: plain lines otherwise
    Console = None  # type: ignore[assignment,misc]

SHARDS_PER_WORKER = 4
"""Shards for each worker: several, so that a slow shard does not delay the others."""
PLAIN_EVERY_S = 2.0


class Backend(Protocol):
    """Executes datasets."""

    def execute(self, dataset: Dataset) -> list[Any]: ...


class FrayBackend(Backend):
    """Executes datasets on the workers of a cluster.

    Args:
        cluster: cluster to use. Default: `current_cluster()`.
        max_parallelism: largest number of workers; never more than there are shards.
        memory_per_worker: memory reserved for each worker, and its limit.
        cpu_per_worker: CPUs of each worker. Default 1.
        scratch: storage for the rows between two stages, reachable from all workers. Default: a temporary directory.
        on_progress: called with (stage, shards done, shards, the pool) when a stage starts and after each shard.
        max_retries: number of times that a shard is repeated because its worker died.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        max_parallelism: int = 100,
        memory_per_worker: str = "2GB",
        *,
        cpu_per_worker: float = 1,
        scratch: str | None = None,
        on_progress: Callable[[str, int, int, WorkerPool], object] = lambda *progress: None,
        max_retries: int = 3,
    ) -> None:
        if max_parallelism < 1:
            raise ValueError(f"max_parallelism={max_parallelism!r} must be 1 or more")
        self.cluster = cluster if cluster is not None else current_cluster()
        self.max_parallelism = max_parallelism
        self.resources = ResourceConfig.with_cpu(cpu=cpu_per_worker, memory=memory_per_worker)
        self.scratch = scratch
        self.on_progress = on_progress
        self.max_retries = max_retries
        self.retried = 0
        """Number of repeated shards so far."""

    def execute(self, dataset: Dataset) -> list[Any]:
        """Return the rows of the dataset in order of its shards, or the URLs of the files with them.

        Raises:
            BaseException: the error of a step, in the first shard that failed.
            ActorDied: the workers of one shard have died too often.
        """
        with tempfile.TemporaryDirectory(prefix="fray-dataset-", ignore_cleanup_errors=True) as here:
            stages = plan(dataset, SHARDS_PER_WORKER * self.max_parallelism, self.scratch or here)
            workers = min(self.max_parallelism, len(stages[0].tasks))
            with WorkerPool(
                self.cluster, workers, self.resources, name_prefix="dataset", max_retries=self.max_retries
            ) as pool:
                for stage in stages:
                    self.on_progress(stage.title, 0, len(stage.tasks), pool)
                    results = []
                    for done, result in enumerate(pool.imap(run_task, stage.tasks), 1):
                        results.append(result)
                        self.on_progress(stage.title, done, len(stage.tasks), pool)
                self.retried += pool.retried
        return [row for result in results for row in result]


# Computation ---------------------------------------------------------------------------------------------------------


def imports_of(file: str) -> Iterator[dict[str, str]]:
    """Yield a row for each module that a source file imports; a row without a module if it is not valid Python.

    It reads tokens: `ast` fails at random when threads of one process use it at once (CPython issue 106905).
    """
    name = Path(file).name
    statement: list[str] = []
    try:
        with open(file, "rb") as source:
            for token in tokenize.tokenize(source.readline):
                if token.type == tokenize.NEWLINE or token.string in (";", ":"):
                    yield from ({"module": module, "by": name} for module in imported(statement))
                    statement = []
                elif token.type in (tokenize.NAME, tokenize.OP):
                    statement.append(token.string)
    except (SyntaxError, tokenize.TokenError):
        yield {"module": "", "by": name}


def imported(statement: Sequence[str]) -> list[str]:
    """Return the modules that a statement imports, without those of its own package."""
    if statement[:1] == ["import"]:
        return [word for before, word in pairwise(statement) if before in ("import", ",")]
    is_other = statement[:1] == ["from"] and statement[1:2] != [] and not statement[1].startswith(".")
    return [statement[1]] if is_other else []


def module_of(row: dict[str, str]) -> str:
    return row["module"]


def importers(module: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    return {"module": module, "imports": len(rows), "by": sorted({row["by"] for row in rows})}


def is_shared(row: dict[str, Any]) -> bool:
    return bool(row["module"]) and len(row["by"]) > 1


def who_imports_what(files: Sequence[str]) -> Dataset:
    """Return the dataset of modules that several files import, with these files."""
    return Dataset.from_items(files).flat_map(imports_of).group_by(module_of, importers).filter(is_shared)


def library_files(root: str, limit: int | None) -> list[str]:
    """Return the source files below a directory, in order; ``limit`` selects that many, evenly spread."""
    paths = (path for path in Path(root).rglob("*.py") if path.is_file())
    files = sorted(str(path) for path in paths if not {"site-packages", "dist-packages"} & set(path.parts))
    return files if limit is None else files[:: max(1, len(files) // limit)][:limit]


# The driver ----------------------------------------------------------------------------------------------------------


class Screen:
    """Progress on stderr: a bar per stage on a terminal; elsewhere a line when a stage is done, or takes long."""

    def __init__(self, kill_worker: bool) -> None:
        self.killed: dict[str, Any] | None = None
        self._kills = kill_worker
        self._bars = Progress(console=Console(stderr=True)) if Console is not None and sys.stderr.isatty() else None
        self._bar: dict[str, TaskID] = {}
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Screen:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, stage: str, done: int, shards: int, pool: WorkerPool) -> None:
        if self._kills and self.killed is None and done:
            self._kill_a_worker(stage, pool)
        now = time.monotonic()
        if self._bars is not None:
            if stage not in self._bar:
                self._bar[stage] = self._bars.add_task(stage, total=shards)
            self._bars.update(self._bar[stage], completed=done)
        elif done == shards or now - self._last_line_s >= PLAIN_EVERY_S:
            self._last_line_s = now
            print(f"{stage:>20} {done:4d} of {shards} shards, {pool.size} workers", file=sys.stderr, flush=True)

    def _kill_a_worker(self, stage: str, pool: WorkerPool) -> None:
        """Send SIGKILL to a busy worker, if there is one at this moment."""
        busy = [worker for worker in pool.workers() if worker.busy and worker.pid]
        if busy and busy[0].pid is not None:
            os.kill(busy[0].pid, signal.SIGKILL)
            self.killed = {"worker": busy[0].job_id, "pid": busy[0].pid, "stage": stage}


def run(options: argparse.Namespace, output: str) -> dict[str, Any]:
    """Run the whole job; return the report."""
    files = library_files(options.input, options.limit)
    began = time.perf_counter()
    with open_cluster(options.cluster) as cluster, Screen(options.kill_worker) as screen:
        backend = FrayBackend(
            cluster,
            max_parallelism=options.workers,
            memory_per_worker="512MB",
            cpu_per_worker=0.5,
            scratch=options.scratch,
            on_progress=screen.update,
        )
        written = backend.execute(who_imports_what(files).write_jsonl(output))
    rows = [row for file in written for row in read_jsonl(file)]
    return {
        "files": len(files),
        "modules": len(rows),
        "top": sorted(((len(row["by"]), row["module"]) for row in rows), reverse=True)[:10],
        "shards": len(written),
        "retried": backend.retried,
        "killed": screen.killed,
        "seconds": round(time.perf_counter() - began, 3),
        "same": in_order(rows) == in_order(run_here(who_imports_what(files))) if options.check else None,
    }


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=module_of)  # type: ignore[arg-type]


def print_report(report: dict[str, Any]) -> None:
    print(f"{report['files']} files in {report['shards']} shards, {report['seconds']:.1f} s")
    if report["killed"]:
        killed = report["killed"]
        print(f"{killed['worker']} (pid {killed['pid']}) was killed; {report['retried']} shards were repeated")
    print(f"{report['modules']} modules are imported by more than one of them; most of all:")
    for count, module in report["top"]:
        print(f"{count:6d}  {module}")
    if report["same"] is not None:
        print("in one plain process: " + ("the same" if report["same"] else "NOT THE SAME"))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dataset_backend.py",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cluster", default="machine", help="machine, local, or fray://HOST:PORT with FRAY_TOKEN")
    parser.add_argument("--workers", type=int, default=min(8, max(2, os.cpu_count() or 2)), help="at most")
    parser.add_argument("--limit", type=int, help="maximum number of files, evenly spread")
    parser.add_argument("--input", default=sysconfig.get_path("stdlib"), help="a directory of Python sources")
    parser.add_argument("--output", metavar="URL", help="directory for the rows, in any storage that fsspec supports")
    parser.add_argument("--scratch", metavar="URL", help="storage for rows between stages; default: temporary")
    parser.add_argument("--kill-worker", action="store_true", help="SIGKILL a busy worker")
    parser.add_argument("--check", action="store_true", help="compute it again in one plain process and compare")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    options = parser.parse_args(argv)
    for name in ("workers", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.kill_worker and not options.cluster.startswith("machine"):
        parser.error("--kill-worker needs workers that are processes of this machine: use --cluster machine")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if the comparison fails, 2 if the job could not be done, 130 after Ctrl-C."""
    options = arguments(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="fray-dataset-") as here:
            report = run(options, options.output or here)
    except (FrayError, ExceptionGroup, OSError) as error:
        print(f"dataset_backend: {first_of(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dataset_backend: interrupted; everything it started has ended", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report)
    return int(report["same"] is False)


def first_of(error: BaseException) -> BaseException:
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(main())
