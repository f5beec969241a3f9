"""KL divergence of each token between the policy and a reference, and the reference: kl, abs, mse, low_var_kl.

From Schulman 2020, "Approximating KL Divergence": estimates of KL(policy ‖ reference) in nats, from tokens that the
policy has sampled, with ``d = logprob - ref_logprob``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fray.rl.tensors.token_batches import TokenBatch, score
from fray.rl.tensors.token_tensors import unknown_option

Reference: TypeAlias = Callable[[TokenBatch], Tensor]
"""Returns the logprobs of a part of a batch by a frozen model, as `score` does; called without gradient."""

LOW_VAR_LOG_RATIO_LIMIT = 5.0
"""Limit of the difference in ``low_var_kl``: above it the estimate only repeats that the policies differ."""
LOW_VAR_LIMIT = 10.0
"""Limit of the estimate of ``low_var_kl`` for one token."""


def low_variance_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return ``exp(-d) - 1 + d`` of each token (k3): never negative, unbiased, of lower variance than ``d``.

    ``d`` is clamped to ±5 and the result to 10; a clamped token has no gradient.
    """
    back = (ref_logprobs - logprobs).clamp(-LOW_VAR_LOG_RATIO_LIMIT, LOW_VAR_LOG_RATIO_LIMIT)
    return (back.exp() - back - 1).clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda logprobs, ref_logprobs: logprobs - ref_logprobs,
    "abs": lambda logprobs, ref_logprobs: (logprobs - ref_logprobs).abs(),
    "mse": lambda logprobs, ref_logprobs: 0.5 * (logprobs - ref_logprobs).square(),
    "low_var_kl": low_variance_kl,
}
"""Name: function of the logprobs of policy and reference."""


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "kl") -> Tensor:
    """Return the estimate of each token, in nats, of the shape of ``logprobs``.

    Args:
        logprobs: of the sampled tokens by the policy; gradients flow into them.
        ref_logprobs: of the same tokens by the reference, of the same shape; no gradient flows into them.
        estimator: ``kl`` (``d``), ``abs`` (``|d|``), ``mse`` (``d² / 2``) or ``low_var_kl`` (`low_variance_kl`).

    Raises:
        ValueError: shapes differ or the estimator is unknown.
    """
    if estimator not in ESTIMATORS:
        raise unknown_option("KL estimator", estimator, ESTIMATORS)
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"ref_logprobs has shape {list(ref_logprobs.shape)}, but logprobs has {list(logprobs.shape)}")
    return ESTIMATORS[estimator](logprobs, ref_logprobs.detach())


def mismatch_k3(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return ``r - 1 - ln r`` of each token, ``r`` being its ratio of policy to behaviour policy, without gradient.

    An estimate of KL(behaviour ‖ policy) in nats from tokens of the behaviour policy: how far the policy that
    generated the tokens is from the one that is trained. ``ln r`` is clamped to ±20.
    """
    log_ratio = (logprobs - behaviour_logprobs).detach().clamp(-20.0, 20.0)
    return torch.expm1(log_ratio) - log_ratio


class FrozenModel:
    """`Reference` in this process, which also scores for others.

    Args:
        model: causal language model of Hugging Face, which this freezes.
        dtype: of the forward pass: ``float32`` or ``bfloat16``.
    """

    def __init__(self, model: Any, dtype: str) -> None:
        self._model = model.requires_grad_(False).eval()
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __call__(self, part: TokenBatch) -> Tensor:
        return score(self._model, part, self._dtype)[0]

    def logprobs(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return, on the CPU, what calling this with a `TokenBatch` of these tensors returns."""
        device = next(self._model.parameters()).device
        rows, width = ids.shape
        with torch.no_grad():
            return self(TokenBatch(ids.to(device), mask.to(device), (width,) * rows)).cpu()


def remote_reference(ask: Callable[[Tensor, Tensor], Tensor]) -> Reference:
    """Return a `Reference` of another process.

    Args:
        ask: calls `FrozenModel.logprobs` there.
    """
    return lambda part: ask(part.ids.cpu(), part.mask.cpu()).to(part.ids.device)
