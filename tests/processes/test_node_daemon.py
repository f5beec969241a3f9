"""``fray-node`` as a process of its own, against a real controller in this loop."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
from attrs import define, field

from fray.controller.serve import RunningController, run_controller
from fray.controller.store import Store
from fray.model.resources import Capacity
from fray.net import file_limits
from fray.net.codec import to_json
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.config import NodeConfig
from fray.node.linux.process_tree import children
from fray.node.linux.process_wait import wait_process_end

LIMIT_S = 90.0
"""Seconds allowed for each wait, for a busy machine."""


@define
class Site:
    directory: Path
    running: RunningController
    nursery: trio.Nursery
    nodes: list[trio.Process] = field(factory=list)

    async def start(self, name: str, *, token: str = "secret", state_dir: str | None = None) -> trio.Process:
        command = [sys.executable, "-m", "fray.node", "--controller", f"fray+unix://{self.directory}/c.sock"]
        command += ["--name", name, "--state-dir", state_dir or str(self.directory / name), "--log-text"]
        process = await trio.lowlevel.open_process(
            command, env={**os.environ, "FRAY_TOKEN": token}, stderr=subprocess.PIPE
        )
        self.nodes.append(process)
        return process

    async def start_embedded(self, name: str, parent_pid: int) -> trio.Process:
        capacity = Capacity(cpu_milli=1000, memory_bytes=1 << 30, disk_bytes=1 << 30)
        config = NodeConfig(
            name=name,
            controller=f"unix:{self.directory}/c.sock",
            token="secret",
            capacity=capacity,
            state_dir=str(self.directory / name),
            parent_pid=parent_pid,
        )
        read, write = os.pipe()
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "fray.node.embedded_main", str(read)], pass_fds=[read], stderr=subprocess.PIPE
        )
        os.close(read)
        os.write(write, to_json(config).encode())
        os.close(write)
        self.nodes.append(process)
        return process


async def said(process: trio.Process, text: str) -> str:
    """Read what a node says until it says ``text``."""
    heard = ""
    assert process.stderr is not None
    with trio.fail_after(LIMIT_S):
        while text not in heard:
            chunk = await process.stderr.receive_some()
            assert chunk, f"it ended without saying {text!r}: {heard}"
            heard += chunk.decode()
    return heard


async def rest_of(process: trio.Process) -> str:
    assert process.stderr is not None
    with trio.fail_after(LIMIT_S):
        return "".join([chunk.decode() async for chunk in process.stderr])


@asynccontextmanager
async def open_site(directory: Path) -> AsyncIterator[Site]:
    async with trio.open_nursery() as nursery:

        async def control(task_status: trio.TaskStatus[RunningController] = trio.TASK_STATUS_IGNORED) -> None:
            rng, network, address = random.SystemRandom(), WebSocketNetwork(), f"unix:{directory}/c.sock"
            await run_controller(Store.memory(), network, [address], "secret", rng=rng, task_status=task_status)

        site = Site(directory, await nursery.start(control), nursery)
        try:
            yield site
        finally:
            for process in site.nodes:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
        nursery.cancel_scope.cancel()


FEW = 300


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Number of descriptors that most systems allow a service at first, or less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_node_joins_and_leaves_in_order_on_sigterm(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        with few_descriptors():
            node = await site.start("a")
        await said(node, "joined the cluster")
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert resource.prlimit(node.pid, resource.RLIMIT_NOFILE) == (min(hard, file_limits.MAX_DESCRIPTORS), hard)
        (zygote,) = children(node.pid)
        assert resource.prlimit(zygote, resource.RLIMIT_NOFILE) == (FEW, hard)
        node.send_signal(signal.SIGTERM)
        await said(node, "node a leaves the cluster")
        with trio.fail_after(LIMIT_S):
            assert await node.wait() == 0


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"name": "a", "state_dir": "other"}, "node name 'a' is in use"),
        ({"name": "b", "state_dir": "a"}, "uses the state directory"),
        ({"name": "c", "token": "guess"}, "does not accept the key: check the token"),
    ],
)
async def test_a_node_the_cluster_does_not_take_says_why_in_one_line(
    tmp_path: Path, second: dict[str, str], text: str
) -> None:
    async with open_site(tmp_path) as site:
        await said(await site.start("a"), "joined the cluster")
        if "state_dir" in second:
            second = {**second, "state_dir": str(tmp_path / second["state_dir"])}
        node = await site.start(**second)
        heard = await said(node, text)
        heard += await rest_of(node)
        with trio.fail_after(LIMIT_S):
            assert await node.wait() == 1
        assert heard.startswith("fray-node: ")
        assert heard.count("\n") == 1
        assert "guess" not in heard


@pytest.mark.skipif(os.geteuid() != 0, reason="only jobs of a node that is root are root")
async def test_a_node_that_is_root_says_once_that_its_jobs_are_too(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        node = await site.start("a")
        heard = await said(node, "or under an account of its own")
        node.terminate()
        assert (heard + await rest_of(node)).count("jobs run as root: they can read the cluster's token") == 1


async def test_an_embedded_node_ends_at_once_with_its_parent(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        parent = await trio.lowlevel.open_process(["sleep", "1000"])
        node = await site.start_embedded("a", parent.pid)
        await said(node, "joined the cluster")
        parent.kill()
        with trio.fail_after(LIMIT_S):
            await parent.wait()
            await wait_process_end(node.pid)


async def test_an_embedded_node_has_forked_its_zygote_before_it_gets_the_token(tmp_path: Path) -> None:
    read, write = os.pipe()
    node = await trio.lowlevel.open_process(
        [sys.executable, "-m", "fray.node.embedded_main", str(read)], pass_fds=[read]
    )
    os.close(read)
    try:
        with trio.fail_after(LIMIT_S):
            while not children(node.pid):  # noqa: ASYNC110 - there is no event
                await trio.sleep(0.01)
        os.write(write, b"this is not a config")
    finally:
        os.close(write)
    with trio.fail_after(LIMIT_S):
        assert await node.wait() == 1
