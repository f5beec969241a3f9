"""Speed of actors at start, restart and end, and the memory of an idle actor, with the lower bounds of the machine.

    python -m bench.actors [--rounds 5] [--json FILE]

Cold figures are from a fresh interpreter each, with compiled modules as in an installed package, in turn with a raw
interpreter, which only imports trio and trio-websocket. The others are taken in one warm ``machine`` cluster of one
node. Memory is that of an idle process actor that has answered, and of its shim, in megabytes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

import fray
from bench.compare import add_peer_option, run_peers
from bench.measure import Number, Results, report

ROUNDS = 5
TOGETHER = 8
RAW_IMPORTS = "trio, trio_websocket"
IMPORT = "import time; t = time.perf_counter(); import {modules}; print((time.perf_counter() - t) * 1e3)"
RAW_START = "import {modules}; import time; print((time.monotonic() - {began}) * 1e3)"
COLD_DRIVER = """
import time
import fray, trio
class Echo:
    def echo(self, value):
        return value
async def main():
    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster:
        up = time.monotonic()
        async with cluster.open_scope("cold") as scope:
            echo = await scope.create_actor(Echo)
            assert await echo.echo(7) == 7
            answered = time.monotonic()
    print((up - {began}) * 1e3, (answered - {began}) * 1e3, (time.monotonic() - answered) * 1e3)
trio.run(main)
"""


class Echo:
    """Smallest possible actor."""

    def echo(self, value: int) -> int:
        return value

    def pids(self) -> tuple[int, int]:
        return os.getpid(), os.getppid()

    def hold(self) -> None:
        time.sleep(60)


def nothing() -> int:
    """Job that is launched."""
    return 7


class Watch:
    """Numbers of a probe, and the time since its last start."""

    def __init__(self, results: Results, probe: str) -> None:
        self.results, self.probe, self.began = results, probe, time.perf_counter()

    def start(self) -> None:
        self.began = time.perf_counter()

    def stop(self, name: str, unit: float = 1e3) -> None:
        self.results.add(self.probe, {name: (time.perf_counter() - self.began) * unit})


# Cold ----------------------------------------------------------------------------------------------------------------


def python(script: str) -> list[float]:
    """Return the numbers that a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()]


@contextmanager
def compiled_modules() -> Iterator[None]:
    """Let children store their compiled modules, as for installed packages."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = cache
        python(COLD_DRIVER.format(began=0.0))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def cold(results: Results) -> None:
    """Measure one round: raw interpreter, whole driver, imports."""
    (raw,) = python(RAW_START.format(modules=RAW_IMPORTS, began=time.monotonic()))
    results.add("raw", {"cold_import_ms": raw})
    up, answered, shutdown = python(COLD_DRIVER.format(began=time.monotonic()))
    results.add("fray", {"cold_up_ms": up, "cold_answer_ms": answered, "shutdown_ms": shutdown})
    (raw,), (own,) = python(IMPORT.format(modules=RAW_IMPORTS)), python(IMPORT.format(modules="fray"))
    results.add("raw", {"import_ms": raw})
    results.add("fray", {"import_ms": own})


# Raw -----------------------------------------------------------------------------------------------------------------


def raw(results: Results) -> None:
    """Measure one round: fork and exec of an interpreter that does nothing; fork of this one, up to its first byte."""
    watch = Watch(results, "raw")
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    watch.stop("fork_exec_python_ms")
    ours, theirs = socket.socketpair()
    watch.start()
    pid = os.fork()
    if pid == 0:
        theirs.send(b"x")
        os._exit(0)
    ours.recv(1)
    watch.stop("fork_to_first_byte_ms")
    os.waitpid(pid, 0)
    ours.close()
    theirs.close()


# Warm ----------------------------------------------------------------------------------------------------------------


async def create(cluster: fray.Cluster, watch: Watch) -> None:
    """Measure from creation to the first answer: one actor, then eight together."""
    for count in (1, TOGETHER):
        async with cluster.open_scope("create") as scope:
            watch.start()
            actors = [await scope.create_actor(Echo) for _ in range(count)]
            futures = [actor.echo.start(7) for actor in actors]
            assert [await future.wait() for future in futures] == [7] * count
            watch.stop(f"create_{count}_ms")
            if count > 1:
                continue
            watch.start()
        watch.stop("end_actor_ms")


async def launch(cluster: fray.Cluster, watch: Watch) -> None:
    async with cluster.open_scope("launch") as scope:
        watch.start()
        job = await scope.launch(fray.JobRequest(name="bench", entrypoint=fray.Entrypoint.from_callable(nothing)))
        assert await job.wait() == 7
        watch.stop("launch_to_result_ms")


async def kill(cluster: fray.Cluster, watch: Watch) -> None:
    """Measure from SIGKILL of an actor's process to the next answer, and to the end of a running call."""
    async with cluster.open_scope("kill") as scope:
        actor = await scope.create_actor(Echo, max_restarts=1)
        pid, _ = await actor.pids()
        watch.start()
        os.kill(pid, signal.SIGKILL)
        assert await actor.echo.options(idempotent=True)(7) == 7
        watch.stop("kill_to_answer_ms")
        mortal = await scope.create_actor(Echo, on_failure="absorb")
        pid, _ = await mortal.pids()
        call = mortal.hold.start()
        await trio.sleep(0.05)
        watch.start()
        os.kill(pid, signal.SIGKILL)
        try:
            await call.wait()
        except fray.ActorDied:
            watch.stop("kill_to_call_ended_ms")


async def memory(cluster: fray.Cluster, results: Results) -> None:
    async with cluster.open_scope("idle") as scope:
        actors = [await scope.create_actor(Echo) for _ in range(TOGETHER)]
        pids = [await actor.pids() for actor in actors]
        await trio.sleep(0.5)
        for own, shim in pids:
            for name, pid in (("actor", own), ("shim", shim)):
                pss, uss = rollup(pid)
                results.add("fray", {f"idle_{name}_pss_mb": pss, f"idle_{name}_uss_mb": uss})


def rollup(pid: int) -> tuple[float, float]:
    """Return proportional and unique memory (PSS, USS) of a process in megabytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return sizes["Pss:"] * 1024 / 1e6, (sizes["Private_Clean:"] + sizes["Private_Dirty:"]) * 1024 / 1e6


async def warm(results: Results, rounds: int) -> None:
    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster:
        for index in range(rounds + 1):
            into = results if index else Results()
            watch = Watch(into, "fray")
            await create(cluster, watch)
            await launch(cluster, watch)
            await kill(cluster, watch)

        await memory(cluster, results)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.actors", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as JSON")
    add_peer_option(parser)
    options = parser.parse_args()
    results = Results()
    with compiled_modules():
        for _ in range(options.rounds):
            cold(results)
            raw(results)
        trio.run(warm, results, options.rounds)
    report("actors", results, _ratios(results), options.json)
    run_peers(options, "create,fault")


def _ratios(results: Results) -> dict[str, Number]:
    return {
        "cold driver / raw import": results.ratio("cold_answer_ms", "fray", "raw", "cold_import_ms"),
        "import fray / raw import": results.ratio("import_ms", "fray", "raw"),
    }


if __name__ == "__main__":
    main()
