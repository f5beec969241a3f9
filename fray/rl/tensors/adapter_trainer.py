"""Training of many adapters of one model by requests: gradients and steps are apart. Synchronous, without Trio.

The result of a request does not depend on the requests of other adapters: each has its own gradients and optimizer, and
a batch is of one request.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from fray.rl.tensors.adapters import Adapter, AdapterSet
from fray.rl.tensors.language_model import LanguageModel
from fray.rl.tensors.losses import LOSSES, LossInputs
from fray.rl.train.datums import SERVICE_LOSSES, AdamParams, Datum, ServiceLoss, check_data
from fray.rl.train.lora import LoRA

OPTIMIZER_FILE = "optimizer.pt"
GRADIENTS_FILE = "gradients.pt"
SLICE_TOKENS = 1024
"""Tokens of one forward pass, padding included; other requests may be served between two."""
R = TypeVar("R")


@frozen(eq=False)
class LossOutput:
    """Result of a forward pass.

    Attributes:
        logprobs: of the targets of each datum, nats, at temperature 1.
        losses: of the same places: their sum is the loss.
        loss: the sum over all data.
    """

    logprobs: list[np.ndarray[Any, Any]]
    losses: list[np.ndarray[Any, Any]]
    loss: float


class AdapterTrainer:
    """Model with adapters that are trained one by one.

    Args:
        lm: the model; its weights do not change.
        adapters: of the model; default: a new set.
        slice_tokens: tokens of one forward pass, padding included; a longer sequence has one of its own.
    """

    def __init__(
        self, lm: LanguageModel, adapters: AdapterSet | None = None, *, slice_tokens: int = SLICE_TOKENS
    ) -> None:
        self.lm = lm
        self.adapters = adapters or AdapterSet(lm.model)
        self._slice_tokens = slice_tokens
        self._optimizers: dict[str, torch.optim.AdamW] = {}

    def create(self, name: str, settings: LoRA) -> None:
        """Make an adapter. Raises ValueError as `AdapterSet.add`."""
        self._own(name, self.adapters.add(name, settings))

    def remove(self, name: str) -> None:
        """Remove an adapter and its optimizer. Raises KeyError with the nearest name."""
        self.adapters.remove(name)
        self._optimizers.pop(name, None)

    def forward(
        self, name: str | None, data: Sequence[Datum], loss: ServiceLoss, *, backward: bool = False
    ) -> Generator[None, None, LossOutput]:
        """Compute a loss, and with ``backward`` add its gradient to that of the adapter.

        A generator: between two forward passes it yields, so that others may use the model; `finished` runs it to its
        end. The data are checked when it begins, before anything is computed. One that fails or is closed before its
        end leaves the gradient as it was.

        Args:
            name: of the adapter; None: the model itself, without ``backward``.

        Raises:
            KeyError: there is no such adapter.
            ValueError: as `fray.rl.train.datums.check_data`.
        """
        parameters = self.adapters[name].parameters if name is not None else []
        check_data(data, loss, vocabulary_size=self.lm.vocabulary_size, max_length=self.lm.max_length)
        before = [None if each.grad is None else each.grad.clone() for each in parameters] if backward else []
        try:
            return (yield from self._passes(name, data, loss, backward=backward))
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=False):
                parameter.grad = gradient
            raise

    def _passes(
        self, name: str | None, data: Sequence[Datum], loss: ServiceLoss, *, backward: bool
    ) -> Generator[None, None, LossOutput]:
        logprobs: list[Any] = [None] * len(data)
        losses: list[Any] = [None] * len(data)
        total = 0.0
        for number, rows in enumerate(self._slices(data)):
            if number:
                yield
            # Selected in each slice: another request may select its own adapter between two.
            with self.adapters.selected(name), torch.set_grad_enabled(backward):
                of_rows, of_tokens = self._losses([data[row] for row in rows], loss)
                part = of_tokens.sum()
                if backward:
                    torch.autograd.backward(part)
            total += float(part.detach())
            for at, row in enumerate(rows):
                length = len(data[row].tokens)
                logprobs[row] = of_rows[at, :length].detach().float().cpu().numpy()
                losses[row] = of_tokens[at, :length].detach().float().cpu().numpy()
        return LossOutput(logprobs, losses, total)

    def step(self, name: str, params: AdamParams) -> dict[str, float]:
        """Change an adapter by the gradients since its last step; return metrics.

        A step without gradients changes nothing but by weight decay, as one with gradients of 0.

        Raises:
            KeyError: there is no such adapter.
        """
        parameters = self.adapters[name].parameters
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(parameters, params.grad_clip_norm or float("inf"))
        optimizer = self._optimizers[name]
        for group in optimizer.param_groups:
            group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
            group |= {"eps": params.eps, "weight_decay": params.weight_decay}
        optimizer.step()
        optimizer.zero_grad()
        return {"grad_norm": float(norm)}

    # Files ------------------------------------------------------------------------------------------------------------

    def save(self, name: str, directory: str | Path, *, optimizer: bool = True, gradients: bool = False) -> None:
        """Write an adapter in the files of `peft`, and what its optimizer knows beside them.

        Args:
            optimizer: write its state, too.
            gradients: write the gradients since the last step, too.
        """
        self.adapters.save(name, directory, self.lm.name)
        if optimizer:
            torch.save(self._optimizers[name].state_dict()["state"], Path(directory, OPTIMIZER_FILE))
        if gradients:
            tensors = self.adapters[name].tensors
            found = {key: tensor.grad for key, tensor in tensors.items() if tensor.grad is not None}
            torch.save(found, Path(directory, GRADIENTS_FILE))

    def load(self, name: str, directory: str | Path, *, optimizer: bool = True, gradients: bool = False) -> None:
        """Read an adapter over one of this name, or as a new one; continuing is then as without a stop.

        Args:
            optimizer: read its state, too; otherwise it is that of a new adapter.
            gradients: read the gradients since the last step, too; otherwise there are none.

        Raises:
            FileNotFoundError: a file is missing; the message names it.
            ValueError: as `AdapterSet.load`.
        """
        path = Path(directory, OPTIMIZER_FILE)
        if optimizer and not path.is_file():
            raise FileNotFoundError(f"no state of an optimizer in {directory}: it has no file {OPTIMIZER_FILE}")
        self._own(name, self.adapters.load(name, directory))
        if optimizer:
            state = torch.load(path, map_location=self.lm.device, weights_only=True)
            owned = self._optimizers[name]
            owned.load_state_dict({**owned.state_dict(), "state": state})
        if gradients:
            found = torch.load(Path(directory, GRADIENTS_FILE), map_location=self.lm.device, weights_only=True)
            for key, gradient in found.items():
                self.adapters[name].tensors[key].grad = gradient

    # Computation ------------------------------------------------------------------------------------------------------

    def _own(self, name: str, adapter: Adapter) -> None:
        self._optimizers[name] = torch.optim.AdamW(adapter.parameters, fused=True)
        self._optimizers[name].zero_grad()

    def _slices(self, data: Sequence[Datum]) -> list[list[int]]:
        """Return rows of similar length together, in an order that the data alone decide."""
        slices: list[list[int]] = []
        width = 0
        for row in sorted(range(len(data)), key=lambda row: (-len(data[row].tokens), row)):
            if not slices or width * (len(slices[-1]) + 1) > self._slice_tokens:
                slices.append([])
                width = len(data[row].tokens)
            slices[-1].append(row)
        return slices

    def _losses(self, data: Sequence[Datum], loss: ServiceLoss) -> tuple[Tensor, Tensor]:
        """Return logprobs and losses, each `[rows, tokens]`; losses are 0 where there is padding."""
        ids = self._padded([datum.tokens for datum in data], torch.int64)
        targets = self._padded([datum.targets for datum in data], torch.int64)
        lengths = torch.tensor([len(datum.tokens) for datum in data], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        logits = self.lm.model(input_ids=ids, use_cache=False).logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = torch.log_softmax(wide, -1).gather(-1, targets[..., None])[..., 0]
        columns = {name: self._padded([datum.columns[name] for datum in data], logprobs.dtype) for name in loss.needs}
        inputs = LossInputs(logprobs, mask, columns.get("logprobs"), columns.get("advantages"))
        of_tokens, _ = LOSSES[SERVICE_LOSSES[loss.name][0]](inputs, **loss.options)
        if "weights" in columns:
            of_tokens = of_tokens * columns["weights"]
        return logprobs, torch.where(mask, of_tokens, 0.0)

    def _padded(self, rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(self.lm.device)


def finished(work: Generator[None, None, R]) -> R:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: R = end.value
            return result
