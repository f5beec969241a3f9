"""Machines that exist independently of the cluster: they are declared, never created or deleted.

A request that fits none of them is refused at once, and the explanation of one that waits names them. A machine
counts as joined when a node with its name (or with its name as attribute ``machine``) is connected.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from fray.controller.providers.base import MachineRequest, ProviderError
from fray.model.policy.machine_groups import ErrorKind, GroupConfig, SeenMachine


@define(eq=False)
class FixedProvider:
    """Provider of all groups of kind ``fixed``; ``options.machines`` names them."""

    groups: Sequence[GroupConfig]

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        self.groups = groups

    async def create(self, request: MachineRequest) -> None:
        raise ProviderError(ErrorKind.INVALID, "provider fixed cannot create machines")

    async def delete(self, name: str, zone: str, group: str) -> None:
        """Ignore a machine that is no longer in the policy."""

    async def list(self) -> Sequence[SeenMachine]:
        return [
            SeenMachine(name, group.name, group.zones[0])
            for group in self.groups
            if group.provider == "fixed"
            for name in group.options["machines"]
        ]

    async def aclose(self) -> None:
        pass
