"""Advantages of GRPO: on tensors of token-level rewards, and on trajectories."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from fray.rl.core.advantages import grpo
from fray.rl.nexrl_types import Trajectory
from fray.rl.train.trajectory_checks import GROUP_KEYS, group_of, name_of


def compute_grpo_outcome_advantage(
    token_level_rewards: Any,
    eos_mask: Any,
    index: Sequence[Hashable],
    run_ids: Sequence[Hashable] | None = None,
) -> tuple[Any, Any]:
    """Return advantages and returns, each a tensor `[batch, tokens]`: the advantage of a row at its tokens that count.

    Args:
        token_level_rewards: tensor `[batch, tokens]`; their sum is the reward of a row.
        eos_mask: tensor `[batch, tokens]`, 1 where a token counts.
        index: the group of each row.
        run_ids: the run of each row, where one has several; default: each row is a run of its own.

    Raises:
        ValueError: lengths differ, or a reward is not finite.
    """
    scores = (token_level_rewards * eos_mask).sum(-1).tolist()
    advantages = token_level_rewards.new_tensor(grpo(scores, _hashable(index), _hashable(run_ids)))
    spread = advantages[:, None] * eos_mask
    return spread, spread


def compute_grpo_advantage_for_trajectories(
    trajectories: list[Trajectory], logger: logging.Logger | None = None, use_run_ids: bool = True
) -> list[Trajectory]:
    """Set ``advantage`` of each trajectory, from ``reward`` relative to its group; return the list.

    Args:
        trajectories: with ``reward``, and ``group_id`` or ``uid``.
        logger: gets a line with the number of groups.
        use_run_ids: trajectories of one group with equal ``run_id`` count as one.

    Raises:
        ValueError: a key is missing, or a reward is not finite; the message names the trajectory.
    """
    for place, trajectory in enumerate(trajectories):
        missing = [] if "reward" in trajectory else ["reward"]
        missing += [] if any(key in trajectory for key in GROUP_KEYS) else [" or ".join(GROUP_KEYS)]
        if missing:
            raise ValueError(f"{name_of(trajectory, place)}: key {missing[0]} is missing; it has {sorted(trajectory)}")
    groups = [group_of(trajectory) for trajectory in trajectories]
    # A trajectory without a run is a run of its own.
    runs = [
        (trajectory["run_id"],) if use_run_ids and "run_id" in trajectory else place
        for place, trajectory in enumerate(trajectories)
    ]
    rewards = [float(trajectory["reward"]) for trajectory in trajectories]
    for trajectory, advantage in zip(trajectories, grpo(rewards, groups, runs), strict=True):
        trajectory["advantage"] = advantage
    if logger is not None:
        logger.info("advantages of %d trajectories in %d groups", len(trajectories), len(set(groups)))
    return trajectories


def _hashable(values: Any) -> Any:
    """Return a sequence whose items are plain values, also of an array or a tensor."""
    return values.tolist() if hasattr(values, "tolist") else values
