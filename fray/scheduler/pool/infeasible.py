"""Requests that can never run on certain machines, and the reasons: what the machines lack, and close matches."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fray.model.resources import Capacity, Demand
from fray.model.specs import JobSpec
from fray.scheduler.pool.pool import (
    AUTO,
    Machine,
    MachinePool,
    fits_when_empty,
    members_held,
    variants,
)
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest, part_of
from fray.scheduler.pool.resource_text import device, has, needs
from fray.scheduler.pool.slice_text import slices_text

NAMES_SHOWN = 8


def is_infeasible(part: MemberGroup, machines: Mapping[str, Capacity]) -> bool:
    """Return whether these machines could hold none of the part's choices, even if they were empty."""
    if part.slice_hosts:
        return _pool(machines).place(PlacementRequest((part,))) is None
    return not any(fits_when_empty(demand, part.members, machines.values()) for demand in part.choices)


def _pool(machines: Mapping[str, Capacity]) -> MachinePool:
    pool = MachinePool()
    for name, capacity in machines.items():
        pool.add(name, capacity)
    return pool


def never_text(spec: JobSpec, machines: Mapping[str, Capacity]) -> str:
    """Return the reasons why these machines could not hold the job even if they were empty, for each of its choices."""
    part = part_of(spec)
    texts = dict.fromkeys(_reason(part, demand, machines) for demand in part.choices)
    return "; and ".join(texts)


def _reason(part: MemberGroup, demand: Demand, machines: Mapping[str, Capacity]) -> str:
    if not machines:
        return f"it needs {needs(demand)}, and there is no machine"
    held = sum(members_held(demand, capacity) for capacity in machines.values())
    if held and part.slice_hosts:
        slices = f"{part.members // part.slice_hosts} whole slices" if part.members > part.slice_hosts else "a slice"
        return f"it needs {slices} of {needs(demand)} a host; {slices_text(_pool(machines), part, demand)}"
    if held:
        return f"it needs {part.members} members of {needs(demand)} each, and all machines together hold {held}"
    unknown = next(_unknown_names(demand, list(machines.values())), "")
    if unknown:
        return f"it needs {needs(demand)}; {unknown}"
    name = max(machines, key=lambda name: _size_key(demand, machines[name]))
    return f"it needs {needs(demand)}; the largest machine is {name}: {has(machines[name])}"


def _size_key(demand: Demand, capacity: Capacity) -> tuple[int, ...]:
    devices = Machine.empty("", capacity).devices
    wanted = max((len(devices[v]) for v in variants(demand, devices)), default=0) if demand.device_count else 0
    return wanted, capacity.cpu_milli, capacity.memory_bytes


# What no machine has at all ------------------------------------------------------------------------------------------


def _unknown_names(demand: Demand, machines: Sequence[Capacity]) -> Iterator[str]:
    """Yield names that no machine has; they may be typing errors, so close matches and existing names are listed."""
    for key, wanted in (("region", demand.regions), ("zone", demand.zones)):
        there = _values(machines, key)
        if wanted and not set(wanted) & set(there):
            names = " or ".join(name or "(none)" for name in wanted)
            yield f"no machine is in {key} {names}{_suggestions(wanted, there)}"
    for constraint in demand.constraints:
        if not any(constraint.meets(capacity.attributes) for capacity in machines):
            there = _values(machines, constraint.key)
            keys = sorted({key for capacity in machines for key in capacity.attributes})
            near = (
                _suggestions(constraint.values, there)
                if there
                else _suggestions([constraint.key], keys, "attributes are")
            )
            yield f"no machine meets {constraint}{near}"
    if demand.device_count:
        kinds = [
            v for capacity in machines for v in Machine.empty("", capacity).device_counts if v[0] == demand.device_kind
        ]
        if not kinds:
            yield f"no machine has a {demand.device_kind}"
        elif demand.device_variant.lower() not in (AUTO, *(variant for _, variant in kinds)):
            there = sorted({variant for _, variant in kinds})
            yield f"no machine has {device(demand)}{_suggestions([demand.device_variant.lower()], there)}"


def _values(machines: Iterable[Capacity], key: str) -> list[str]:
    return sorted({value for capacity in machines if (value := capacity.attributes.get(key))})


def _suggestions(wanted: Iterable[str], there: Sequence[str], word: str = "there is") -> str:
    """Return ``; there is a, b, c``, close matches first."""
    near = [one for name in wanted for one in difflib.get_close_matches(name, there, 3)]
    names = list(dict.fromkeys([*near, *there]))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"; {word} {', '.join(names[:NAMES_SHOWN])}{more}" if names else ""


def contradiction(demand: Demand, regions_of: Mapping[str, Sequence[str]]) -> str:
    """Return why no machine can be in the demand's zones and regions; empty if one can, or if that is not known.

    Args:
        regions_of: regions of the machines in each of its zones.
    """
    known = [(zone, regions_of.get(zone, ())) for zone in demand.zones]
    if not demand.regions or not known or any(not regions for _, regions in known):
        return ""
    if any(region in demand.regions for _, regions in known for region in regions):
        return ""
    texts = ", ".join(f"zone {zone} is in region {' or '.join(regions)}" for zone, regions in known)
    return f"{texts}, and regions={list(demand.regions)}: write zones of those regions, or leave one of both out"
