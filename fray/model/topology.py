"""TPU slice types as data: how many chips, on how many hosts.

Source: Google Cloud TPU documentation, system architecture pages of v4, v5e, v5p and v6e; for TPU7x (Ironwood) the GKE
page on planning TPUs (``tpu7x-standard-4t``: four chips a machine) and the names of Google's own ``xpk``. The cloud TPU
API has no type for TPU7x yet: such machines come from GKE and report their type themselves.

- The number in a v4, v5p or tpu7x type counts TensorCores, two a chip. In v5e and v6e types it counts chips.
- A host of v4, v5p and tpu7x has four chips. Slices of v5e and v6e up to eight chips are one machine, larger ones
  consist of machines of four.
- v4, v5p and tpu7x are cubes of 4x4x4 chips joined by switches, so beyond one cube every multiple of it is a slice type
  here. Only the cloud determines which of those it sells; chips and hosts follow from the number anyway.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import lru_cache

from fray.errors import InvalidRequest
from fray.model.frozen import frozen


@frozen
class TpuTopology:
    """One slice type. ``chips = hosts * chips_per_host``."""

    variant: str
    chips: int
    hosts: int
    chips_per_host: int


@frozen
class TpuFamily:
    """Slice types of one generation, ``{prefix}-{size}``.

    Attributes:
        prefix: as the cloud writes it.
        aliases: other ways to write it.
        cores_per_chip: 2: sizes count TensorCores; 1: they count chips.
        sizes: all of them, or those up to one cube.
        largest: every multiple of a cube up to this is a size too; 0: none.
        one_host_chips: slices of up to so many chips are one machine; those of larger ones have four chips.
    """

    prefix: str
    sizes: tuple[int, ...]
    cores_per_chip: int = 1
    largest: int = 0
    one_host_chips: int = 4
    aliases: tuple[str, ...] = ()

    def all_sizes(self) -> tuple[int, ...]:
        return *self.sizes, *range(2 * self.sizes[-1], self.largest + 1, self.sizes[-1])

    def topology(self, size: int) -> TpuTopology:
        chips = size // self.cores_per_chip
        per_host = chips if chips <= self.one_host_chips else CHIPS_PER_HOST
        return TpuTopology(f"{self.prefix}-{size}", chips, chips // per_host, per_host)


CHIPS_PER_HOST = 4
"""Chips of a host in slices of several hosts, in every generation so far."""
_CUBE = (8, 16, 32, 64, 128)
_FLAT = (1, 4, 8, 16, 32, 64, 128, 256)
TPU_FAMILIES = (
    TpuFamily("v4", _CUBE, cores_per_chip=2, largest=4096),
    TpuFamily("v5litepod", _FLAT, one_host_chips=8, aliases=("v5e", "v5lite")),
    TpuFamily("v5p", _CUBE, cores_per_chip=2, largest=12288),
    TpuFamily("v6e", _FLAT, one_host_chips=8, aliases=("trillium",)),
    TpuFamily("tpu7x", _CUBE, cores_per_chip=2, largest=18432, aliases=("v7x", "ironwood")),
)
_PARTS = re.compile(r"(.*?)-?(\d{0,9})\Z", re.DOTALL)
_NAMED = {name: family for family in TPU_FAMILIES for name in (family.prefix, *family.aliases)}


@lru_cache(maxsize=1024)
def find_topology(variant: str) -> TpuTopology | None:
    """Return the topology of a slice type in any spelling; None: unknown type."""
    name, dash, size = variant.strip().lower().rpartition("-")
    family = _NAMED.get(name) if dash and size.isdecimal() else None
    return family.topology(int(size)) if family and int(size) in family.all_sizes() else None


def tpu_topology(variant: str) -> TpuTopology:
    """Return the topology of a slice type such as ``v5litepod-16``; ``v5e-16`` is the same.

    Raises:
        InvalidRequest: no such type; the message names the nearest ones.
    """
    found = find_topology(variant) if isinstance(variant, str) else None
    if found is None:
        raise InvalidRequest(f"unknown TPU type {variant!r}; similar types: {', '.join(_similar_types(str(variant)))}")
    return found


def _similar_types(variant: str) -> list[str]:
    """Return types of the same generation and similar size, or of generations with a similar name."""
    written = variant.strip().lower()
    name, size = (written, "") if written in _NAMED else _PARTS.match(written).groups()  # type: ignore[union-attr]
    if name in _NAMED:
        return _nearest_sizes(_NAMED[name], size)
    likely = difflib.get_close_matches(name, _NAMED, 3, 0.5) or [family.prefix for family in TPU_FAMILIES]
    prefixes = dict.fromkeys(_NAMED[one].prefix for one in likely)
    return [near for prefix in prefixes for near in _nearest_sizes(_NAMED[prefix], size)[:1]]


def _nearest_sizes(family: TpuFamily, size: str) -> list[str]:
    """Return the three nearest sizes, nearest first."""
    wanted = max(1, int(size)) if size else family.sizes[0]
    sizes = sorted(family.all_sizes(), key=lambda one: max(one, wanted) / min(one, wanted))
    return [f"{family.prefix}-{one}" for one in sizes[:3]]


def topology_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield rows for documentation: name, what its number counts, types of one host, types of several."""
    for family in TPU_FAMILIES:
        single = [size for size in family.sizes if family.topology(size).hosts == 1]
        several = [f"{size} ({family.topology(size).hosts})" for size in family.sizes if size not in single]
        if family.largest:
            hosts = family.topology(family.largest).hosts
            several.append(f"every multiple of {family.sizes[-1]} up to {family.largest} ({hosts})")
        counts = "chips" if family.cores_per_chip == 1 else f"TensorCores, {family.cores_per_chip} a chip"
        name = ", ".join([f"`{family.prefix}-N`", *(f"`{alias}-N`" for alias in family.aliases)])
        yield name, counts, ", ".join(map(str, single)), ", ".join(several)
