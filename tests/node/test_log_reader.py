"""Reading logs through a real controller: from nodes that answer, are silent, come back, or never do."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fray.api.cluster import Cluster, cluster_of
from fray.controller.store import Store
from fray.errors import InvalidRequest, NoSuchJob
from fray.model.log_records import LogLine, LogLineKind
from fray.model.messages.client import Role
from fray.model.specs import EndReason, Outcome
from fray.net.transport import Credential
from fray.node.config import LogRules
from fray.node.logs.archive import Archiver
from fray.node.logs.store import LogStore, open_writer
from fray.runtime.logs.reader import LogQuery
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.scheduler.state.rows import SchedulerConfig
from tests.controller.test_gateway import child_key
from tests.support.controller import (
    ADDRESS,
    TOKEN,
    Client,
    Node,
    Stage,
    spec,
    stage,
)

ATTEMPT = "work-1:0:0"


@asynccontextmanager
async def reading(cluster: Stage, host: str = "tool") -> AsyncIterator[Cluster]:
    """A client that reads logs."""
    place = RuntimeConfig(role=Role.TOOL)
    credential = Credential("cluster", TOKEN)
    async with open_runtime(cluster.network.at(host), [ADDRESS], credential, place, rng=random.Random(3)) as runtime:
        yield cluster_of(runtime)


async def at_work(cluster: Stage) -> tuple[Client, Node]:
    driver, node = await cluster.client(), await cluster.node()
    await driver.launch(spec())
    await node.wait_desired(ATTEMPT)
    return driver, node


def texts_of(lines: list[LogLine]) -> list[str]:
    """Texts; of gaps how many lines they stand for."""
    return [f"gap {line.lost}" if line.kind is LogLineKind.GAP else line.text for line in lines]


async def some(reader: Any, count: int) -> list[LogLine]:
    return [await reader.__anext__() for _ in range(count)]


async def test_what_is_on_the_disk_alone_is_read_from_there(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me:
        _, node = await at_work(cluster)
        node.write_lines(ATTEMPT, *(f"line {n}" for n in range(3000)))
        found = [line async for line in me.logs("work-1")]
        assert texts_of(found) == [f"line {n}" for n in range(3000)]
        assert (found[0].job_id, found[0].name, found[0].stream, found[0].number) == ("work-1", "work", "out", 0)
        assert texts_of([line async for line in me.logs("work-1", tail=2)]) == ["line 2998", "line 2999"]
        assert texts_of([line async for line in me.logs("work-1", contains="77", tail=2)]) == ["line 2877", "line 2977"]


@pytest.mark.parametrize(
    "asked",
    [
        *({"tail": -1}, {"tail": 1.5}, {"tail": 10**9}, {"since_s": float("nan")}, {"since_s": -1}),
        *({"contains": "x" * 1001}, {"contains": b"x"}, {"stream": "both"}),
    ],
)
def test_what_cannot_be_asked_of_a_log_is_refused_at_once(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        LogQuery(job_id="j", **asked)


async def test_a_follower_gets_old_and_new_lines_once_and_ends_with_the_job(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me:
        _, node = await at_work(cluster)
        node.write_lines(ATTEMPT, "old")
        node.print_lines(ATTEMPT, "new")
        reader = me.logs("work-1", follow=True)
        assert texts_of(await some(reader, 2)) == ["old", "new"]
        node.print_lines(ATTEMPT, "newer")
        assert texts_of(await some(reader, 1)) == ["newer"]
        node.print_lines(ATTEMPT, "last")
        node.succeed(ATTEMPT)
        assert texts_of([line async for line in reader]) == ["last"]


async def test_a_restarted_controller_costs_no_line_and_no_second_copy(autojump_clock: Any) -> None:
    async with stage(Store.memory()) as cluster, reading(cluster) as me:
        _, node = await at_work(cluster)
        node.print_lines(ATTEMPT, "one", "two")
        reader = me.logs("work-1", follow=True)
        assert texts_of(await some(reader, 2)) == ["one", "two"]
        await cluster.crash()
        node.write_lines(ATTEMPT, "while disconnected")
        await cluster.start()
        assert texts_of(await some(reader, 1)) == ["while disconnected"]
        node.print_lines(ATTEMPT, "after")
        node.succeed(ATTEMPT)
        assert texts_of([line async for line in reader]) == ["after"]


async def test_a_silent_machine_is_a_gap_and_its_lines_come_when_it_is_back(autojump_clock: Any) -> None:
    async with stage(rules=SchedulerConfig(suspect_s=30)) as cluster, reading(cluster) as me:
        _, node = await at_work(cluster)
        node.print_lines(ATTEMPT, "one")
        reader = me.logs("work-1", follow=True)
        assert texts_of(await some(reader, 1)) == ["one"]
        cluster.network.freeze("n1")
        (gap,) = await some(reader, 1)
        assert (gap.kind, gap.lost) == (LogLineKind.GAP, None)
        assert "n1 is silent" in gap.text
        now = [line async for line in me.logs("work-1")]
        assert texts_of(now) == ["one", "gap None"]
        cluster.network.thaw("n1")
        node.print_lines(ATTEMPT, "two")
        assert texts_of(await some(reader, 1)) == ["two"]
        await reader.aclose()


async def test_a_node_that_does_not_answer_is_no_reason_to_hang(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me:
        _, node = await at_work(cluster)
        node.write_lines(ATTEMPT, "unreachable")
        node.answers = False
        began = trio.current_time()
        assert texts_of([line async for line in me.logs("work-1")]) == ["gap None"]
        assert trio.current_time() - began < 15


async def test_what_retention_has_dropped_is_counted(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me:
        _, node = await at_work(cluster)
        for number in range(4):
            node.write_lines(ATTEMPT, f"line {number}")
        del node.logs[ATTEMPT][:2]
        found = [line async for line in me.logs("work-1")]
        assert texts_of(found) == ["gap 2", "line 2", "line 3"]
        assert (found[0].number, found[0].until) == (0, found[1].time)
        del node.logs[ATTEMPT][1]
        node.write_lines(ATTEMPT)
        assert texts_of([line async for line in me.logs("work-1", tail=5)])[-1] == "line 2"


async def test_a_tree_is_merged_by_time_and_each_line_says_whose_it_is(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me:
        _, node = await at_work(cluster)
        desired = node.desired[ATTEMPT]
        job = await cluster.client(role=Role.JOB, attempt_id=ATTEMPT, credential=child_key(desired), host="job")
        for number in range(3):  # the fake node's clock counts lines
            node.write_lines(ATTEMPT, f"parent {number}")
        reader = me.logs("work-1", follow=True, tree=True)
        assert texts_of(await some(reader, 3)) == ["parent 0", "parent 1", "parent 2"]
        await job.launch(spec("child"))
        await node.wait_desired("child-1:0:0")
        node.print_lines("child-1:0:0", "child 0")
        assert texts_of(await some(reader, 1)) == ["child 0"]
        node.write_lines("child-1:0:0", "child 1")
        merged = [line async for line in me.logs("work-1", tree=True)]
        assert [(line.name, line.time) for line in merged] == sorted(
            ((line.name, line.time) for line in merged), key=lambda found: found[1]
        )
        assert {line.job_id for line in merged} == {"work-1", "child-1"}
        assert texts_of([line async for line in me.logs("work-1")]) == ["parent 0", "parent 1", "parent 2"]
        node.succeed("child-1:0:0")
        node.succeed(ATTEMPT)
        assert texts_of([line async for line in reader]) == ["child 1"]


async def test_attempts_are_chosen_by_number(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec(max_retries_failure=1))
        await node.wait_desired(ATTEMPT)
        node.print_lines(ATTEMPT, "first try")
        node.end(ATTEMPT, Outcome(cause=EndReason.FAILURE))
        await node.wait_desired("work-1:1:0")
        node.print_lines("work-1:1:0", "second try")
        node.succeed("work-1:1:0")
        await driver.job_ended("work-1")
        assert texts_of([line async for line in me.logs("work-1", follow=True)]) == ["first try", "second try"]
        assert texts_of([line async for line in me.logs("work-1", attempt=0)]) == ["first try"]
        assert texts_of([line async for line in me.logs("work-1", attempt=-1)]) == ["second try"]
        assert texts_of([line async for line in me.logs("work-1", attempt=ATTEMPT)]) == ["first try"]


async def test_many_readers_of_one_job_ask_its_machine_for_nothing(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me, trio.open_nursery() as nursery:
        _, node = await at_work(cluster)
        node.print_lines(ATTEMPT, "seen")
        node.answers = False
        found: list[list[str]] = []

        async def read() -> None:
            found.append(texts_of([line async for line in me.logs("work-1", follow=True)]))

        for _ in range(50):
            nursery.start_soon(read)
        await trio.sleep(1)
        for number in range(20):
            node.print_lines(ATTEMPT, f"live {number}")
        await trio.sleep(1)
        node.succeed(ATTEMPT)
    assert found == [["seen", *(f"live {number}" for number in range(20))]] * 50


async def test_what_is_asked_wrongly_is_said_at_once_and_an_unknown_job_when_it_is_read(autojump_clock: Any) -> None:
    async with stage() as cluster, reading(cluster) as me:
        for wrong in ({"stream": "stdout"}, {"tail": -1}, {"since_s": -1.0}):
            with pytest.raises(InvalidRequest, match=next(iter(wrong))):
                me.logs("work-1", **wrong)  # type: ignore[arg-type]
        for follow in (False, True):
            with pytest.raises(NoSuchJob):
                await me.logs("unknown-1", follow=follow).__anext__()


# Archives ------------------------------------------------------------------------------------------------------------


async def test_logs_of_a_machine_that_is_gone_are_read_from_its_archive(tmp_path: Path) -> None:
    archive = f"file://{tmp_path}/archive"
    store = LogStore(tmp_path / "logs", LogRules(archive=archive))
    log = store.open(ATTEMPT, lambda chunk: None)
    writer = open_writer(log.directory)
    for number in range(100):
        writer.write("out", 1.0 + number, f"line {number}\n".encode())
    log.close()
    await archive_all(store)
    async with (
        stage(rules=SchedulerConfig(suspect_s=0.01, lease_s=0.02, forget_node_s=1000)) as cluster,
        reading(cluster) as me,
    ):
        driver, node = await cluster.client(), await cluster.node(log_archive=archive, lease_s=0.02)
        await driver.launch(spec())
        await node.wait_desired(ATTEMPT)
        node.write_lines(ATTEMPT, *["these"] * 100)
        node.succeed(ATTEMPT)
        await driver.job_ended("work-1")
        node.scope.cancel()
        cluster.network.crash("n1")
        await trio.sleep(0.1)
        with trio.fail_after(10):
            found = texts_of([line async for line in me.logs("work-1")])
        assert found == [f"line {number}" for number in range(100)]


async def archive_all(store: LogStore) -> Archiver:
    archiver = Archiver(store)
    await archiver.copy_pending()
    return archiver


async def test_an_archive_that_fails_is_tried_again_and_nothing_is_copied_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wall = tmp_path / "archive"
    wall.write_text("no directory")
    store = LogStore(tmp_path / "logs", LogRules(archive=f"file://{wall}"))
    log = store.open(ATTEMPT, lambda chunk: None)
    open_writer(log.directory).write("out", 1.0, b"line\n")
    assert await (await archive_all(store)).copy_pending() == 0  # it lives, and this is what is written
    log.close()
    archiver = Archiver(store)
    assert await archiver.copy_pending() == 0
    assert "cannot be archived" in caplog.text
    first = archiver.pause_s()
    assert await archiver.copy_pending() == 0
    assert archiver.pause_s() == 2 * first
    wall.unlink()
    assert await archiver.copy_pending() == 1
    assert await archiver.copy_pending() == 0
    assert sorted(path.name for path in wall.rglob("*.*")) == ["0.0", "000000000000.log.gz", "index.json"]
