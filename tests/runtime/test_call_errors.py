"""Errors of calls say which side caused them, and the actor still works afterwards."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import ActorDied, InvalidRequest, MessageTooLarge, NoSuchMethod, NotPicklable, RemoteError
from fray.errors import RemoteTraceback
from fray.model.messages import large_values
from tests.support.calls import open_stage


class OwnError(Exception):
    """Takes other arguments than it hands to its base."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} in {where}")
        self.code, self.where = code, where


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Inner:
    def __init__(self) -> None:
        self.open = threading.Lock()


class Faulty:
    """Actor in the loop."""

    limit = 3

    def __init__(self) -> None:
        self.size = 7

    async def add(self, k: int = 1) -> int:
        return k

    def count(self, n: int) -> Iterator[int]:
        yield from range(n)

    def unpicklable(self) -> Any:
        return {"parts": [Inner()]}

    def huge(self) -> str:
        return "x" * (65 * 1024 * 1024)

    def own(self) -> None:
        raise OwnError(7, where="own")

    def noted(self) -> None:
        error = ValueError("with notes")
        error.add_note("a note of the method")
        raise error

    def caused(self) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("outer") from error

    def holds(self) -> None:
        raise HoldsLock

    def local(self) -> None:
        class Hidden(Exception):
            lock = threading.Lock()

        raise Hidden("text that stays")

    async def several(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._boom, ValueError("one"))
            nursery.start_soon(self._boom, OwnError(2, where="two"))

    async def _boom(self, error: Exception) -> None:
        raise error

    def leave(self) -> None:
        sys.exit(3)


class OnThread:
    size = 7

    def add(self, k: int = 1) -> int:
        return k

    def count(self, n: int) -> Iterator[int]:
        yield from range(n)


class Relay:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def own(self) -> None:
        await self.handle.own()


class Broken:
    def __init__(self, how: str) -> None:
        raise OwnError(1, where=how)

    async def add(self) -> int:
        return 1


class OnceOnly:
    def __init__(self, been_here: Path) -> None:
        if been_here.exists():
            raise ValueError("not a second time")
        been_here.touch()

    def leave(self) -> None:
        raise SystemExit(3)


class BrokenOnThread:
    def __init__(self) -> None:
        raise ValueError("no such model")

    def add(self) -> int:
        return 1


@asynccontextmanager
async def scope_of_local() -> AsyncIterator[fray.Scope]:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        yield scope


# Errors of the method ------------------------------------------------------------------------------------------------


async def test_errors_of_user_code_arrive_whole_and_the_actor_is_well(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way = await stage.actor(Faulty())
        with pytest.raises(OwnError) as own:
            await way.call("own")
        assert (own.value.code, own.value.where) == (7, "own")
        assert "in own" in "".join(traceback.format_exception(own.value))

        with pytest.raises(ValueError, match="with notes") as noted:
            await way.call("noted")
        assert noted.value.__notes__ == ["a note of the method"]

        with pytest.raises(RuntimeError, match="outer") as caused:
            await way.call("caused")
        assert isinstance(caused.value.__cause__, KeyError)
        assert isinstance(caused.value.__cause__.__cause__, RemoteTraceback)

        with pytest.raises(HoldsLock, match="holds a lock"):
            await way.call("holds")
        with pytest.raises(RemoteError, match="Hidden: text that stays"):
            await way.call("local")

        with pytest.raises(ExceptionGroup) as several:
            await way.call("several")
        kinds = {type(error): error for error in several.value.exceptions}
        assert set(kinds) == {ValueError, OwnError}
        assert "in _boom" in "".join(traceback.format_exception(several.value))
        assert await way.call("add", 5) == 5


async def test_an_error_from_two_hops_away_has_both_tracebacks(autojump_clock: Any) -> None:
    async with scope_of_local() as scope:
        relay = await scope.create_actor(Relay, await scope.create_actor(Faulty))
        with pytest.raises(OwnError) as caught:
            await relay.own()
        text = "".join(traceback.format_exception(caught.value))
        assert "await self.handle.own()" in text
        assert 'raise OwnError(7, where="own")' in text


# Results -------------------------------------------------------------------------------------------------------------


async def test_a_result_that_cannot_be_sent_is_an_error_and_the_actor_still_works(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    async with open_stage() as stage:
        way = await stage.actor(Faulty())
        with pytest.raises(NotPicklable, match=r"the result of a\.unpicklable\(\) .*item 'parts': .*'open' of Inner"):
            await way.call("unpicklable")
        assert len(await way.call("huge")) == 65 * 1024 * 1024, "more than one message holds"
        monkeypatch.setattr(large_values, "SIZE_LIMIT_BYTES", 1024 * 1024)
        with pytest.raises(MessageTooLarge, match="write the data to storage and send the path") as large:
            await way.call("huge")
        assert large.value.details["limit_bytes"] == 1024 * 1024
        assert await way.call("add") == 1


# The wrong name or way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Faulty, OnThread], ids=["loop", "thread"])
async def test_a_handle_tells_a_wrong_name_at_once_and_the_actor_tells_it_too(cls: type) -> None:
    async with scope_of_local() as scope:
        actor = await scope.create_actor(cls)
        with pytest.raises(NoSuchMethod, match="'cuont'; did you mean count"):
            actor.cuont  # noqa: B018
        with pytest.raises(AttributeError, match="begins with an underscore"):
            actor._boom  # noqa: B018
        with pytest.raises(NoSuchMethod, match="has no public method 'size'"):
            actor.size  # noqa: B018
        blind = fray.ActorHandle(actor._actor_id, "blind", None, actor._runtime)
        for name, said in [("cuont", "did you mean count"), ("size", "is an attribute, not a method")]:
            for made in (getattr(blind, name).start(), getattr(blind, name).stream(), getattr(blind, name).open()):
                with pytest.raises(NoSuchMethod, match=said):
                    await made
        with pytest.raises(InvalidRequest, match=r"count\(\) is a generator: iterate over its stream\(\)"):
            await actor.count(3)
        with pytest.raises(InvalidRequest, match=r"add\(\) is not a generator: await it"):
            async with actor.add.stream(3) as items:
                await anext(items)
        with pytest.raises(InvalidRequest, match=r"add\(\) takes no stream: await it"):
            async with actor.add.open(3) as stream:
                await stream.receive()
        assert await actor.add(5) == 5


async def test_a_handle_that_is_stale_says_why_its_actor_is_gone() -> None:
    async with fray.open_cluster("local") as cluster:
        async with cluster.open_scope("s") as scope:
            actor = await scope.create_actor(Faulty, name="short-lived")
            assert await actor.add() == 1
        with pytest.raises(ActorDied, match="short-lived is gone"):
            await actor.add()
        with pytest.raises(ActorDied, match="short-lived is gone"):
            async with actor.count.stream(3) as items:
                await anext(items)


# Constructors --------------------------------------------------------------------------------------------------------


async def test_a_constructor_that_raises_is_the_error_of_each_call() -> None:
    async with scope_of_local() as scope:
        for cls, args, kind, said in [
            (Broken, ("the constructor",), OwnError, "code 1 in the constructor"),
            (BrokenOnThread, (), ValueError, "no such model"),
        ]:
            actor, seen = await scope.create_actor(cls, *args, on_failure="absorb"), list[BaseException]()
            for _ in range(2):
                with pytest.raises(kind, match=said) as caught:
                    await actor.add()
                assert caught.value not in seen
                seen.append(caught.value)
                assert [note for note in caught.value.__notes__ if "raised by the constructor of actor" in note]
                assert "in __init__" in "".join(traceback.format_exception(caught.value))


async def test_an_actor_that_has_run_and_cannot_be_restarted_gives_its_constructors_error(tmp_path: Path) -> None:
    async with scope_of_local() as scope:
        config = fray.ActorConfig(max_restarts=1, backoff_s=0.0)
        actor = await scope.create_actor(OnceOnly, tmp_path / "been here", on_failure="absorb", actor_config=config)
        with pytest.raises(RemoteError, match="SystemExit"):
            await actor.leave()
        with pytest.raises(ValueError, match="a second time"):
            await actor.leave()


async def test_a_group_that_cannot_be_ready_names_the_error_of_the_constructor() -> None:
    async with scope_of_local() as scope:
        group = await scope.create_actor_group(BrokenOnThread, count=2, on_failure="absorb")
        with pytest.raises(fray.GroupFailed, match=r"number \d: its constructor raised ValueError: no such") as caught:
            await group.wait_ready()
        assert isinstance(caught.value.__cause__, ValueError)


async def test_a_method_that_exits_ends_its_actor_and_its_caller_gets_an_error() -> None:
    async with scope_of_local() as scope:
        actor = await scope.create_actor(Faulty, on_failure="absorb")
        with pytest.raises(RemoteError, match="SystemExit: 3"):
            await actor.leave()
        with pytest.raises(ActorDied):
            await actor.add()
