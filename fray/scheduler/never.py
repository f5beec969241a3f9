"""Why a job can never run on some machines, even if they were empty."""

from __future__ import annotations

from collections.abc import Mapping

from fray.model.resources import Capacity, Demand
from fray.model.specs import JobSpec
from fray.scheduler.match import Machine, members_held, variants
from fray.scheduler.words import has, needs


def never_text(spec: JobSpec, machines: Mapping[str, Capacity]) -> str:
    """Why these machines could not hold the job even if they were empty, naming the largest."""
    demand = spec.demand
    if not machines:
        return f"it needs {needs(demand)}, and there is no machine"
    held = sum(members_held(demand, capacity) for capacity in machines.values())
    if held:
        return f"it needs {spec.members} members of {needs(demand)} each, and all machines together hold {held}"
    name = max(machines, key=lambda name: _largeness(demand, machines[name]))
    return f"it needs {needs(demand)}; the largest machine is {name}: {has(machines[name])}"


def _largeness(demand: Demand, capacity: Capacity) -> tuple[int, ...]:
    devices = Machine.empty("", capacity).devices
    wanted = max((len(devices[v]) for v in variants(demand, devices)), default=0) if demand.device_count else 0
    return wanted, capacity.cpu_milli, capacity.memory_bytes
