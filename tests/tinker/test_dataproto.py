"""Batches of OpenTinker as JSON and back: every type round-trips, what cannot be decoded is refused with its place."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fray.tinker.wire.dataproto import (
    ARRAY_DTYPES,
    TENSOR_DTYPES,
    DataProto,
    DataProtoError,
    ImageRecord,
    TensorRecord,
    decode_data_proto,
    decode_value,
    encode_data_proto,
    encode_value,
    equal_values,
)

PNG = b"\x89PNG\r\n\x1a\n"
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")


plain_arrays = st.sampled_from(sorted(ARRAY_DTYPES)).flatmap(
    lambda name: arrays.arrays(native(ARRAY_DTYPES[name]), SHAPES)
)
tensors = st.sampled_from(sorted(TENSOR_DTYPES)).flatmap(
    lambda name: arrays.arrays(native(TENSOR_DTYPES[name]), SHAPES).map(lambda array: TensorRecord(array, name))
)
images = st.builds(ImageRecord, st.just("RGB"), st.just((2, 3)), st.binary(max_size=20).map(lambda rest: PNG + rest))
json_leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
keys = st.text(max_size=5).filter(lambda key: key != "__type__")
values = st.recursive(
    st.one_of(json_leaves, plain_arrays, tensors, images),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: object_array(items)),
    ),
    max_leaves=8,
)


def object_array(items: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = item
    return array


@given(values)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert equal_values(decode_value(json.loads(json.dumps(encode_value(value)))), value)


@given(st.integers(0, 3), st.data())
def test_a_batch_comes_back_as_it_was(rows: int, data: st.DataObject) -> None:
    columns = arrays.arrays(np.int64, (rows, 2)).map(TensorRecord)
    sent = DataProto(
        data.draw(st.dictionaries(keys, columns, max_size=2)),
        data.draw(st.dictionaries(keys, st.lists(values, min_size=rows, max_size=rows).map(object_array), max_size=2)),
        data.draw(st.dictionaries(keys, values, max_size=2)),
    )
    got = decode_data_proto(json.loads(json.dumps(encode_data_proto(sent))))
    for section in ("batch", "non_tensor_batch", "meta_info"):
        assert equal_values(getattr(got, section), getattr(sent, section))


def test_the_encoding_is_the_one_of_the_protocol() -> None:
    record = TensorRecord(np.array([[1, -2]], np.int64))
    assert encode_value(record) == {
        "__type__": "torch.Tensor",
        "__dtype__": "torch.int64",
        "__shape__": [1, 2],
        "__device__": "cpu",
        "__data__": "AQAAAAAAAAD+/////////w==",
    }
    assert encode_value(np.array([1, 256], ">u2")) == {
        "__type__": "numpy.ndarray",
        "__shape__": [2],
        "__dtype__": "uint16",
        "__data__": "AQAAAQ==",
    }
    assert encode_value(np.array(["a", "bc"])) == {
        "__type__": "numpy.ndarray",
        "__shape__": [2],
        "__dtype__": "object",
        "__data__": ["a", "bc"],
    }
    assert encode_value((1, np.float32(0.5), np.bool_(True))) == [1, 0.5, True]


def test_arrays_are_sent_in_c_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert encode_value(np.asfortranarray(array)) == encode_value(array)
    assert equal_values(decode_value(encode_value(array.T)), np.ascontiguousarray(array.T))


@given(st.recursive(json_leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner)))
def test_whatever_json_is_sent_nothing_but_a_refusal_is_raised(value: Any) -> None:
    refusal = "batch_data"
    try:
        decode_data_proto(value)
    except DataProtoError as error:
        refusal = str(error)
    assert refusal.startswith("batch_data")


def tensor(**changes: Any) -> dict[str, Any]:
    whole = {"__type__": "torch.Tensor", "__dtype__": "torch.uint8", "__shape__": [2], "__data__": "AAE="}
    return {name: value for name, value in (whole | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        (tensor(__data__="AAEC"), ".__data__: 3 bytes, but shape [2] of torch.uint8 has 2"),
        (tensor(__data__="AA"), ".__data__: not base64"),
        (tensor(__data__="A A="), ".__data__: not base64"),
        (tensor(__data__="ä"), ".__data__: not base64"),
        (tensor(__data__=7), ".__data__: expected base64, not a number"),
        (tensor(__data__=...), ".__data__: expected base64, not null"),
        (tensor(__shape__=[-2]), ".__shape__: [-2] has a negative number"),
        (tensor(__shape__=[-1, -2]), ".__shape__: [-1, -2] has a negative number"),
        (tensor(__shape__=[1 << 40]), "has more than 2147483648 elements"),
        (tensor(__shape__=[1 << 20, 1 << 20]), "has more than 2147483648 elements"),
        (tensor(__shape__=[0, 1 << 70]), "has more than 2147483648 elements"),
        (tensor(__shape__=[1] * 33), "33 dimensions; the limit is 32"),
        (tensor(__shape__=[2.0]), ".__shape__: expected a list of integers"),
        (tensor(__shape__=[True, True]), ".__shape__: expected a list of integers"),
        (tensor(__shape__=...), ".__shape__: expected a list of integers, not None"),
        (tensor(__dtype__="torch.complex64"), ".__dtype__: 'torch.complex64' is unknown"),
        (tensor(__dtype__="uint8"), ".__dtype__: 'uint8' is unknown"),
        (tensor(__dtype__=["torch.uint8"]), ".__dtype__: ['torch.uint8'] is unknown"),
        (tensor(__dtype__="torch.bool", __data__="AAI="), ".__data__: expected bytes of 0 and 1 for bool"),
        (tensor(__device__=0), ".__device__: expected a text"),
        (tensor(__type__="builtins.eval"), ".__type__: 'builtins.eval' is unknown"),
        (tensor(__type__=[]), ".__type__: [] is unknown"),
        ({"__type__": "numpy.ndarray", "__dtype__": "object", "__data__": "x"}, "expected a list of the objects"),
        (
            {"__type__": "numpy.ndarray", "__dtype__": "object", "__shape__": [3], "__data__": [1]},
            ".__data__: 1 objects, but shape [3] has 3",
        ),
        (
            {"__type__": "numpy.ndarray", "__dtype__": "object", "__data__": [1, tensor(__shape__=[-1])]},
            ".__data__[1].__shape__: [-1] has a negative number",
        ),
        ({"__type__": "PIL.Image", "__mode__": "CMYK", "__size__": [1, 1], "__data__": ""}, ".__mode__: 'CMYK'"),
        ({"__type__": "PIL.Image", "__mode__": "L", "__size__": [0, 1], "__data__": ""}, ".__size__: expected"),
        ({"__type__": "PIL.Image", "__mode__": "L", "__size__": [1, 1], "__data__": "AAE="}, "expected a PNG"),
        (
            {"__type__": "PIL.Image", "__mode__": "L", "__size__": [1 << 20, 1 << 20], "__data__": "AAE="},
            "the limit is 67108864",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused_with_its_place(value: Any, refusal: str) -> None:
    with pytest.raises(DataProtoError) as caught:
        decode_data_proto({"meta_info": {"x": [value]}})
    assert str(caught.value).startswith("batch_data.meta_info['x'][0]")
    assert refusal in str(caught.value)


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        ([], "batch_data: expected an object with batch, non_tensor_batch, meta_info, not a list"),
        ({"bach": {}}, "batch_data: unknown key 'bach'"),
        ({"batch": 3}, "batch_data.batch: expected an object, not a number"),
        ({"batch": {"a": 3}}, "batch_data.batch['a']: expected a torch.Tensor, not a number"),
        ({"batch": {"a": tensor(__shape__=[], __data__="AA==")}}, "expected rows, and its shape is []"),
        ({"non_tensor_batch": {"a": "x"}}, "batch_data.non_tensor_batch['a']: expected a numpy.ndarray, not a text"),
        ({"batch": {"a": tensor()}, "non_tensor_batch": {"b": [1]}}, "['b']: 1 rows, but batch['a'] has 2"),
    ],
)
def test_a_batch_of_another_form_is_refused(value: Any, refusal: str) -> None:
    with pytest.raises(DataProtoError) as caught:
        decode_data_proto(value)
    assert refusal in str(caught.value)


def test_values_too_deep_inside_one_another_are_refused() -> None:
    value: Any = 1
    for _ in range(70):
        value = [value]
    with pytest.raises(DataProtoError, match="more than 64 values inside one another"):
        encode_value(value)
    with pytest.raises(DataProtoError, match="more than 64 values inside one another"):
        decode_value(value)


def test_an_image_is_sent_as_png() -> None:
    from PIL import Image

    image = Image.new("L", (3, 2), 77)
    record = decode_value(encode_value(image))
    assert (record.mode, record.size) == ("L", (3, 2))
    assert list(Image.open(io.BytesIO(record.png)).tobytes()) == [77] * 6
    assert decode_value(encode_value(Image.new("CMYK", (1, 1)))).mode == "RGB"


def test_what_has_no_encoding_is_refused_with_its_place() -> None:
    with pytest.raises(DataProtoError, match=r"meta_info\['f'\]\[1\]: a builtin_function_or_method cannot be sent"):
        encode_data_proto({"meta_info": {"f": [1, print]}})
    with pytest.raises(DataProtoError, match="arrays of complex64 cannot be sent"):
        encode_value(np.zeros(2, np.complex64))
    with pytest.raises(ValueError, match=r"elements of torch.bfloat16 are uint16 of NumPy, not float32"):
        TensorRecord(np.zeros(2, np.float32), "torch.bfloat16")
