"""Machines that are there whatever the cluster wants: nothing is made or deleted, they are only declared.

So what fits none of them is refused at once, and what waits is told that it waits for them. A machine counts as joined
when a node of its name is here (or one with its name as attribute ``machine``).
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
        raise ProviderError(ErrorKind.INVALID, "nothing is made in a group of provider fixed")

    async def delete(self, name: str, zone: str, group: str) -> None:
        """A machine that left the policy: nobody looks after it any more."""

    async def list(self) -> Sequence[SeenMachine]:
        return [
            SeenMachine(name, group.name, group.zones[0])
            for group in self.groups
            if group.provider == "fixed"
            for name in group.options["machines"]
        ]

    async def aclose(self) -> None:
        pass
