"""Out-of-band pickling of PyTorch tensors.

PyTorch pickles the memory of a tensor into the stream. In a process that has imported it, `reduce_tensor` replaces
that for dense tensors on the CPU; Fray itself never imports PyTorch.
"""

from __future__ import annotations

import sys
from typing import Any

from fray.runtime.serialization.buffers import INLINE_UP_TO_BYTES

PROTOCOL = 5


def reduce_tensor(tensor: Any) -> Any:
    """Return what a pickler's reducer returns for a tensor."""
    if not _is_dense(tensor):
        return tensor.__reduce_ex__(PROTOCOL)
    torch = sys.modules["torch"]
    # As bytes: numpy has no bfloat16 and other types of PyTorch.
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return _tensor_of, (array, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _is_dense(tensor: Any) -> bool:
    """Return whether the tensor is all of one block of numbers on the CPU, whose memory no other tensor shares."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.grad_fn is not None or tensor.__dict__:
        return False
    size = tensor.numel() * tensor.element_size()
    # Tensors that share a storage are left to PyTorch, whose own pickling keeps the sharing.
    return bool(size > INLINE_UP_TO_BYTES and tensor.untyped_storage().nbytes() == size)


def _tensor_of(array: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch  # unpickling a tensor needs it anyway

    array = array if array.flags.writeable else array.copy()  # torch would write to it all the same
    return torch.from_numpy(array).view(dtype).reshape(shape).requires_grad_(requires_grad)
