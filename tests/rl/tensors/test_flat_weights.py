"""Flat buffers of weights: what is written is what is loaded, tied weights once, other models refused."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

import numpy as np  # noqa: E402

from fray.rl.tensors import flat_weights  # noqa: E402

pytestmark = pytest.mark.torch


class TwoLayers(torch.nn.Module):
    def __init__(self, width: int = 5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, width, dtype=dtype)
        self.mean = torch.nn.BatchNorm1d(width, dtype=dtype)
        self.head = torch.nn.Linear(width, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def buffer_of(model: torch.nn.Module) -> np.ndarray:
    buffer = np.zeros(flat_weights.table_of(model).total_bytes, np.uint8)
    flat_weights.write(model, buffer)
    return buffer


def test_tied_weights_are_in_the_buffer_once_and_saved_buffers_too() -> None:
    model = TwoLayers()
    table = flat_weights.table_of(model)
    assert list(table.places) == [
        *("embed.weight", "mean.weight", "mean.bias"),
        *("mean.running_mean", "mean.running_var", "mean.num_batches_tracked"),
    ]
    assert table.places["embed.weight"].shape == (7, 5)
    assert table.places["mean.num_batches_tracked"].dtype == "int64"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_written_is_what_is_loaded(dtype: torch.dtype) -> None:
    model, other = TwoLayers(dtype=dtype), TwoLayers(dtype=dtype)
    parameter = other.embed.weight
    buffer = buffer_of(model)
    buffer.flags.writeable = False
    flat_weights.load(other, flat_weights.table_of(model), buffer)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert other.embed.weight is parameter
    assert other.head.weight is parameter


def test_weights_of_another_type_and_layout_are_converted() -> None:
    model, other = TwoLayers(), TwoLayers(dtype=torch.bfloat16)
    model.embed.weight.data = model.embed.weight.data.T.contiguous().T
    flat_weights.load(other, flat_weights.table_of(model), buffer_of(model))
    assert torch.equal(other.embed.weight, model.embed.weight.bfloat16())


def test_weights_pass_through_a_mapped_file(tmp_path: Path) -> None:
    model, other = TwoLayers(), TwoLayers()
    table = flat_weights.table_of(model)
    path = tmp_path / "weights"
    path.write_bytes(bytes(table.total_bytes))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        flat_weights.write(model, mapped, table)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        flat_weights.load(other, table, memoryview(mapped))
    assert torch.equal(other.embed.weight, model.embed.weight)


def test_weights_of_another_model_are_refused_and_nothing_is_copied() -> None:
    model = TwoLayers()
    before = buffer_of(model)
    wider = TwoLayers(width=6)
    with pytest.raises(
        ValueError, match=r"not those of this model: embed.weight has shape \[7, 6\] instead of \[7, 5\]"
    ):
        flat_weights.load(model, flat_weights.table_of(wider), buffer_of(wider))
    assert np.array_equal(buffer_of(model), before)


def test_buffers_that_are_short_or_read_only_are_refused() -> None:
    model = TwoLayers()
    table = flat_weights.table_of(model)
    with pytest.raises(ValueError, match=f"the buffer has 3 bytes, but the table of weights needs {table.total_bytes}"):
        flat_weights.load(model, table, bytes(3))
    with pytest.raises(ValueError, match="read-only"):
        flat_weights.write(model, bytes(table.total_bytes))
