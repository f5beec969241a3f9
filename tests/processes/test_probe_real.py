"""A machine that looks whether it is well: with a real process, a real disk, and what is wrong with them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from fray.model.resources import Capacity
from fray.node import inventory, self_test
from fray.node.config import NodeConfig
from fray.node.self_test import SelfTest
from tests.processes.launcher_bench import LIMIT_S, Bench, open_bench


def probes_of(bench: Bench, directory: Path, found: tuple[str, ...] = ()) -> SelfTest:
    size = Capacity(cpu_milli=1000, memory_bytes=1, disk_bytes=1)
    config = NodeConfig(
        name="n", controller="unix:/c", token="", capacity=size, state_dir=str(directory), detected_devices=found
    )
    probes = SelfTest(config, bench.launcher)
    hear = bench.launcher.on_observed

    def on_observed(observed: Any, value: bytes | None) -> None:
        if not probes.on_observed(observed):
            hear(observed, value)

    bench.launcher.on_observed = on_observed
    return probes


async def wait_empty(directory: Path) -> None:
    while os.listdir(directory):  # noqa: ASYNC110
        await trio.sleep(0.01)  # a thread removes what an attempt leaves


def left_over(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith("probe")]


async def test_a_machine_that_is_well_starts_a_process_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        probes = probes_of(bench, tmp_path)
        with trio.fail_after(LIMIT_S):
            assert [await probes.probe() for _ in range(2)] == ["", ""]
            await wait_empty(tmp_path / "attempts")
        assert bench.reports == []
        assert not left_over(tmp_path)


async def test_a_program_that_cannot_be_started_fails_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "PROGRAM", ("no-such-program",))
    async with open_bench(tmp_path) as bench:
        assert "no-such-program" in await probes_of(bench, tmp_path).probe()


async def test_a_disk_that_cannot_be_written_fails_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with open_bench(tmp_path) as bench:
        monkeypatch.setattr(os, "fsync", full)
        assert "No space left on device" in await probes_of(bench, tmp_path).probe()
        assert not left_over(tmp_path)


async def test_devices_that_have_disappeared_fail_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "find_devices", lambda: ("gpu-0",))
    async with open_bench(tmp_path) as bench:
        assert await probes_of(bench, tmp_path, ("gpu-0", "gpu-1")).probe() == "devices are missing: gpu-1"
