"""Tables of flat buffers of weights: places, fingerprints, differences."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.rl.weights_table import ALIGNMENT_BYTES, ITEM_BYTES, WeightTable

TENSORS = [("embed", (15, 64), "float32"), ("norm", (3,), "bfloat16"), ("scale", (), "int8")]


def test_tensors_follow_one_another_at_aligned_places() -> None:
    table = WeightTable.of_tensors(TENSORS)
    assert [(name, place.offset, place.byte_count) for name, place in table.places.items()] == [
        ("embed", 0, 3840),
        ("norm", 3840, 6),
        ("scale", 3904, 1),
    ]
    assert table.total_bytes == 3905


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(sorted(ITEM_BYTES))), max_size=8))
def test_no_tensors_overlap_and_all_fit(tensors: list[tuple[list[int], str]]) -> None:
    table = WeightTable.of_tensors((f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(tensors))
    end = 0
    for place in table.places.values():
        assert place.offset >= end
        assert place.offset % ALIGNMENT_BYTES == 0
        end = place.offset + place.byte_count
    assert end <= table.total_bytes < sum(place.byte_count + ALIGNMENT_BYTES for place in table.places.values()) + 1


def test_a_table_survives_pickling_and_json() -> None:
    table = WeightTable.of_tensors(TENSORS)
    for again in (pickle.loads(pickle.dumps(table)), WeightTable.of_json(json.loads(json.dumps(table.to_json())))):
        assert again == table
        assert again.fingerprint == table.fingerprint


def test_fingerprints_differ_with_names_shapes_types_and_order() -> None:
    others = [
        [("embed2", *TENSORS[0][1:]), *TENSORS[1:]],
        [("embed", (64, 15), "float32"), *TENSORS[1:]],
        [("embed", (15, 64), "float16"), *TENSORS[1:]],
        TENSORS[::-1],
        TENSORS[:2],
    ]
    assert len({WeightTable.of_tensors(tensors).fingerprint for tensors in [TENSORS, *others]}) == 6


def test_differences_name_the_tensors() -> None:
    table = WeightTable.of_tensors(TENSORS)
    other = WeightTable.of_tensors([("embed", (15, 32), "float32"), ("norm", (3,), "float32"), ("gate", (), "int8")])
    assert table.difference_text(other) == (
        "it lacks scale; it has gate, which the model lacks; embed has shape [15, 32] instead of [15, 64]"
    )
    assert table.difference_text(table) == ""
    many = WeightTable.of_tensors((f"w{index}", (1,), "int8") for index in range(9))
    assert many.difference_text(WeightTable.of_tensors([])) == "it lacks w0, w1, w2, w3 and 5 more"


def test_unknown_types_and_names_that_occur_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown type 'float3' of tensor 'a'; did you mean float32"):
        WeightTable.of_tensors([("a", (), "float3")])
    with pytest.raises(ValueError, match="two tensors have the name 'a'"):
        WeightTable.of_tensors([("a", (), "int8"), ("a", (), "int8")])
