"""Peak FLOP/s of devices as Marin imports them. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.v2.marin.device_flops import (
    DEVICE_FLOPS,
    FlopDtype,
    device_flops,
    device_flops_for_jax_device,
    jax_device_kind_to_fray_device_type,
    normalize_device_type,
    normalize_dtype,
)
from fray.v2.marin.version import unknown_name

__all__ = [
    "DEVICE_FLOPS",
    "FlopDtype",
    "device_flops",
    "device_flops_for_jax_device",
    "jax_device_kind_to_fray_device_type",
    "normalize_device_type",
    "normalize_dtype",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
