"""Zygotes of other environments: there while they are used, and a while longer; on a virtual clock."""

from __future__ import annotations

from typing import cast

import pytest
import trio
import trio.testing
from attrs import define

from fray.errors import LaunchFailed
from fray.node.prepare import NotPrepared, PreparedEnvironment
from fray.node.zygotes.manager import ZygoteManager
from fray.node.zygotes.pool import ZygotePool


@define(eq=False)
class Stub:
    """Stand-in for `ZygoteManager`: it starts after a second, or fails."""

    starts: list[str]
    name: str
    pid: int | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.starts.append(self.name)
        self.pid = len(self.starts)
        await trio.sleep(1)
        if self.name == "broken":
            raise LaunchFailed("it cannot be imported")
        task_status.started()
        await trio.sleep_forever()


def at(name: str) -> PreparedEnvironment:
    return PreparedEnvironment(interpreter=name)


@pytest.fixture
async def zygote_pool(nursery: trio.Nursery) -> ZygotePool:
    starts: list[str] = []
    own = cast("ZygoteManager", Stub(starts, ""))
    made = ZygotePool(
        own, lambda prepared: cast("ZygoteManager", Stub(starts, prepared.interpreter)), idle_s=60, idle_limit=1
    )
    await nursery.start(made.run)
    return made


def starts_of(zygote_pool: ZygotePool) -> list[str]:
    return cast("Stub", zygote_pool.own.manager).starts


async def test_the_node_s_own_is_always_there(zygote_pool: ZygotePool, autojump_clock: trio.testing.MockClock) -> None:
    assert await zygote_pool.acquire(PreparedEnvironment()) is zygote_pool.own
    assert starts_of(zygote_pool) == [""]


async def test_many_who_ask_together_share_one_that_ends_a_while_after_the_last(
    zygote_pool: ZygotePool, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(zygote_pool.acquire, at("a"))
    assert starts_of(zygote_pool) == ["", "a"]
    assert zygote_pool.interpreters == {"a": 5}
    pooled = await zygote_pool.acquire(at("a"))
    for _ in range(6):
        pooled.release()
    await trio.sleep(59)
    (await zygote_pool.acquire(at("a"))).release()
    await trio.sleep(59)
    assert zygote_pool.interpreters == {"a": 0}, "used meanwhile"
    await trio.sleep(2)
    assert zygote_pool.interpreters == {}
    assert zygote_pool.pids == {1}


async def test_of_those_that_wait_for_nothing_the_longest_idle_goes(
    zygote_pool: ZygotePool, autojump_clock: trio.testing.MockClock
) -> None:
    for name in ("a", "b"):
        pooled = await zygote_pool.acquire(at(name))
        pooled.release()
        await trio.sleep(5)
    assert zygote_pool.interpreters == {"b": 0}


async def test_one_that_cannot_start_fails_all_who_wait_and_the_next_one_tries_again(
    zygote_pool: ZygotePool, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(2):
        with pytest.raises(NotPrepared, match="it cannot be imported"):
            await zygote_pool.acquire(at("broken"))
        await trio.sleep(0.1)
    assert starts_of(zygote_pool) == ["", "broken", "broken"]
    assert zygote_pool.interpreters == {}
