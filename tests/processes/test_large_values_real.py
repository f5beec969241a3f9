"""Large tasks, arguments and results between real processes: they arrive, and the controller holds little of them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, ResourceConfig
from tests.processes.lab import TOKEN, Lab, connected, open_lab

pytestmark = pytest.mark.full

MB = 1_000_000
ROOM = ResourceConfig.with_cpu(cpu=0.5, memory="1GB")


def add_one(array: numpy.ndarray) -> numpy.ndarray:
    array += 1
    return array


def peak_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def job(array: numpy.ndarray) -> JobRequest:
    return JobRequest("large", entrypoint=Entrypoint.from_callable(add_one, args=(array,)), resources=ROOM)


async def test_50_mb_go_through_a_pool_and_back() -> None:
    array = numpy.arange(50 * MB // 8)
    async with (
        fray.open_cluster("machine", logs=False) as cluster,
        fray.WorkerPool(cluster, 2, ROOM) as pool,
    ):
        futures = [pool.submit(add_one, array) for _ in range(3)]
        for future in futures:
            found = await future
            assert found.flags.writeable
            assert (found == array + 1).all()


async def test_300_mb_go_to_a_job_and_back_and_the_controller_holds_a_few_parts(tmp_path: Path) -> None:
    array = numpy.random.default_rng(7).integers(0, 1 << 62, 300 * MB // 8)
    with open_lab(tmp_path, "alpha") as lab:
        await connected(lab)
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            small = await cluster.launch(job(array[:2]))
            assert (await small == array[:2] + 1).all()
            pid = lab.running["controller"].pid
            before = peak_bytes(pid)
            large = await cluster.launch(job(array))
            found = await large
            assert (found == array + 1).all()
            assert peak_bytes(pid) - before < 64 * MB


async def test_a_result_survives_a_kill_of_the_controller_in_the_middle(tmp_path: Path) -> None:
    with open_lab(tmp_path, "alpha") as lab:
        await connected(lab)
        array = numpy.random.default_rng(7).integers(0, 1 << 62, 100 * MB // 8)
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster, trio.open_nursery() as nursery:
            nursery.start_soon(_kill_in_the_middle, lab)
            large = await cluster.launch(job(array))
            assert (await large == array + 1).all()
            assert len(large.info.attempts) == 1


def _has_files(directory: Path, count: int) -> bool:
    return directory.exists() and len(list(directory.iterdir())) >= count


async def _until(is_true: Callable[[], bool]) -> None:
    """Look again and again: the files are another process's."""
    with trio.fail_after(120):
        while not is_true():  # noqa: ASYNC110 - nothing tells when a file appears
            await trio.sleep(0.005)


async def _kill_in_the_middle(lab: Lab) -> None:
    """Kill the controller twice, each time when some more parts of a value are on its disk."""
    parts = lab.directory / "store" / "workspaces" / "chunks"
    for count in (20, 130):
        await _until(partial(_has_files, parts, count))
        lab.kill("controller", signal.SIGKILL)
        lab.start_controller()
