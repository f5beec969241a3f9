"""Trajectories, batches and roles, as NexRL names them.

A batch is made of columns: lists, NumPy arrays or tensors, a row for each trajectory. Nothing here imports torch or
NumPy: arrays bring their library with them.
"""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ModelTag = str
"""Name of a model within a run."""
DEFAULT_MODEL_TAG: ModelTag = "default"

Trajectory = dict[str, Any]
"""One episode: ``prompt``, ``response``, ``tokens``, ``loss_mask``, ``reward``, ``group_id`` and whatever a worker
adds."""

GROUP_KEYS = ("group_id", "uid", "run_id")
"""Columns by which advantages are compared; rows of padding get groups of their own."""


class NexRLRole(enum.Enum):
    """Roles of the components of a run."""

    ROLLOUT_WORKER = "rollout_worker"
    TRAINER = "trainer"
    TRAJECTORY_POOL = "trajectory_pool"
    WEIGHT_SYNC_CONTROLLER = "weight_sync_controller"
    DATA_LOADER = "data_loader"
    VALIDATE_DATALOADER = "validate_dataloader"
    VALIDATOR = "validator"


@dataclass
class Batch:
    """Columns of a batch, and facts about it.

    Attributes:
        values: name: list, NumPy array or tensor with ``metadata["batch_size"]`` rows.
        metadata: ``batch_size`` (rows), and what else belongs to the whole batch, such as ``model_tag``.
    """

    values: dict[str, Any]
    metadata: dict[str, Any]

    def __len__(self) -> int:
        """Return the number of rows, those of padding included."""
        return int(self.metadata["batch_size"])

    def copy(self) -> Batch:
        """Return a deep copy."""
        return Batch(copy.deepcopy(self.values), copy.deepcopy(self.metadata))

    def to_dict(self) -> dict[str, Any]:
        """Return values and metadata in one dict; metadata wins where both have a key."""
        return {**self.values, **self.metadata}

    def to_nextrainer_batch(self) -> dict[str, Any]:
        """Return ``{"batch": arrays and tensors, "non_tensor_batch": other columns, "meta_info": metadata}``."""
        arrays = {name: column for name, column in self.values.items() if _is_array(column)}
        others = {name: column for name, column in self.values.items() if name not in arrays}
        return {"batch": arrays, "non_tensor_batch": others, "meta_info": dict(self.metadata)}

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], model_tag: ModelTag | None = None) -> Batch:
        """Return the batch whose rows are ``trajectories``: arrays and tensors are stacked, other values become lists.

        Metadata are ``batch_size`` and, if given, ``model_tag``.

        Raises:
            ValueError: there is no trajectory, one has other keys than the first, or arrays of one key differ in shape.
        """
        if not trajectories:
            raise ValueError("no trajectories: a batch has at least one")
        names = list(trajectories[0])
        for row, trajectory in enumerate(trajectories):
            if different := set(names) ^ set(trajectory):
                raise ValueError(f"trajectory {row} and trajectory 0 differ in keys: only one has {sorted(different)}")
        values = {name: _stacked(name, [trajectory[name] for trajectory in trajectories]) for name in names}
        metadata: dict[str, Any] = {"batch_size": len(trajectories)}
        return cls(values, metadata if model_tag is None else {**metadata, "model_tag": model_tag})

    @staticmethod
    def remove_redundant_left_padding(
        data: Batch,
        pad_token_id: int,
        fields: Sequence[str],
        anchor_field: str = "input_ids",
        max_strip_threshold: int | None = None,
    ) -> Batch:
        """Return ``data`` without the first positions that are padding in every row of the anchor.

        Args:
            data: the batch; it stays as it is.
            pad_token_id: token that is padding.
            fields: columns to shorten, `[batch, tokens]`.
            anchor_field: column of tokens that decides how many positions.
            max_strip_threshold: highest number of positions to remove; None for no limit.

        A batch of padding alone is returned as it is: no model takes sequences of length 0.

        Raises:
            ValueError: a column is missing, or has rows shorter than what is removed.
        """
        return _without_padding(data, pad_token_id, fields, anchor_field, max_strip_threshold, left=True)

    @staticmethod
    def remove_redundant_right_padding(
        data: Batch,
        pad_token_id: int,
        fields: Sequence[str],
        anchor_field: str = "input_ids",
        max_strip_threshold: int | None = None,
    ) -> Batch:
        """Return ``data`` without the last positions that are padding in every row of the anchor.

        Arguments and errors are those of `remove_redundant_left_padding`.
        """
        return _without_padding(data, pad_token_id, fields, anchor_field, max_strip_threshold, left=False)

    def pad_to_world_size(self, world_size: int) -> Batch:
        """Return a batch whose rows divide evenly among ``world_size`` ranks, with rows of padding at its end.

        A row of padding repeats the first row with a ``loss_mask`` of 0 everywhere and a group of its own
        (`GROUP_KEYS`), so that it weighs nothing in losses, their denominators and the advantages of others, and no
        forward pass meets a sequence without tokens. ``metadata["padding_rows"]`` counts them. A batch that divides
        already is returned itself.

        Raises:
            ValueError: ``world_size`` is below 1, the batch is empty, or it has no ``loss_mask``.
        """
        if world_size < 1:
            raise ValueError(f"invalid world_size {world_size}: expected 1 or more")
        missing = -len(self) % world_size
        if not missing:
            return self
        if "loss_mask" not in self.values:
            raise ValueError(f"a batch without loss_mask cannot be padded; it has {sorted(self.values)}")
        before = self.metadata.get("padding_rows", 0)
        values = {name: _extended(name, column, missing, before) for name, column in self.values.items()}
        rows = {"batch_size": len(self) + missing, "padding_rows": before + missing}
        return Batch(values, {**self.metadata, **rows})


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _library_of(array: Any) -> Any:
    """Return the library of an array: torch or NumPy, which share the names of the functions used here."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def _stacked(name: str, column: list[Any]) -> Any:
    if not all(_is_array(value) for value in column):
        return column
    shapes = {tuple(value.shape) for value in column}
    if len(shapes) > 1:
        raise ValueError(f"arrays of key {name!r} differ in shape: {sorted(shapes)}; pad them to one length first")
    return _library_of(column[0]).stack(column)


def _without_padding(
    data: Batch, pad: int, fields: Sequence[str], anchor_field: str, limit: int | None, *, left: bool
) -> Batch:
    for name in (anchor_field, *fields):
        if name not in data.values:
            raise ValueError(f"no column {name!r} in the batch; it has {sorted(data.values)}")
    rows = [list(row) for row in data.values[anchor_field]]
    runs = [_pads_at_start(row if left else row[::-1], pad) for row in rows]
    if all(run == len(row) for run, row in zip(runs, rows, strict=True)):
        return data
    count = min(runs)
    count = count if limit is None else min(count, limit)
    return Batch(
        {
            name: _shortened(name, column, count, left) if name in fields else column
            for name, column in data.values.items()
        },
        dict(data.metadata),
    )


def _pads_at_start(row: Sequence[Any], pad: int) -> int:
    return next((position for position, token in enumerate(row) if int(token) != pad), len(row))


def _shortened(name: str, column: Any, count: int, left: bool) -> Any:
    if min(len(row) for row in column) < count:
        raise ValueError(f"rows of column {name!r} are too short to remove {count} positions of padding")
    if _is_array(column):
        return column[:, count:] if left else column[:, : column.shape[1] - count]
    return [row[count:] if left else row[: len(row) - count] for row in column]


def _extended(name: str, column: Any, missing: int, before: int) -> Any:
    """Return a column with ``missing`` rows of padding at its end."""
    if name in GROUP_KEYS and not _is_array(column):
        return [*column, *(f"padding-{before + index}" for index in range(missing))]
    if not _is_array(column):
        row = [0] * len(column[0]) if name == "loss_mask" else column[0]
        return [*column, *(copy.deepcopy(row) for _ in range(missing))]
    library = _library_of(column)
    added = library.stack([column[0]] * missing)
    if name == "loss_mask":
        added = library.zeros_like(added)
    elif name in GROUP_KEYS:
        added = library.stack([column.min() - 1 - index for index in range(missing)])
    return library.concatenate([column, added])
