"""Metrics of GRPO for a batch of trajectories."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

from fray.rl.nexrl_types import Trajectory
from fray.rl.train.trajectory_checks import group_of


def log_grpo_metrics(trajectories: list[Trajectory], metrics: dict[str, Any]) -> None:
    """Add statistics of rewards, advantages and groups to ``metrics``, with the prefix ``grpo/``.

    Args:
        trajectories: with ``reward``, ``advantage``, and ``group_id`` or ``uid``; nothing is added if there are none.
        metrics: is changed.
    """
    if not trajectories:
        return
    rewards = [float(trajectory["reward"]) for trajectory in trajectories]
    advantages = [float(trajectory["advantage"]) for trajectory in trajectories]
    metrics |= {
        "grpo/reward_mean": fmean(rewards),
        "grpo/reward_std": pstdev(rewards),
        "grpo/advantage_mean": fmean(advantages),
        "grpo/advantage_std": pstdev(advantages),
        "grpo/groups": float(len({group_of(trajectory) for trajectory in trajectories})),
        "grpo/zero_advantages": fmean(not advantage for advantage in advantages),
    }
