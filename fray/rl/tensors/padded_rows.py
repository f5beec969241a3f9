"""Trajectories as NexRL's trainers pad them: prompts on the left, responses on the right; and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fray.rl.nexrl_types import Batch, Trajectory

TENSORS = ("input_ids", "attention_mask", "position_ids", "loss_mask", "rollout_log_probs", "prompts", "responses")


def padded(trajectories: Sequence[Trajectory], pad_token_id: int) -> list[Trajectory]:
    """Return trajectories of equal length, with tensors.

    The response begins with the first token that counts. New keys are ``input_ids``, ``attention_mask``,
    ``position_ids``, ``loss_mask`` and ``rollout_log_probs`` (0.0 if there are none), each `[tokens]`, ``prompts`` and
    ``responses``; ``tokens`` and ``logprobs`` are left out, and so are keys that only some of them have.

    Args:
        trajectories: with ``tokens``, ``loss_mask``, and ``logprobs``.
        pad_token_id: token that is padding.
    """
    common = set.intersection(*(set(one) for one in trajectories)) - {"tokens", "logprobs", *TENSORS}
    starts = [list(one["loss_mask"]).index(1) for one in trajectories]
    left = max(starts)
    right = max(len(one["tokens"]) - start for one, start in zip(trajectories, starts, strict=True))
    rows = []
    for one, start in zip(trajectories, starts, strict=True):
        before, after = left - start, right - (len(one["tokens"]) - start)

        def row(values: Sequence[Any], padding: Any, before: int = before, after: int = after) -> Tensor:
            return torch.tensor([*[padding] * before, *values, *[padding] * after])

        mask = row([1] * len(one["tokens"]), 0)
        ids = row(one["tokens"], pad_token_id)
        rows.append(
            {name: one[name] for name in one if name in common}
            | {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
                "loss_mask": row(one["loss_mask"], 0),
                "rollout_log_probs": row(
                    [float(each) for each in one.get("logprobs", [0.0] * len(one["tokens"]))], 0.0
                ),
                "prompts": ids[:left],
                "responses": ids[left:],
            }
        )
    return rows


def rows_of(batch: Batch) -> list[tuple[int, Trajectory]]:
    """Return the rows of a batch that are not padding, each with its place, as `PolicyTrainer` takes them."""
    values, found = batch.values, []
    advantages = values.get("advantages")
    for place in range(len(batch)):
        if not bool(values["loss_mask"][place].any()):
            continue
        there = values["attention_mask"][place].bool()
        row = {
            "tokens": values["input_ids"][place][there].tolist(),
            "loss_mask": values["loss_mask"][place][there].tolist(),
        }
        old = values.get("old_log_probs", values.get("rollout_log_probs"))
        if old is not None:
            row["logprobs"] = _whole(old[place], there).tolist()
        if advantages is not None:
            one = advantages[place]
            row["advantages"] = float(one) if getattr(one, "ndim", 0) == 0 else _whole(one, there).tolist()
        row |= {
            name: values[name][place] for name in ("reward", "group_id", "uid", "task_id", "run_id") if name in values
        }
        found.append((place, row))
    return found


def spread_rows(batch: Batch, rows: Sequence[Sequence[float]], places: Sequence[int]) -> Tensor:
    """Return numbers of the tokens of rows as a tensor like ``input_ids``; 0 where there is padding."""
    spread = torch.zeros(batch.values["input_ids"].shape)
    for place, row in zip(places, rows, strict=True):
        spread[place][batch.values["attention_mask"][place].bool()] = torch.tensor(row)
    return spread


def token_rewards(batch: Batch) -> Tensor:
    """Return ``reward`` of each row at the last token of its response that counts: `[batch, response tokens]`."""
    mask = response_part(batch, "loss_mask")
    rewards = torch.zeros(mask.shape)
    for place, reward in enumerate(batch.values["reward"]):
        counting = mask[place].nonzero()
        if len(counting):
            rewards[place, int(counting[-1])] = float(reward)
    return rewards


def response_part(batch: Batch, name: str) -> Tensor:
    """Return the columns of the responses, the last ones."""
    width = batch.values["responses"].shape[1]
    part: Tensor = batch.values[name][:, -width:]
    return part


def _whole(values: Tensor, there: Tensor) -> Tensor:
    """Return numbers of the tokens that are there; of a response alone, 0 for the prompt."""
    values = torch.nn.functional.pad(values, (there.shape[0] - values.shape[0], 0))
    return values[there]
