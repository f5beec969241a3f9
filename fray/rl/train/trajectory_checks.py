"""Checks of one trajectory: tokens, masks, logprobs and rewards, with errors that name it. Without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from fray.rl.nexrl_types import Trajectory

GROUP_KEYS = ("group_id", "uid")
"""Keys of the group by which rewards are compared; the first that is there counts."""
_NAMING_KEYS = ("task_id", *GROUP_KEYS, "run_id")


class InvalidTrajectory(ValueError):
    """A trajectory cannot be trained; in a run its rollout fails by this name."""


def check_trajectory(
    trajectory: Trajectory,
    *,
    vocabulary_size: int,
    max_length: int | None = None,
    needs: Sequence[str] = ("logprobs", "reward", "group_id"),
    index: int | None = None,
) -> None:
    """Check a trajectory that shall be trained.

    Args:
        trajectory: ``tokens`` and ``loss_mask``, and ``logprobs``, ``reward``, ``group_id`` (or ``uid``) and
            ``step_rewards`` where they are needed or there.
        vocabulary_size: tokens are 0 to one less.
        max_length: longest sequence that the model takes, in tokens.
        needs: keys that must be there beside the first two.
        index: place in its batch, for the message.

    Raises:
        InvalidTrajectory: a key is missing, lengths differ, a token is outside of the vocabulary, a logprob or reward
            is not a finite number, or no token counts. The message names the trajectory by its place and keys.
    """
    for problem in _problems(trajectory, vocabulary_size, max_length, needs):
        raise InvalidTrajectory(f"{name_of(trajectory, index)}: {problem}")


def name_of(trajectory: Trajectory, index: int | None = None) -> str:
    """Return a name for messages: ``trajectory 3 (task_id 'a', run_id 2)``."""
    keys = ", ".join(f"{key} {trajectory[key]!r}" for key in _NAMING_KEYS if key in trajectory)
    return "trajectory" + ("" if index is None else f" {index}") + (f" ({keys})" if keys else "")


def group_of(trajectory: Trajectory) -> Any:
    """Return the group, as ``group_id`` or ``uid`` has it. Raises KeyError if neither is there."""
    return trajectory[GROUP_KEYS[0] if GROUP_KEYS[0] in trajectory else GROUP_KEYS[1]]


def turn_lengths(loss_mask: Sequence[int]) -> list[int]:
    """Return the lengths of the runs of tokens that count: the turns of the policy."""
    return [len(list(run)) for counts, run in groupby(loss_mask, bool) if counts]


def _problems(
    trajectory: Trajectory, vocabulary_size: int, max_length: int | None, needs: Sequence[str]
) -> Iterator[str]:
    """Yield what is wrong. Checks rely on those before them, so the first problem is the one to report."""
    for key in ("tokens", "loss_mask", *needs):
        if key not in trajectory and not (key == "group_id" and "uid" in trajectory):
            yield f"key {key!r} is missing; it has {', '.join(sorted(map(str, trajectory)))}"
    tokens, mask = _as_list(trajectory["tokens"]), _as_list(trajectory["loss_mask"])
    if not tokens:
        yield "tokens is empty"
    if max_length is not None and len(tokens) > max_length:
        yield f"it has {len(tokens)} tokens, but the model takes at most {max_length}"
    for key in ("loss_mask", "logprobs"):
        if key in trajectory and len(trajectory[key]) != len(tokens):
            yield f"{key} has {len(trajectory[key])} numbers, but there are {len(tokens)} tokens"
    if (place := _first_outside(tokens, vocabulary_size)) is not None:
        yield f"tokens[{place}] is {tokens[place]!r}: expected 0 to {vocabulary_size - 1}, the tokens of the vocabulary"
    if (place := _first_outside(mask, 2)) is not None:
        yield f"loss_mask[{place}] is {mask[place]!r}: expected 0 or 1"
    if not any(mask):
        yield "no token counts: loss_mask has no 1"
    if mask[0]:
        yield "loss_mask[0] is 1, but nothing comes before the first token to predict it from; expected 0"
    logprobs = _as_list(trajectory.get("logprobs", ()))
    if (place := _first_not_finite(logprobs)) is not None:
        yield f"logprobs[{place}] is {logprobs[place]!r}: expected a finite number"
    if "reward" in trajectory and not _is_finite(trajectory["reward"]):
        yield f"reward is {trajectory['reward']!r}: expected a finite number"
    if "step_rewards" in trajectory:
        yield from _problems_of_steps(_as_list(trajectory["step_rewards"]), len(turn_lengths(mask)))


def _problems_of_steps(rewards: list[Any], turns: int) -> Iterator[str]:
    if len(rewards) != turns:
        yield f"step_rewards has {len(rewards)} numbers, but loss_mask has {turns} turns (runs of 1)"
    if (place := _first_not_finite(rewards)) is not None:
        yield f"step_rewards[{place}] is {rewards[place]!r}: expected a finite number"


def _first_outside(values: list[Any], end: int) -> int | None:
    """Return the place of the first value that is not an integer from 0 to ``end - 1``."""
    # Types and bounds of a whole list take a hundredth of the time of a look at each value.
    if set(map(type, values)) <= {int, bool} and min(values, default=0) >= 0 and max(values, default=0) < end:
        return None
    return next(
        (place for place, value in enumerate(values) if not (hasattr(value, "__index__") and 0 <= value < end)), None
    )


def _first_not_finite(values: list[Any]) -> int | None:
    if set(map(type, values)) <= {int, float} and math.isfinite(sum(values)):
        return None
    return next((place for place, value in enumerate(values) if not _is_finite(value)), None)


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False
