"""Start times of jobs: in the node's environment, in a warm and in a cold one of their own; and many short jobs.

    python -m bench.start [--rounds 5] [--jobs 1000] [--peer ray] [--json FILE]

``spec_to_line_ms`` is from the spec at the node's launcher to the first line of user code; ``launch_to_line_ms``
from `Scope.launch` in a driver, all processes of one machine. *Warm* is an environment that exists (the first number
includes the start of its zygote, for the second a zygote is ready); *cold* a new one, from wheels on this disk.
Short jobs run at most as many at a time as there are CPUs; beside them `concurrent.futures.ProcessPoolExecutor` with a
new spawned process for each task, and with ``--peer ray`` Ray tasks in a process each (``max_calls=1``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

import fray
from bench.actors import compiled_modules
from bench.measure import Number, Results, report
from fray import Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig
from fray.model.specs import AttemptSpec, EntryKind, JobSpec, ObservedAttempt, Phase
from fray.node.attempts.process_launcher import ProcessLauncher
from fray.testing.wheels import make_wheel, offline

ROUNDS, JOBS = 5, 1000
PEER_JOBS = 40
"""Number of tasks for other systems: spawning a process for each takes long, and the rate is the same."""
RAY = """
import os, sys, time
import ray
ray.init(num_cpus=os.cpu_count(), log_to_driver=False, include_dashboard=False)
@ray.remote(max_calls=1)
def now():
    return time.time()
ray.get([now.remote() for _ in range(4)])
count = int(sys.argv[1])
begun = time.perf_counter()
ray.get([now.remote() for _ in range(count)])
print(count / (time.perf_counter() - begun))
"""


now = time.time
"""Job that returns the time of its first line, without imports."""


# The node's own environment ------------------------------------------------------------------------------------------


async def attempt_specs(results: Results, rounds: int) -> None:
    """Measure the node's part of a start, without a cluster."""
    payload = fray.runtime.serialization.pickling.dumps((now, (), {}), "now")
    with tempfile.TemporaryDirectory(prefix="fray-bench-", dir="/tmp") as directory:
        launcher, ended = ProcessLauncher(directory), dict[str, trio.Event]()
        values: dict[str, bytes] = {}

        def on_observed(observed: ObservedAttempt, value: bytes | None) -> None:
            if observed.phase is Phase.ENDED:
                values[observed.attempt_id] = value or b""
                ended[observed.attempt_id].set()

        launcher.on_observed = on_observed
        async with trio.open_nursery() as nursery:
            await nursery.start(launcher.run)
            for index in range(rounds + 3):
                name = f"job-{index}"
                spec = JobSpec(
                    job_id=name, name=name, namespace="bench", entry=EntryKind.CALLABLE, sys_path=(os.getcwd(),)
                )
                ended[f"{name}:0:0"] = trio.Event()
                begun = time.time()
                launcher.start(
                    AttemptSpec(attempt_id=f"{name}:0:0", spec=spec, controller="unix:/none", key="k"), payload
                )
                await ended[f"{name}:0:0"].wait()
                at = fray.runtime.serialization.pickling.loads(values[f"{name}:0:0"])
                if index >= 3:
                    results.add("own environment", {"spec_to_line_ms": (at - begun) * 1e3})
            nursery.cancel_scope.cancel()


async def launch(scope: fray.Scope, fn: Callable[[], float], environment: EnvironmentConfig | None = None) -> float:
    """Return milliseconds from the launch to the first line."""
    begun = time.time()
    request = JobRequest(name=f"j{begun}", entrypoint=Entrypoint.from_callable(fn), environment=environment)
    at: float = await (await scope.launch(request)).wait()
    return (at - begun) * 1e3


# Environments of their own -------------------------------------------------------------------------------------------


@contextmanager
def wheels(count: int) -> Iterator[None]:
    """Let uv use these packages without a network, with its own cache."""
    with tempfile.TemporaryDirectory(prefix="fray-bench-") as directory:
        for version in range(count):
            make_wheel(Path(directory), "bench_package", str(version))
        before = dict(os.environ)
        os.environ.update(offline(Path(directory), Path(directory) / "uv"), XDG_CACHE_HOME=directory)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


async def environments(results: Results, rounds: int) -> None:
    asked = [EnvironmentConfig(pip_packages=[f"bench_package=={version}"]) for version in range(rounds)]
    for state in ("cold", "warm"):
        for environment in asked:  # each in a new cluster, so that no zygote is ready
            async with (
                fray.open_cluster("machine?nodes=1", logs=False) as cluster,
                cluster.open_scope("bench") as scope,
            ):
                results.add("own environment", {"launch_to_line_ms": await launch(scope, now)})
                took_ms = await launch(scope, now, environment)
                results.add(f"{state} environment", {"launch_to_line_ms": took_ms})
                took_ms = await launch(scope, now, environment)
                results.add("warm environment", {"with_zygote_ms": took_ms})


# Many short jobs -----------------------------------------------------------------------------------------------------


async def many(results: Results, jobs: int) -> None:
    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster, cluster.open_scope("bench") as scope:
        await launch(scope, now)
        entrypoint, one = Entrypoint.from_callable(now), ResourceConfig(cpu=1, memory="128MB")
        requests = [JobRequest(name=f"short-{n}", entrypoint=entrypoint, resources=one) for n in range(jobs)]
        begun = time.perf_counter()
        launched = await scope.launch_all(requests)
        for job in launched:
            await job.wait()
        results.add("fray", {"short_jobs_per_s": jobs / (time.perf_counter() - begun)})


def spawned(results: Results) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        begun = time.perf_counter()
        for future in [pool.submit(now) for _ in range(PEER_JOBS)]:
            future.result()
        results.add("spawn", {"short_jobs_per_s": PEER_JOBS / (time.perf_counter() - begun)})


def ray_tasks(results: Results) -> None:
    from bench.peers import __main__ as peers

    done = subprocess.run([str(peers.make()), "-c", RAY, str(PEER_JOBS)], capture_output=True, text=True, check=True)
    results.add("ray", {"short_jobs_per_s": float(done.stdout.split()[-1])})


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.start", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help="short jobs in a row (default 1000)")
    parser.add_argument("--peer", choices=["ray"], help="its tasks, too; made by `make peers`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as JSON")
    options = parser.parse_args()
    results = Results()
    with compiled_modules(), wheels(options.rounds):
        trio.run(attempt_specs, results, options.rounds * 4)
        trio.run(environments, results, options.rounds)
        trio.run(many, results, options.jobs)
        spawned(results)
        if options.peer == "ray":
            ray_tasks(results)
    report("start", results, _ratios(results), options.json)


def _ratios(results: Results) -> dict[str, Number]:
    others: dict[str, Any] = {name: name for name in ("spawn", "ray") if name in results.rounds}
    return {f"short jobs: fray / {name}": results.ratio("short_jobs_per_s", "fray", name) for name in others}


if __name__ == "__main__":
    from bench import start

    start.main()
