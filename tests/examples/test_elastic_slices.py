"""Elastic example: training continues as members come, go and are killed, with the weights of a single loop."""

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

# Model ---------------------------------------------------------------------------------------------------------------


def test_lines_of_docstrings_are_prose_and_others_code() -> None:
    source = "def f():\n    '''It does\n    this.'''\n\n    return 'text'\n"
    assert [is_prose for _, is_prose in model.lines_of(source)] == [False, True, True, False]


def test_the_sum_of_the_parts_of_a_step_does_not_depend_on_their_number() -> None:
    data, weights = model.load(), model.plain(model.load(), 3)
    whole = model.gradient(weights, data, 7, 0, 1)
    for size in (2, 3, 5):
        parts = [model.gradient(weights, data, 7, rank, size) for rank in range(size)]
        assert np.allclose(np.sum(parts, axis=0), whole)


def test_the_model_learns() -> None:
    data = model.load()
    assert model.accuracy(model.plain(data, 300), data) > 0.88 > 0.8 > model.accuracy(model.fresh(), data)


# Decisions of the leader ---------------------------------------------------------------------------------------------


class Members:
    """Members of a leader, in tasks of this test."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.leader = Leader()
        self.presence: dict[str, trio.CancelScope] = {}
        self.rounds: dict[str, Round | None] = {}
        self._nursery = nursery

    async def _stay(self, member: str) -> None:
        with trio.CancelScope() as self.presence[member]:
            await self.leader.stay(member)

    async def come(self, member: str) -> None:
        self._nursery.start_soon(self._stay, member)
        await wait_all_tasks_blocked()
        await self.bring(member, None)

    async def bring(self, member: str, number: int | None) -> None:
        """Deliver a part of a round; the answer appears in `rounds` later."""

        async def exchange() -> None:
            self.rounds[member] = await self.leader.exchange(member, number, None if number is None else model.fresh())

        self._nursery.start_soon(exchange)
        await wait_all_tasks_blocked()

    async def go(self, member: str) -> None:
        self.presence[member].cancel()
        await wait_all_tasks_blocked()

    def shares(self) -> dict[str, tuple[int, int, int]]:
        return {who: (at.step, at.rank, at.size) for who, at in self.rounds.items() if at is not None}

    async def all_bring(self, *members: str) -> None:
        for member in members:
            at = self.rounds[member]
            assert at is not None
            await self.bring(member, at.number)


async def test_a_new_member_joins_the_next_round_and_present_members_share_each_step() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        assert members.shares() == {"a:0:0": (0, 0, 1)}
        await members.all_bring("a:0:0")
        assert members.shares() == {"a:0:0": (1, 0, 2), "b:0:0": (1, 1, 2)}
        nursery.cancel_scope.cancel()


async def test_the_remaining_members_repeat_a_step_with_a_lost_part() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        await members.all_bring("a:0:0")
        await members.all_bring("a:0:0")
        assert members.leader.ran_with(1, 1), "step 1 waits for b"
        await members.go("b:0:0")
        assert members.shares()["a:0:0"] == (1, 0, 1)
        assert members.leader._redone == 1
        nursery.cancel_scope.cancel()


async def test_a_leaving_member_finishes_its_step_and_returns_as_a_new_attempt() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        await members.all_bring("a:0:0")
        members.leader._leaving.add("b")
        await members.all_bring("a:0:0", "b:0:0")
        assert members.rounds["b:0:0"] is None
        assert members.shares()["a:0:0"] == (2, 0, 1), "nothing was repeated"
        await members.go("b:0:0")
        await members.come("b:1:0")
        await members.all_bring("a:0:0")
        assert members.shares()["b:1:0"] == (3, 1, 2)
        nursery.cancel_scope.cancel()


async def test_a_killed_member_is_removed_when_its_job_restarts_even_if_its_connection_returns() -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        await members.come("b:0:0")
        await members.all_bring("a:0:0")
        await members.all_bring("a:0:0")
        await members.come("b:1:0")
        assert members.shares() == {"a:0:0": (1, 0, 2), "b:0:0": (1, 1, 2), "b:1:0": (1, 1, 2)}
        await members.bring("b:0:0", 2)
        assert members.rounds["b:0:0"] is None, "it comes back, and is ignored"
        nursery.cancel_scope.cancel()


async def test_all_members_are_released_after_the_last_step(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        members = Members(nursery)
        await members.come("a:0:0")
        nursery.start_soon(members.leader.result, 1)
        await wait_all_tasks_blocked()
        await members.all_bring("a:0:0")
        assert members.rounds == {"a:0:0": None}
        assert (await members.leader.result(1))["sizes"] == [1]
        nursery.cancel_scope.cancel()


# Complete runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked", [["local"], [elastic_slices.MACHINES, "--kill"]], ids=["local", "machine, one killed"]
)
def test_training_continues_with_the_present_slices_and_has_the_weights_of_a_single_loop(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(elastic_slices, "STEPS", 3)
    assert elastic_slices.main([*asked, "--steps", "100", "--check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["check"] == "the same"
    sizes = [size for size, _ in report["phases"]]
    if "--kill" in asked:  # which may come at any time: also in a phase of two, which then has a step with one
        rest = iter(sizes)
        assert all(size in rest for size in (3, 2, 3)), sizes
    else:
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
def test_invalid_options_print_one_line_and_exit_with_2(asked: list[str], says: str, capsys: Any) -> None:
    try:
        status = elastic_slices.main(asked)
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
