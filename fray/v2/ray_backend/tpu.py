"""Slices of TPU VMs for one gang: first the slices, by the resource that only the first VM of each has, then all of
their VMs, a bundle of a placement group for each.

The head of a slice stands for the slice: whoever holds it, holds all of it. So two gangs never have halves of the same
two slices. The VMs of a slice offer a resource of its name, which keeps the bundles of one slice together.
"""

from __future__ import annotations

from typing import Any

from ray.util import placement_group_table

from fray.v2.ray_backend.process_context import untyped
from fray.v2.ray_backend.specs import SliceRequest

SLICE_LABEL = "ray.io/tpu-slice-name"
MEGASCALE_PORT = "8081"


def head_bundles(wish: SliceRequest) -> list[dict[str, float]]:
    """One for each slice."""
    return [{wish.head: 1}] * wish.slices


def names_of_slices(heads: Any) -> list[str | None]:
    """Of the slices that a placement group of `head_bundles` holds; None: that machine is of no named slice."""
    nodes = {node["NodeID"]: node for node in untyped.nodes()}
    held = placement_group_table(heads)["bundles_to_node_id"]
    return [_slice_of(nodes.get(held[index], {})) for index in sorted(held)]


def _slice_of(node: dict[str, Any]) -> str | None:
    name = (node.get("Labels") or {}).get(SLICE_LABEL)
    return name if name in (node.get("Resources") or {}) else None


def vm_bundles(wish: SliceRequest, names: list[str | None], each: dict[str, float]) -> list[dict[str, float]]:
    """One for each VM, slice by slice: what a member takes (``each``), at the slice of that name."""
    return [each | ({name: 1} if name else {}) for name in names for _ in range(wish.vms)]


def variables(wish: SliceRequest, rank: int, coordinator: str) -> dict[str, str]:
    """What the TPU runtime of a member wants to know where there are several slices."""
    if wish.slices == 1:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": f"{coordinator}:{MEGASCALE_PORT}",
        "MEGASCALE_NUM_SLICES": str(wish.slices),
        "MEGASCALE_SLICE_ID": str(rank // wish.vms),
        "MEGASCALE_PORT": MEGASCALE_PORT,
    }
