"""The seam between the controller and whoever has machines.

A provider obeys: it decides nothing, tries nothing again, and remembers nothing that its cloud does not. One instance
serves all groups of its kind. Each call runs in a task of its own under a bound (`fray.controller.provider_driver`),
so it may
take its time; it may be cancelled at any checkpoint, and the law learns from `list` what has become of it.
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
    """A provider did not do what it was asked; ``kind`` says whether it is worth another try."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message, kind=kind.value)
        self.kind = kind


@frozen
class Join:
    """How the nodes of a new unit come in."""

    address: str
    """Of the controller, as ``fray-node --controller`` takes it."""
    token: str = field(repr=False)
    """Good for the nodes of this unit alone where that is known, else the cluster's."""


@frozen
class MachineRequest:
    """One unit to be made."""

    name: str
    """Unique for ever; what is made is found again by it. Lower-case letters, digits and ``-``, at most 60."""
    group: GroupConfig
    zone: str
    spot: bool
    join: Join


class Provider(Protocol):
    """Of one kind of machines. Every method may raise `ProviderError`; any other exception is a bug of the provider."""

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        """The policy was read again. Machines of groups that are gone are still listed and deleted, as far as can be.

        Raises:
            InvalidRequest: an option cannot be; nothing is changed.
        """

    async def create(self, request: MachineRequest) -> None:
        """Begin to make a unit; it need not be there on return. One of this name that exists already is enough.

        Its nodes join with `GroupConfig.node_attributes` of their zone, unit and worker.
        """

    async def delete(self, name: str, zone: str, group: str) -> None:
        """Begin to end a unit with all its hosts. One that does not exist is deleted already."""

    async def list(self) -> Sequence[SeenMachine]:
        """All units with this cluster's label, of whatever group; all or an error, never a part."""

    async def aclose(self) -> None:
        """The controller leaves. Machines stay, unless they are part of its process."""
