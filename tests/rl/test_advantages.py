"""Advantages: the golden numbers, and each formula against its definition written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.rl.core.advantages import dr_grpo, gae, grpo, next_baseline, reinforce, rloo, step_grpo, whitened

REWARDS = st.floats(-10, 10).map(lambda value: round(value, 3))
GROUPED = st.lists(st.tuples(REWARDS, st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=16)


@pytest.mark.parametrize(
    ("formula", "rewards", "expected"),
    [
        (grpo, [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        (grpo, [3, 1, 2, 2, 0], [1.22788, -0.526234, 0.350823, 0.350823, -1.403292]),
        (grpo, [0.7], [0.7]),
        (grpo, [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        (dr_grpo, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        (dr_grpo, [0.7], [0.7]),
        (rloo, [1, 0, 0, 1], [0.666667, -0.666667, -0.666667, 0.666667]),
        (rloo, [0.7], [0.7]),
    ],
)
def test_golden_numbers(formula: Callable[..., list[float]], rewards: list[float], expected: list[float]) -> None:
    assert formula(rewards, ["g"] * len(rewards)) == pytest.approx(expected, abs=1e-6)


def test_several_trajectories_of_a_run_count_as_one() -> None:
    # Run a has two parts: the runs' means are 1 and 0, so the mean is 0.5 and not 2/3.
    assert dr_grpo([1, 1, 0], ["g"] * 3, ["a", "a", "b"]) == [0.5, 0.5, -0.5]
    assert grpo([1, 1, 0], ["g"] * 3, ["a", "a", "b"]) == pytest.approx([0.707106, 0.707106, -0.707106], abs=1e-5)


def test_the_deviation_of_a_single_run_is_1() -> None:
    assert grpo([3, 1], ["g", "g"], ["a", "a"]) == [1, -1]


def slow(rewards: Sequence[float], groups: Sequence[int], runs: Sequence[int], kind: str) -> list[float]:
    """The definitions, for one trajectory at a time."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [index for index, other in enumerate(groups) if other == group]
        if len(members) == 1:
            advantages.append(reward)
            continue
        if all(rewards[index] == rewards[members[0]] for index in members):
            advantages.append(0.0)
            continue
        means = []
        for run in sorted({runs[index] for index in members}):
            parts = [rewards[index] for index in members if runs[index] == run]
            means.append(sum(parts) / len(parts))
        mean = sum(means) / len(means)
        if kind == "grpo":
            variance = sum((one - mean) ** 2 for one in means) / (len(means) - 1) if len(means) > 1 else None
            advantages.append((reward - mean) / (1.0 if variance is None else math.sqrt(variance) + 1e-6))
        elif kind == "dr_grpo":
            advantages.append(reward - mean)
        else:
            others = (sum(means) - reward) / (len(means) - 1) if len(means) > 1 else 0.0
            advantages.append(reward - others)
    return advantages


@given(GROUPED)
def test_grpo_and_dr_grpo_are_their_definitions(trajectories: list[tuple[float, int, int]]) -> None:
    rewards, groups, runs = (list(column) for column in zip(*trajectories, strict=True))
    assert grpo(rewards, groups, runs) == pytest.approx(slow(rewards, groups, runs, "grpo"), rel=1e-6, abs=1e-6)
    assert dr_grpo(rewards, groups, runs) == pytest.approx(slow(rewards, groups, runs, "dr_grpo"), abs=1e-6)


@given(st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=16))
def test_rloo_subtracts_the_mean_of_the_others(trajectories: list[tuple[float, int]]) -> None:
    rewards, groups = (list(column) for column in zip(*trajectories, strict=True))
    assert rloo(rewards, groups) == pytest.approx(slow(rewards, groups, range(len(rewards)), "rloo"), abs=1e-6)


@given(GROUPED)
def test_advantages_of_a_group_of_runs_sum_to_zero(trajectories: list[tuple[float, int, int]]) -> None:
    rewards, groups, _ = (list(column) for column in zip(*trajectories, strict=True))
    advantages = grpo(rewards, groups)
    for group in set(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        if len(members) > 1:
            assert sum(advantages[index] for index in members) == pytest.approx(0, abs=1e-5)


def test_the_advantage_of_a_step_sums_what_follows() -> None:
    # Over all steps: mean 0.5, deviation 0.57735.
    assert step_grpo([[0, 1], [1, 0]], ["g", "g"]) == [
        pytest.approx([0, 0.866024], abs=1e-6),
        pytest.approx([0, -0.866024], abs=1e-6),
    ]
    discounted = step_grpo([[0, 1], [1, 0]], ["g", "g"], gamma=0.5)
    assert discounted[0] == pytest.approx([-0.866024 + 0.5 * 0.866024, 0.866024], abs=1e-6)


def test_a_single_step_is_grpo() -> None:
    assert [steps[0] for steps in step_grpo([[3], [1], [2]], ["g"] * 3)] == grpo([3, 1, 2], ["g"] * 3)


def test_reinforce_subtracts_a_moving_average() -> None:
    baseline = next_baseline(None, [1, 0])
    assert baseline == 0.5
    assert reinforce([1, 0], baseline) == [0.5, -0.5]
    assert next_baseline(baseline, [1, 1], decay=0.5) == 0.75


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(reward: float) -> None:
    with pytest.raises(ValueError, match=r"invalid reward (nan|-?inf) of trajectory 1: expected a finite number"):
        grpo([0, reward], ["g", "g"])


def test_lengths_and_the_discount_are_checked() -> None:
    with pytest.raises(ValueError, match="2 rewards, 1 groups"):
        grpo([1, 2], ["g"])
    with pytest.raises(ValueError, match=r"invalid gamma 1\.5: expected a number above 0 and at most 1"):
        step_grpo([[1]], ["g"], gamma=1.5)


@given(
    st.lists(st.tuples(REWARDS, st.floats(-3, 3)), min_size=1, max_size=12),
    st.floats(0.1, 1.0),
    st.floats(0.0, 1.0),
)
def test_gae_is_the_mean_of_returns_of_all_lengths_weighted_by_lam(
    steps: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = [reward for reward, _ in steps], [value for _, value in steps]
    count = len(steps)

    def of_length(at: int, length: int) -> float:
        """The return of so many rewards, then the value of the state after them; 0 after the end."""
        found = sum(gamma**k * rewards[at + k] for k in range(length))
        return found + (gamma**length * values[at + length] if at + length < count else 0.0)

    advantages, returns = gae(rewards, values, gamma, lam)
    for at in range(count):
        longest = count - at
        mean = sum((1 - lam) * lam ** (length - 1) * of_length(at, length) for length in range(1, longest))
        mean += lam ** (longest - 1) * of_length(at, longest)
        assert returns[at] == pytest.approx(mean, abs=1e-8)
        assert advantages[at] == pytest.approx(mean - values[at], abs=1e-8)


def test_gae_refuses_what_it_cannot_compute() -> None:
    assert gae([0.0, 1.0], [0.5, 0.25]) == ([0.5, 0.75], [1.0, 1.0])
    for arguments, text in (
        (([1.0], [1.0, 2.0]), "1 rewards and 2 values: lengths differ"),
        (([1.0, math.nan], [1.0, 2.0]), "invalid reward nan of step 1"),
        (([1.0], [math.inf]), "invalid value inf of step 0"),
        (([1.0], [1.0], 0.0), "invalid gamma 0.0"),
        (([1.0], [1.0], 1.0, 1.5), "invalid lam 1.5"),
    ):
        with pytest.raises(ValueError, match=text):
            gae(*arguments)


@given(st.lists(st.lists(REWARDS, max_size=4), max_size=4))
def test_whitened_numbers_have_mean_0_and_deviation_1(rows: list[list[float]]) -> None:
    found = whitened(rows)
    assert [len(row) for row in found] == [len(row) for row in rows]
    before, after = [each for row in rows for each in row], [each for row in found for each in row]
    if len(set(before)) < 2:
        assert set(after) <= {0.0}
        return
    assert sum(after) == pytest.approx(0, abs=1e-6)
    if max(before) - min(before) > 0.1:
        assert sum(each**2 for each in after) == pytest.approx(len(after) - 1, rel=1e-3)
    assert sorted(range(len(before)), key=before.__getitem__) == sorted(range(len(after)), key=after.__getitem__)
