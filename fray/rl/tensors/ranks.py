"""Ranks of a data-parallel trainer: each computes parts of every batch, and all do the same step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """Processes of a group of `torch.distributed` with the same model, which get the same batches in the same order.

    Args:
        group: of processes; None: all of them. `torch.distributed.init_process_group` was called.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.index: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def own(self, parts: Sequence[T]) -> Sequence[T]:
        """Return the parts of a batch that this rank computes; none if there are fewer parts than ranks."""
        return parts[self.index :: self.size]

    def row_limit(self, rows: int, limit: int | None) -> int:
        """Return the most rows of a part, so that there is one for each rank."""
        share = -(-rows // self.size)
        return share if limit is None else min(share, limit)

    def gather(self, values: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, values, group=self._group)
        return found

    def add(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks; return it."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients by their sums over the ranks, in one message."""
        every = list(parameters)
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in every]
        whole = self.add(torch.cat([grad.flatten() for grad in grads]))
        for one, grad in zip(every, torch.split(whole, [grad.numel() for grad in grads]), strict=True):
            one.grad = grad.view_as(one)
