"""Policy losses: clip, dual_clip, gspo, cispo, importance_sampling, dro, cross_entropy, or a function of yours.

And `value_loss`, that of a critic.

Each takes `LossInputs` and its own options, and returns the loss of each token, `[batch, tokens]`, with metrics.
`policy_loss` applies an off-policy correction to them and makes one loss. Losses are to be minimized; ``ratio`` is
``exp(logprob - old_logprob)``, the log-ratio clamped to ±20, and ``A`` the advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from fray.rl.tensors.aggregation import aggregate
from fray.rl.tensors.corrections import Correction
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

TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Loss of each token, `[batch, tokens]`, and metrics of shape `[]`."""
LossFunction = Callable[..., TokenLosses]
"""Function of `LossInputs` and options by keyword."""


@attrs.frozen(eq=False)
class LossInputs:
    """Tensors that losses are computed from; values where the mask is 0 are replaced by 0, whatever they are.

    Attributes:
        logprobs: `[batch, tokens]`, nats, of the sampled tokens by the policy in training; gradients flow into them.
        mask: `[batch, tokens]`, not 0 where a token counts; kept as booleans.
        old_logprobs: `[batch, tokens]`, of the same tokens before the update; no gradient. All losses but
            ``cross_entropy`` need them.
        advantages: `[batch, tokens]`, or `[batch]` for one of all tokens of a sequence; no gradient. Needed likewise.
        entropy: `[batch, tokens]`, nats, if known; its mean becomes a metric.

    Raises:
        ValueError: a shape differs from that of ``mask``; the message names the tensor.
    """

    logprobs: Tensor
    mask: Tensor
    old_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    entropy: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        if self.advantages is not None and self.advantages.dim() == 1 and len(self.advantages) == len(self.mask):
            object.__setattr__(self, "advantages", self.advantages[:, None].expand_as(self.mask))
        names = ("logprobs", "old_logprobs", "advantages", "entropy")
        tensors = {name: value for name in names if (value := getattr(self, name)) is not None}
        keep = counted(self.mask, **tensors)
        object.__setattr__(self, "mask", keep)
        for name, value in tensors.items():
            object.__setattr__(self, name, zero_elsewhere(value if name == "logprobs" else value.detach(), keep))

    def old_and_advantages(self, loss: str) -> tuple[Tensor, Tensor]:
        """Return both; raises ValueError that names what the loss needs and is missing."""
        if self.old_logprobs is None or self.advantages is None:
            missing = [name for name in ("old_logprobs", "advantages") if getattr(self, name) is None]
            raise ValueError(f"loss {loss!r} needs {' and '.join(missing)}; 'cross_entropy' needs neither")
        return self.old_logprobs, self.advantages


def clip(inputs: LossInputs, *, low: float = 0.2, high: float = 0.2) -> TokenLosses:
    """Return ``-min(ratio A, clip(ratio, 1 - low, 1 + high) A)``.

    From Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; a ``high`` above ``low``, such as 0.28, from
    Yu et al. 2025, "DAPO". Raises ValueError for ``low`` outside of 0 to 1, or ``high`` below 0.
    """
    _check_clip(low, high)
    old, advantages = inputs.old_and_advantages("clip")
    return _clipped(ratio_of(inputs.logprobs - old), advantages, inputs.mask, low, high)


def dual_clip(inputs: LossInputs, *, low: float = 0.2, high: float = 0.2, bound: float = 3.0) -> TokenLosses:
    """Return the loss of `clip`, at most ``-bound A`` where the advantage is negative.

    From Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning": without the bound a
    token that has become likely since, and was bad, has a loss without limit. Raises ValueError for ``bound`` of 1 or
    less, and as `clip`.
    """
    if not bound > 1:
        raise ValueError(f"invalid bound {bound} of loss 'dual_clip': expected a number above 1")
    _check_clip(low, high)
    old, advantages = inputs.old_and_advantages("dual_clip")
    losses, metrics = _clipped(ratio_of(inputs.logprobs - old), advantages, inputs.mask, low, high)
    limit = -bound * advantages
    bounded = (advantages < 0) & (losses > limit)
    metrics["dual_clip_fraction"] = mean_over(bounded.to(losses.dtype), inputs.mask)
    return torch.where(bounded, limit, losses), metrics


def gspo(inputs: LossInputs, *, low: float = 3e-4, high: float = 4e-4) -> TokenLosses:
    """Return the loss of `clip` with one ratio for a sequence: the geometric mean of those of its tokens.

    From Zheng et al. 2025, "Group Sequence Policy Optimization"; its token form (GSPO-token), which allows an
    advantage of each token: the value is the sequence's ratio, the gradient goes through the token's own logprob. The
    bounds are small because the mean is close to 1. Raises ValueError as `clip`.
    """
    _check_clip(low, high)
    old, advantages = inputs.old_and_advantages("gspo")
    log_ratio = sequence_mean(inputs.logprobs.detach() - old, inputs.mask)
    ratio = ratio_of(log_ratio) * torch.exp(inputs.logprobs - inputs.logprobs.detach())
    return _clipped(ratio, advantages, inputs.mask, low, high)


def cispo(inputs: LossInputs, *, low: float = 1.0, high: float = 4.0) -> TokenLosses:
    """Return ``-clip(ratio, 1 - low, 1 + high) A logprob``, without a gradient through the clipped ratio.

    From MiniMax 2025, "MiniMax-M1": unlike in `clip`, a token beyond the bounds keeps a gradient. With ``low`` 1
    there is no lower bound, as in the paper; ``high`` is a choice of the run there. Raises ValueError as `clip`.
    """
    _check_clip(low, high)
    old, advantages = inputs.old_and_advantages("cispo")
    ratio = ratio_of(inputs.logprobs.detach() - old)
    weight = ratio.clamp(1 - low, 1 + high)
    metrics = {"clip_fraction": mean_over((weight != ratio).to(ratio.dtype), inputs.mask)}
    return -weight * advantages * inputs.logprobs, metrics


def importance_sampling(inputs: LossInputs) -> TokenLosses:
    """Return ``-ratio A``: the policy gradient for tokens of another policy, without a bound.

    From Degris et al. 2012, "Off-Policy Actor-Critic".
    """
    old, advantages = inputs.old_and_advantages("importance_sampling")
    return -ratio_of(inputs.logprobs - old) * advantages, {}


def dro(inputs: LossInputs, *, beta: float = 0.05) -> TokenLosses:
    """Return ``-logprob A + beta / 2 (logprob - old_logprob)²``.

    From Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models Alignment"
    (DRO): the distance from the old policy is a penalty instead of a bound. ``A`` takes the place of reward minus
    learned value. Raises ValueError for ``beta`` below 0.
    """
    if not beta >= 0:
        raise ValueError(f"invalid beta {beta} of loss 'dro': expected 0 or more")
    old, advantages = inputs.old_and_advantages("dro")
    return -inputs.logprobs * advantages + 0.5 * beta * (inputs.logprobs - old).square(), {}


def cross_entropy(inputs: LossInputs) -> TokenLosses:
    """Return ``-logprob``: supervised training on the tokens; needs neither old logprobs nor advantages."""
    return -inputs.logprobs, {}


LOSSES: dict[str, LossFunction] = {
    "clip": clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "importance_sampling": importance_sampling,
    "dro": dro,
    "cross_entropy": cross_entropy,
}
"""Name: function."""


def policy_loss(
    inputs: LossInputs,
    loss: str | LossFunction = "clip",
    *,
    aggregation: str = "token-mean",
    length: int | None = None,
    denominator: float | None = None,
    correction: Correction | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss, of shape `[]`, and metrics of it.

    Metrics are means over the tokens that count: ``ratio_mean`` and ``mismatch_k3`` (nats) between the policy and the
    old one, ``entropy`` if given, those of the correction and of the loss (``clip_fraction``); besides ``tokens``,
    their number, by which metrics of parts of a batch can be weighed, and ``loss``.

    Args:
        inputs: tensors of the batch, or of a part of it.
        loss: one of `LOSSES`, or a function of `LossInputs` and ``options`` that returns the loss of each token,
            `[batch, tokens]`, and a dict of metrics of shape `[]`.
        aggregation: how tokens make one loss (`fray.rl.tensors.aggregation.aggregate`).
        length: number of tokens of aggregation ``constant-length``.
        denominator: that of the whole batch, if ``inputs`` are a part of it; counted after the correction.
        correction: of `fray.rl.tensors.corrections`: the loss of each token is multiplied by its weight; rejected
            tokens are left out, of the denominator too.
        options: those of the loss.

    Raises:
        ValueError: the loss or aggregation is unknown, an option is out of its range, a tensor is missing or has a
            shape that differs.
        TypeError: the loss has no such option.
    """
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown_option("loss", loss, LOSSES)
    function = LOSSES[loss] if isinstance(loss, str) else loss
    if correction is not None:
        counted(inputs.mask, **{"correction.mask": correction.mask, "correction.weights": correction.weights})
        inputs = attrs.evolve(inputs, mask=inputs.mask & correction.mask)
    token_losses, metrics = function(inputs, **options)
    if correction is not None:
        token_losses = zero_elsewhere(token_losses * correction.weights, inputs.mask)
    total = aggregate(token_losses, inputs.mask, aggregation, length=length, denominator=denominator)
    metrics = dict(metrics)
    if inputs.old_logprobs is not None:
        log_ratio = inputs.logprobs.detach() - inputs.old_logprobs
        metrics["ratio_mean"] = mean_over(ratio_of(log_ratio), inputs.mask)
        metrics["mismatch_k3"] = mean_over(mismatch_k3(inputs.logprobs, inputs.old_logprobs), inputs.mask)
    if inputs.entropy is not None:
        metrics["entropy"] = mean_over(inputs.entropy, inputs.mask)
    numbers = as_numbers(metrics | {"tokens": inputs.mask.sum(), "loss": total})
    if correction is not None:
        numbers |= {f"rollout_{name}": value for name, value in correction.metrics.items()}
    return total, numbers


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.5,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a critic, of shape `[]`, and metrics of it: ``tokens``, ``loss``, ``clip_fraction``.

    It is the mean over the tokens that count of half of ``max((value - return)², (clipped - return)²)``, where
    ``clipped`` is the value within ``clip`` of the old one. From the implementation of Schulman et al. 2017, "Proximal
    Policy Optimization Algorithms".

    Args:
        values: `[batch, tokens]`, by the critic in training; gradients flow into them.
        returns: `[batch, tokens]`, to which they are fitted; no gradient.
        old_values: `[batch, tokens]`, before the update; no gradient.
        mask: `[batch, tokens]`, not 0 where a token counts.
        clip: farthest from the old value, above 0.
        denominator: number of tokens of the whole batch, if this is a part of it; above 0.

    Raises:
        ValueError: shapes differ, or ``clip`` or ``denominator`` is not above 0.
    """
    if not clip > 0:
        raise ValueError(f"invalid clip {clip} of the value loss: expected a number above 0")
    keep = counted(mask, values=values, returns=returns, old_values=old_values)
    values = zero_elsewhere(values, keep)
    returns, old_values = (zero_elsewhere(each.detach(), keep) for each in (returns, old_values))
    plain = (values - returns).square()
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    total = aggregate(0.5 * torch.maximum(plain, bounded), keep, denominator=denominator)
    clipped = mean_over((bounded > plain).to(plain.dtype), keep)
    return total, as_numbers({"clip_fraction": clipped, "tokens": keep.sum(), "loss": total})


def _check_clip(low: float, high: float) -> None:
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"invalid clip bounds, low {low} and high {high}: expected 0 <= low <= 1 and high >= 0")


def _clipped(ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> TokenLosses:
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    metrics = {"clip_fraction": mean_over((bounded > plain).to(ratio.dtype), mask)}
    return torch.maximum(plain, bounded), metrics
