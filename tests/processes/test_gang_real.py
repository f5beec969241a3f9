"""Frameworks in a gang of real processes, unaided. Each test runs where its framework can be imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, ResourceConfig

SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="1GB")


async def run_gang(fn: Callable[[], Any], **more: Any) -> Any:
    async with fray.open_cluster("machine?nodes=2&cpu=2") as cluster, cluster.open_scope("s") as scope:
        request = JobRequest(name="gang", entrypoint=Entrypoint.from_callable(fn), resources=SMALL, replicas=2, **more)
        with trio.fail_after(100):
            return await (await scope.launch(request))


def sum_by_torch() -> float:
    import torch  # type: ignore[import-not-found, unused-ignore]
    import torch.distributed as dist  # type: ignore[import-not-found, unused-ignore]

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total.item())


def sum_by_jax() -> float:
    import jax  # type: ignore[import-not-found, unused-ignore]

    jax.distributed.initialize()
    from jax.experimental import multihost_utils  # type: ignore[import-not-found, unused-ignore]

    all_of_them = multihost_utils.process_allgather(jax.numpy.array([jax.process_index() + 1.0]))
    jax.distributed.shutdown()
    return float(all_of_them.sum())


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
async def test_torch_distributed_works_unaided_in_a_gang() -> None:
    assert await run_gang(sum_by_torch) == 3.0


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
async def test_jax_distributed_works_unaided_in_a_gang() -> None:
    assert await run_gang(sum_by_jax) == 3.0


def meet_next_door() -> str:
    """The second member says hello at the port of the first; the first says what it heard. The first life fails."""
    import socket
    import time

    job = fray.current_job()
    assert job.coordinator is not None
    host, _, port = job.coordinator.rpartition(":")
    if job.attempt.endswith(":0:1"):
        raise RuntimeError("restart")
    if job.rank == 1:
        while True:
            try:
                with socket.create_connection((host, int(port)), timeout=1) as connection:
                    connection.sendall(b"hello")
                return ""
            except ConnectionRefusedError:
                time.sleep(0.01)
    with socket.create_server((host, job.ports["coordinator"])) as listener:
        connection, _ = listener.accept()
        with connection:
            return f"{connection.recv(100).decode()} in {job.attempt.split(':')[1]}"


@pytest.mark.promise("P6")
async def test_members_meet_at_the_coordinators_port_also_when_they_restart() -> None:
    assert await run_gang(meet_next_door, max_retries_failure=1) == "hello in 1"
