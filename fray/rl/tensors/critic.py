"""Critic: a language model with a value head, trained beside a policy to predict the return from each token on."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fray.rl.tensors import flat_weights
from fray.rl.tensors.language_model import LanguageModel, pretrained_backbone
from fray.rl.tensors.losses import value_loss
from fray.rl.tensors.ranks import Ranks
from fray.rl.tensors.token_batches import TokenBatch, numbers_in_parts
from fray.rl.tensors.token_tensors import mean_over
from fray.rl.train.settings import GRPO

CRITIC_STATE_FILE = "critic_state.pt"
"""Value head and optimizer, beside the files of the model below the head."""


class CriticTrainer:
    """Critic of a policy and its optimizer.

    Args:
        lm: model that is copied, without the layer that makes logits. The value head is 0 at first: all values are.
        settings: of the policy's trainer, with a critic.
        row_limit: returns the rows of a forward pass by the number of rows.
        ranks: as of `PolicyTrainer`.
    """

    def __init__(self, lm: LanguageModel, settings: GRPO, row_limit: Any, ranks: Ranks | None = None) -> None:
        critic = settings.critic_settings
        assert critic is not None
        self._settings, self._critic, self._row_limit, self._ranks = settings, critic, row_limit, ranks
        self._dtype = getattr(torch, settings.dtype)
        self.backbone = copy.deepcopy(lm.model.base_model)
        one = next(iter(self.backbone.parameters()))
        self.head = torch.nn.Linear(self.backbone.config.hidden_size, 1, device=one.device, dtype=one.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self._parameters = [*self.backbone.parameters(), *self.head.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=critic.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def values(self, batch: TokenBatch) -> Tensor:
        """Return the value before each token, `[rows, tokens]` as the batch, 0 where no token counts; no gradient."""
        limits = self._row_limit(batch), self._settings.micro_batch_tokens
        return numbers_in_parts(self._values, batch, *limits, self._ranks)

    def train(self, minibatches: Sequence[TokenBatch]) -> dict[str, float]:
        """Do an optimizer step for each minibatch, with columns ``values`` and ``returns``; return metrics.

        A step whose loss or gradient is not finite is not applied.
        """
        sums = dict.fromkeys(("loss", "clip_fraction", "grad_norm", "not_finite"), 0.0)
        for minibatch in minibatches:
            found = self._step(minibatch)
            sums = {name: value + found[name] for name, value in sums.items()}
        metrics = {name: value / len(minibatches) for name, value in sums.items()} | {"lr": self._critic.lr}
        return {f"critic_{name}": value for name, value in metrics.items()}

    def save(self, directory: Path) -> None:
        """Write the model below the head in the layout of Hugging Face, and head and optimizer beside it."""
        self.backbone.save_pretrained(directory)
        state = {"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict()["state"]}
        torch.save(state, directory / CRITIC_STATE_FILE)

    def load(self, directory: Path) -> None:
        """Continue from a directory that `save` wrote.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: the directory has another model; the message has the difference.
        """
        path = directory / CRITIC_STATE_FILE
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint of a critic in {directory}: it has no file {CRITIC_STATE_FILE}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = pretrained_backbone(directory, self._parameters[0].dtype)
        if difference := flat_weights.table_of(self.backbone).difference_text(flat_weights.table_of(saved)):
            raise ValueError(f"the critic in {directory} is of another model: {difference}")
        self.backbone.load_state_dict(saved.state_dict())
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state["optimizer"]})

    def _values(self, batch: TokenBatch) -> Tensor:
        """Return values in the columns from ``batch.first`` on: each from the hidden state before its token."""
        kept = batch.ids.shape[1] - batch.first
        with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16, enabled=self._dtype is torch.bfloat16):
            hidden = self.backbone(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state[:, -kept:]
            values: Tensor = self.head(hidden)[..., 0]
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def _step(self, minibatch: TokenBatch) -> dict[str, float]:
        parts: Sequence[TokenBatch] = minibatch.parts(self._row_limit(minibatch), self._settings.micro_batch_tokens)
        tokens = float(minibatch.mask.sum())
        found = []
        for part in parts if self._ranks is None else self._ranks.own(parts):
            returns, before = part.scored_column("returns"), part.scored_column("values")
            assert returns is not None
            assert before is not None
            loss, numbers = value_loss(
                self._values(part), returns, before, part.scored, clip=self._critic.clip, denominator=tokens
            )
            torch.autograd.backward(loss)
            found.append(numbers)
        if self._ranks is not None:
            found = [numbers for of_rank in self._ranks.gather(found) for numbers in of_rank]
            self._ranks.add_gradients(self._parameters)
        limit = math.inf if self._settings.grad_clip is None else self._settings.grad_clip
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        total = sum(numbers["loss"] for numbers in found)
        is_finite = math.isfinite(total) and math.isfinite(norm)
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad()
        clipped = sum(numbers["clip_fraction"] * numbers["tokens"] for numbers in found) / tokens
        return {"loss": total, "clip_fraction": clipped, "grad_norm": norm, "not_finite": float(not is_finite)}


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Return how far values predict returns, over the tokens that count: all tensors are `[rows, tokens]`.

    ``critic_explained_variance`` is 1 minus the variance of the error divided by that of the returns: 1 for exact
    values, 0 for a constant, and 0 if all returns are equal.
    """
    mean = partial(mean_over, mask=mask)
    spread = mean((returns - mean(returns)).square())
    error = returns - values
    left = mean((error - mean(error)).square())
    return {
        "critic_value_mean": mean(values).item(),
        "critic_return_mean": mean(returns).item(),
        "critic_explained_variance": (1 - left / spread).item() if spread > 0 else 0.0,
    }
