"""Batches of lists, NumPy arrays and tensors: stacking, padding, conversions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.rl.core.advantages import grpo
from fray.rl.nexrl_types import Batch, NexRLRole

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

needs_torch = [pytest.mark.torch, pytest.mark.skipif(torch is None, reason="needs torch: make test-rl")]
KINDS = pytest.mark.parametrize(
    "column",
    [list, numpy.array, pytest.param(lambda rows: torch.tensor(rows), marks=needs_torch)],
    ids=["list", "numpy", "torch"],
)
Column = Callable[[Any], Any]


def rows_of(column: Any) -> list:
    return column if isinstance(column, list) else column.tolist()


def batch_of(**columns: Any) -> Batch:
    return Batch(columns, {"batch_size": len(next(iter(columns.values())))})


@KINDS
def test_golden_numbers_of_padding(column: Column) -> None:
    batch = batch_of(
        input_ids=column([[0, 0, 1, 2, 0], [0, 3, 4, 0, 0]]), mask=column([[0, 0, 1, 1, 0], [0, 1, 1, 0, 0]])
    )
    fields = ["input_ids", "mask"]
    left = Batch.remove_redundant_left_padding(batch, 0, fields)
    both = Batch.remove_redundant_right_padding(left, 0, fields)
    assert rows_of(both.values["input_ids"]) == [[0, 1, 2], [3, 4, 0]]
    assert rows_of(both.values["mask"]) == [[0, 1, 1], [1, 1, 0]]
    assert rows_of(batch.values["input_ids"]) == [[0, 0, 1, 2, 0], [0, 3, 4, 0, 0]]


TOKENS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 2), min_size=width, max_size=width), min_size=1, max_size=4)
)


@KINDS
@given(rows=TOKENS, limit=st.none() | st.integers(0, 3))
def test_padding_is_removed_position_by_position_as_long_as_all_rows_have_it(
    column: Column, rows: list, limit: int | None
) -> None:
    expected, removed = rows, 0
    while any(map(any, rows)) and not any(row[0] for row in expected) and removed != limit:
        expected, removed = [row[1:] for row in expected], removed + 1
    found = Batch.remove_redundant_left_padding(
        batch_of(input_ids=column(rows), other=column(rows)), 0, ["input_ids"], "input_ids", limit
    )
    assert rows_of(found.values["input_ids"]) == expected
    assert rows_of(found.values["other"]) == rows
    mirrored = Batch.remove_redundant_right_padding(
        batch_of(tokens=column([row[::-1] for row in rows])), 0, ["tokens"], "tokens", limit
    )
    assert rows_of(mirrored.values["tokens"]) == [row[::-1] for row in expected]


def test_a_batch_of_padding_alone_stays() -> None:
    batch = batch_of(input_ids=[[0, 0], [0, 0]])
    assert Batch.remove_redundant_left_padding(batch, 0, ["input_ids"]).values == {"input_ids": [[0, 0], [0, 0]]}


def test_columns_that_cannot_be_shortened_are_named() -> None:
    batch = batch_of(input_ids=[[0, 0, 1]], scores=[[5]])
    with pytest.raises(ValueError, match="rows of column 'scores' are too short to remove 2 positions"):
        Batch.remove_redundant_left_padding(batch, 0, ["input_ids", "scores"])
    with pytest.raises(ValueError, match=re.escape("no column 'mask' in the batch; it has ['input_ids', 'scores']")):
        Batch.remove_redundant_left_padding(batch, 0, ["mask"])


@KINDS
def test_trajectories_become_columns(column: Column) -> None:
    trajectories = [
        {"tokens": column([1, 2]), "reward": 0.5, "uid": "a"},
        {"tokens": column([3, 4]), "reward": 1, "uid": "b"},
    ]
    batch = Batch.from_trajectories(trajectories, model_tag="policy")
    assert (
        rows_of(batch.values["tokens"]) == [[1, 2], [3, 4]]
        if column is list
        else batch.values["tokens"].shape == (2, 2)
    )
    assert (batch.values["reward"], batch.values["uid"]) == ([0.5, 1], ["a", "b"])
    assert (len(batch), batch.metadata) == (2, {"batch_size": 2, "model_tag": "policy"})
    assert type(batch.values["tokens"]) is type(column([[1]]))


def test_trajectories_that_make_no_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="no trajectories: a batch has at least one"):
        Batch.from_trajectories([])
    with pytest.raises(
        ValueError, match=re.escape("trajectory 1 and trajectory 0 differ in keys: only one has ['r', 's']")
    ):
        Batch.from_trajectories([{"r": 1}, {"s": 1}])
    with pytest.raises(
        ValueError, match=re.escape("arrays of key 'x' differ in shape: [(1,), (2,)]; pad them to one length")
    ):
        Batch.from_trajectories([{"x": numpy.zeros(1)}, {"x": numpy.zeros(2)}])


@KINDS
def test_rows_of_padding_weigh_nothing(column: Column) -> None:
    batch = batch_of(
        input_ids=column([[5, 6], [7, 8], [9, 9]]),
        loss_mask=column([[0, 1], [1, 1], [1, 0]]),
        group_id=column([4, 4, 4]),
        uid=["a", "a", "a"],
        reward=[1.0, 0.0, 0.0],
    )
    padded = batch.pad_to_world_size(2).pad_to_world_size(8)
    assert (len(padded), padded.metadata["padding_rows"], len(batch)) == (8, 5, 3)
    assert rows_of(padded.values["input_ids"])[3:] == [[5, 6]] * 5
    assert rows_of(padded.values["loss_mask"]) == [[0, 1], [1, 1], [1, 0], *[[0, 0]] * 5]
    for key in ("group_id", "uid"):
        groups = rows_of(padded.values[key])
        assert len(set(groups)) == 6
        assert grpo(padded.values["reward"], groups)[:3] == grpo([1.0, 0.0, 0.0], [0, 0, 0])
    assert type(padded.values["input_ids"]) is type(batch.values["input_ids"])


def test_a_batch_that_divides_is_not_padded() -> None:
    batch = batch_of(tokens=[[1], [2]])
    assert batch.pad_to_world_size(2) is batch


def test_a_batch_that_cannot_be_padded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a batch without loss_mask cannot be padded; it has \['tokens'\]"):
        batch_of(tokens=[[1]]).pad_to_world_size(2)
    with pytest.raises(ValueError, match="invalid world_size 0: expected 1 or more"):
        batch_of(tokens=[[1]]).pad_to_world_size(0)


def test_copies_and_conversions() -> None:
    batch = Batch({"x": numpy.zeros(2), "uid": ["a", "b"], "step": [1, 2]}, {"batch_size": 2, "step": 7})
    copied = batch.copy()
    copied.values["x"][0] = 1
    copied.metadata["step"] = 8
    assert (batch.values["x"][0], batch.metadata["step"]) == (0, 7)
    assert batch.to_dict() == {**batch.values, "batch_size": 2, "step": 7}
    assert batch.to_nextrainer_batch() == {
        "batch": {"x": batch.values["x"]},
        "non_tensor_batch": {"uid": ["a", "b"], "step": [1, 2]},
        "meta_info": {"batch_size": 2, "step": 7},
    }


def test_roles_have_the_names_of_nexrl() -> None:
    assert [role.value for role in NexRLRole] == [
        *("rollout_worker", "trainer", "trajectory_pool", "weight_sync_controller"),
        *("data_loader", "validate_dataloader", "validator"),
    ]


def test_importing_the_types_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, fray.rl.nexrl_types, fray.rl.tensors.kl_control; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
