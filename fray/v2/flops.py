"""Peak FLOP/s of accelerators, dense, one chip, as their makers publish them.

Sources: Google Cloud's pages on TPU v4, v5e, v5p, v6e and TPU7x; NVIDIA's data sheets of the GPUs (tensor cores,
without sparsity; SXM where there are several forms). A CPU machine counts as 1e11: an
amount for planning, not a measurement.
"""

from __future__ import annotations

from fray.model.topology import find_topology

_TPU = {
    "v4": {"bf16": 275e12, "int8": 275e12},
    "v5litepod": {"bf16": 197e12, "int8": 394e12},
    "v5p": {"bf16": 459e12, "int8": 918e12},
    "v6e": {"bf16": 918e12, "int8": 1836e12},
    "tpu7x": {"bf16": 2307e12, "fp8": 4614e12},
}
_GPU = {
    "a10": {"bf16": 125e12, "fp16": 125e12, "int8": 250e12, "fp32": 31.2e12},
    "a100": {"bf16": 312e12, "fp16": 312e12, "int8": 624e12, "fp32": 19.5e12},
    "h100": {"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 67e12},
    "h200": {"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 67e12},
    "b200": {"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12, "int8": 4500e12, "fp32": 80e12},
    "l4": {"bf16": 121e12, "fp16": 121e12, "fp8": 242e12, "int8": 242e12, "fp32": 30.3e12},
    "l40s": {"bf16": 362e12, "fp16": 362e12, "fp8": 733e12, "int8": 733e12, "fp32": 91.6e12},
    "t4": {"fp16": 65e12, "int8": 130e12, "fp32": 8.1e12},
    "v100": {"fp16": 125e12, "fp32": 15.7e12},
}
_CPU = 1e11
_SAME = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float8": "fp8"}


def peak_flops(kind: str, variant: str, dtype: str = "bf16") -> float:
    """Return the peak of one chip of a device, in FLOP/s.

    Raises:
        ValueError: the chip or the type of number is not in the tables; the message lists those that are.
    """
    if kind == "cpu":
        return _CPU
    known = _TPU if kind == "tpu" else _GPU
    name = _chip(kind, variant)
    if name not in known:
        raise ValueError(f"peak FLOP/s of {kind} {variant!r} are not known; known: {', '.join(sorted(known))}")
    number = _SAME.get(dtype, dtype)
    if number not in known[name]:
        raise ValueError(
            f"peak FLOP/s of {variant} in {dtype!r} are not known; known: {', '.join(sorted(known[name]))}"
        )
    return known[name][number]


def _chip(kind: str, variant: str) -> str:
    """Return the chip's name in the tables: ``v5litepod`` for ``v5e-16``, ``a100`` for ``A100-80GB``."""
    if kind == "tpu":
        found = find_topology(variant)
        return found.variant.rpartition("-")[0] if found else variant
    return variant.lower().split("-")[0]
