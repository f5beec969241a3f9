"""Trajectories as padded tensors, and logprobs of their tokens by a model.

Sequences are padded at their ends: a causal model never looks there, so no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from fray.rl.nexrl_types import Trajectory
from fray.rl.tensors.ranks import Ranks
from fray.rl.train.trajectory_checks import turn_lengths


@attrs.frozen(eq=False)
class TokenBatch:
    """Tokens of sequences, and numbers for each of them, as tensors `[rows, tokens]`.

    Attributes:
        ids: int64, padded at the end.
        mask: booleans: the tokens that count. The first column counts nowhere.
        lengths: tokens of each row.
        columns: other tensors of the same shape by name, such as ``rollout_logprobs``.
    """

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    columns: Mapping[str, Tensor] = attrs.field(factory=dict)

    @classmethod
    def of_trajectories(cls, trajectories: Sequence[Trajectory], pad_id: int, device: Any = "cpu") -> TokenBatch:
        """Return the batch of trajectories that were checked (`fray.rl.train.trajectory_checks`).

        Where all have ``logprobs``, they become the column ``rollout_logprobs``.
        """
        rows = [trajectory["tokens"] for trajectory in trajectories]
        lengths = tuple(len(row) for row in rows)
        ids = _padded(rows, lengths, np.int64, pad_id).to(device)
        mask = _padded([trajectory["loss_mask"] for trajectory in trajectories], lengths, np.bool_, 0).to(device)
        columns = {}
        if all("logprobs" in trajectory for trajectory in trajectories):
            logprobs = [trajectory["logprobs"] for trajectory in trajectories]
            columns["rollout_logprobs"] = _padded(logprobs, lengths, np.float32, 0.0).to(device)
        return cls(ids, mask, lengths, columns)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def first(self) -> int:
        """Return the first column where a token counts, the number of columns if none does."""
        counting = self.mask.any(0).nonzero()
        return int(counting[0]) if len(counting) else self.ids.shape[1]

    @property
    def scored(self) -> Tensor:
        """Return the mask from column `first` on, the columns for which `score` returns numbers."""
        return self.mask[:, self.first :]

    def scored_column(self, name: str) -> Tensor | None:
        """Return a column from `first` on; None if there is no such column."""
        column = self.columns.get(name)
        return None if column is None else column[:, self.first :]

    def with_columns(self, **columns: Tensor) -> TokenBatch:
        """Return the batch with more columns."""
        return attrs.evolve(self, columns={**self.columns, **columns})

    def take(self, rows: Sequence[int]) -> TokenBatch:
        """Return the batch of these rows, as short as the longest of them."""
        lengths = tuple(self.lengths[row] for row in rows)
        index = torch.tensor(rows, dtype=torch.int64, device=self.ids.device)
        end = max(lengths, default=0)

        def taken(tensor: Tensor) -> Tensor:
            return tensor[:, :end].index_select(0, index)

        columns = {name: taken(column) for name, column in self.columns.items()}
        return TokenBatch(taken(self.ids), taken(self.mask), lengths, columns)

    def parts(self, row_limit: int | None, token_limit: int | None) -> list[TokenBatch]:
        """Return the batch in parts for one forward pass each: rows of similar length together.

        Args:
            row_limit: rows of a part; None: all.
            token_limit: tokens of a part, padding included; None: no limit. A longer row is a part of its own.
        """
        groups = list(self._row_groups(row_limit or len(self), token_limit))
        return [self] if len(groups) == 1 else [self.take(rows) for rows in groups]

    def is_one_part(self, row_limit: int | None, token_limit: int | None) -> bool:
        """Return whether `parts` would return the batch itself."""
        return len(list(self._row_groups(row_limit or len(self), token_limit))) == 1

    def _row_groups(self, row_limit: int, token_limit: int | None) -> Iterator[list[int]]:
        longest_first = sorted(range(len(self)), key=lambda row: -self.lengths[row])
        while longest_first:
            fitting = row_limit if token_limit is None else token_limit // self.lengths[longest_first[0]]
            count = max(1, min(row_limit, fitting))
            yield longest_first[:count]
            del longest_first[:count]

    def column(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Return a tensor `[rows, tokens]`, float32, of a number for each token of each row."""
        return _padded(values, self.lengths, np.float32, 0.0).to(self.ids.device)

    def spread(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Return a tensor `[rows, tokens]`, float32, of one number for each row, or for each of its turns.

        A turn is a run of tokens that count; 0 stands where no token counts.
        """
        masks = self.mask.cpu()
        if all(len(row) == 1 for row in values):
            return masks.float().mul_(torch.tensor([row[0] for row in values])[:, None]).to(self.ids.device)
        spread = torch.zeros(masks.shape)
        for row, of_turns in enumerate(values):
            lengths = turn_lengths(masks[row].tolist())
            numbers = of_turns if len(of_turns) > 1 else list(of_turns) * len(lengths)
            spread[row, masks[row]] = torch.tensor(np.repeat(numbers, lengths), dtype=torch.float32)
        return spread.to(self.ids.device)


def score(model: Any, batch: TokenBatch, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies, nats, of the tokens in the columns from ``batch.first`` on, each `[rows, tokens]`.

    Logprobs are those at temperature 1 over the whole vocabulary, in float32 or the wider type of the model; gradients
    flow into them, but not into the entropies. Where no token counts, numbers mean nothing.

    Args:
        model: causal language model of Hugging Face.
        batch: at least one token of it counts.
        dtype: of the forward pass; bfloat16 by autocast.
    """
    kept = batch.ids.shape[1] - batch.first
    with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits = model(input_ids=batch.ids[:, :-1], use_cache=False, logits_to_keep=kept).logits
    every = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    logprobs = every.gather(-1, batch.ids[:, batch.first :, None])[..., 0]
    with torch.no_grad():
        entropies = -(every.exp() * every).sum(-1)
    return logprobs, entropies


def score_in_parts(
    model: Any,
    batch: TokenBatch,
    row_limit: int | None,
    token_limit: int | None,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return logprobs without gradient, `[rows, tokens]` as the batch, 0 where no token counts.

    With ``ranks``, each computes a share of the parts.
    """
    return numbers_in_parts(lambda part: score(model, part, dtype)[0], batch, row_limit, token_limit, ranks)


def numbers_in_parts(
    compute: Callable[[TokenBatch], Tensor],
    batch: TokenBatch,
    row_limit: int | None,
    token_limit: int | None,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return a number for each token, `[rows, tokens]` as the batch, 0 where none counts, computed part by part.

    Args:
        compute: returns the numbers of a part, in the columns from its ``first`` on; it is called without gradient.
        batch: at least one token of it counts.
        row_limit: as of `TokenBatch.parts`.
        token_limit: likewise.
        ranks: each computes a share of the parts.
    """
    result = torch.zeros(batch.ids.shape, device=batch.ids.device)
    rows = torch.arange(len(batch), device=batch.ids.device)[:, None].expand(batch.ids.shape)
    parts = batch.with_columns(row=rows).parts(row_limit, token_limit)
    with torch.no_grad():
        for part in parts if ranks is None else ranks.own(parts):
            numbers = torch.where(part.scored, compute(part), 0.0).float()
            result[part.columns["row"][:, 0], part.first : part.first + numbers.shape[1]] = numbers
    return result if ranks is None else ranks.add(result)


def _padded(rows: Sequence[Any], lengths: Sequence[int], dtype: Any, padding: Any) -> Tensor:
    is_there = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
    table = np.full(is_there.shape, padding, dtype)
    # One conversion of all rows, as one of each row takes longer than the forward pass of a tiny model.
    table[is_there] = np.concatenate([np.asarray(row, dtype) for row in rows])
    return torch.from_numpy(table)
