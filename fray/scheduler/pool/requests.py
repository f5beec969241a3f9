"""What is asked of a pool in one decision: an `Ask`, placed whole or not at all.

An ask has parts: one for a job, one for each job of a group, one for the units of a reservation. All members of a part
want the same; any-of devices are several `choices`, of which the whole part gets one. A part with ``slice_hosts`` is
made of runs of so many members, and each run takes all hosts of one TPU slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, frozen

from fray.model.gangs import slice_hosts
from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.model.specs import JobSpec


def is_weightless(demand: Demand) -> bool:
    """Takes nothing of a machine."""
    return not (demand.cpu_milli or demand.memory_bytes or demand.disk_bytes or demand.device_count)


@frozen(cache_hash=True)
class MemberGroup:
    """Members that want the same.

    Attributes:
        choices: what each takes of its machine; one of these for all, the first that can be had. Never empty.
        members: how many. With ``slice_hosts`` a multiple of it.
        slice_hosts: hosts of one TPU slice, if that is more than one; else 0.
    """

    choices: tuple[Demand, ...]
    members: int = 1
    slice_hosts: int = 0

    @property
    def demand(self) -> Demand:
        """The one that is liked best."""
        return self.choices[0]


@frozen(cache_hash=True)
class PlacementRequest:
    """Parts that are placed together.

    Attributes:
        same: ``"region"`` or ``"zone"`` that all parts must share; empty: anywhere.
    """

    parts: tuple[MemberGroup, ...]
    same: str = ""

    @property
    def members(self) -> int:
        return sum(part.members for part in self.parts)

    @property
    def is_weightless(self) -> bool:
        """It takes nothing of any machine, whichever of its devices it gets (but a port, perhaps)."""
        return all(map(is_weightless, self.demands))

    @property
    def demands(self) -> tuple[Demand, ...]:
        """All that any member might take."""
        return tuple(choice for part in self.parts for choice in part.choices)


@frozen
class MemberPlacement:
    """One member's place: a node, and the devices and ports of it."""

    node: NodeName
    devices: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()


@frozen
class Placement:
    """Where the members of one part go, in order, and which of its choices they got."""

    grants: tuple[MemberPlacement, ...]
    choice: int = 0

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        return tuple(grant.node for grant in self.grants)


def part_of(spec: JobSpec) -> MemberGroup:
    """What a job asks for."""
    hosts = slice_hosts(spec)
    return MemberGroup((spec.demand, *spec.alternatives), spec.members, hosts if hosts > 1 else 0)


def request_of(spec: JobSpec) -> PlacementRequest:
    """What a job asks for by itself."""
    return PlacementRequest((part_of(spec),))


def confine_to(ask: PlacementRequest, same: str, place: str) -> PlacementRequest:
    """The same, of machines of one region or zone only; empty: of those that name none.

    Args:
        same: ``"region"`` or ``"zone"``.
    """
    return PlacementRequest(
        tuple(evolve(part, choices=tuple(_in_locality(d, same, place) for d in part.choices)) for part in ask.parts)
    )


def _in_locality(demand: Demand, same: str, place: str) -> Demand:
    return evolve(demand, zones=(place,)) if same == "zone" else evolve(demand, regions=(place,))


Shares: TypeAlias = Mapping[NodeName, tuple[tuple[Demand, int], ...]]
"""By machine: demands, and how many members of each."""


def nodes_of(placed: Iterable[Placement]) -> dict[NodeName, None]:
    return {node: None for one in placed for node in one.nodes}


def shares_of(ask: PlacementRequest, placed: Sequence[Placement]) -> Shares:
    """What is taken of which machine."""
    found: dict[NodeName, dict[Demand, int]] = {}
    for part, one in zip(ask.parts, placed, strict=True):
        demand = part.choices[one.choice]
        for node in one.nodes:
            here = found.setdefault(node, {})
            here[demand] = here.get(demand, 0) + 1
    return {node: tuple(demands.items()) for node, demands in found.items()}
