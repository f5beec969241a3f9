"""Tensors of torch in a batch: they are sent with their own types, bfloat16 by its bits."""

from __future__ import annotations

import numpy as np
import pytest

from fray.tinker.wire.dataproto import DataProtoError, TensorRecord, decode_value, encode_data_proto, encode_value

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_a_tensor_is_sent_with_its_type_and_elements(name: str) -> None:
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, name)).T
    record = decode_value(encode_value(tensor))
    assert record == TensorRecord(tensor.contiguous().numpy(), f"torch.{name}")


def test_bfloat16_is_sent_by_its_bits() -> None:
    tensor = torch.tensor([1.0, -2.5, float("inf")], dtype=torch.bfloat16, requires_grad=True)
    record = decode_value(encode_value(tensor))
    assert record.dtype == "torch.bfloat16"
    back = torch.from_numpy(record.array.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(back, tensor.detach())


def test_a_type_without_encoding_is_refused_by_name() -> None:
    with pytest.raises(DataProtoError, match=r"batch\['z'\]: tensors of torch.complex64 cannot be sent"):
        encode_data_proto({"batch": {"z": torch.zeros(1, dtype=torch.complex64)}})
