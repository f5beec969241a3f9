"""Infeasible requests: why machines, even if they were empty, could not hold a job; and what slices lack now."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fray.model.resources import Capacity, Demand
from fray.model.specs import JobSpec
from fray.scheduler.pool.pool import (
    AUTO,
    Machine,
    MachinePool,
    admits_demand,
    fits_when_empty,
    members_held,
    variants,
)
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest, part_of
from fray.scheduler.reasons import Reason, ReasonKind, count_reasons, device_text


def is_infeasible(part: MemberGroup, machines: Mapping[str, Capacity]) -> bool:
    """Return whether these machines, even if they were empty, would hold the part in none of its choices."""
    if part.slice_hosts:
        # Slices cannot be counted by members: the rules of a pool decide, on an empty one.
        return _pool(machines).place(PlacementRequest((part,))) is None
    return not any(fits_when_empty(demand, part.members, machines.values()) for demand in part.choices)


def _pool(machines: Mapping[str, Capacity]) -> MachinePool:
    pool = MachinePool()
    for name, capacity in machines.items():
        pool.add(name, capacity)
    return pool


def infeasible_text(spec: JobSpec, machines: Mapping[str, Capacity]) -> str:
    """Return why these machines could not hold the job even if they were empty, in each of its choices."""
    part = part_of(spec)
    return "; and ".join(dict.fromkeys(str(_infeasible_reason(part, demand, machines)) for demand in part.choices))


def _infeasible_reason(part: MemberGroup, demand: Demand, machines: Mapping[str, Capacity]) -> Reason:
    demands = (demand,)
    # The most specific reason that is true comes first: the next ones would be true as well, and say less.
    if not machines:
        return Reason(ReasonKind.CLUSTER_EMPTY, demands=demands)
    held = sum(members_held(demand, capacity) for capacity in machines.values())
    if held and part.slice_hosts:
        # Hosts are large enough, so whole slices are what is missing.
        shortage = slice_reasons(_pool(machines), part, demand)
        slices = part.members // part.slice_hosts
        return Reason(ReasonKind.CLUSTER_SLICES, details=shortage, demands=demands, slices=slices)
    if held:
        return Reason(ReasonKind.CLUSTER_SMALL, demands=demands, members=part.members, held=held)
    # A name that no machine has is in most cases a typing error, so the nearest known names are shown.
    if lacking := next(_unknown_names(demand, list(machines.values())), None):
        return Reason(ReasonKind.CLUSTER_LACKS, details=[lacking], demands=demands)
    # The one that comes closest: by the devices that are wanted, then by size.
    name = max(machines, key=lambda name: _largeness(demand, machines[name]))
    return Reason(ReasonKind.LARGEST_MACHINE, name, demands=demands, capacity=machines[name])


def _largeness(demand: Demand, capacity: Capacity) -> tuple[int, ...]:
    devices = Machine.empty("", capacity).devices
    wanted = max((len(devices[v]) for v in variants(demand, devices)), default=0) if demand.device_count else 0
    return wanted, capacity.cpu_milli, capacity.memory_bytes


# Names that no machine has --------------------------------------------------------------------------------------------


def _unknown_names(demand: Demand, machines: Sequence[Capacity]) -> Iterator[Reason]:
    """Yield names that no machine has, with those that machines have: the name may be misspelled."""
    for key, wanted in (("region", demand.regions), ("zone", demand.zones)):
        there = _values(machines, key)
        # One known name is enough for the request to be feasible.
        if wanted and not set(wanted) & set(there):
            places = tuple(name or "(none)" for name in wanted)
            yield Reason(ReasonKind.NO_LOCALITY, names=_nearest_first(wanted, there), key=key, places=places)
    for constraint in demand.constraints:
        if not any(constraint.meets(capacity.attributes) for capacity in machines):
            there = _values(machines, constraint.key)
            # If no machine has the attribute at all, its key may be misspelled, else its value.
            keys = [] if there else sorted({key for capacity in machines for key in capacity.attributes})
            near = _nearest_first(constraint.values, there)
            known = _nearest_first([constraint.key], keys)
            yield Reason(ReasonKind.NO_ATTRIBUTE, str(constraint), near, keys=known)
    if demand.device_count:
        empty = [Machine.empty("", capacity).device_counts for capacity in machines]
        kinds = [v for counts in empty for v in counts if v[0] == demand.device_kind]
        if not kinds:
            yield Reason(ReasonKind.NO_DEVICE, f"a {demand.device_kind}")
        elif demand.device_variant.lower() not in (AUTO, *(variant for _, variant in kinds)):
            near = _nearest_first([demand.device_variant.lower()], sorted({variant for _, variant in kinds}))
            yield Reason(ReasonKind.NO_DEVICE, device_text(demand), near)


def _values(machines: Iterable[Capacity], key: str) -> list[str]:
    return sorted({value for capacity in machines if (value := capacity.attributes.get(key))})


def _nearest_first(wanted: Iterable[str], there: Sequence[str]) -> tuple[str, ...]:
    near = [match for name in wanted for match in difflib.get_close_matches(name, there, 3)]
    return tuple(dict.fromkeys([*near, *there]))


def contradiction(demand: Demand, regions_of: Mapping[str, Sequence[str]]) -> Reason | None:
    """Return why no machine can be in its zones and its regions; None: a machine can, or the regions are not known.

    Args:
        regions_of: for each of its zones, the regions of machines there.
    """
    known = [(zone, regions_of.get(zone, ())) for zone in demand.zones]
    # This does not need a complete list of machines: the region of a zone does not change. A zone without machines may
    # be anywhere.
    if not demand.regions or not known or any(not regions for _, regions in known):
        return None
    if any(region in demand.regions for _, regions in known for region in regions):
        return None
    zones = [Reason(ReasonKind.ZONE_IN_REGION, zone, regions) for zone, regions in known]
    return Reason(ReasonKind.CONTRADICTION, details=zones, regions=list(demand.regions))


# TPU slices -----------------------------------------------------------------------------------------------------------


def slice_reasons(pool: MachinePool, part: MemberGroup, demand: Demand) -> list[Reason]:
    """Return how many slices there are, and what each lacks; empty if no machine has such chips."""
    hosts = [machine for machine in pool.machines.values() if variants(demand, machine.device_counts)]
    if not hosts:
        return []
    # By all hosts, open or not: a slice with a silent host is reported with that reason, not left out.
    slices: dict[tuple[str, str, str], list[Machine]] = {}
    for machine in hosts:
        if machine.slice is not None:
            slices.setdefault(machine.slice, []).append(machine)
    found = [_slice_reason(part, demand, group) for _, group in sorted(slices.items())]
    kind = ReasonKind.SLICES if slices else ReasonKind.NO_SLICE
    counts = count_reasons(found)
    reasons = [Reason(kind, demand.device_variant, counts=counts, total=len(slices), hosts=part.slice_hosts)]
    nameless = [machine.name for machine in hosts if machine.slice is None]
    if nameless:
        reasons.append(Reason(ReasonKind.HOSTS_WITHOUT_SLICE, names=nameless))
    # A configuration error, so that the reason says how slices are declared.
    elif any(each.kind is ReasonKind.SLICE_AMBIGUOUS for each in found):
        reasons.append(Reason(ReasonKind.SLICE_HINT))
    return reasons


def _slice_reason(part: MemberGroup, demand: Demand, group: list[Machine]) -> Reason:
    """Return the first reason why a slice cannot be allocated, or that it is free."""
    # In the order of the rules of `slices`: what is missing for good before what may change with the load.
    there = [machine for machine in group if machine.is_open]
    if part.slice_hosts > len(group):
        return Reason(ReasonKind.SLICE_INCOMPLETE, missing=part.slice_hosts - len(group))
    if len(there) < part.slice_hosts:
        return Reason(ReasonKind.SLICE_CLOSED)
    if len(there) > part.slice_hosts or len({machine.worker for machine in there}) < len(there):
        return Reason(ReasonKind.SLICE_AMBIGUOUS)
    if not all(admits_demand(demand, machine.capacity) for machine in there):
        return Reason(ReasonKind.SLICE_REFUSED)
    chips = [(machine, variant) for machine in there for variant in variants(demand, machine.device_counts)]
    if any(len(machine.devices[variant]) < machine.device_counts[variant] for machine, variant in chips):
        return Reason(ReasonKind.SLICE_IN_USE)
    has_room = all(
        machine.cpu_milli >= demand.cpu_milli
        and machine.memory_bytes >= demand.memory_bytes
        and machine.disk_bytes >= demand.disk_bytes
        and machine.ports.free >= demand.ports
        for machine in there
    )
    return Reason(ReasonKind.SLICE_FREE if has_room else ReasonKind.SLICE_SMALL)
