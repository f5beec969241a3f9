"""Weights in the safetensors format as a table and a buffer: the file is the buffer. Without torch."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fray.rl.weights_table import ITEM_BYTES, WeightPlace, WeightTable

HEADER_LIMIT_BYTES = 100 << 20
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Types of safetensors, and their names in tables."""
_TYPE_NAMES = {name: short for short, name in _TYPES.items()}


def read_weights(directory: str | Path) -> tuple[WeightTable, bytearray]:
    """Return the weights in a directory of a Hugging Face model: all of its ``.safetensors`` files, in one buffer.

    Raises:
        ValueError: there is no such file, or one is damaged.
        OSError: one cannot be read.
    """
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"there is no .safetensors file in {str(directory)!r}")
    buffer, starts = bytearray(), []
    for path in paths:
        starts.append(len(buffer))
        buffer += path.read_bytes()
    return table_of_files(buffer, starts), buffer


def table_of_files(buffer: bytes | bytearray | mmap.mmap, starts: Sequence[int] = (0,)) -> WeightTable:
    """Return the table of files of safetensors that lie one after the other in a buffer.

    Args:
        buffer: the files.
        starts: where each begins.

    Raises:
        ValueError: it is not of that format, damaged, or two files have one tensor.
    """
    places: dict[str, WeightPlace] = {}
    for start, end in zip(starts, [*starts[1:], len(buffer)], strict=True):
        for name, place in _places(buffer, start, end):
            if name in places:
                raise ValueError(f"two files have the tensor {name!r}")
            places[name] = place
    return WeightTable(places, len(buffer))


def header_of(table: WeightTable) -> bytes:
    """Return the beginning of a file of safetensors with the tensors of a table, which follow it without gaps."""
    entries, end = dict[str, Any](), 0
    for name, place in table.places.items():
        begin, end = end, end + place.byte_count
        entries[name] = {"dtype": _TYPE_NAMES[place.dtype], "shape": list(place.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _places(buffer: bytes | bytearray | mmap.mmap, start: int, end: int) -> list[tuple[str, WeightPlace]]:
    size = int.from_bytes(buffer[start : start + 8], "little")
    data = start + 8 + size
    if end - start < 8 or size > HEADER_LIMIT_BYTES or data > end:
        raise ValueError("these bytes are not of the safetensors format: their header is longer than they are")
    try:
        header = json.loads(buffer[start + 8 : data])
        return [(name, _place(name, one, data, end)) for name, one in header.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"these bytes are not of the safetensors format: {error}") from None


def _place(name: str, entry: Any, data: int, end: int) -> WeightPlace:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"tensor {name!r} lacks dtype, shape or data_offsets") from None
    if dtype not in _TYPES:
        raise ValueError(f"tensor {name!r} has the type {dtype!r}; expected one of {', '.join(_TYPES)}")
    place = WeightPlace(data + first, shape, _TYPES[dtype])
    if min(shape, default=0) < 0 or not 0 <= first <= last <= end - data or last - first != place.byte_count:
        items = place.item_count * ITEM_BYTES[place.dtype]
        raise ValueError(
            f"tensor {name!r} of shape {list(shape)} needs {items} bytes, and has {last - first} of {end - data}"
        )
    return place
