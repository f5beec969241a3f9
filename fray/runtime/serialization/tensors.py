"""Tensors whose memory stays outside the pickle.

PyTorch pickles the memory of a tensor into the stream. A process that has imported it gets a pickler that knows better
for dense tensors on the CPU; Fray itself never imports it.
"""

from __future__ import annotations

import sys
from typing import Any

from fray.runtime.serialization.buffers import INLINE_UP_TO_BYTES

PROTOCOL = 5


def reduce_tensor(tensor: Any) -> Any:
    """How a pickler takes a tensor apart."""
    if not _is_dense(tensor):
        return tensor.__reduce_ex__(PROTOCOL)
    torch = sys.modules["torch"]
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return _tensor_of, (array, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _is_dense(tensor: Any) -> bool:
    """One block of plain numbers on the CPU, and all of it, so that nothing else shares its memory."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.grad_fn is not None or tensor.__dict__:
        return False
    size = tensor.numel() * tensor.element_size()
    return bool(size > INLINE_UP_TO_BYTES and tensor.untyped_storage().nbytes() == size)


def _tensor_of(array: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch  # type: ignore[import-not-found]  # a pickled tensor needs it whoever pickled it

    array = array if array.flags.writeable else array.copy()  # torch would write to it all the same
    return torch.from_numpy(array).view(dtype).reshape(shape).requires_grad_(requires_grad)
