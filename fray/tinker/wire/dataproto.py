"""Codec of OpenTinker's batches: verl's ``DataProto`` as JSON, and back.

A batch is ``{"batch": {name: tensor}, "non_tensor_batch": {name: array}, "meta_info": {…}}``. Tensors and arrays carry
their bytes as base64, little-endian and in C order, arrays of objects a flat list, images a PNG.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

ELEMENTS_LIMIT = 1 << 31
"""Elements of one tensor or array; the bytes of a message limit them earlier."""
DIMENSIONS_LIMIT = 32
"""Dimensions of one array: those of the oldest NumPy."""
DEPTH_LIMIT = 64
"""Values inside one another."""
PIXELS_LIMIT = 1 << 26
"""Pixels of one image."""

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_UNSIGNED = ("uint16", "uint32", "uint64")
ARRAY_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in (*_NAMES, *_UNSIGNED)}
"""Types of the elements of arrays, by NumPy's names."""
TENSOR_DTYPES = {f"torch.{name}": dtype for name, dtype in ARRAY_DTYPES.items()} | {"torch.bfloat16": np.dtype("<u2")}
"""Types of the elements of tensors, by torch's names; bfloat16 is its 16 bits."""
IMAGE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
"""Modes of images that PNG has."""
SECTIONS = ("batch", "non_tensor_batch", "meta_info")


class DataProtoError(ValueError):
    """Message that is not a batch; it says at which place."""


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value)


@frozen(eq=False)
class TensorRecord:
    """A tensor, without torch.

    Attributes:
        array: its elements; of ``torch.bfloat16`` the bits, as unsigned integers of 16 bits.
        dtype: one of `TENSOR_DTYPES`, such as ``torch.int64``.
        device: where it was, such as ``cpu``; it means nothing to the receiver.

    Raises:
        ValueError: the elements are of another type than ``dtype`` says.
    """

    array: np.ndarray[Any, Any] = field(converter=_as_array)
    dtype: str = ""
    device: str = "cpu"

    def __attrs_post_init__(self) -> None:
        if not self.dtype:
            object.__setattr__(self, "dtype", f"torch.{self.array.dtype.name}")
        expected = TENSOR_DTYPES.get(self.dtype)
        if expected is None:
            raise ValueError(f"unknown dtype {self.dtype!r}; expected one of {', '.join(TENSOR_DTYPES)}")
        if self.array.dtype != expected:
            raise ValueError(f"elements of {self.dtype} are {expected.name} of NumPy, not {self.array.dtype.name}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorRecord):
            return NotImplemented
        return self.dtype == other.dtype and equal_values(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]


@frozen(eq=False)
class ImageRecord:
    """An image as it travels. With Pillow, ``PIL.Image.open(io.BytesIO(record.png))`` is the image.

    Attributes:
        mode: as Pillow has it: ``RGB``, ``L``, …
        size: width and height, pixels.
        png: the file.
    """

    mode: str
    size: tuple[int, int]
    png: bytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ImageRecord):
            return NotImplemented
        return (self.mode, self.size, self.png) == (other.mode, other.size, other.png)

    __hash__ = None  # type: ignore[assignment]


@frozen
class DataProto:
    """A batch: tensors, arrays of anything, and facts about it.

    Attributes:
        batch: tensors, with one row for each sample.
        non_tensor_batch: arrays of NumPy, with one row for each sample.
        meta_info: JSON values, tensors and arrays.
    """

    batch: dict[str, TensorRecord] = field(factory=dict)
    non_tensor_batch: dict[str, np.ndarray[Any, Any]] = field(factory=dict)
    meta_info: dict[str, Any] = field(factory=dict)

    def __len__(self) -> int:
        """Return the number of rows."""
        for column in self.batch.values():
            return int(column.array.shape[0])
        for array in self.non_tensor_batch.values():
            return int(array.shape[0])
        return 0


def equal_values(one: Any, other: Any) -> bool:
    """Return whether two decoded values are equal: arrays by type, shape and elements, NaN equal to NaN."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype == object:
            return all(equal_values(*pair) for pair in zip(one.flat, other.flat, strict=True))
        return one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_values(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(equal_values(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


# Encoding -------------------------------------------------------------------------------------------------------------


def encode_data_proto(data: Any) -> dict[str, Any]:
    """Return a batch as a JSON value.

    Args:
        data: `DataProto`, an object with the same three attributes (verl's own), or a dict of the three.

    Raises:
        DataProtoError: a value cannot be encoded; the message has its place.
    """
    sections = [data.get(name) if isinstance(data, Mapping) else getattr(data, name, None) for name in SECTIONS]
    encoded: dict[str, Any] = {}
    for name, section in zip(SECTIONS, sections, strict=True):
        # A TensorDict has the methods of a mapping, and is not a `Mapping`.
        items = {} if section is None else dict(section.items())
        encoded[name] = {str(key): encode_value(value, f"{name}[{key!r}]") for key, value in items.items()}
    return encoded


def encode_value(value: Any, place: str = "value", depth: int = 0) -> Any:
    """Return a value as a JSON value: tensors (torch's own, too), arrays, images, lists, dicts and what JSON has.

    Tuples become lists, numbers of NumPy those of Python.

    Raises:
        DataProtoError: there is no encoding for it, or values are too deep inside one another; it has ``place``.
    """
    if depth > DEPTH_LIMIT:
        raise DataProtoError(f"{place}: more than {DEPTH_LIMIT} values inside one another")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return encode_value(value.item(), place, depth)
    if isinstance(value, TensorRecord):
        return _encoded_tensor(value)
    if isinstance(value, np.ndarray):
        return _encoded_array(value, place, depth)
    if isinstance(value, ImageRecord):
        return _encoded_image(value)
    if isinstance(value, Mapping):
        return {str(key): encode_value(each, f"{place}[{key!r}]", depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_value(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
    module = type(value).__module__.partition(".")[0]
    if module == "torch" and hasattr(value, "detach"):
        return _encoded_tensor(_record_of_torch(value, place))
    if module == "PIL":
        return _encoded_image(_record_of_image(value))
    raise DataProtoError(f"{place}: a {type(value).__name__} cannot be sent in a batch")


def _record_of_torch(tensor: Any, place: str) -> TensorRecord:
    dtype, device = str(tensor.dtype), str(tensor.device)
    if dtype not in TENSOR_DTYPES:
        raise DataProtoError(f"{place}: tensors of {dtype} cannot be sent; expected one of {', '.join(TENSOR_DTYPES)}")
    plain = tensor.detach().cpu().contiguous()
    if dtype == "torch.bfloat16":
        import sys

        return TensorRecord(plain.view(sys.modules["torch"].int16).numpy().view("<u2"), dtype, device)
    return TensorRecord(plain.numpy(), dtype, device)


def _record_of_image(image: Any) -> ImageRecord:
    plain = image if image.mode in IMAGE_MODES else image.convert("RGB")
    # What notebooks ask for is the one way to the bytes of a PNG without a file.
    return ImageRecord(plain.mode, plain.size, plain._repr_png_())


def _encoded_tensor(record: TensorRecord) -> dict[str, Any]:
    return {
        "__type__": "torch.Tensor",
        "__dtype__": record.dtype,
        "__shape__": list(record.array.shape),
        "__device__": record.device,
        "__data__": _base64_of(record.array, TENSOR_DTYPES[record.dtype]),
    }


def _encoded_array(array: np.ndarray[Any, Any], place: str, depth: int) -> dict[str, Any]:
    head: dict[str, Any] = {"__type__": "numpy.ndarray", "__shape__": list(array.shape)}
    # Texts have a width in NumPy, which no receiver needs.
    if array.dtype == object or array.dtype.kind in "US":
        items = [encode_value(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(array.flat)]
        return {**head, "__dtype__": "object", "__data__": items}
    if array.dtype.name not in ARRAY_DTYPES:
        raise DataProtoError(
            f"{place}: arrays of {array.dtype.name} cannot be sent; expected one of {', '.join(ARRAY_DTYPES)}, object"
        )
    return {**head, "__dtype__": array.dtype.name, "__data__": _base64_of(array, ARRAY_DTYPES[array.dtype.name])}


def _encoded_image(image: ImageRecord) -> dict[str, Any]:
    data = base64.b64encode(image.png).decode("ascii")
    return {"__type__": "PIL.Image", "__mode__": image.mode, "__size__": list(image.size), "__data__": data}


def _base64_of(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> str:
    return base64.b64encode(array.astype(dtype, copy=False).tobytes()).decode("ascii")


# Decoding -------------------------------------------------------------------------------------------------------------


def decode_data_proto(value: Any, place: str = "batch_data") -> DataProto:
    """Return the batch that a JSON value is.

    Args:
        value: as `encode_data_proto` returns it; ``non_tensor_batch`` and ``meta_info`` may be missing or null.
        place: of the value in its message, for errors.

    Raises:
        DataProtoError: it is not a batch, a part of it cannot be decoded, or columns differ in their number of rows.
    """
    if not isinstance(value, dict):
        raise DataProtoError(f"{place}: expected an object with {', '.join(SECTIONS)}, not {_kind(value)}")
    if unknown := sorted(set(value) - set(SECTIONS)):
        raise DataProtoError(f"{place}: unknown key {unknown[0]!r}; expected {', '.join(SECTIONS)}")
    sections: list[dict[str, Any]] = []
    for name in SECTIONS:
        section = value.get(name)
        if section is not None and not isinstance(section, dict):
            raise DataProtoError(f"{place}.{name}: expected an object, not {_kind(section)}")
        sections.append({key: decode_value(each, f"{place}.{name}[{key!r}]") for key, each in (section or {}).items()})
    tensors, arrays, facts = sections
    for key, tensor in tensors.items():
        if not isinstance(tensor, TensorRecord):
            raise DataProtoError(f"{place}.batch[{key!r}]: expected a torch.Tensor, not {_kind(tensor)}")
    for key, array in arrays.items():
        if isinstance(array, list):
            arrays[key] = _object_array(array, (len(array),))
        elif not isinstance(array, np.ndarray):
            raise DataProtoError(f"{place}.non_tensor_batch[{key!r}]: expected a numpy.ndarray, not {_kind(array)}")
    _check_rows(tensors, arrays, place)
    return DataProto(tensors, arrays, facts)


def _check_rows(tensors: dict[str, Any], arrays: dict[str, Any], place: str) -> None:
    first: tuple[str, int] | None = None
    columns = [(f"batch[{key!r}]", record.array) for key, record in tensors.items()]
    columns += [(f"non_tensor_batch[{key!r}]", array) for key, array in arrays.items()]
    for name, array in columns:
        if not array.shape:
            raise DataProtoError(f"{place}.{name}: expected rows, and its shape is []")
        first = first or (name, array.shape[0])
        if array.shape[0] != first[1]:
            raise DataProtoError(f"{place}.{name}: {array.shape[0]} rows, but {first[0]} has {first[1]}")


def decode_value(value: Any, place: str = "value", depth: int = 0) -> Any:
    """Return what a JSON value stands for: tensors are `TensorRecord`, arrays NumPy's, images `ImageRecord`.

    Raises:
        DataProtoError: a part of it cannot be decoded; the message has its place.
    """
    if depth > DEPTH_LIMIT:
        raise DataProtoError(f"{place}: more than {DEPTH_LIMIT} values inside one another")
    if isinstance(value, list):
        return [decode_value(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "__type__" not in value:
        return {key: decode_value(each, f"{place}[{key!r}]", depth + 1) for key, each in value.items()}
    kind = value["__type__"]
    decode = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decode is None:
        raise DataProtoError(f"{place}.__type__: {kind!r} is unknown; expected one of {', '.join(_DECODERS)}")
    return decode(value, place, depth)


def _decoded_tensor(value: dict[str, Any], place: str, depth: int) -> TensorRecord:
    name = value.get("__dtype__")
    dtype = TENSOR_DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise DataProtoError(f"{place}.__dtype__: {name!r} is unknown; expected one of {', '.join(TENSOR_DTYPES)}")
    device = value.get("__device__", "cpu")
    if not isinstance(device, str):
        raise DataProtoError(f"{place}.__device__: expected a text such as 'cpu', not {_kind(device)}")
    assert isinstance(name, str)
    return TensorRecord(_elements(value, dtype, place), name, device)


def _decoded_array(value: dict[str, Any], place: str, depth: int) -> np.ndarray[Any, Any]:
    name = value.get("__dtype__")
    if name == "object":
        return _decoded_objects(value, place, depth)
    dtype = ARRAY_DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        known = ", ".join(ARRAY_DTYPES)
        raise DataProtoError(f"{place}.__dtype__: {name!r} is unknown; expected one of {known}, object")
    return _elements(value, dtype, place)


def _decoded_objects(value: dict[str, Any], place: str, depth: int) -> np.ndarray[Any, Any]:
    items = value.get("__data__")
    if not isinstance(items, list):
        raise DataProtoError(f"{place}.__data__: expected a list of the objects, not {_kind(items)}")
    shape = _shape_of(value, place) if "__shape__" in value else (len(items),)
    if math.prod(shape) != len(items):
        raise DataProtoError(f"{place}.__data__: {len(items)} objects, but shape {list(shape)} has {math.prod(shape)}")
    decoded = [decode_value(item, f"{place}.__data__[{index}]", depth + 1) for index, item in enumerate(items)]
    return _object_array(decoded, shape)


def _object_array(items: list[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    # Assigned one by one: NumPy would make equal lists another dimension.
    array = np.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = item
    return array.reshape(shape)


def _decoded_image(value: dict[str, Any], place: str, depth: int) -> ImageRecord:
    mode, size = value.get("__mode__"), value.get("__size__")
    if mode not in IMAGE_MODES:
        raise DataProtoError(f"{place}.__mode__: {mode!r} is unknown; expected one of {', '.join(IMAGE_MODES)}")
    if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
        raise DataProtoError(f"{place}.__size__: expected [width, height], not {size!r:.100}")
    if size[0] * size[1] > PIXELS_LIMIT:
        raise DataProtoError(f"{place}.__size__: {size[0]} x {size[1]} pixels; the limit is {PIXELS_LIMIT}")
    png = _bytes_of(value, place)
    if not png.startswith(b"\x89PNG\r\n\x1a\n"):
        raise DataProtoError(f"{place}.__data__: expected a PNG")
    return ImageRecord(mode, (size[0], size[1]), png)


_DECODERS: dict[str, Callable[[dict[str, Any], str, int], Any]] = {
    "torch.Tensor": _decoded_tensor,
    "numpy.ndarray": _decoded_array,
    "PIL.Image": _decoded_image,
}


def _elements(value: dict[str, Any], dtype: np.dtype[Any], place: str) -> np.ndarray[Any, Any]:
    shape = _shape_of(value, place)
    content = _bytes_of(value, place)
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataProtoError(
            f"{place}.__data__: {len(content)} bytes, but shape {list(shape)} of {value['__dtype__']} has {expected}"
        )
    if dtype.name == "bool" and content.strip(b"\x00\x01"):
        raise DataProtoError(f"{place}.__data__: expected bytes of 0 and 1 for bool")
    # A copy: arrays over bytes are read-only, and their alignment is that of the bytes.
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _shape_of(value: dict[str, Any], place: str) -> tuple[int, ...]:
    shape = value.get("__shape__")
    if not isinstance(shape, list) or not all(type(each) is int for each in shape):
        raise DataProtoError(f"{place}.__shape__: expected a list of integers, not {shape!r:.100}")
    if len(shape) > DIMENSIONS_LIMIT:
        raise DataProtoError(f"{place}.__shape__: {len(shape)} dimensions; the limit is {DIMENSIONS_LIMIT}")
    if any(each < 0 for each in shape):
        raise DataProtoError(f"{place}.__shape__: {shape!r:.100} has a negative number")
    if any(each > ELEMENTS_LIMIT for each in shape) or math.prod(shape) > ELEMENTS_LIMIT:
        raise DataProtoError(f"{place}.__shape__: {shape!r:.100} has more than {ELEMENTS_LIMIT} elements")
    return tuple(shape)


def _bytes_of(value: dict[str, Any], place: str) -> bytes:
    text = value.get("__data__")
    if not isinstance(text, str):
        raise DataProtoError(f"{place}.__data__: expected base64, not {_kind(text)}")
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise DataProtoError(f"{place}.__data__: not base64: {error}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
