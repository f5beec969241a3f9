"""Reservation of TPU slices for one gang, as bundles of placement groups.

First the slices are reserved, by the resource that only the first VM of each slice has (its head), then all of their
VMs. A gang that has reserved the head of a slice has the whole slice, so two gangs never have halves of the same two
slices. The VMs of a slice offer a resource of its name, which keeps the bundles of one slice together.
"""

from __future__ import annotations

from typing import Any

from ray.util import placement_group_table

from fray.v2.ray_backend.process_context import untyped
from fray.v2.ray_backend.specs import SliceRequest

SLICE_LABEL = "ray.io/tpu-slice-name"
MEGASCALE_PORT = "8081"


def head_bundles(request: SliceRequest) -> list[dict[str, float]]:
    """Return a bundle for each slice."""
    return [{request.head: 1}] * request.slices


def names_of_slices(heads: Any) -> list[str | None]:
    """Return the names of the slices that a placement group of `head_bundles` has reserved; None for a machine without
    a slice name."""
    nodes = {node["NodeID"]: node for node in untyped.nodes()}
    bundles = placement_group_table(heads)["bundles_to_node_id"]
    return [_slice_of(nodes.get(bundles[index], {})) for index in sorted(bundles)]


def _slice_of(node: dict[str, Any]) -> str | None:
    name = (node.get("Labels") or {}).get(SLICE_LABEL)
    return name if name in (node.get("Resources") or {}) else None


def vm_bundles(request: SliceRequest, names: list[str | None], each: dict[str, float]) -> list[dict[str, float]]:
    """Return a bundle for each VM, slice by slice: the amounts of a member (``each``), in the slice of that name."""
    return [each | ({name: 1} if name else {}) for name in names for _ in range(request.vms)]


def variables(request: SliceRequest, rank: int, coordinator: str) -> dict[str, str]:
    """Return the variables that the TPU runtime of a member needs when the job has several slices."""
    if request.slices == 1:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": f"{coordinator}:{MEGASCALE_PORT}",
        "MEGASCALE_NUM_SLICES": str(request.slices),
        "MEGASCALE_SLICE_ID": str(rank // request.vms),
        "MEGASCALE_PORT": MEGASCALE_PORT,
    }
