"""Interface between the controller and a source of machines.

A provider only carries out orders: it decides nothing, retries nothing, and remembers nothing that its cloud does not.
One instance serves all groups of its kind. Each call runs in a task of its own with a timeout
(`fray.controller.provider_driver`), so it may take its time; it may be cancelled at any checkpoint, and the scheduler
learns from `list` what has become of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import field, frozen

from fray.errors import FrayError
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)

__all__ = [
    "ErrorKind",
    "GroupConfig",
    "Join",
    "MachineRequest",
    "MachineState",
    "Provider",
    "ProviderError",
    "SeenMachine",
]


class ProviderError(FrayError):
    """A provider failed to carry out an order; ``kind`` says whether to retry."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message, kind=kind.value)
        self.kind = kind


@frozen
class Join:
    """Address and token with which the nodes of a new unit join."""

    address: str
    """Address of the controller, as ``fray-node --controller`` takes it."""
    token: str = field(repr=False)
    """Join token of this unit."""


@frozen
class MachineRequest:
    """Order to create one unit."""

    name: str
    """Name of the unit, never reused; the unit is found again by it. Lower-case letters, digits and ``-``, at most 60.
    """
    group: GroupConfig
    zone: str
    spot: bool
    join: Join


class Provider(Protocol):
    """Provider of one kind of machines. Every method may raise `ProviderError`; any other exception is a bug of the
    provider."""

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        """Apply a changed policy. Machines of groups that are gone are still listed and deleted, as far as possible.

        Raises:
            InvalidRequest: an option is invalid; nothing is changed.
        """

    async def create(self, request: MachineRequest) -> None:
        """Start to create a unit; it need not exist on return. One of this name that exists already is enough.

        Its nodes join with `GroupConfig.node_attributes` of their zone, unit and worker.
        """

    async def delete(self, name: str, zone: str, group: str) -> None:
        """Start to delete a unit with all its hosts. One that does not exist counts as deleted."""

    async def list(self) -> Sequence[SeenMachine]:
        """Return all units with this cluster's label, of any group; a partial list is an error."""

    async def aclose(self) -> None:
        """Close the provider. Machines stay, unless they are part of its process."""
