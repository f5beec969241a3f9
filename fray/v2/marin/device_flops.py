"""Peak FLOP/s of one device as Marin counts them, and names of devices.

`fray.v2.flops` has the figures of `fray.v2`, which differ in the last digits for some GPUs.
"""

from __future__ import annotations

import logging
from typing import Literal

log = logging.getLogger("fray.v2")

FlopDtype = Literal["bf16", "fp16", "fp32", "fp64", "tf32", "int8", "int4", "fp8"]
"""Types of numbers."""

_T = 1e12


def _peaks(**teraflops: float) -> dict[str, float]:
    return {dtype: peak * _T for dtype, peak in teraflops.items()}


_HOPPER = _peaks(fp64=67, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979, int8=1979)
_AMPERE = _peaks(fp64=19.5, fp32=19.5, tf32=156, fp16=312, bf16=312)
_A10 = _peaks(fp32=31.2, tf32=62.5, fp16=125, bf16=125)
_MI300 = _peaks(fp64=163.4, fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9, int8=2614.9)
_V5P = _peaks(bf16=459)

DEVICE_FLOPS: dict[str, dict[str, float]] = {
    "h100": _HOPPER,
    "h100-pcie": _peaks(fp64=51, fp32=51, tf32=378, fp16=756.5, bf16=756.5, fp8=1513, int8=1513),
    "h200": _HOPPER,
    "a100": _AMPERE,
    "a100-40g": _AMPERE,
    "a100-80g": _AMPERE,
    "a10": _A10,
    "a10g": _A10,
    "a40": _peaks(fp32=37.4, tf32=74.8, fp16=149.7, bf16=149.7),
    "a6000": _peaks(fp32=38.7, tf32=154.85, fp16=154.85, bf16=154.85),
    "b100": _HOPPER,
    "b200": _peaks(fp64=40, fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000, int8=5000, fp4=10000),
    "v100": _peaks(fp64=7, fp32=14, fp16=112),
    "v100-sxm": _peaks(fp64=7.8, fp32=15.7, fp16=125),
    "v100s": _peaks(fp64=8.2, fp32=16.4, fp16=130),
    "t4": _peaks(fp32=8.1, fp16=65, int8=130, int4=260),
    "l4": _peaks(fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5, int8=242.5),
    "l40s": _peaks(fp32=91.6, tf32=183.2, fp16=366.5, bf16=366.5, fp8=733, int8=733),
    "gb10": _peaks(bf16=100),
    "mi300x": _MI300,
    "mi325x": _MI300,
    "mi350x": _peaks(fp64=72.1, fp32=144.2, fp16=2309.6, bf16=2309.6, fp8=4614, int8=4614),
    "mi355x": _peaks(fp64=78.6, fp32=157.3, fp16=2516.6, bf16=2516.6, fp8=5033.2, int8=5033.2),
    "auto": _HOPPER,
    "v3": _peaks(bf16=61.5),
    "v4": _peaks(bf16=275, int8=275),
    "v5litepod": _peaks(bf16=197, int8=393),
    "v5": _V5P,
    "v5p": _V5P,
    "v6e": _peaks(bf16=918, int8=1836),
    "trn1": _peaks(fp32=23.75, tf32=23.75, fp16=95, bf16=95, int8=190),
}
"""FLOP/s by device and type of numbers; ``auto`` counts as an H100."""

_JAX_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("h100", "pcie"), "h100-pcie"),
    (("h100",), "h100"),
    (("h200",), "h200"),
    (("a100", "80g"), "a100-80g"),
    (("a100",), "a100-40g"),
    (("a10g",), "a10g"),
    (("a10",), "a10"),
    (("a40",), "a40"),
    (("v100", "sxm"), "v100-sxm"),
    (("v100s",), "v100s"),
    (("v100",), "v100"),
    (("t4",), "t4"),
    (("a6000",), "a6000"),
    (("l40s",), "l40s"),
    (("l4",), "l4"),
    (("b200",), "b200"),
    (("gb10",), "gb10"),
    *(((name,), name) for name in ("mi300x", "mi325x", "mi350x", "mi355x")),
)
"""Words of JAX's ``device_kind``, and the device that has them all; the first match counts."""


def normalize_device_type(device_type: str) -> str:
    """Return the key of `DEVICE_FLOPS`: ``v4`` for ``v4-128``, ``h100`` for ``H100``."""
    lower = device_type.lower()
    # Also for "v100-sxm", as Marin has it; the other GPUs keep what follows their dash.
    return lower.partition("-")[0] if lower.startswith("v") else lower


def normalize_dtype(dtype: str) -> str:
    """Return the type of numbers in lower case and without ``amp_``."""
    return dtype.lower().removeprefix("amp_")


def device_flops(device_type: str, dtype: str = "bf16") -> float | None:
    """Return the peak of one device in FLOP/s; None, with a line in the log, if it is not in the table."""
    found = DEVICE_FLOPS.get(normalize_device_type(device_type), {}).get(normalize_dtype(dtype))
    if found is None:
        log.warning("the peak FLOP/s of %s in %s are not known", device_type, dtype)
    return found


def jax_device_kind_to_fray_device_type(kind: str) -> str:
    """Return the key of `DEVICE_FLOPS` for JAX's ``device_kind``: ``h100`` for ``NVIDIA H100 80GB HBM3``."""
    kind = kind.lower()
    if kind.startswith("tpu "):
        generation = kind.removeprefix("tpu ").strip()
        if "5" in generation:
            return "v5litepod" if "lite" in generation else "v5p"
        return "v6e" if "6" in generation and "lite" in generation else generation.replace(" ", "")
    return next((name for words, name in _JAX_KINDS if all(word in kind for word in words)), kind)


def device_flops_for_jax_device(jax_device_kind: str, dtype: str = "bf16") -> float | None:
    """Return the peak in FLOP/s of the device of a JAX ``device_kind``; None if it is not in the table."""
    return device_flops(jax_device_kind_to_fray_device_type(jax_device_kind), dtype)
