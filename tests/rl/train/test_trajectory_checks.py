"""Checks of trajectories: each problem is named with the trajectory."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fray.rl.train.trajectory_checks import check_trajectory, group_of, turn_lengths

GOOD: dict[str, Any] = {
    "tokens": [1, 2, 3],
    "loss_mask": [0, 1, 1],
    "logprobs": [0.0, -1.0, -2],
    "reward": True,
    "group_id": 0,
    "task_id": "a",
}


def check(change: dict[str, Any]) -> None:
    check_trajectory({**GOOD, **change}, vocabulary_size=4, max_length=3, index=7)


def test_a_good_trajectory_passes_with_either_name_of_its_group() -> None:
    check({})
    renamed = {key: value for key, value in GOOD.items() if key != "group_id"} | {"uid": 0}
    check_trajectory(renamed, vocabulary_size=4)
    assert group_of(GOOD) == group_of(renamed) == 0
    assert turn_lengths([0, 1, 1, 0, 1]) == [2, 1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": [], "loss_mask": [], "logprobs": []}, "tokens is empty"),
        ({"tokens": [1, 2, 4]}, r"tokens\[2\] is 4: expected 0 to 3"),
        ({"tokens": [1, -1, 2]}, r"tokens\[1\] is -1"),
        ({"tokens": [1, 1.5, 2]}, r"tokens\[1\] is 1.5"),
        ({"loss_mask": [0, 1]}, "loss_mask has 2 numbers, but there are 3 tokens"),
        ({"loss_mask": [0, 1, 2]}, r"loss_mask\[2\] is 2: expected 0 or 1"),
        ({"loss_mask": [0, 0, 0]}, "no token counts"),
        ({"loss_mask": [1, 1, 1]}, r"loss_mask\[0\] is 1, but nothing comes before the first token"),
        ({"logprobs": [0.0]}, "logprobs has 1 numbers, but there are 3 tokens"),
        ({"logprobs": [0.0, -math.inf, 0.0]}, r"logprobs\[1\] is -inf: expected a finite number"),
        ({"logprobs": [0.0, "x", 0.0]}, r"logprobs\[1\] is 'x'"),
        ({"reward": "1"}, "reward is '1': expected a finite number"),
        ({"reward": math.nan}, "reward is nan"),
        ({"step_rewards": [1.0, 2.0]}, "step_rewards has 2 numbers, but loss_mask has 1 turns"),
        ({"step_rewards": [None]}, r"step_rewards\[0\] is None"),
    ],
)
def test_a_problem_is_named_with_the_trajectory(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"trajectory 7 \(task_id 'a', group_id 0\): {problem}"):
        check(change)


def test_a_missing_key_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="trajectory: key 'reward' is missing; it has logprobs, loss_mask, tokens"):
        check_trajectory({key: GOOD[key] for key in ("tokens", "loss_mask", "logprobs")}, vocabulary_size=4)


def test_too_many_tokens_are_refused() -> None:
    four = {"tokens": [1] * 4, "loss_mask": [0, 1, 1, 1], "logprobs": [-1.0] * 4}
    with pytest.raises(ValueError, match="it has 4 tokens, but the model takes at most 3"):
        check(four)
