"""Off-policy corrections: weights of tokens whose policy differs from the one that generated them.

The weight is the ratio of the trainer's probability to that of the inference server (the rollout policy) for the same
tokens, per token, per sequence or geometric. It is truncated (TIS) or the tokens beyond its bounds are rejected (MIS).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fray.rl.tensors.kl import mismatch_k3
from fray.rl.tensors.token_tensors import (
    as_numbers,
    counted,
    mean_over,
    ratio_of,
    sequence_mean,
    unknown_option,
    zero_elsewhere,
)

LEVELS = ("token", "sequence", "geometric")
"""Tokens that share a weight, and how it is made of theirs: each its own, product, or geometric mean of the
sequence."""


@attrs.frozen(eq=False)
class Correction:
    """Result of a correction: what each token weighs, which tokens still count, and metrics.

    Attributes:
        weights: `[batch, tokens]`, without gradient; 0 for tokens that do not count.
        mask: `[batch, tokens]`, booleans: the tokens that counted before and are not rejected. The denominator of the
            loss is counted from it.
        metrics: ``mismatch_k3`` (nats), ``rejected_fraction`` and, of `truncate`, ``truncated_fraction``: means over
            the tokens that counted before; ``correction_weight_mean`` over those that still count.
    """

    weights: Tensor
    mask: Tensor
    metrics: dict[str, float]


def truncate(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, high: float = 2.0, level: str = "token"
) -> Correction:
    """Return the weights ``min(ratio, high)`` (truncated importance sampling, TIS); all tokens still count.

    From Ionides 2008, "Truncated Importance Sampling"; for rollouts of another engine Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    Args:
        logprobs: `[batch, tokens]`, of the trainer for the weights with which the tokens were generated.
        rollout_logprobs: `[batch, tokens]`, as the server returned them.
        mask: `[batch, tokens]`, not 0 where a token counts.
        high: highest weight, above 0.
        level: one of `LEVELS`.

    Raises:
        ValueError: shapes differ, the level is unknown, or ``high`` is not above 0.
    """
    _check_bounds(0.0, high)
    keep, ratio, metrics = _ratios(logprobs, rollout_logprobs, mask, level)
    weights = zero_elsewhere(ratio.clamp(max=high), keep)
    return _correction(keep, weights, keep, metrics | {"truncated_fraction": _share(ratio > high, keep)})


def reject(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: str = "token",
) -> Correction:
    """Return the ratios as weights, with the tokens whose ratio is below ``low`` or above ``high`` rejected (MIS).

    Masked importance sampling, as in Team Ling 2025, "Every Step Evolves" (IcePop), and for sequences in Liu et al.
    2025, "When Speed Kills Stability". Rejected tokens leave the loss and its denominator. At level ``geometric``
    bounds near 1 make sense, such as 0.99 and 1.01.

    Args:
        logprobs: as for `truncate`.
        rollout_logprobs: as for `truncate`.
        mask: as for `truncate`.
        low: lowest ratio that is kept, 0 or more; 0 keeps all below ``high``.
        high: highest ratio that is kept, at least ``low``.
        level: one of `LEVELS`.

    Raises:
        ValueError: shapes differ, the level is unknown, or the bounds are not valid.
    """
    _check_bounds(low, high)
    keep, ratio, metrics = _ratios(logprobs, rollout_logprobs, mask, level)
    kept = keep & (ratio >= low) & (ratio <= high)
    return _correction(kept, zero_elsewhere(ratio, kept), keep, metrics)


def _check_bounds(low: float, high: float) -> None:
    if not (0 <= low <= high and high > 0):
        raise ValueError(f"invalid bounds of ratios, low {low} and high {high}: expected 0 <= low <= high and high > 0")


def _ratios(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the tokens that count, the ratio of each token at this level, and metrics of the ratios."""
    if level not in LEVELS:
        raise unknown_option("level of correction", level, LEVELS)
    keep = counted(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = zero_elsewhere(logprobs.detach() - rollout_logprobs.detach(), keep)
    metrics = {"mismatch_k3": mean_over(mismatch_k3(log_ratio, torch.zeros_like(log_ratio)), keep)}
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, keep).expand_as(log_ratio)
    return keep, ratio_of(log_ratio), metrics


def _correction(kept: Tensor, weights: Tensor, before: Tensor, metrics: dict[str, Tensor]) -> Correction:
    means = {"correction_weight_mean": mean_over(weights, kept), "rejected_fraction": _share(~kept, before)}
    return Correction(weights, kept, as_numbers(metrics | means))


def _share(chosen: Tensor, mask: Tensor) -> Tensor:
    return mean_over(chosen.to(torch.float64), mask)
