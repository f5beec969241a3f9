"""Weights of one version, as servers get them: a reference to shared memory or to a file, and the versions kept.

The controller of a run and the coordinator have the references only; the bytes go from the trainer to the servers.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen

from fray.api.objects import ObjectRef
from fray.errors import ObjectLost
from fray.rl.core.versions import VersionName
from fray.rl.weights_table import WeightTable


class WeightSync(Enum):
    """Way of the weights from the trainer to the servers."""

    MEMORY = "memory"
    """Shared memory of the trainer's host, which servers there read in place; other hosts fetch it once each."""
    DISK = "disk"
    """Files of safetensors in the output directory."""
    NETWORK = "network"
    """Safetensors over HTTP: the trainer's process posts them to a port of each server."""
    NONE = "none"
    """Servers keep the weights of the model."""


@frozen
class WeightFile:
    """File with weights; ``await`` gives its bytes, mapped."""

    path: Path

    def __await__(self) -> Generator[Any, Any, Any]:
        return trio.to_thread.run_sync(self._map).__await__()

    def _map(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ObjectLost(f"{self.path} no longer exists: newer weights have replaced it") from None

    async def release(self) -> None:
        """Remove the file."""
        await trio.to_thread.run_sync(lambda: self.path.unlink(missing_ok=True))


@frozen
class PublishedWeights:
    """Weights of a version.

    Attributes:
        table: which tensor is where.
        content: gives the bytes when awaited, read-only; raises ObjectLost if they are gone.
    """

    table: WeightTable
    content: ObjectRef | WeightFile


@define
class KeptWeights:
    """Weights that servers may load: the newest, and those that servers load still or keep for a validation."""

    kept: dict[VersionName, PublishedWeights | None] = field(factory=dict)
    """Weights of each version; None: those of the model, which servers have."""

    def add(self, version: VersionName, weights: PublishedWeights | None, needed: Sequence[VersionName | None]) -> None:
        """Keep the weights of a new version, and of those before it the ``needed`` ones."""
        kept = {name: found for name, found in self.kept.items() if name in needed and name != version}
        self.kept = {**kept, version: weights}
