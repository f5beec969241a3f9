"""Calls that come back to an actor that waits for them fail as cycles; calls that can run, run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import fray
from fray import blocking
from fray.errors import CallCycle
from fray.model.messages.calls import CallMeta
from fray.runtime.calls.wire import pack_meta, split_meta
from fray.runtime.current_call import current_actor
from fray.runtime.deadlock import (
    actor_of,
    comes_back,
    describe_cycle,
    is_stuck,
    link,
    marks_of,
)
from tests.support.calls import Stage, Way, open_stage

# The rule -----------------------------------------------------------------------------------------------------------

words = st.text(st.characters(blacklist_characters="\x00\x1f", blacklist_categories=["Cs"]), min_size=1, max_size=20)


@given(actor=words, what=words, mark=words)
def test_a_link_keeps_its_parts(actor: str, what: str, mark: str) -> None:
    one = link(actor, what, mark)
    assert actor_of(one) == actor
    assert marks_of([one]) == {mark}
    assert comes_back([one], actor)
    assert not comes_back([one], actor + "x")
    assert describe_cycle([one], actor, "end") == [what, "end"]
    assert split_meta(pack_meta(CallMeta(chain=(one,))) + b"rest")[0].chain == (one,)


marks = st.sampled_from("abcd")


@given(
    waits=st.lists(st.frozensets(marks), max_size=4),
    queued=st.lists(st.frozensets(marks), max_size=4),
    limit=st.integers(1, 4),
)
def test_stuck_is_when_nothing_under_way_can_end_by_itself(
    waits: list[frozenset[str]], queued: list[frozenset[str]], limit: int
) -> None:
    """The dumb twin: let everything run that can, and see whether a queued call begins."""
    may_end = [not any(mark in led for mark in waiting for led in queued) for waiting in waits]
    begins = len(waits) < limit or any(may_end)
    assert is_stuck(waits, queued, limit) is not begins


def test_a_chain_that_is_too_long_for_the_wire_loses_its_oldest_links() -> None:
    chain = tuple(link("a" * 300, "x", str(number)) for number in range(1000))
    kept = split_meta(pack_meta(CallMeta(chain=chain)))[0].chain
    assert kept[1:] == chain[-len(kept) + 1 :]
    assert len(kept) > 200


# Conversations -------------------------------------------------------------------------------------------------------


class Member:
    """Actor that calls the next member of a ring, or a given one."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.ring: list[Way] = []
        self.log: list[str] = []

    async def go(self, path: list[int], how: str = "call") -> list[str]:
        """Along ``path``, by number of the member; returns who was there."""
        name = current_actor().name
        if not path:
            return [name]
        way = self.ring[path[0]]
        if how == "call":
            return [name, *await way.call("go", path[1:], how)]
        future = way.start("go", path[1:], how)
        if how == "later":
            await trio.sleep(5)
        return [name, *await future]

    async def leave_behind(self, to: int) -> str:
        """Call back without waiting for it."""
        self.ring[to].start("note", "behind")
        return "left"

    async def note(self, what: str) -> None:
        self.log.append(what)

    async def patient(self) -> None:
        await trio.sleep(60)


@asynccontextmanager
async def ring(*limits: int | None) -> AsyncIterator[tuple[list[Way], list[Member]]]:
    async with open_stage() as stage:
        members = [Member(stage) for _ in limits]
        ways = []
        for number, (member, limit) in enumerate(zip(members, limits, strict=True)):
            host = await stage.host(f"h{number}")
            place = host.register(member, f"m{number}", actor_id=f"m{number}", max_concurrency=limit)
            ways.append(stage.way(stage.caller.route_to(stage.endpoint(host, place, f"m{number}"))))
        for member in members:
            member.ring = ways
        yield ways, members


async def test_a_call_that_comes_back_to_a_full_actor_names_the_cycle(autojump_clock: Any) -> None:
    async with ring(1, None) as (ways, _):
        with pytest.raises(CallCycle, match=r"m0\.go\(\) → m1\.go\(\) → m0\.go\(\), which cannot begin") as caught:
            await ways[0].call("go", [1, 0])
        assert caught.value.details["cycle"] == ["m0.go()", "m1.go()", "m0.go()"]
        assert trio.current_time() < 1, "at once"
        assert await ways[0].call("go", [1]) == ["m0", "m1"], "and both are well"


async def test_an_actor_that_calls_itself_is_the_shortest_cycle(autojump_clock: Any) -> None:
    async with ring(1) as (ways, _):
        with pytest.raises(CallCycle, match=r"m0\.go\(\) → m0\.go\(\), which"):
            await ways[0].call("go", [0])


@pytest.mark.parametrize("how", ["call", "start", "later"])
async def test_futures_that_are_awaited_close_a_cycle_too(how: str, autojump_clock: Any) -> None:
    """Also when the wait begins long after the call has come back."""
    async with ring(1, None) as (ways, _):
        with pytest.raises(CallCycle):
            await ways[0].call("go", [1, 0], how)
        assert trio.current_time() < 8


async def test_a_call_back_without_a_waiter_is_not_a_cycle(autojump_clock: Any) -> None:
    async with ring(1) as (ways, members):
        assert await ways[0].call("leave_behind", 0) == "left"
        await ways[0].call("note", "after")
        assert members[0].log == ["behind", "after"]


async def test_actors_with_room_are_called_again(autojump_clock: Any) -> None:
    async with ring(None, None, 2) as (ways, _):
        assert await ways[0].call("go", [1, 0, 1, 0]) == ["m0", "m1", "m0", "m1", "m0"]
        assert await ways[2].call("go", [0, 2]) == ["m2", "m0", "m2"]
        with pytest.raises(CallCycle, match="runs 2 calls at a time"):
            await ways[2].call("go", [0, 2, 0, 2])


async def test_a_full_actor_whose_calls_can_end_is_waited_for(autojump_clock: Any) -> None:
    async with ring(2, None) as (ways, _):
        other = ways[0].start("patient")
        assert await ways[0].call("go", [1, 0]) == ["m0", "m1", "m0"], "after a minute"
        await other


async def test_two_chains_that_wait_for_one_another_in_one_queue_are_a_cycle(autojump_clock: Any) -> None:
    async with ring(2, None) as (ways, _):
        both = [ways[0].start("go", [1, 0]) for _ in range(2)]
        ends = [(await_error(call)) for call in both]
        results = [await end for end in ends]
        assert sorted(type(result).__name__ for result in results) == ["CallCycle", "list"]


async def await_error(call: Any) -> Any:
    try:
        return await call
    except CallCycle as error:
        return error


class Sync:
    """Actor on a thread that calls through the blocking API."""

    def __init__(self) -> None:
        self.other: Any = None

    def meet(self, other: Any) -> None:
        self.other = other

    def go(self, steps: int) -> int:
        return steps if steps == 0 else 1 + int(self.other.go(steps - 1))


async def test_threads_that_wait_for_one_another_fail_as_a_cycle() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        one, two = await scope.create_actor(Sync, name="one"), await scope.create_actor(Sync, name="two")
        await one.meet(blocking.ActorHandle(two))
        await two.meet(blocking.ActorHandle(one))
        assert await one.go(1) == 1
        with pytest.raises(CallCycle, match=r"one\.go\(\) → two\.go\(\) → one\.go\(\)"):
            await one.go(2)
        wide = await scope.create_actor(Sync, name="wide", actor_config=fray.ActorConfig(max_concurrency=2))
        await wide.meet(blocking.ActorHandle(two))
        await two.meet(blocking.ActorHandle(wide))
        assert await wide.go(2) == 2
