"""Requests to a pool: parts that are placed together or not at all.

A request has parts: one for a job, one for each job of a group, one for the units of a reservation. All members of a
part want the same; alternative devices are several `choices`, of which the whole part gets one. The members of a part
with ``slice_hosts`` are grouped by that number, and each group takes all hosts of one TPU slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, field, frozen

from fray.model.gangs import slice_hosts
from fray.model.ids import AttemptId, NodeName
from fray.model.resources import Demand
from fray.model.specs import JobSpec


def is_weightless(demand: Demand) -> bool:
    """Return whether the demand takes nothing of a machine."""
    return not (demand.cpu_milli or demand.memory_bytes or demand.disk_bytes or demand.device_count)


# Keys of the pool's indexes and caches: the hash of all demands is computed once for each object.
@frozen(cache_hash=True)
class MemberGroup:
    """Members that want the same.

    Attributes:
        choices: alternatives of what each member takes; all members get the first that fits. Never empty.
        members: number of members; with ``slice_hosts`` a multiple of it.
        slice_hosts: hosts of one TPU slice if that is more than one, else 0.
    """

    # One choice for all members, even if a mixture of devices would let them start sooner.
    choices: tuple[Demand, ...]
    members: int = 1
    slice_hosts: int = 0

    @property
    def demand(self) -> Demand:
        """The preferred choice."""
        return self.choices[0]


@frozen(cache_hash=True)
class PlacementRequest:
    """Parts that are placed together.

    Attributes:
        same: ``"region"`` or ``"zone"`` that all parts must share; empty for no condition.
    """

    parts: tuple[MemberGroup, ...]
    same: str = ""
    demands: tuple[Demand, ...] = field(init=False, eq=False, repr=False)
    """All choices of all parts."""
    is_weightless: bool = field(init=False, eq=False, repr=False)
    """True if it takes nothing of any machine (except ports), whichever choice it gets."""

    @demands.default
    def _all_demands(self) -> tuple[Demand, ...]:
        return tuple(choice for part in self.parts for choice in part.choices)

    @is_weightless.default
    def _takes_nothing(self) -> bool:
        return all(map(is_weightless, self.demands))

    @property
    def members(self) -> int:
        return sum(part.members for part in self.parts)


@frozen
class MemberPlacement:
    """Place of one member: a node, and its devices and ports there."""

    node: NodeName
    devices: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    loans: tuple[tuple[AttemptId, int], ...] = ()
    """Thousandths of CPUs that are lent to it, by lender: the pool has given it so much less."""


@frozen
class Placement:
    """Places of the members of one part, in order, and the choice they got."""

    grants: tuple[MemberPlacement, ...]
    choice: int = 0

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        return tuple(grant.node for grant in self.grants)


def part_of(spec: JobSpec) -> MemberGroup:
    """Return what a job requests, as part of a request."""
    hosts = slice_hosts(spec)
    # A slice of a single host is an ordinary machine with chips: it may be shared.
    return MemberGroup((spec.demand, *spec.alternatives), spec.members, hosts if hosts > 1 else 0)


def request_of(spec: JobSpec) -> PlacementRequest:
    """Return what a job requests by itself."""
    return PlacementRequest((part_of(spec),))


def confine_to(request: PlacementRequest, same: str, place: str) -> PlacementRequest:
    """Return the same request for machines of one region or zone only.

    Args:
        same: ``"region"`` or ``"zone"``.
        place: its name; empty for machines without the attribute.
    """
    return PlacementRequest(
        tuple(evolve(part, choices=tuple(_in_locality(d, same, place) for d in part.choices)) for part in request.parts)
    )


def _in_locality(demand: Demand, same: str, place: str) -> Demand:
    # It replaces the zones or regions of the author, among which the place is: it was found with them.
    return evolve(demand, zones=(place,)) if same == "zone" else evolve(demand, regions=(place,))


MemberShare: TypeAlias = tuple[Demand, tuple[str, ...], tuple[int, ...]]
"""Amounts, devices and ports that a member takes of its machine."""
PlacedShare: TypeAlias = tuple[NodeName, MemberShare]
"""A machine, and what a member takes of it."""
Shares: TypeAlias = Mapping[NodeName, tuple[tuple[Demand, int], ...]]
"""Demands and number of members of each, by machine."""


def nodes_of(placed: Iterable[Placement]) -> dict[NodeName, None]:
    return {node: None for one in placed for node in one.nodes}


def shares_of(request: PlacementRequest, placed: Sequence[Placement]) -> Shares:
    """Return what a placed request takes of each machine."""
    found: dict[NodeName, dict[Demand, int]] = {}
    for part, one in zip(request.parts, placed, strict=True):
        # The choice that was placed: alternatives differ in devices, and so in what they take.
        demand = part.choices[one.choice]
        for node in one.nodes:
            here = found.setdefault(node, {})
            here[demand] = here.get(demand, 0) + 1
    return {node: tuple(demands.items()) for node, demands in found.items()}
