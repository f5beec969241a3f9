"""TPU slice types as data: how many chips, on how many hosts.

Source: Google Cloud TPU documentation, system architecture pages of v4, v5e, v5p and v6e. The number in a v4 and
v5p type counts TensorCores (two a chip); in v5e and v6e types it counts chips.
"""

from __future__ import annotations

import difflib

from fray.errors import InvalidRequest
from fray.model.word import frozen


@frozen
class TpuTopology:
    """One slice type. ``chips = hosts * chips_per_host``."""

    variant: str
    chips: int
    hosts: int
    chips_per_host: int


def _slices(prefix: str, sizes: list[int], cores_per_chip: int, largest_single_host: int) -> dict[str, TpuTopology]:
    table = {}
    for size in sizes:
        chips = max(1, size // cores_per_chip)
        per_host = chips if chips <= largest_single_host else 4
        table[f"{prefix}-{size}"] = TpuTopology(f"{prefix}-{size}", chips, chips // per_host, per_host)
    return table


TPU_TOPOLOGIES: dict[str, TpuTopology] = {
    **_slices("v4", [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], 2, 4),
    **_slices("v5litepod", [1, 4, 8, 16, 32, 64, 128, 256], 1, 8),
    **_slices("v5p", [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288], 2, 4),
    **_slices("v6e", [1, 4, 8, 16, 32, 64, 128, 256], 1, 8),
}


def tpu_topology(variant: str) -> TpuTopology:
    """The topology of a slice type such as ``v5litepod-16``.

    Raises:
        InvalidRequest: no such type; the message names the nearest ones.
    """
    try:
        return TPU_TOPOLOGIES[variant]
    except KeyError:
        near = difflib.get_close_matches(variant, TPU_TOPOLOGIES, 3) or list(TPU_TOPOLOGIES)[:3]
        raise InvalidRequest(f"unknown TPU type {variant!r}; near ones: {', '.join(near)}") from None
