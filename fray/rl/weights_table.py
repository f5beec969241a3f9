"""Table of a flat buffer of weights: where each tensor is, and of which shape and type. Without torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from attrs import frozen

from fray.model.text import near_text

ALIGNMENT_BYTES = 64
"""Offsets are multiples of it: a line of a CPU's cache, and enough for any type."""
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Types of tensors, as torch names them, and the bytes of a number."""
_NAMES_IN_TEXT = 4


@frozen
class WeightPlace:
    """Place of one tensor in the buffer.

    Attributes:
        offset: byte at which it begins.
        shape: its dimensions; ``()`` for a single number.
        dtype: one of `ITEM_BYTES`.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def item_count(self) -> int:
        """Return how many numbers the tensor has."""
        return math.prod(self.shape)

    @property
    def byte_count(self) -> int:
        """Return the bytes of the tensor."""
        return self.item_count * ITEM_BYTES[self.dtype]


@frozen
class WeightTable:
    """Name of each tensor and its place in one flat buffer. Pickles; `to_json` and `of_json` for everything else.

    Attributes:
        places: the place of each tensor, in the order of the buffer.
        total_bytes: length of the buffer, 0 or more.
    """

    places: Mapping[str, WeightPlace]
    total_bytes: int

    @classmethod
    def of_tensors(cls, tensors: Iterable[tuple[str, Iterable[int], str]]) -> WeightTable:
        """Return the table that places tensors one after the other, at multiples of `ALIGNMENT_BYTES`.

        Args:
            tensors: name, shape and type of each.

        Raises:
            ValueError: two tensors have one name, or a type is unknown.
        """
        places: dict[str, WeightPlace] = {}
        end = 0
        for name, shape, dtype in tensors:
            if dtype not in ITEM_BYTES:
                raise ValueError(
                    f"unknown type {dtype!r} of tensor {name!r}{near_text(dtype, ITEM_BYTES)}; "
                    f"expected one of {', '.join(ITEM_BYTES)}"
                )
            if name in places:
                raise ValueError(f"two tensors have the name {name!r}")
            offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            places[name] = WeightPlace(offset, tuple(shape), dtype)
            end = offset + places[name].byte_count
        return cls(places, end)

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that differ for tables that differ in anything."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return lists, dicts and numbers, of which `of_json` makes the table again."""
        tensors = [[name, place.offset, list(place.shape), place.dtype] for name, place in self.places.items()]
        return {"total_bytes": self.total_bytes, "tensors": tensors}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> WeightTable:
        """Return the table that `to_json` has written."""
        places = {name: WeightPlace(offset, tuple(shape), dtype) for name, offset, shape, dtype in value["tensors"]}
        return cls(places, value["total_bytes"])

    def difference_text(self, other: WeightTable) -> str:
        """Return how ``other`` differs in names and shapes, as a clause about it; "" if it does not.

        Types and places may differ: a reader converts and finds its tensors by name.
        """
        return "; ".join(self._differences(other))

    def _differences(self, other: WeightTable) -> Iterator[str]:
        if missing := [name for name in self.places if name not in other.places]:
            yield f"it lacks {_listed(missing)}"
        if unknown := [name for name in other.places if name not in self.places]:
            yield f"it has {_listed(unknown)}, which the model lacks"
        shapes = [
            f"{name} has shape {list(other.places[name].shape)} instead of {list(place.shape)}"
            for name, place in self.places.items()
            if name in other.places and other.places[name].shape != place.shape
        ]
        if shapes:
            yield _listed(shapes)


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_IN_TEXT
    return ", ".join(names[:_NAMES_IN_TEXT]) + (f" and {more} more" if more > 0 else "")
