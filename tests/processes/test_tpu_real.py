"""TPU slices of Google's (by our server) whose hosts are real ``fray-node`` processes, let in by their slice's token: a
gang asks for a slice, gets it, loses it, and gets another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import fray
from fray.controller import provider_driver
from fray.model.specs import JobInfo
from fray.testing.tpu_cloud import TpuCloud
from fray.testing.tpu_hosts import TpuHosts
from fray.testing.tpu_server import serve_tpus

POLICY = """
[[group]]
name = "v5e"
provider = "tpu"
tpu = "v5litepod-16"
cpu = 4
memory = "1GB"
zones = ["us-west4-a"]
spot = true
max = 2

[group.options]
project = "lab"
runtime_version = "v2-alpha-tpuv5-lite"
install = "true"
queued = true
endpoint = "{endpoint}"
"""


@contextmanager
def cloud_with_hosts(directory: Path) -> Iterator[TpuHosts]:
    """And the policy that leads there, as ``policy.toml``."""
    cloud = TpuCloud(create_s=0.2, delete_s=0.1, queue_s=0.1, clock=time.monotonic)
    with serve_tpus(cloud) as endpoint, TpuHosts(cloud, directory) as hosts:
        (directory / "policy.toml").write_text(POLICY.format(endpoint=endpoint))
        yield hosts


def work(directory: str, until: str) -> int:
    """One member: says that it is there, and waits for the word to end."""
    me = fray.current_job()
    Path(directory, f"{me.attempt}.here").touch()
    while not Path(directory, until).exists():
        time.sleep(0.02)
    return me.rank


async def running(job: fray.Job, directory: Path, generation: int) -> JobInfo:
    """All four members of this generation are at work."""
    while len(list(directory.glob(f"*:{generation}:*.here"))) < 4:  # noqa: ASYNC110, ASYNC240  # other processes
        await trio.sleep(0.05)
    return job.info


def hosts_of(info: JobInfo) -> list[str]:
    return [member.node for member in info.members]


async def test_a_gang_gets_a_slice_loses_it_and_gets_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(provider_driver.POLL_INTERVALS, "tpu", provider_driver.PollIntervals(0.2, 1.0))  # type: ignore[index]
    with cloud_with_hosts(tmp_path) as hosts, trio.fail_after(90):
        async with fray.open_cluster(f"machine?nodes=0&policy={tmp_path}/policy.toml") as cluster:
            slice_of_4 = fray.ResourceConfig.with_tpu("v5litepod-16", cpu=1, memory="100MB")
            entry = fray.Entrypoint.from_callable(work, args=(str(tmp_path), "go"))
            job = await cluster.launch(fray.JobRequest(name="train", entrypoint=entry, resources=slice_of_4))
            first = hosts_of(await running(job, tmp_path, 0))
            (unit,) = hosts.running
            assert first == [f"{unit}-{worker}" for worker in range(4)]

            hosts.cloud.preempt(unit)
            second = hosts_of(await running(job, tmp_path, 1))
            (Path(tmp_path) / "go").touch()
            assert (await job.wait_ended()).state is fray.JobState.SUCCEEDED
            (other,) = hosts.running
            assert other != unit
            assert second == [f"{other}-{worker}" for worker in range(4)]
            tokens = [kept.what.metadata["fray-join-token"] for kept in hosts.cloud.nodes.values()]
        assert tokens
        assert not any(token.rpartition(":")[2] in hosts.logs() for token in tokens)
