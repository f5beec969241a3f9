"""Payloads and results with large buffers beside their pickle."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import FrayError
from fray.model.specs import BLOB_LIMIT_BYTES
from fray.runtime.serialization import pickling
from fray.runtime.serialization.values import LargeValue, loads_value, value_id, value_of


def large(obj: object) -> LargeValue:
    found = value_of(pickling.pack(obj))
    assert isinstance(found, LargeValue)
    return found


@given(sizes=st.lists(st.integers(0, 3_000), max_size=6), text=st.text(max_size=50))
def test_a_small_object_is_bytes_and_its_arrays_are_copies(sizes: list[int], text: str) -> None:
    arrays = [numpy.arange(size, dtype="u2") for size in sizes]
    value = value_of(pickling.pack((text, arrays)))
    assert isinstance(value, bytes)
    found_text, found = loads_value(value)
    assert found_text == text
    assert all((one == other).all() and other.flags.writeable for one, other in zip(arrays, found, strict=True))


def test_a_large_array_is_not_copied_when_it_is_made_and_when_it_is_opened() -> None:
    array = numpy.arange(BLOB_LIMIT_BYTES, dtype="u1")
    value = large({"a": array, "b": array[:70_000]})
    array[5] = 77
    content = value.join()
    assert len(content) == len(value)
    found = loads_value(content, owned=True)
    assert found["a"][5] == 77
    assert (found["a"] == array).all()
    assert found["a"].ctypes.data % 16 == 0
    found["a"][6] = 78
    assert numpy.frombuffer(content, "u1").tobytes() != bytes(value.join())


def test_an_object_that_is_opened_from_bytes_of_others_has_copies() -> None:
    content = large(numpy.zeros(BLOB_LIMIT_BYTES, "u1")).join()
    one, two = loads_value(content), loads_value(content)
    one[0] = 1
    assert two[0] == 0


@pytest.mark.parametrize("obj", [b"x" * (BLOB_LIMIT_BYTES + 1), list(range(3_000_000)), "é" * BLOB_LIMIT_BYTES])
def test_objects_without_buffers_are_plain_pickles(obj: object) -> None:
    assert loads_value(bytes(large(obj).join())) == obj


@given(st.lists(st.binary(min_size=0, max_size=40), max_size=8), st.integers(0, 400), st.integers(1, 100))
def test_a_part_is_read_across_the_borders_of_views(views: list[bytes], at: int, size: int) -> None:
    whole = b"".join(views)
    value = LargeValue([memoryview(view) for view in views])
    at = min(at, len(whole))
    size = min(size, len(whole) - at)
    assert (len(value), value.read(at, size)) == (len(whole), whole[at : at + size])


def test_equal_objects_have_equal_names() -> None:
    one, two = numpy.ones(BLOB_LIMIT_BYTES, "u1"), numpy.ones(BLOB_LIMIT_BYTES, "u1")
    assert value_id(large(one)) == value_id(large(two))
    two[-1] = 0
    assert value_id(large(one)) != value_id(large(two))


def test_a_truncated_container_is_refused() -> None:
    content = large(numpy.zeros(BLOB_LIMIT_BYTES, "u1")).join()
    with pytest.raises(FrayError, match="truncated"):
        loads_value(content[: BLOB_LIMIT_BYTES // 2])
