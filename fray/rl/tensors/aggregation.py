"""One loss from the losses of tokens: token-mean, seq-mean-token-mean, seq-mean-token-sum, constant-length.

A loss is a sum over tokens divided by a denominator. The denominator can be counted over a whole batch and given to
each of its parts (micro-batches, ranks): then the losses and the gradients of the parts sum up to those of the batch.
"""

from __future__ import annotations

from torch import Tensor

from fray.rl.tensors.token_tensors import counted, unknown_option, zero_elsewhere

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length")
"""Names that `aggregate` knows."""


def denominator_of(mask: Tensor, aggregation: str = "token-mean", length: int | None = None) -> float:
    """Return what `aggregate` divides by: the tokens that count, or the sequences that have such tokens, times
    ``length``.

    Args:
        mask: `[batch, tokens]`, of the whole batch.
        aggregation: one of `AGGREGATIONS`.
        length: for ``constant-length`` alone, and required there: 1 or more tokens.

    Raises:
        ValueError: the aggregation is unknown, or ``length`` is missing, below 1, or given to another aggregation.
    """
    if aggregation not in AGGREGATIONS:
        raise unknown_option("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "constant-length":
        if length is None or length < 1:
            raise ValueError(f"invalid length {length} of aggregation 'constant-length': expected 1 or more tokens")
    elif length is not None:
        raise ValueError(f"length={length} belongs to aggregation 'constant-length', not to {aggregation!r}")
    keep = counted(mask)
    if aggregation == "token-mean":
        return float(keep.sum())
    return float(keep.any(-1).sum()) * (length or 1)


def aggregate(
    losses: Tensor,
    mask: Tensor,
    aggregation: str = "token-mean",
    *,
    length: int | None = None,
    denominator: float | None = None,
) -> Tensor:
    """Return one loss, of shape `[]`; 0 if no token counts.

    - ``token-mean``: the mean over all tokens; long sequences weigh more (Yu et al. 2025, "DAPO").
    - ``seq-mean-token-mean``: the mean over sequences of the mean over their tokens (Shao et al. 2024, "DeepSeekMath").
    - ``seq-mean-token-sum``: the mean over sequences of the sum over their tokens.
    - ``constant-length``: the same sum divided by ``length``, whatever the sequence's own length (Liu et al. 2025,
      "Understanding R1-Zero-Like Training", Dr.GRPO).

    A sequence of which no token counts is not counted as a sequence.

    Args:
        losses: `[batch, tokens]`, the loss of each token.
        mask: `[batch, tokens]`, not 0 where a token counts.
        aggregation: one of `AGGREGATIONS`.
        length: number of tokens of ``constant-length``.
        denominator: that of the whole batch (`denominator_of`), if this is a part of it; above 0.

    Raises:
        ValueError: shapes differ, the aggregation is unknown, or ``length`` or ``denominator`` is not valid.
    """
    keep = counted(mask, losses=losses)
    own = denominator_of(keep, aggregation, length)
    if denominator is not None and not denominator > 0:
        raise ValueError(f"invalid denominator {denominator}: expected a number above 0, as of denominator_of()")
    sums = zero_elsewhere(losses, keep).sum(-1)
    if aggregation == "seq-mean-token-mean":
        sums = sums / keep.sum(-1).clamp(min=1)
    return sums.sum() / (denominator or max(own, 1.0))
