"""The elastic example: members come, go and are killed, training goes on, and its weights are those of a plain loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import elastic_model as model
import elastic_slices
from elastic_leader import Leader, Round

# What is trained -----------------------------------------------------------------------------------------------------


def test_lines_of_docstrings_are_prose_and_others_code() -> None:
    source = "def f():\n    '''It does\n    this.'''\n\n    return 'text'\n"
    assert [is_prose for _, is_prose in model.lines_of(source)] == [False, True, True, False]


def test_the_parts_of_a_step_add_up_to_the_same_whatever_their_number() -> None:
    data, weights = model.load(), model.plain(model.load(), 3)
    whole = model.gradient(weights, data, 7, 0, 1)
    for size in (2, 3, 5):
        parts = [model.gradient(weights, data, 7, rank, size) for rank in range(size)]
        assert np.allclose(np.sum(parts, axis=0), whole)


def test_it_learns() -> None:
    data = model.load()
    assert model.accuracy(model.plain(data, 300), data) > 0.88 > 0.8 > model.accuracy(model.fresh(), data)


# What the leader decides ---------------------------------------------------------------------------------------------


class Members:
    """Who stays with a leader, in this test's own tasks."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.leader = Leader()
        self.presence: dict[str, trio.CancelScope] = {}
        self.given: dict[str, Round | None] = {}
        self._nursery = nursery

    async def _stay(self, member: str) -> None:
        with trio.CancelScope() as self.presence[member]:
            await self.leader.stay(member)

    async def come(self, member: str) -> None:
        self._nursery.start_soon(self._stay, member)
        await wait_all_tasks_blocked()
        await self.bring(member, None)

    async def bring(self, member: str, number: int | None) -> None:
        """Its part of a round, in vain or not; what it is given is in `given`, some time."""

        async def exchange() -> None:
            self.given[member] = await self.leader.exchange(member, number, None if number is None else model.fresh())

        self._nursery.start_soon(exchange)
        await wait_all_tasks_blocked()

    async def go(self, member: str) -> None:
        self.presence[member].cancel()
        await wait_all_tasks_blocked()

    def shares(self) -> dict[str, tuple[int, int, int]]:
        return {who: (at.step, at.rank, at.size) for who, at in self.given.items() if at is not None}

    async def all_bring(self, *members: str) -> None:
        for member in members:
            at = self.given[member]
            assert at is not None
            await self.bring(member, at.number)


async def test_who_comes_is_of_the_next_round_and_each_step_is_shared_by_those_that_are_there() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        assert members.shares() == {"a:0:0": (0, 0, 1)}
        await members.all_bring("a:0:0")
        assert members.shares() == {"a:0:0": (1, 0, 2), "b:0:0": (1, 1, 2)}
        nursery.cancel_scope.cancel()


async def test_a_step_whose_part_is_lost_is_begun_again_by_those_that_are_left() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        await members.all_bring("a:0:0")
        await members.all_bring("a:0:0")
        assert members.leader.had(1, 1), "step 1 waits for b"
        await members.go("b:0:0")
        assert members.shares()["a:0:0"] == (1, 0, 1)
        assert members.leader._redone == 1
        nursery.cancel_scope.cancel()


async def test_who_is_to_leave_makes_its_step_and_is_put_away_and_is_heard_as_a_new_attempt() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        await members.all_bring("a:0:0")
        members.leader._leaving.add("b")
        await members.all_bring("a:0:0", "b:0:0")
        assert members.given["b:0:0"] is None
        assert members.shares()["a:0:0"] == (2, 0, 1), "nothing was begun again"
        await members.go("b:0:0")
        await members.come("b:1:0")
        await members.all_bring("a:0:0")
        assert members.shares()["b:1:0"] == (3, 1, 2)
        nursery.cancel_scope.cancel()


async def test_a_killed_member_is_gone_when_its_job_begins_anew_though_its_connection_might_come_back() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        await members.all_bring("a:0:0")
        await members.all_bring("a:0:0")
        await members.come("b:1:0")
        assert members.shares() == {"a:0:0": (1, 0, 2), "b:0:0": (1, 1, 2), "b:1:0": (1, 1, 2)}
        await members.bring("b:0:0", 2)
        assert members.given["b:0:0"] is None, "it comes back, and is not heard"
        nursery.cancel_scope.cancel()


async def test_all_are_sent_home_when_there_are_steps_enough(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        nursery.start_soon(members.leader.result, 1)
        await wait_all_tasks_blocked()
        await members.all_bring("a:0:0")
        assert members.given == {"a:0:0": None}
        assert (await members.leader.result(1))["sizes"] == [1]
        nursery.cancel_scope.cancel()


# The whole of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked", [["local"], [elastic_slices.MACHINES, "--kill"]], ids=["local", "machine, one killed"]
)
def test_training_goes_on_with_the_slices_there_are_and_comes_to_the_weights_of_a_plain_loop(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(elastic_slices, "STEPS", 3)
    assert elastic_slices.main([*asked, "--steps", "100", "--check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["check"] == "the same"
    sizes = [size for size, _ in report["phases"]]
    assert sizes[-3:] == [3, 2, 3] or sizes[-4:-1] == [3, 2, 3]
    assert report["redone"] >= ("--kill" in asked)
    assert report["accuracy"]["trained"] > 0.85 > report["accuracy"]["untrained"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--steps", "0"], "--steps must be 1 or more"),
        (["--slice-cpu", "0"], "--slice-cpu must be more than 0"),
        (["local", "--kill"], "choose machine"),
        (["nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_status_2(asked: list[str], says: str, capsys: Any) -> None:
    try:
        status = elastic_slices.main(asked)
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
