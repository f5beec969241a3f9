"""A TPU slice of Google's (by our server) whose four hosts are real ``fray-node`` processes, let in by one token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from labs import TOKEN, Lab

import fray
from fray.controller.providers.base import Join, MachineRequest
from fray.controller.providers.tpu import TpuProvider
from fray.model.fleet import GroupConfig
from fray.testing.tpu_cloud import TpuCloud
from fray.testing.tpu_hosts import TpuHosts
from fray.testing.tpu_server import serve_tpus

ZONE = "us-west4-a"


@contextmanager
def cloud_with_hosts(directory: Path) -> Iterator[tuple[TpuHosts, GroupConfig]]:
    cloud = TpuCloud(create_s=0.2, delete_s=0.1, queue_s=0.1, clock=time.monotonic)
    with serve_tpus(cloud) as endpoint, TpuHosts(cloud, directory) as hosts:
        options = {
            "project": "lab",
            "runtime_version": "v2-alpha-tpuv5-lite",
            "install": "true",
            "queued": True,
            "endpoint": endpoint,
        }
        yield hosts, GroupConfig(name="v5e", provider="tpu", tpu="v5litepod-16", zones=(ZONE,), options=options)


def where() -> dict[str, Any]:
    import os

    return {key: os.environ.get(key) for key in ("FRAY_NODE", "FRAY_RANK")}


async def test_the_hosts_of_a_slice_join_with_one_token_and_none_after_them(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.start_controller()
    try:
        lab.wait_serving()
        with cloud_with_hosts(tmp_path) as (hosts, group), trio.fail_after(60):
            async with fray.open_cluster(lab.spec, token=TOKEN) as cluster:
                provider = TpuProvider("c1", [group])
                token = await cluster.join_token("v5e-1", hosts=4)
                await provider.create(MachineRequest("v5e-1", group, ZONE, True, Join(lab.spec, token)))
                while len(nodes := await cluster.nodes()) < 4:
                    await provider.list()
                    await trio.sleep(0.1)
                assert {node.name: node.attributes["tpu_worker"] for node in nodes} == {
                    f"v5e-1-{worker}": str(worker) for worker in range(4)
                }
                assert {node.attributes["machine"] for node in nodes} == {"v5e-1"}
                assert all(len(node.devices) == 4 for node in nodes)
                await provider.aclose()
        assert token.rpartition(":")[2] not in hosts.said() + (tmp_path / "controller.log").read_text()
    finally:
        lab.close()
