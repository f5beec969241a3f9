"""Marin's Zephyr on Fray and on others: ``.venv-marin/bin/python -m bench.zephyr [--rounds 3] [--shards 200]``.

Two pipelines over the standard library's sources, one after the other: counts of words, and lines grouped by their
length; on Fray's `local` and `machine` (with Zephyr preloaded), and in the same turn on what was asked for:

    --marin-fray DIR    on Marin's own local client: pip install --no-deps --target DIR marin-fray==…
    --ray DIR           on Ray, by Fray's `RayClient`: pip install --no-deps --target DIR ray msgpack
    --groups 2          groups of workers of each client, one after the other
    --json FILE         writes all numbers
    --profile           instead: whose code runs, as shares of samples in all processes (py-spy must be on PATH)

Shards run in Zephyr's workers (`InlineRunner`). Per client: ``first_start_s`` and ``next_start_s``, until all workers
of a group are there; ``pipelines_s`` of the fastest group, ``shards_s`` of it in which a worker runs shards, and
``gap_ms``, the median time between two shards of a stage on a worker; ``cpu_s`` of all processes, with the import of
Zephyr in each; and ``loop_s``, ``loop_cpu_s``, the same by plain loops. `make test-marin` makes the environment.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import Results, report
from fray.node.linux.process_tree import become_subreaper

PIPELINE = Path(__file__).with_name("zephyr_pipeline.py")
MACHINE = "machine?preload=zephyr.worker,zephyr.context"


def run(spec: str, paths: list[Path], arguments: list[str]) -> dict[str, float]:
    """Run the pipelines in a process of their own. Raises RuntimeError: it failed, or has other results."""
    environ = {**os.environ, "FRAY_CLIENT_SPEC": spec, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    before = reap()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-P", str(PIPELINE), *arguments, directory]
        ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the pipelines on {spec} failed:\n{ran.stderr[-4000:]}")
    found = json.loads(ran.stdout.splitlines()[-1])
    if not found["same"]:
        raise RuntimeError(f"the pipelines on {spec} have other results than plain loops")
    first, *later = found["starts_s"]
    starts = {"first_start_s": first, **({"next_start_s": min(later)} if later else {})}
    cpu_s = reap() - before - found["loop_cpu_s"]
    return (
        starts
        | {"cpu_s": cpu_s}
        | {name: found[name] for name in ("pipelines_s", "shards_s", "gap_ms", "loop_s", "loop_cpu_s")}
    )


def profile(spec: str, arguments: list[str]) -> dict[str, float]:
    """Return which share of the samples that hold the interpreter is in Fray's code, in Zephyr's and in the pipelines'.

    What a library does counts for the package that has called it; so ``import`` is the import of all modules.
    Raises RuntimeError: py-spy or the pipelines failed.
    """
    environ = {**os.environ, "FRAY_CLIENT_SPEC": spec, "PYTHONPATH": str(PIPELINE.parents[1])}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "stacks")
        sampler = ["py-spy", "record", "--subprocesses", "--gil", "--full-filenames", "--rate", "50", "--format", "raw"]
        program = [sys.executable, "-P", str(PIPELINE), *arguments, directory]
        ran = subprocess.run([*sampler, "-o", str(file), "--", *program], env=environ, capture_output=True, text=True)
        if ran.returncode or not file.exists():
            raise RuntimeError(f"the profile on {spec} failed:\n{ran.stderr[-4000:]}")
        stacks = file.read_text().splitlines()
    samples: collections.Counter[str] = collections.Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        samples[next(filter(None, map(_owner, reversed(stack.split(";")))), "other")] += int(count)
    return {owner: count / samples.total() for owner, count in samples.most_common()} | {"samples": samples.total()}


def _owner(frame: str) -> str:
    """Return whose code a frame ``name (path:line)`` is; empty for that of libraries."""
    path = frame.rpartition("(")[2]
    owners = {PIPELINE.name: "pipelines", "/fray/": "fray", "/zephyr/": "zephyr", "importlib": "import"}
    return next((owner for part, owner in owners.items() if part in path), "")


def reap() -> float:
    """Wait for all processes that a run has left (Ray's end after it); return the CPU seconds of all so far."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.zephyr")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--marin-fray", type=Path, metavar="DIR")
    parser.add_argument("--ray", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    here = Path(__file__).parents[1]
    clients = {"fray local": ("local", [here]), "fray machine": (MACHINE, [here])}
    if options.marin_fray:
        clients["marin local"] = ("local", [options.marin_fray.resolve()])
    if options.ray:
        clients["ray"] = ("ray", [here, options.ray.resolve()])
    arguments = [str(number) for number in (options.shards, options.workers, options.groups)]
    if options.profile:
        for name, (spec, _) in clients.items():
            if name.startswith("fray"):
                print(name, {owner: round(share, 3) for owner, share in profile(spec, arguments).items()}, flush=True)
        return
    become_subreaper()  # so that the CPU seconds of all descendants are known
    results = Results()
    for _ in range(options.rounds):
        for name, (spec, paths) in clients.items():
            numbers = run(spec, paths, arguments)
            print(name, {key: round(number, 2) for key, number in numbers.items()}, file=sys.stderr, flush=True)
            results.add(name, numbers)
    ratios = {}
    if options.marin_fray:
        for number in ("pipelines_s", "cpu_s"):
            ratios[f"{number}: fray local / marin local"] = results.ratio(number, "fray local", "marin local")
    if options.ray:
        ratios["gap_ms: fray machine / ray"] = results.ratio("gap_ms", "fray machine", "ray")
    report(f"Zephyr, {options.shards} shards, {options.workers} workers", results, ratios, options.json)


if __name__ == "__main__":
    main()
