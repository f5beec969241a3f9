"""Scores of episodes: what an episode may return, and the trajectory that is trained of its turns."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from fray.rl.core.versions import Segment, VersionName
from fray.rl.rollout.scores import MadeTrajectories, Score, score, scores_of, trajectory_of


@frozen(eq=False)
class Turn:
    """Reply whose tokens have the logprobs -token / 10."""

    prompt_ids: list[int]
    token_ids: list[int]
    version: int = 0
    finish_reason: str = "stop"

    @property
    def logprobs(self) -> list[float]:
        return [-token / 10 for token in self.token_ids]

    @property
    def segments(self) -> list[Segment]:
        return [(VersionName(0, self.version), len(self.token_ids))]


def test_a_single_turn_is_its_prompt_and_its_reply() -> None:
    reply = Turn([1, 2], [3, 4])
    trajectory = trajectory_of(score(reply, 0.5, metrics={"right": 1}), [reply])
    assert trajectory == {
        "tokens": [1, 2, 3, 4],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.3, -0.4],
        "versions": [(VersionName(0, 0), 2)],
        "reward": 0.5,
        "finish_reason": "stop",
        "metrics": {"right": 1},
    }


def test_three_turns_that_continue_one_another_are_one_trajectory_with_a_mask() -> None:
    first = Turn([1], [2, 3])
    second = Turn([1, 2, 3, 9, 9], [4], version=1)
    third = Turn([1, 2, 3, 9, 9, 4, 8], [5, 6], version=1)
    trajectory = trajectory_of(score(third, 1.0), [first, second, third])
    assert trajectory["tokens"] == [1, 2, 3, 9, 9, 4, 8, 5, 6]
    assert trajectory["loss_mask"] == [0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert trajectory["logprobs"] == [0, -0.2, -0.3, 0, 0, -0.4, 0, -0.5, -0.6]
    assert trajectory["versions"] == [(VersionName(0, 0), 2), (VersionName(0, 1), 1), (VersionName(0, 1), 2)]


def test_turns_that_the_last_prompt_does_not_continue_are_not_trained() -> None:
    other, sibling = Turn([1, 2], [7, 7]), Turn([1, 2], [3])
    reply = Turn([1, 2], [3, 4])
    trajectory = trajectory_of(score(reply, 1.0), [other, sibling, reply])
    assert (trajectory["tokens"], trajectory["loss_mask"]) == ([1, 2, 3, 4], [0, 0, 1, 1])


def test_of_two_replies_to_one_prompt_the_one_in_the_conversation_counts() -> None:
    short, long = Turn([1], [2]), Turn([1], [2, 3])
    last = Turn([1, 2, 3, 9], [4])
    trajectory = trajectory_of(score(last, 1.0), [short, long, last])
    assert trajectory["loss_mask"] == [0, 1, 1, 0, 1]
    assert sum(length for _, length in trajectory["versions"]) == sum(trajectory["loss_mask"])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "good", None])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(ValueError, match=r"invalid reward .*: expected a"):
        score(Turn([1], [2]), reward)


def test_an_episode_returns_as_many_scores_as_its_task_has_samples() -> None:
    one = score(Turn([1], [2]), 1)
    assert scores_of(one, 1) == [one]
    assert scores_of((one, one), 2) == [one, one]
    with pytest.raises(ValueError, match="returned 2 scores; expected 3"):
        scores_of([one, one], 3)
    for nonsense in (None, 3, "text", [one, None]):
        with pytest.raises(TypeError, match=r"expected rl.score\(reply, reward=...\)"):
            scores_of(nonsense, 1)
    assert isinstance(one, Score)


def test_an_episode_may_return_a_trajectory_to_learn_from() -> None:
    made = {"tokens": [1, 2], "loss_mask": [0, 1], "reward": 1}
    (one,) = scores_of(made, 1)
    assert isinstance(one, MadeTrajectories)
    assert one.trajectories == (made,)
    assert len(scores_of([made, made], 2)) == 2
    with pytest.raises(ValueError, match="invalid reward inf: expected a finite number"):
        scores_of({**made, "reward": float("inf")}, 1)
    with pytest.raises(TypeError, match=r"an episode returned dict; expected rl\.score"):
        scores_of({"tokens": [1]}, 1)


def test_scores_are_finite_numbers_and_in_the_trajectory() -> None:
    one = score(Turn([1], [2]), reward=1, score={"exact": True, "length": 3})
    assert trajectory_of(one, [])["score"] == {"exact": 1.0, "length": 3.0}
    assert "score" not in trajectory_of(score(Turn([1], [2]), reward=1), [])
    with pytest.raises(ValueError, match=r"invalid score\['exact'\] 'yes': expected a number"):
        score(Turn([1], [2]), reward=1, score={"exact": "yes"})
    with pytest.raises(ValueError, match=r"invalid score\['x'\] nan: expected a finite number"):
        score(Turn([1], [2]), reward=1, score={"x": float("nan")})
