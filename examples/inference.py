"""Inference: N servers under one name, called by several threads; every call is answered even if a server is killed.

    python examples/inference.py [--cluster SPEC] [--servers N] [--seconds S] [--callers N] [--kill-server]
                                 [--weights URL] [--json]

Each server is a job that loads the weights (of `training.py`, or of a small new model) and registers an actor under a
common name; `pool.call()` sends each request to one of them. With --kill-server a server is killed under load (SIGKILL;
on `local`, where jobs are threads, its job is ended): its calls are repeated on others, as the model's answers have no
side effects (``idempotent=True``), and its job restarts and joins the others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import language_model as model
from fray import ActorDied
from fray.blocking import (
    ActorServer,
    Cluster,
    ClusterResolver,
    Entrypoint,
    EnvironmentConfig,
    JobRequest,
    ResourceConfig,
    current_cluster,
    current_job,
    open_cluster,
)

NAME = "model"


class Server:
    """Copy of the model."""

    def __init__(self, weights: model.Arrays) -> None:
        self._weights = weights

    def complete(self, start: str, length: int) -> tuple[str, str]:
        """Return a possible continuation, and the job that computed it."""
        return model.complete(self._weights, start, length), current_job().id

    def pid(self) -> int:
        return os.getpid()


def serve(weights_url: str) -> None:
    """Job of each server."""
    from fsspec.core import url_to_fs

    storage, path = url_to_fs(weights_url)
    found = model.load(storage, path)
    if found is None:
        raise FileNotFoundError(f"no weights at {weights_url}: train them with training.py --output")
    server = ActorServer(current_cluster())
    server.register(NAME, Server(found[0]))
    server.serve()


def write_weights(directory: str, steps: int = 150) -> str:
    """Train a small model for a moment; return the path of its weights."""
    from fsspec.core import url_to_fs

    storage, root = url_to_fs(directory)
    state, text = model.state_of(model.fresh(0)), model.corpus(characters=200_000)
    for step, (seen, answers) in zip(range(steps), model.batches(text, 128, 0, 0), strict=False):
        weights = {name: value for name, value in state.items() if "." not in name}
        model.adam(state, model.loss_and_gradients(weights, seen, answers)[1], step, 0.003)
    model.save(storage, f"{root}/checkpoint.npz", state, steps)
    return f"{directory}/checkpoint.npz"


class Load:
    """Threads that send one request after another, until they are stopped."""

    def __init__(self, pool: Any, callers: int) -> None:
        self._ask = pool.call("least_loaded").complete.options(idempotent=True)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self.times_s: list[float] = []
        self._threads = [threading.Thread(target=self._call, args=(n,), name=f"caller-{n}") for n in range(callers)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        starts = ("def ", "class ", "import ", "return ")
        while not self._over.is_set():
            began = time.perf_counter()
            try:
                _, server = self._ask(starts[number % len(starts)], 20)
            except ActorDied:  # an orderly end of the server: repeat the call on another
                continue
            except Exception as error:  # noqa: BLE001 - the example counts them, and there should be none
                with self._lock:
                    self.failed.append(repr(error))
            else:
                with self._lock:
                    self.answered[server] += 1
                    self.times_s.append(time.perf_counter() - began)

    def wait_answered(self, more: int, by: str | None = None) -> None:
        """Wait until so many more requests have been answered, by server ``by`` if given."""
        count = self.answered.total if by is None else lambda: self.answered[by]
        goal = count() + more
        while count() < goal and not self.failed:
            time.sleep(0.01)


def kill(cluster: Cluster, job: Any, pool: Any) -> None:
    """Send SIGKILL to the server's process; on `local`, where it is a thread, end its job."""
    pids = [future.result() for future in pool.broadcast().pid()]
    jobs = [endpoint.job_id for endpoint in pool.endpoints]
    pid = dict(zip(jobs, pids, strict=True))[job.id]
    if pid == os.getpid():
        job.terminate("killed on purpose")
        job.wait_ended()
    else:
        os.kill(pid, signal.SIGKILL)


def run(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Serve, call and kill; return the report."""
    if options.weights:
        return serve_and_call(cluster, options, options.weights)
    with tempfile.TemporaryDirectory(prefix="fray-inference-") as directory:
        return serve_and_call(cluster, options, write_weights(directory))


def serve_and_call(cluster: Cluster, options: argparse.Namespace, weights: str) -> dict[str, Any]:
    request = JobRequest(
        name="server",
        entrypoint=Entrypoint.from_callable(serve, args=(weights,)),
        resources=ResourceConfig.with_cpu(cpu=0.5, memory="512MB"),
        environment=EnvironmentConfig.create(workspace=str(Path(__file__).parent)),
        max_retries_failure=3,
    )
    jobs = cluster.launch(request, count=options.servers)
    pool = ClusterResolver(cluster).lookup(NAME)
    pool.wait_for_size(options.servers, timeout=120)
    began, outcome = time.perf_counter(), "no server was killed"
    with Load(pool, options.callers) as load:
        load.wait_answered(10 * options.servers)
        if options.kill_server:
            kill(cluster, jobs[0], pool)
            outcome = "its job restarted"
            if jobs[0].info.state.finished:
                jobs[0] = cluster.launch(request, name="server-again")
                outcome = "another job took its place"
            pool.wait_for_size(options.servers, timeout=120)
            load.wait_answered(3, by=jobs[0].id)
        time.sleep(max(0.0, options.seconds - (time.perf_counter() - began)))
    seconds = time.perf_counter() - began
    for job in jobs:
        job.terminate("the example has ended")
        job.wait_ended()
    times = sorted(load.times_s)
    return {
        "answered": dict(load.answered),
        "failed": load.failed,
        "per_s": round(len(times) / seconds, 1),
        "p50_ms": round(1000 * times[len(times) // 2], 2),
        "p99_ms": round(1000 * times[len(times) * 99 // 100], 2),
        "killed": outcome,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="inference.py",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    spec = os.environ.get("FRAY_CLUSTER_SPEC", "machine")
    parser.add_argument("--cluster", default=spec, help="local, machine, or fray://HOST:PORT with FRAY_TOKEN")
    parser.add_argument("--servers", type=int, default=3, help="jobs that serve the model")
    parser.add_argument("--callers", type=int, default=8, help="threads that call")
    parser.add_argument("--seconds", type=float, default=5.0, help="smallest duration of the load")
    parser.add_argument("--weights", metavar="URL", help="checkpoint.npz of training.py; else a small model is made")
    parser.add_argument("--kill-server", action="store_true", help="kill one of them under load")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON on stdout")
    options = parser.parse_args(argv)
    if options.servers < 1 or options.callers < 1:
        parser.error("--servers and --callers must be 1 or more")
    if options.kill_server and options.servers < 2:
        parser.error("--kill-server needs --servers 2 or more: others must answer meanwhile")
    with open_cluster(options.cluster) as cluster:
        report = run(cluster, options)
    if options.json:
        print(json.dumps(report))
    else:
        by = ", ".join(f"{server} {count}" for server, count in report["answered"].items())
        print(f"answered: {by}; failed: {len(report['failed'])}; {report['killed']}")
        print(f"{report['per_s']} a second, p50 {report['p50_ms']} ms, p99 {report['p99_ms']} ms")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
