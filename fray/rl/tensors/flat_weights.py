"""Weights of a model in one flat buffer: the table of it, writing and loading with one copy of the bytes.

Tied weights are in the buffer once, under the first of their names. Buffers are any contiguous bytes: shared memory, an
array, a mapped file; for reading they may be read-only.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fray.rl.weight_files import table_of_files
from fray.rl.weights_table import WeightPlace, WeightTable

Weights: TypeAlias = torch.nn.Module | Mapping[str, Tensor]
"""A model with its parameters and saved buffers, or tensors by name, such as those of an adapter."""


def table_of(model: Weights) -> WeightTable:
    """Return the table of the tensors of ``model``."""
    return WeightTable.of_tensors(
        (name, tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in _tensors_of(model)
    )


def write(model: Weights, buffer: Any, table: WeightTable | None = None) -> None:
    """Copy the weights of ``model`` into ``buffer``.

    Args:
        buffer: writable contiguous bytes, `table_of(model).total_bytes` or more.
        table: `table_of(model)`, if it is at hand.

    Raises:
        ValueError: the buffer is too short or read-only.
    """
    table = table or table_of(model)
    target = _bytes_of(buffer, table)
    if not target.flags.writeable:
        raise ValueError("the buffer to write weights into is read-only")
    for name, tensor in _tensors_of(model):
        _part(target, table.places[name])[...] = _as_bytes(_on_host(tensor))


def write_file(model: Weights, path: Path) -> WeightTable:
    """Write the weights of ``model`` as a file of safetensors, which appears when it is complete.

    Returns:
        The table of the file's bytes, for `load` of the whole file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    save_file({name: tensor.cpu().contiguous() for name, tensor in _tensors_of(model)}, unfinished)
    with unfinished.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        table = table_of_files(content)
    unfinished.rename(path)
    return table


def load(model: Weights, table: WeightTable, buffer: Any) -> None:
    """Copy weights from ``buffer`` into those of ``model``, in place; tensors of another type are converted.

    Args:
        table: of the buffer.
        buffer: contiguous bytes, ``table.total_bytes`` or more.

    Raises:
        ValueError: the names or shapes differ from those of the model, which the message lists, or the buffer is too
            short. Then nothing was copied.
    """
    if difference := table_of(model).difference_text(table):
        raise ValueError(f"the weights are not those of this model: {difference}")
    source = _bytes_of(buffer, table)
    with torch.no_grad():
        for name, tensor in _tensors_of(model):
            _copy(tensor, source, table.places[name])


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    # From memory that is not pinned, the driver copies twice.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _copy(tensor: Tensor, source: np.ndarray[Any, Any], place: WeightPlace) -> None:
    dtype = getattr(torch, place.dtype)
    part = _part(source, place)
    if tensor.device.type == "cpu" and tensor.dtype is dtype and tensor.is_contiguous():
        _as_bytes(tensor)[...] = part
        return
    # A tensor over memory that may be read-only cannot be had without a copy.
    staged = torch.empty(place.shape, dtype=dtype, pin_memory=tensor.device.type == "cuda")
    _as_bytes(staged)[...] = part
    tensor.copy_(staged)


def _tensors_of(model: Weights) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    tensors = model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def _bytes_of(buffer: Any, table: WeightTable) -> np.ndarray[Any, Any]:
    array = np.frombuffer(buffer, np.uint8)
    if array.size < table.total_bytes:
        raise ValueError(f"the buffer has {array.size} bytes, but the table of weights needs {table.total_bytes}")
    return array


def _part(array: np.ndarray[Any, Any], place: WeightPlace) -> np.ndarray[Any, Any]:
    return array[place.offset : place.offset + place.byte_count]


def _as_bytes(tensor: Tensor) -> Any:
    # As bytes: NumPy has no bfloat16.
    return tensor.reshape(-1).view(torch.uint8).numpy()
