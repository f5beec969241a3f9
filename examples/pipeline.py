"""Data pipeline on `fray.v2`: near copies among the docstrings of Python's standard library, or in any texts.

    python examples/pipeline.py [--client SPEC] [--coordinator actor|job] [--workers N] [--shards N] [--input DIR]
                                [--output URL] [--kill-worker] [--check] [--json]

Workers extract documents from files, shuffle them by common parts, compare, and count by package. Every shard of every
stage is a Parquet file in --output, which is any storage that fsspec supports; after any failure, a rerun with the same
--output continues from the finished shards. On a cluster of several machines --input and --output must be
reachable from all of them, and the directory of these files, too.

In the order of reading: `pipeline_text` (the computation), `pipeline_plan` (its stages), `pipeline_backend` (execution
by a client), `pipeline_workers` (the actors), with `pipeline_ledger` (failures) and `pipeline_shards` (storage).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pipeline_text as text
from fray.v2 import Client, ResourceConfig
from fray.v2.client import client_of
from pipeline_backend import ActorBackend
from pipeline_plan import Dataset
from pipeline_screen import Board, Screen, print_report
from pipeline_shards import list_files, sources, stored_rows
from pipeline_workers import ExecutionHint

WORKER = ResourceConfig(cpu=0.5, ram="512m")


def near_copies(root: str, files: Sequence[tuple[str, int, float]], shards: int) -> Dataset:
    """Return the computation as a dataset."""
    docs = (
        Dataset.from_files(root, files, shards)
        .flat_map(text.documents)
        .map(text.normalised)
        .filter(text.long_enough)
        .store("docs", text.DOCS)
    )
    copies = (
        docs.flat_map(text.first_shingles)
        .shuffle("sketch", text.SKETCH, "key", shards)
        .group("key", text.near_pairs)
        .gather("pairs", text.PAIRS)
        .whole(text.copies)
        .store("copies", text.COPIES)
    )
    parts = max(1, shards // 4)
    return (
        docs.map(text.counted)
        .group("package", text.summed)
        .shuffle("counts", text.COUNTS, "package", parts)
        .union(copies.map(text.counted_copy).shuffle("copied", text.COUNTS, "package", parts))
        .group("package", text.summed)
        .store("table", text.COUNTS)
    )


def run(client: Client, options: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    """Run the pipeline on this client; return the report."""
    began = time.perf_counter()
    files = list_files(options.input)
    files = files[:: max(1, len(files) // options.limit)][: options.limit] if options.limit else files
    dataset = near_copies(options.input, files, options.shards)
    screen.say(f"{len(files)} files of {options.input} in {len(dataset.files)} shards, to {options.output}")
    hint = ExecutionHint(options.output, options.kill_worker)
    with (
        client.host_actor(Board, screen, name=f"board-{os.getpid()}") as board,
        ActorBackend(
            client, options.workers, WORKER, coordinator=options.coordinator, board=board.handle, name="pipeline"
        ) as backend,
    ):
        table = backend.execute(dataset, hint)
        summary = backend.summary
    result = {"table": sorted(table, key=lambda row: str(row["package"])), **copies_of(options.output, dataset)}
    seconds = round(time.perf_counter() - began, 3)
    report = {
        "result": result,
        "run": summary,
        "seconds": seconds,
        "workers": options.workers,
        "output": options.output,
    }
    if options.check:
        report["check"] = check(result, options.input, [path for path, _, _ in files], screen)
    return report


def copies_of(output: str, dataset: Dataset) -> dict[str, Any]:
    """Return the pairs and groups that an earlier stage has stored."""
    plan = dataset.plan()
    groups: dict[str, list[str]] = defaultdict(list)
    for row in stored_rows(output, plan, "copies"):
        groups[row["group"]].append(row["id"])
    pairs = sorted(sorted([row["one"], row["other"]]) for row in stored_rows(output, plan, "pairs"))
    return {"pairs": pairs, "groups": sorted(sorted(members) for members in groups.values())}


def check(result: Mapping[str, Any], root: str, paths: Sequence[str], screen: Screen) -> str:
    """Compute the same in this process, one loop after the other; return which parts of the result differ."""
    began = time.perf_counter()
    plain = text.plain_result(sources(root, paths))
    different = [name for name in plain if plain[name] != result[name]]
    screen.say(f"in a single process: {time.perf_counter() - began:.1f} s")
    return f"different: {', '.join(different)}" if different else "the same"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    spec, stdlib = os.environ.get("FRAY_CLIENT_SPEC", "local"), sysconfig.get_path("stdlib")
    parser = argparse.ArgumentParser(
        prog="pipeline.py",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--client", default=spec, help="local, machine, fray://HOST:PORT with FRAY_TOKEN, or ray")
    parser.add_argument("--coordinator", choices=("actor", "job"), default="actor", help="kind of the coordinator")
    parser.add_argument("--workers", type=int, default=min(8, max(2, os.cpu_count() or 2)), help="worker actors")
    parser.add_argument("--shards", type=int, default=16, help="shards of the input, and of the shuffle")
    parser.add_argument("--input", default=stdlib, metavar="DIR", help="texts; Python's standard library")
    parser.add_argument("--output", metavar="URL", help="directory of shards, new or to continue; default: a new one")
    parser.add_argument("--limit", type=int, metavar="FILES", help="maximum number of files, evenly spread")
    parser.add_argument("--kill-worker", action="store_true", help="SIGKILL a worker with its first shard half done")
    parser.add_argument("--check", action="store_true", help="compute it again in a single loop and compare")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON on stdout")
    options = parser.parse_args(argv)
    for name in ("workers", "shards", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.kill_worker and options.client == "local" and options.workers < 2:
        parser.error("--kill-worker on local needs --workers 2 or more: threads are not restarted")
    options.output = options.output or tempfile.mkdtemp(prefix="pipeline-")
    if "://" not in options.output:
        options.output = str(Path(options.output).absolute())
    if "://" not in options.input:
        options.input = str(Path(options.input).absolute())
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if the result is wrong, 2 if the job could not be done, 130 after Ctrl-C."""
    options = arguments(argv)
    try:
        with Screen() as screen:
            client = client_of(options.client)
            try:
                report = run(client, options, screen)
            finally:
                client.shutdown(wait=False)
    except KeyboardInterrupt:
        print(f"pipeline: interrupted; continue with --output {options.output}", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"pipeline: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    if options.check:
        print(f"pipeline: compared with a single loop over the same files: {report['check']}", file=sys.stderr)
    return int(report.get("check", "the same") != "the same")


if __name__ == "__main__":
    sys.exit(main())
