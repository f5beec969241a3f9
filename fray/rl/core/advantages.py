"""Advantages of samples from their rewards: one number for each trajectory, or for each of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean
from typing import TypeAlias

EPSILON = 1e-6
"""Added to deviations, as in GRPO's first implementations."""

RewardGroups: TypeAlias = dict[Hashable, dict[Hashable, list[int]]]
"""Indexes of trajectories by group and run."""


def grpo(rewards: Sequence[float], groups: Sequence[Hashable], runs: Sequence[Hashable] | None = None) -> list[float]:
    """Return advantages relative to the group: ``(reward - mean) / (deviation + 1e-6)``.

    Several trajectories of one run (parts of one episode) count as one: mean and sample deviation are those of the
    runs' mean rewards. A group of one trajectory keeps its reward; with a single run of several, the deviation is 1.
    From Shao et al. 2024, "DeepSeekMath", section 4.1.

    Args:
        rewards: one for each trajectory.
        groups: the group of each trajectory.
        runs: the run of each trajectory; default: each is a run of its own.

    Raises:
        ValueError: the sequences differ in length, or a reward is not finite.
    """

    def scale(means: Sequence[float], size: int) -> tuple[float, float]:
        mean, count = fmean(means), len(means)
        if size == 1:
            return 0.0, 1.0
        if count == 1:
            return mean, 1.0
        return mean, math.sqrt(math.fsum((each - mean) ** 2 for each in means) / (count - 1)) + EPSILON

    return _relative(rewards, groups, runs, scale)


def dr_grpo(
    rewards: Sequence[float], groups: Sequence[Hashable], runs: Sequence[Hashable] | None = None
) -> list[float]:
    """Return ``reward - mean``, without the division. Arguments and errors as of `grpo`.

    From Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO).
    """
    return _relative(rewards, groups, runs, lambda means, size: (fmean(means) if size > 1 else 0.0, 1.0))


def rloo(rewards: Sequence[float], groups: Sequence[Hashable], runs: Sequence[Hashable] | None = None) -> list[float]:
    """Return the reward minus the mean of the other runs of the group. Arguments and errors as of `grpo`.

    From Ahmadian et al. 2024, "Back to Basics" (REINFORCE leave-one-out).
    """

    def scale(means: Sequence[float], size: int) -> tuple[float, float]:
        count = len(means)
        return (fmean(means), (count - 1) / count) if count > 1 else (0.0, 1.0)

    return _relative(rewards, groups, runs, scale)


def reinforce(rewards: Sequence[float], baseline: float) -> list[float]:
    """Return ``reward - baseline``, as `next_baseline` keeps it. Raises ValueError for a reward that is not finite.

    From Williams 1992, "Simple Statistical Gradient-Following Algorithms".
    """
    _check_finite(rewards)
    return [reward - baseline for reward in rewards]


def next_baseline(baseline: float | None, rewards: Sequence[float], decay: float = 0.9) -> float:
    """Return the moving average of mean rewards; the first mean itself if there is none yet."""
    mean = fmean(rewards)
    return mean if baseline is None else decay * baseline + (1 - decay) * mean


def step_grpo(rewards: Sequence[Sequence[float]], groups: Sequence[Hashable], gamma: float = 1.0) -> list[list[float]]:
    """Return advantages of each step of each trajectory, from rewards of steps.

    Rewards are normalized over all steps of the group; the advantage of a step is the discounted sum of the normalized
    rewards from it to the end. From Shao et al. 2024, "DeepSeekMath", section 4.1.3 (process supervision), there with
    ``gamma`` 1.

    Args:
        rewards: for each trajectory, the reward of each of its steps.
        groups: the group of each trajectory.
        gamma: discount for each step, above 0 and at most 1.

    Raises:
        ValueError: the sequences differ in length, a reward is not finite, or ``gamma`` is out of its range.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"invalid gamma {gamma}: expected a number above 0 and at most 1")
    lengths = [len(steps) for steps in rewards]
    flat = [reward for steps in rewards for reward in steps]
    owners = [group for group, length in zip(groups, lengths, strict=True) for _ in range(length)]
    normalized = iter(grpo(flat, owners))
    advantages = []
    for length in lengths:
        total, backwards = 0.0, []
        for value in reversed([next(normalized) for _ in range(length)]):
            total = value + gamma * total
            backwards.append(total)
        advantages.append(backwards[::-1])
    return advantages


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 1.0
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of the steps of one trajectory, which ends with the last of them.

    The advantage of a step is the sum over the steps from it on of ``reward + gamma next_value - value``, discounted by
    ``gamma lam`` a step; the return, to which a critic is fitted, is the advantage plus the value. From Schulman et al.
    2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation".

    Args:
        rewards: after each step.
        values: of the state before each step, by the critic.
        gamma: discount of a step, above 0 and at most 1.
        lam: 0: the error of one step; 1: all rewards that follow, minus the value.

    Raises:
        ValueError: the lengths differ, a number is not finite, or ``gamma`` or ``lam`` is out of its range.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"invalid gamma {gamma}: expected a number above 0 and at most 1")
    if not 0 <= lam <= 1:
        raise ValueError(f"invalid lam {lam}: expected a number from 0 to 1")
    if len(rewards) != len(values):
        raise ValueError(f"{len(rewards)} rewards and {len(values)} values: lengths differ")
    for name, numbers in (("reward", rewards), ("value", values)):
        if (place := next((at for at, each in enumerate(numbers) if not math.isfinite(each)), None)) is not None:
            raise ValueError(f"invalid {name} {numbers[place]} of step {place}: expected a finite number")
    advantage, following, backwards = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        backwards.append(advantage)
    advantages = backwards[::-1]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def whitened(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return numbers minus the mean of all rows' numbers, divided by their deviation plus `EPSILON`.

    Equal numbers, and a single one, become 0.
    """
    flat = [value for row in rows for value in row]
    if not flat or min(flat) == max(flat):
        return [[0.0] * len(row) for row in rows]
    mean = fmean(flat)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in flat) / (len(flat) - 1)) + EPSILON
    return [[(value - mean) / deviation for value in row] for row in rows]


def _relative(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    runs: Sequence[Hashable] | None,
    scale: Callable[[Sequence[float], int], tuple[float, float]],
) -> list[float]:
    """Return ``(reward - baseline) / divisor`` of each reward.

    Both are of its group: ``scale(mean rewards of its runs, number of trajectories)``.
    """
    _check_finite(rewards)
    if len(groups) != len(rewards) or (runs is not None and len(runs) != len(rewards)):
        raise ValueError(
            f"{len(rewards)} rewards, {len(groups)} groups and {len(runs or rewards)} runs: lengths differ"
        )
    members: RewardGroups = {}
    for index, group in enumerate(groups):
        members.setdefault(group, {}).setdefault(index if runs is None else runs[index], []).append(index)
    advantages = [0.0] * len(rewards)
    for by_run in members.values():
        indexes = [index for parts in by_run.values() for index in parts]
        # Exactly 0, where the mean of equal numbers may differ from them in the last bit.
        if len(indexes) > 1 and len({rewards[index] for index in indexes}) == 1:
            continue
        baseline, divisor = scale([fmean(rewards[index] for index in parts) for parts in by_run.values()], len(indexes))
        for index in indexes:
            advantages[index] = (rewards[index] - baseline) / divisor
    return advantages


def _check_finite(rewards: Sequence[float]) -> None:
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"invalid reward {reward} of trajectory {index}: expected a finite number")
