"""Choice of the next tokens of a batch: temperature, top-k, top-p, end tokens that are not yet allowed, random numbers.

Random numbers are not drawn from a generator with a state: each is computed from the seed of its completion and the
number of the token, by SplitMix64. A completion is thus the same whatever else is in the batch, and no batch needs a
loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

Array = np.ndarray[Any, Any]

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = 2**64 - 1


def stream_key(seed: int, index: int) -> int:
    """Return the key of the random numbers of a request's completion ``index``: 64 bits."""
    return _mixed(_mixed(seed) + _GAMMA * (index + 1) & _MASK)


def _mixed(state: int) -> int:
    for shift, factor in _MIX:
        state = (state ^ state >> shift) * factor & _MASK
    return state ^ state >> 31


def uniform(keys: Array, counts: Array) -> Array:
    """Return a number from 0 to below 1 for each token: float32, multiples of 2⁻²⁴.

    Args:
        keys: of `stream_key`, uint64, `[rows]`.
        counts: tokens that the completion already has, `[rows]`.
    """
    with np.errstate(over="ignore"):
        state = keys + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
        for shift, factor in _MIX:
            state = (state ^ state >> np.uint64(shift)) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    # 24 bits are what a float32 holds exactly; with more, a number just below 1 would be rounded to 1.
    numbers: Array = (state >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return numbers


@frozen(eq=False)
class RowSampling:
    """Sampling of each row of a batch; arrays `[rows]`.

    Attributes:
        keys: of the random numbers, uint64.
        counts: tokens generated before this one.
        temperature: 0 for the most probable token.
        top_p: 1 for all tokens.
        top_k: 0 for all tokens.
        min_tokens: tokens before which no end token is chosen.
        ends: end tokens, `[rows, most]`; -1 where a row has fewer.
    """

    keys: Array
    counts: Array
    temperature: Array
    top_p: Array
    top_k: Array
    min_tokens: Array
    ends: Array


def choose(logits: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a token for each row.

    Args:
        logits: float32, `[rows, vocabulary]`.

    Returns:
        The tokens, `[rows]`; their logprobs at temperature 1 over the full vocabulary, `[rows]`; and the logprobs of
        all tokens, `[rows, vocabulary]`.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _drawn(_allowed(logits, logprobs, rows), rows)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs


def _allowed(logits: Tensor, logprobs: Tensor, rows: RowSampling) -> Tensor:
    """Return logits, up to a constant for each row, of the distribution to draw from."""
    scores = logprobs
    if (early := rows.counts < rows.min_tokens).any():
        scores = scores.clone()
        row, column = np.nonzero(early[:, None] & (rows.ends >= 0))
        scores[_on(scores, row), _on(scores, rows.ends[row, column])] = -torch.inf
    if (rows.temperature != 1).any():
        # Rows of temperature 0 take the maximum, which a division does not change.
        divisor = np.where(rows.temperature == 0, 1, rows.temperature).astype(np.float32)
        scores = scores / _on(scores, divisor)[:, None]
    filtered = np.flatnonzero(((rows.top_p < 1) | (rows.top_k > 0)) & (rows.temperature > 0))
    if len(filtered):
        scores = scores.clone() if scores is logprobs else scores
        at = _on(scores, filtered)
        scores[at] = _filtered(scores[at], rows.top_p[filtered], rows.top_k[filtered])
    return scores


def _filtered(scores: Tensor, top_p: Array, top_k: Array) -> Tensor:
    """Return the scores with those outside the top k, then those outside the top p, at minus infinity."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    width = scores.shape[-1]
    most = np.where(top_k > 0, np.minimum(top_k, width), width)
    ordered = ordered.masked_fill(torch.arange(width, device=scores.device) >= _on(scores, most)[:, None], -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    # A token stays if those before it do not have the probability yet: the first always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    limit = np.where(top_p < 1, top_p, 2).astype(np.float32)
    before[:, 0] = 0
    ordered = ordered.masked_fill(before >= _on(scores, limit)[:, None], -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def _drawn(scores: Tensor, rows: RowSampling) -> Tensor:
    greedy = rows.temperature == 0
    if greedy.all():
        return scores.argmax(dim=-1)
    # Inversion of the cumulated probabilities needs one random number for each row, not one for each token.
    sums = scores.softmax(dim=-1).cumsum_(dim=-1)
    total = sums[:, -1:]
    # Rounding must not reach the total: only below it is there a token of positive probability.
    at = torch.minimum(
        _on(scores, uniform(rows.keys, rows.counts))[:, None] * total, total.nextafter(total.new_zeros(()))
    )
    tokens = torch.searchsorted(sums, at, right=True)[:, 0]
    return torch.where(_on(scores, greedy), scores.argmax(dim=-1), tokens) if greedy.any() else tokens


def _on(like: Tensor, array: Array) -> Tensor:
    return tensor_of(array, like.device)


def tensor_of(array: Array, device: torch.device) -> Tensor:
    """Return the numbers of an array, which may be a column of a table, as a tensor of its own."""
    return torch.from_numpy(np.array(array)).to(device)
