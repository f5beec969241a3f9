"""Keys and values of the sequences that an engine generates: one row for each, of a common, growing width.

A row's token of position p is in column p of the row. Rows are used from the first without gaps, so that a decoding
step attends to a slice of each layer, without copying it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from attrs import define
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

INITIAL_WIDTH = 32
"""Columns of a cache with its first tokens."""


@define(eq=False)
class Writing:
    """Place to which the forward pass that runs writes its keys and values."""

    positions: Tensor | None = None
    """Column of each row's token, `[rows]`, from row 0; None while prompts are computed, which are kept aside."""
    same: int | None = None
    """The column, if it is the same in all rows."""
    columns: int = 0
    """Columns that are attended to."""


class SlotLayer:
    """Keys and values of one layer, `[rows, columns, heads, width]`, with the methods that transformers calls."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    is_initialized = True

    def __init__(self, writing: Writing) -> None:
        self.writing = writing
        self.keys: Any = None
        self.values: Any = None
        self.prompts: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, `[rows, heads, tokens, width]`; return all to attend to."""
        writing = self.writing
        if writing.positions is None:
            self.prompts = key_states, value_states
            return key_states, value_states
        rows = len(key_states)
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            if writing.same is not None:
                store[:rows, writing.same] = new[:, :, 0]
            else:
                store[torch.arange(rows, device=store.device), writing.positions] = new[:, :, 0]
        columns = writing.columns
        return self.keys[:rows, :columns].transpose(1, 2), self.values[:rows, :columns].transpose(1, 2)

    def get_seq_length(self) -> int:
        """Return how many tokens the longest row has before this pass."""
        return max(0, self.writing.columns - 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns to attend to, first of them)."""
        return (query_length if self.writing.positions is None else self.writing.columns), 0

    def get_max_length(self) -> int:
        """Return -1: it grows."""
        return -1


# transformers asks whether a layer is one of its own; with a base class that has no types it could not be checked.
CacheLayerMixin.register(SlotLayer)


class SlotCache:
    """Cache of all layers.

    Args:
        layers: number of layers.
        slots: most rows.
        max_length: most columns.
    """

    def __init__(self, layers: int, slots: int, max_length: int) -> None:
        self.slots, self.max_length = slots, max_length
        self._writing = Writing()
        self._layers = [SlotLayer(self._writing) for _ in range(layers)]
        layers_of_model: Any = self._layers
        self.of_model: Any = transformers.Cache(layers=layers_of_model)
        """The same as a cache of transformers, which the model is called with."""

    def begin_prompts(self) -> None:
        """Prepare a forward pass of new prompts, which attend to themselves only."""
        self._writing.positions, self._writing.same, self._writing.columns = None, None, 0

    def begin_tokens(self, positions: Tensor, same: int | None, columns: int) -> None:
        """Prepare a forward pass of one token for each row from row 0.

        Args:
            positions: of the tokens, `[rows]`.
            same: their position, if it is the same.
            columns: the largest position, plus one.
        """
        self._writing.positions, self._writing.same, self._writing.columns = positions, same, columns
        self._reserve(0, columns)

    def place_prompts(self, sources: Tensor, first: int, width: int) -> None:
        """Copy keys and values of prompts that were computed into rows.

        Args:
            sources: for each row, which prompt of the last pass it has.
            first: the first row; the others follow.
            width: tokens of the longest of these prompts.
        """
        for layer in self._layers:
            if layer.prompts is not None:
                keys, values = layer.prompts
                self._place(layer, "keys", keys, sources, first, width)
                self._place(layer, "values", values, sources, first, width)

    def forget_prompts(self) -> None:
        """Free what the last pass of prompts has computed."""
        for layer in self._layers:
            layer.prompts = None

    def move(self, sources: Tensor, targets: Tensor, columns: int) -> None:
        """Copy rows, up to ``columns``, over others."""
        # Between steps, too; what forward passes in inference mode have made can be changed in this mode only.
        with torch.inference_mode():
            for layer in self._layers:
                if layer.keys is not None:
                    layer.keys[targets, :columns] = layer.keys[sources, :columns]
                    layer.values[targets, :columns] = layer.values[sources, :columns]

    def _place(self, layer: SlotLayer, name: str, new: Tensor, sources: Tensor, first: int, width: int) -> None:
        if getattr(layer, name) is None:
            _, heads, _, size = new.shape
            setattr(layer, name, new.new_zeros(0, 0, heads, size))
        self._grow(layer, name, first + len(sources), width)
        getattr(layer, name)[first : first + len(sources), :width] = new[:, :, :width].transpose(1, 2)[sources]

    def _reserve(self, rows: int, columns: int) -> None:
        for layer in self._layers:
            if layer.keys is not None and columns > layer.keys.shape[1]:
                self._grow(layer, "keys", rows, columns)
                self._grow(layer, "values", rows, columns)

    def _grow(self, layer: SlotLayer, name: str, rows: int, columns: int) -> None:
        old = getattr(layer, name)
        if rows <= old.shape[0] and columns <= old.shape[1]:
            return
        # Doubled, so that all growing together copies an entry about once; zeros, as 0 × NaN is NaN in attention.
        height = old.shape[0] if rows <= old.shape[0] else min(self.slots, max(rows, 2 * old.shape[0]))
        width = old.shape[1] if columns <= old.shape[1] else max(columns, 2 * old.shape[1], INITIAL_WIDTH)
        larger = old.new_zeros(height, min(width, self.max_length), *old.shape[2:])
        larger[: old.shape[0], : old.shape[1]] = old
        setattr(layer, name, larger)
