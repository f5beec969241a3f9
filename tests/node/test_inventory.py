"""Inventory of a machine, read from files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import evolve

from fray.model.resources import Capacity, Device
from fray.net.process_identity import boot_id, process_mark
from fray.node.inventory import (
    cpu_milli,
    gpu_devices,
    gpu_variant,
    memory_bytes,
    read_capacity,
    tpu_devices,
)
from fray.node.main import override

GIB = 1024**3


def machine(root: Path, **files: str) -> Path:
    """Files by path, ``__`` for ``/`` and ``_DOT_`` for ``.``."""
    for name, text in {"proc/meminfo": "MemTotal:       16777216 kB\n", **_paths(files)}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _paths(files: dict[str, str]) -> dict[str, str]:
    return {name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()}


def test_without_limits_the_affinity_and_the_machine_count(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert cpu_milli(root, 6) == 6000
    assert memory_bytes(root) == 16 * GIB


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_DOT_max="150000 100000\n")
    assert cpu_milli(root, 6) == 1500


def test_the_tightest_of_the_groups_above_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="0::/pod/fray\n",
        sys__fs__cgroup__pod__cpu_DOT_max="200000 100000",
        sys__fs__cgroup__pod__fray__cpu_DOT_max="max 100000",
        sys__fs__cgroup__pod__memory_DOT_max=str(2 * GIB),
        sys__fs__cgroup__pod__fray__memory_DOT_max="max",
    )
    assert (cpu_milli(root, 6), memory_bytes(root)) == (2000, 2 * GIB)


def test_control_groups_of_version_1_count_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="4:memory:/job\n3:cpu,cpuacct:/job\n",
        sys__fs__cgroup__cpu__job__cpu_DOT_cfs_quota_us="50000",
        sys__fs__cgroup__cpu__job__cpu_DOT_cfs_period_us="100000",
        sys__fs__cgroup__memory__job__memory_DOT_limit_in_bytes=str(GIB),
    )
    assert (cpu_milli(root, 6), memory_bytes(root)) == (500, GIB)


def test_no_limit_in_version_1_is_no_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="4:memory:/\n3:cpu:/\n",
        sys__fs__cgroup__cpu__cpu_DOT_cfs_quota_us="-1",
        sys__fs__cgroup__cpu__cpu_DOT_cfs_period_us="100000",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712",
    )
    assert (cpu_milli(root, 6), memory_bytes(root)) == (6000, 16 * GIB)


def test_a_quota_larger_than_the_machine_changes_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup="0::/", sys__fs__cgroup__cpu_DOT_max="6400000 100000")
    assert cpu_milli(root, 4) == 4000


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("", "unknown"),
    ],
)
def test_gpus_are_named_as_people_ask_for_them(name: str, variant: str) -> None:
    assert gpu_variant(name) == variant


def test_gpus_are_found_without_their_tool(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        **{
            "proc/driver/nvidia/gpus/0000:01:00_DOT_0/information": "Model: \t NVIDIA H100 80GB HBM3\nIRQ: 1\n",
            "proc/driver/nvidia/gpus/0000:02:00_DOT_0/information": "Model: \t NVIDIA L4\n",
        },
    )
    assert gpu_devices(root) == (Device("gpu-0", "gpu", "h100"), Device("gpu-1", "gpu", "l4"))


def test_a_machine_without_accelerators_has_none(tmp_path: Path) -> None:
    assert gpu_devices(tmp_path) == ()
    assert tpu_devices(tmp_path, {}) == ((), {})


def test_tpu_chips_come_with_the_place_of_their_slice(tmp_path: Path) -> None:
    root = machine(tmp_path, **{f"dev/accel{index}": "" for index in range(4)})
    facts = {
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_NAME": "slice-a",
        "TPU_WORKER_ID": "2",
        "TPU_ZONE": "us-east5-b",
    }
    devices, attributes = tpu_devices(root, facts)
    assert devices == tuple(Device(f"tpu-{index}", "tpu", "v5litepod-16") for index in range(4))
    assert attributes == {
        "slice": "slice-a",
        "tpu_worker": "2",
        "tpu_type": "v5litepod-16",
        "zone": "us-east5-b",
        "region": "us-east5",
    }


def test_vfio_groups_are_tpus_on_googles_machines_only(tmp_path: Path) -> None:
    root = machine(tmp_path, dev__vfio__0="", dev__vfio__vfio="")
    assert tpu_devices(root, {})[0] == ()
    machine(tmp_path, sys__class__dmi__id__sys_vendor="Google\n")
    assert len(tpu_devices(root, {})[0]) == 1


def test_this_very_machine_can_be_read() -> None:
    capacity = read_capacity()
    assert 0 < capacity.cpu_milli <= (os.cpu_count() or 1) * 1000
    assert capacity.memory_bytes > 0
    assert capacity.disk_bytes > 0
    assert process_mark().pid == os.getpid()
    assert process_mark() == process_mark()
    assert process_mark().boot_id == boot_id()


# What the operator says instead


FOUND = Capacity(cpu_milli=8000, memory_bytes=GIB, disk_bytes=GIB, devices=(Device("gpu-0", "gpu", "h100"),))


def test_the_operator_may_say_what_the_machine_offers() -> None:
    said = override(FOUND, {"cpu": 1.5, "memory": "2GB", "disk": 5, "attributes": {"rack": 7}})
    assert (said.cpu_milli, said.memory_bytes, said.disk_bytes, said.attributes) == (1500, 2 * GIB, 5, {"rack": "7"})
    assert said.devices == FOUND.devices
    assert evolve(override(FOUND, {}), ports=FOUND.ports) == FOUND  # ports are offered, not found


def test_the_operator_may_hide_name_or_invent_accelerators() -> None:
    assert override(FOUND, {"gpus": 0}).devices == ()
    assert [device.variant for device in override(FOUND, {"gpus": 2}).devices] == ["h100", "unknown"]
    assert override(FOUND, {"gpus": ["a100"]}).devices == (Device("gpu-0", "gpu", "a100"),)
    assert [device.id for device in override(FOUND, {"tpus": ["v4-8"]}).devices] == ["gpu-0", "tpu-0"]
