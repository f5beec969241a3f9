"""Advantages of a batch of trajectories, by the settings of a trainer. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fray.rl.core import advantages as core
from fray.rl.nexrl_types import Trajectory
from fray.rl.train.settings import GRPO
from fray.rl.train.trajectory_checks import group_of, turn_lengths

_OF_GROUPS = {"grpo": core.grpo, "dr_grpo": core.dr_grpo, "rloo": core.rloo}


def needed_keys(settings: GRPO) -> tuple[str, ...]:
    """Return the keys that trajectories need beside ``tokens`` and ``loss_mask``."""
    if settings.loss == "cross_entropy":
        return ()
    of_advantage = {"reinforce": ("reward",), "step_grpo": ("reward", "step_rewards", "group_id")}
    if settings.advantage == "gae":
        return ("logprobs", "reward")
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


def gae_of(
    settings: GRPO, trajectories: Sequence[Trajectory], values: Sequence[Sequence[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Return advantages and returns of each token of each trajectory; 0 where none counts.

    The tokens that count are the steps. The reward is given after the last one, or ``step_rewards`` after the last of
    each turn. Advantages are whitened over the batch.

    Args:
        settings: with a critic.
        trajectories: checked before.
        values: of each token of each trajectory; what stands where no token counts is not looked at.

    Raises:
        ValueError: a value is not finite.
    """
    critic = settings.critic_settings
    assert critic is not None
    places = [[at for at, counts in enumerate(each["loss_mask"]) if counts] for each in trajectories]
    found = [
        core.gae(_token_rewards(each), [row[at] for at in of_row], settings.gamma, critic.lam)
        for each, row, of_row in zip(trajectories, values, places, strict=True)
    ]
    lengths = [len(each["tokens"]) for each in trajectories]
    advantages = core.whitened([advantages for advantages, _ in found])
    return _spread(advantages, places, lengths), _spread([returns for _, returns in found], places, lengths)


def _token_rewards(trajectory: Trajectory) -> list[float]:
    """Return the reward after each token that counts."""
    lengths = turn_lengths(list(trajectory["loss_mask"]))
    of_turns = trajectory.get("step_rewards")
    rewards = [0.0] * (len(lengths) - 1) + [trajectory["reward"]] if of_turns is None else of_turns
    return [
        float(reward) if last else 0.0
        for reward, length in zip(rewards, lengths, strict=True)
        for last in [False] * (length - 1) + [True]
    ]


def _spread(
    values: Sequence[Sequence[float]], places: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[list[float]]:
    rows = [[0.0] * length for length in lengths]
    for row, of_row, at in zip(rows, values, places, strict=True):
        for place, value in zip(at, of_row, strict=True):
            row[place] = value
    return rows
