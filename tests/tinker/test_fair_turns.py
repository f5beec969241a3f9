"""Turns of users and places in memory, against lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.tinker.core.fair_turns import EngineTurn, FairTurns
from fray.tinker.core.residency import Residency

USERS = st.sampled_from("abcd")
ACTIONS = st.one_of(
    st.lists(USERS, min_size=1, max_size=3, unique=True),
    st.sampled_from(["next", "withdraw"]),
    st.integers(0, 8).map(float),
)


def test_users_are_behind_those_who_wait_and_were_served_less() -> None:
    turns = FairTurns()
    for user, seconds in (("ada", 3.0), ("bob", 1.0), ("eve", 1.0)):
        turns.ask([user])
        turns.next()
        turns.end(seconds)
    turns.ask(["ada"])
    assert turns.behind() == {}, "only one waits"
    turns.ask(["bob", "eve"])
    assert turns.behind() == {"ada": 2}
    turns.next()
    assert turns.behind() == {"ada": 2}, "they are served now"
    turns.end(0.5)
    turns.next()
    assert turns.behind() == {}


def test_a_user_of_twice_the_weight_has_twice_the_time() -> None:
    turns = FairTurns()
    turns.weights = {"ada": 2.0, "gone": 5.0}
    for _ in range(30):
        asked = [turns.ask([user]) for user in ("ada", "bob")]
        assert turns.next() in asked
        turns.end(1.0)
        for turn in asked:
            if turn in turns._waiting:
                turns.withdraw(turn)
    assert turns.seconds == {"ada": 20.0, "bob": 10.0}


@given(st.lists(ACTIONS, max_size=60))
def test_the_turn_of_the_least_served_user_is_next_as_in_a_list(actions: list[list[str] | str | float]) -> None:
    turns = FairTurns()
    served: dict[str, float] = {}
    levels: dict[str, float] = {}
    waiting: list[tuple[list[str], EngineTurn]] = []
    current: list[str] | None = None
    now = 0.0
    for action in actions:
        if isinstance(action, list):
            for user in action:
                levels[user] = max(levels.get(user, 0.0), now)
            waiting.append((action, turns.ask(action)))
        elif action == "withdraw" and waiting:
            turns.withdraw(waiting.pop(len(waiting) // 2)[1])
        elif action == "next":
            ordered = sorted(waiting, key=lambda one: min(levels[user] for user in one[0]))
            expected = ordered[0] if ordered and current is None else None
            assert turns.next() == (None if expected is None else expected[1])
            if expected is not None:
                waiting.remove(expected)
                current, now = expected[0], max(now, min(levels[user] for user in expected[0]))
        elif isinstance(action, float) and current is not None:
            turns.end(action)
            for user in current:
                levels[user] += action / len(current)
                served[user] = served.get(user, 0.0) + action / len(current)
            current = None
    assert turns.seconds == pytest.approx(served)


def test_a_small_request_waits_for_one_slice_of_a_large_one() -> None:
    turns = FairTurns()
    large = turns.ask(["large"])
    for _ in range(10):
        assert turns.next() is large
        small = turns.ask(["small"])
        turns.end(0.1)
        large = turns.ask(["large"])
        assert turns.next() is small
        turns.end(0.01)


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
def test_adapters_in_use_stay_and_of_the_others_those_used_last(limit: int, actions: list[tuple[str, bool]]) -> None:
    residency = Residency(limit)
    used: list[str] = []
    order: list[str] = []
    for name, takes in actions:
        if takes:
            idle = [each for each in order if each not in used]
            is_possible = name in order or len(order) < limit or bool(idle)
            assert residency.take(name) == is_possible
            if is_possible:
                if name not in order and len(order) >= limit:
                    order.remove(idle[0])
                order = [*(each for each in order if each != name), name]
                used.append(name)
        elif name in used:
            residency.release(name)
            used.remove(name)
        assert residency.names == set(order)


def test_a_limit_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="resident=0: expected at least 1"):
        Residency(0)
