"""Logs of real processes: through kills of the node and the controller, into an archive, and for many readers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio

import fray
from fray import Entrypoint, JobRequest, LogLineKind, ResourceConfig
from fray.blocking import open_cluster
from tests.processes.lab import TOKEN, Lab

SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="64MB")


def murmur(said: str, go: str) -> None:
    """Two lines and a piece; then, once a file exists, more of it into a pipe that may have no reader any more."""
    print("one", flush=True)
    print("two", flush=True)
    sys.stdout.write("three")
    sys.stdout.flush()
    Path(said).touch()
    while not os.path.exists(go):
        time.sleep(0.01)
    print(" and more", flush=True)
    print("last words", end="", flush=True)
    Path(said + ".again").touch()
    time.sleep(600)


def chat(count: int) -> None:
    for number in range(count):
        print(number)


def parent(count: int) -> None:
    from fray.blocking import current_cluster

    print("parent")
    with current_cluster().open_scope("below") as scope:
        scope.run(chat, count, name="child", resources=SMALL)


def job(name: str, fn: Callable[..., None], *args: object) -> JobRequest:
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(fn, args), resources=SMALL, detached=True)


async def until(path: str) -> None:
    with trio.fail_after(30):
        while not await trio.Path(path).exists():  # noqa: ASYNC110 - another process makes it
            await trio.sleep(0.02)


async def test_the_last_lines_outlive_node_and_controller_in_the_archive(tmp_path: Path) -> None:
    lab, said, go = Lab(tmp_path), str(tmp_path / "said"), str(tmp_path / "go")
    archive = f"file://{tmp_path}/archive"
    try:
        lab.start_controller()
        lab.start_node("n", "--logs-archive", archive)
        await trio.to_thread.run_sync(lab.wait_serving)
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            with trio.fail_after(60):
                await cluster.wait_for_nodes(1)
                work = await cluster.launch(job("murmur", murmur, said, go))
                reader = cluster.logs(work, follow=True)
                assert [(await reader.__anext__()).text for _ in range(2)] == ["one", "two"]
                await until(said)
                await trio.Path(go).touch()
                await until(said + ".again")
                lab.kill("n")
                lab.kill("controller")
                lab.start_controller()
                lab.start_node("n", "--logs-archive", archive)
                await cluster.wait_for_nodes(1)
                wanted = ["one", "two", "three and more", "last words"]
                first = f"{work.id}:0:0"
                found = [line async for line in cluster.logs(work.id, attempt=first)]
                assert [line.text for line in found if line.kind is LogLineKind.LINE] == wanted
                rest = [(await reader.__anext__()).text for _ in range(3)]
                assert [text for text in rest if "missing" not in text][:2] == wanted[2:]
                await cluster.terminate(work)
                await reader.aclose()
                await until(f"{tmp_path}/archive/{work.id}/0.0/index.json")
    finally:
        lab.close()


async def test_a_whole_tree_is_one_query_and_any_number_may_follow(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster, trio.open_nursery() as nursery:
            heard: list[list[str]] = []
            work = await cluster.launch(job("parent", parent, 20_000))

            async def follow() -> None:
                heard.append([line.text async for line in work.logs(follow=True, tree=True)])

            for _ in range(10):
                nursery.start_soon(follow)
            info = await cluster.monitor(work, lambda line: None, tree=True)
            assert info.state == "succeeded"
        assert len(heard) == 10
        assert all(sorted(lines) == sorted(["parent", *map(str, range(20_000))]) for lines in heard)


def test_sync_code_reads_and_monitors() -> None:
    with open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster:
        work = cluster.launch(job("chat", chat, 5000))
        with work.logs(follow=True) as lines:
            assert [int(line.text) for line in lines] == list(range(5000))
        assert [line.text for line in cluster.logs(work, tail=2)] == ["4998", "4999"]
        seen: list[str] = []
        assert cluster.monitor(work, lambda line: seen.append(line.text), tail=1).state == "succeeded"
        assert seen == ["4999"]
