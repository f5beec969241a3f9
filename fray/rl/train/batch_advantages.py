"""Advantages of a batch of trajectories, by the settings of a trainer. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fray.rl.core import advantages as core
from fray.rl.nexrl_types import Trajectory
from fray.rl.train.settings import GRPO
from fray.rl.train.trajectory_checks import group_of

_OF_GROUPS = {"grpo": core.grpo, "dr_grpo": core.dr_grpo, "rloo": core.rloo}


def needed_keys(settings: GRPO) -> tuple[str, ...]:
    """Return the keys that trajectories need beside ``tokens`` and ``loss_mask``."""
    if settings.loss == "cross_entropy":
        return ()
    of_advantage = {"reinforce": ("reward",), "step_grpo": ("reward", "step_rewards", "group_id")}
    return ("logprobs", *of_advantage.get(settings.advantage, ("reward", "group_id")))


def advantages_of(
    settings: GRPO, trajectories: Sequence[Trajectory], rewards: Sequence[float], baseline: float | None
) -> list[list[float]]:
    """Return the advantages of each trajectory: one, or one for each of its turns with ``step_grpo``.

    Args:
        settings: ``advantage`` and its numbers.
        trajectories: with ``group_id`` or ``uid``, and ``run_id`` where an episode has several; checked before.
        rewards: one for each trajectory.
        baseline: moving average of rewards of ``reinforce``; None before the first batch, whose own mean counts then.
    """
    if settings.advantage == "reinforce":
        return [[value] for value in core.reinforce(rewards, fmean(rewards) if baseline is None else baseline)]
    groups = [group_of(trajectory) for trajectory in trajectories]
    if settings.advantage == "step_grpo":
        of_steps = [[float(reward) for reward in trajectory["step_rewards"]] for trajectory in trajectories]
        return core.step_grpo(of_steps, groups, settings.gamma)
    # A trajectory without a run is a run of its own.
    runs = [
        (trajectory["run_id"],) if "run_id" in trajectory else index for index, trajectory in enumerate(trajectories)
    ]
    return [[value] for value in _OF_GROUPS[settings.advantage](rewards, groups, runs)]
