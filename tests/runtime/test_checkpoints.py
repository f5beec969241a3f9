"""Actors that keep their state over restarts, in ``local``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

import fray
from fray import ActorConfig, InvalidRequest, MessageTooLarge, RemoteError
from fray.model.specs import BLOB_LIMIT_BYTES
from tests.api.test_names import running


class Stateful:
    """Counts, in the loop."""

    def __init__(self, start: int = 0, padding: int = 0) -> None:
        self.n = start
        self.padding = padding

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def keep(self) -> int:
        await fray.current_actor().checkpoint()
        return self.n

    async def keep_soon(self) -> None:
        fray.current_actor().checkpoint_nowait()

    async def die(self) -> None:
        raise SystemExit(1)

    def __fray_checkpoint__(self) -> dict[str, Any]:
        return {"n": self.n, "padding": b"x" * self.padding}

    def __fray_restore__(self, state: dict[str, Any]) -> None:
        self.n = state["n"]
        self.padding = len(state["padding"])


class ThreadedStateful:
    """The same on a thread."""

    def __init__(self, start: int = 0) -> None:
        self.n = self.m = start

    def add(self, k: int) -> int:
        self.n += k
        self.m += k
        return self.n

    def keep(self) -> None:
        fray.current_actor().checkpoint_nowait()

    def die(self) -> None:
        raise SystemExit(1)

    def __fray_checkpoint__(self) -> tuple[int, int, str]:
        return self.n, self.m, threading.current_thread().name

    def __fray_restore__(self, state: tuple[int, int, str]) -> None:
        self.n, self.m, self.taken_on = state

    def where(self) -> tuple[str, str]:
        return self.taken_on, threading.current_thread().name


class Unrestorable(Stateful):
    def __fray_restore__(self, state: Any) -> None:
        raise ValueError("a state of another version")


class Lonely:
    def __fray_checkpoint__(self) -> int:
        return 1


class Forgetful:
    async def keep(self) -> None:
        await fray.current_actor().checkpoint()


ALWAYS = ActorConfig(max_restarts=5)


async def die(actor: fray.ActorHandle) -> None:
    with pytest.raises(RemoteError, match="SystemExit"):
        await actor.die()


def test_state_saved_on_demand_is_there_after_a_restart_and_later_changes_are_not() -> None:
    async def test(cluster: fray.Cluster) -> None:
        actor = await cluster.create_actor(Stateful, 5, name="k", actor_config=ALWAYS)
        assert await actor.add(1) == 6
        assert await actor.keep() == 6
        assert await actor.add(1) == 7
        await die(actor)
        assert await actor.add(10) == 16
        await die(actor)
        assert await actor.add(100) == 106

    running(test)


def test_state_is_saved_periodically_and_on_its_own_thread() -> None:
    async def test(cluster: fray.Cluster) -> None:
        config = ActorConfig(max_restarts=5, checkpoint_every_s=0.02)
        actor = await cluster.create_actor(ThreadedStateful, 5, name="k", actor_config=config)
        assert await actor.add(1) == 6
        await trio.sleep(0.2)
        await die(actor)
        assert await actor.add(1) == 7
        taken_on, mine = await actor.where()
        assert taken_on == mine

    running(test)


def test_a_thread_asks_for_it_without_waiting() -> None:
    async def test(cluster: fray.Cluster) -> None:
        actor = await cluster.create_actor(ThreadedStateful, 5, name="k", actor_config=ALWAYS)
        await actor.add(1)
        await actor.keep()
        await trio.sleep(0.1)
        await actor.add(1)
        await die(actor)
        assert await actor.add(0) == 6

    running(test)


def test_a_sibling_that_restarts_keeps_its_state() -> None:
    async def test(cluster: fray.Cluster) -> None:
        async with cluster.open_scope("s") as scope:
            group = [fray.child(Stateful, 1, name="a"), fray.child(ThreadedStateful, 2, name="b")]
            a, b = await scope.supervise(group, strategy="one_for_all")
            assert [await a.add(10), await b.add(10)] == [11, 12]
            await die(a)
            with trio.fail_after(5):
                while [info.restarts for info in await cluster.list_actors()] != [1, 1]:
                    await trio.lowlevel.checkpoint()
            assert [await a.add(1), await b.add(1)] == [2, 13]

    running(test)


def test_the_state_goes_with_the_job_and_another_actor_of_the_name_starts_without_it() -> None:
    async def test(cluster: fray.Cluster) -> None:
        actor = await cluster.create_actor(Stateful, 5, name="k", actor_config=ALWAYS)
        await actor.add(1)
        await actor.keep()
        await cluster.delete_actor(actor)
        again = await cluster.create_actor(Stateful, 5, name="k", actor_config=ALWAYS)
        await die(again)
        assert await again.add(0) == 5

    running(test)


def test_a_restore_that_raises_fails_the_actor_with_that_error() -> None:
    async def test(cluster: fray.Cluster) -> None:
        actor = await cluster.create_actor(Unrestorable, name="k", actor_config=ActorConfig(max_restarts=1))
        await actor.keep()
        await die(actor)
        with pytest.raises((ValueError, fray.ActorDied), match="another version"):
            await actor.add(0)
        assert "another version" in (await cluster.actor_info("k")).reason

    running(test)


def test_a_state_over_the_limit_is_refused_and_says_where_it_could_go() -> None:
    async def test(cluster: fray.Cluster) -> None:
        actor = await cluster.create_actor(Stateful, 5, BLOB_LIMIT_BYTES, name="k", actor_config=ALWAYS)
        with pytest.raises(MessageTooLarge, match="checkpoint_storage="):
            await actor.keep()
        assert await actor.add(1) == 6

    running(test)


def test_a_large_state_is_saved_in_a_storage_and_only_the_last_one(tmp_path: Path) -> None:
    async def test(cluster: fray.Cluster) -> None:
        config = ActorConfig(max_restarts=5, checkpoint_storage=f"file://{tmp_path}/ckpt")
        actor = await cluster.create_actor(Stateful, 5, BLOB_LIMIT_BYTES, name="k", actor_config=config)
        for _ in range(2):
            await actor.add(1)
            await actor.keep()
        await die(actor)
        assert await actor.add(1) == 8
        await actor.keep()

    running(test)
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


@pytest.mark.parametrize(
    ("cls", "config", "says"),
    [
        (Lonely, ActorConfig(), "write both"),
        (Forgetful, ActorConfig(checkpoint_every_s=1.0), "can keep no state"),
        (Forgetful, ActorConfig(checkpoint_storage="file:///x"), "can keep no state"),
    ],
)
def test_a_class_that_cannot_keep_its_state_is_refused_at_the_door(cls: type, config: ActorConfig, says: str) -> None:
    async def test(cluster: fray.Cluster) -> None:
        with pytest.raises(InvalidRequest, match=says):
            await cluster.create_actor(cls, actor_config=config)

    running(test)


def test_requesting_a_checkpoint_of_a_class_without_hooks_says_what_to_write() -> None:
    async def test(cluster: fray.Cluster) -> None:
        actor = await cluster.create_actor(Forgetful)
        with pytest.raises(InvalidRequest, match="__fray_restore__"):
            await actor.keep()

    running(test)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if record.name == "fray.actor" and record.exc_info]
