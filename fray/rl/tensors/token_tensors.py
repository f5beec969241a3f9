"""Tensors with one number for each token: checks of shapes, and sums over the tokens that count.

Shapes: `[batch, tokens]`, a row for each sequence. A mask has the same shape; a token counts where it is not 0. What is
stored at other positions is never looked at, so that padding of any value, infinite or not a number, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fray.model.text import near_text

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ±20 before `exp`, which keeps products of ratios finite in float32."""


def counted(mask: Tensor, **tensors: Tensor) -> Tensor:
    """Return ``mask`` as booleans, after a check that it and each of ``tensors`` have one shape `[batch, tokens]`.

    Raises ValueError that names the tensor whose shape differs, and both shapes.
    """
    if mask.dim() != 2:
        raise ValueError(f"invalid mask of shape {list(mask.shape)}: expected [batch, tokens]")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but mask has {list(mask.shape)}")
    return mask != 0


def zero_elsewhere(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor`` with 0 where ``mask`` is false: no value and no gradient comes from there."""
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return ``exp(log_ratio)``, the log-ratio clamped to ±`LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def mean_over(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens that count; 0 if there are none."""
    return zero_elsewhere(tensor, mask).sum() / mask.sum().clamp(min=1)


def sequence_mean(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens that count of each row, of shape `[batch, 1]`; 0 for a row without any."""
    return zero_elsewhere(tensor, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def as_numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return metrics as Python numbers, with one transfer from the device for all of them."""
    if not metrics:
        return {}
    return dict(
        zip(metrics, torch.stack([value.detach().double() for value in metrics.values()]).tolist(), strict=True)
    )


def unknown_option(kind: str, name: object, known: Mapping[str, object] | tuple[str, ...]) -> ValueError:
    """Return the error for a ``name`` that is not among ``known``, with the nearest of them."""
    names = ", ".join(f"'{one}'" for one in known)
    return ValueError(f"unknown {kind} {name!r}{near_text(str(name), known)}; expected one of {names}")
