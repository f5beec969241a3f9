"""Time that a job waits for its workspace: at first, again, and after an edit: ``python -m bench.workspace``.

For comparison: ``tar`` from one directory into another, the cost of a copy by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import trio

import fray
from fray import Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig
from fray.runtime.workspaces import upload

WORDS = ("def", "class", "return", "import", "for", "in", "if", "else", "self", "value", "number", "yield")


def make(root: Path, files: int) -> int:
    """Make a tree of Python-like text, 4 KB per file; return its bytes."""
    rng, size = random.Random(files), 0
    for number in range(files):
        file = root / f"pkg{number // 100:03}" / f"module{number:05}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(rng.choices(WORDS, k=600)) + f" # {rng.getrandbits(4000):x}\n"
        file.write_text(text)
        os.utime(file, (time.time() - 3600,) * 2)
        size += len(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return size


def tar(root: Path, into: Path) -> float:
    into.mkdir()
    began = time.perf_counter()
    command = f"tar -C '{root}' --exclude .git -cf - . | tar -C '{into}' -xf -"
    subprocess.run(command, shell=True, check=True)
    return time.perf_counter() - began


def count() -> int:
    return sum(len(files) for _, _, files in os.walk("."))


async def once(cluster: fray.Cluster, root: Path, files: int) -> float:
    """Return the seconds from the launch to the end of a job that reads all files."""
    request = JobRequest(
        name="look",
        entrypoint=Entrypoint.from_callable(count),
        environment=EnvironmentConfig(workspace=str(root)),
        resources=ResourceConfig.with_cpu(cpu=0.1, memory="100MB"),
    )
    began = time.perf_counter()
    assert await (await cluster.launch(request)) == files
    return time.perf_counter() - began


async def measure(files: int, directory: Path) -> dict[str, float]:
    root = directory / "tree"
    size = make(root, files)
    found: dict[str, float] = {"files": files, "mb": size / 1e6, "tar_s": tar(root, directory / "copy")}
    async with fray.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster:
        found["first_s"] = await once(cluster, root, files)
        found["again_s"] = await once(cluster, root, files)
        began = time.perf_counter()
        await upload.find_directory(str(root))
        found["unchanged_scan_s"] = time.perf_counter() - began
        upload._caches.clear()
        began = time.perf_counter()
        await upload.find_directory(str(root))
        found["next_driver_scan_s"] = time.perf_counter() - began
        (root / "pkg000" / "module00007.py").write_text("edited = True\n")
        found["edited_s"] = await once(cluster, root, files)
    found["first_mb_per_s"], found["tar_mb_per_s"] = size / 1e6 / found["first_s"], size / 1e6 / found["tar_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.workspace", description=__doc__)
    parser.add_argument("--files", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    results = []
    for files in options.files:
        directory = Path(tempfile.mkdtemp(prefix="fray-bench-"))
        os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
        try:
            results.append(trio.run(measure, files, directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        print("  ".join(f"{name}={value:,.3f}" for name, value in results[-1].items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    from bench import workspace as _workspace  # so that the job's function is pickled by its module's name

    _workspace.main()
