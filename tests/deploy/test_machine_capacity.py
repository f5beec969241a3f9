"""Capacity of the nodes of a ``machine`` cluster: all of the machine, and nothing twice."""

from __future__ import annotations

import os

import pytest
import trio

import fray
from fray import JobRequest, ResourceConfig
from fray.deploy.cluster_spec import parse_spec
from fray.deploy.machine import node_capacity
from fray.model.resources import Capacity, Device
from fray.node.inventory import read_capacity

GPUS = tuple(Device(kind="gpu", variant="h100", id=f"gpu-{number}") for number in range(5))
WHOLE = Capacity(cpu_milli=7001, memory_bytes=1_000_003, disk_bytes=10, devices=GPUS)


def test_machine_is_one_node_unless_a_number_is_given() -> None:
    assert (parse_spec("machine").nodes, parse_spec("machine?nodes=3").nodes) == (1, 3)
    assert node_capacity(WHOLE, 0, 1, None, None) == WHOLE


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_nodes_share_the_machine_without_rest_or_overlap(nodes: int) -> None:
    found = [node_capacity(WHOLE, index, nodes, None, None) for index in range(nodes)]
    assert sum(each.cpu_milli for each in found) == WHOLE.cpu_milli
    assert sum(each.memory_bytes for each in found) == WHOLE.memory_bytes
    assert sum(each.disk_bytes for each in found) == WHOLE.disk_bytes
    assert max(each.cpu_milli for each in found) - min(each.cpu_milli for each in found) <= 1
    assert sorted(device.id for each in found for device in each.devices) == [device.id for device in GPUS]


def test_an_amount_that_is_given_is_that_of_each_node() -> None:
    found = [node_capacity(WHOLE, index, 2, 4.0, "1KB") for index in range(2)]
    assert {(each.cpu_milli, each.memory_bytes) for each in found} == {(4000, 1024)}


def test_a_job_may_ask_for_every_cpu_of_the_machine_and_not_for_more() -> None:
    cpus = read_capacity().cpu_milli / 1000

    async def main() -> None:
        async with fray.open_cluster("machine", logs=False) as cluster, cluster.open_scope() as scope:
            whole = ResourceConfig(cpu=cpus, memory="100MB")
            assert await scope.run(os.getpid, resources=whole) != os.getpid()
            assert [node.cpu_milli for node in await cluster.nodes()] == [cpus * 1000]
            with pytest.raises(fray.NeverSchedulable, match="the largest machine is node-0"):
                await scope.launch(JobRequest("more", ResourceConfig(cpu=cpus + 1, memory="100MB"), os.getpid))

    trio.run(main)
