"""Invariants of reservations, and of the devices of any machine (see `check`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from fray.model.reservations import ReservationState
from fray.model.resources import Demand
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.pool import Machine
from fray.scheduler.state.reservation_rows import Host, ReservationRow
from fray.scheduler.state.rows import AttemptRow, Node
from fray.scheduler.state.state import State


def units_by_node(state: State) -> defaultdict[str, list[tuple[Demand, Host]]]:
    """Return the units of reservations on each machine, by the rows."""
    found: defaultdict[str, list[tuple[Demand, Host]]] = defaultdict(list)
    for row in state.reservations.values():
        for unit in row.units:
            for host in unit.hosts:
                found[host.node].append((row.demand_of(unit), host))
    return found


def devices_add_up(
    state: State, held: list[AttemptRow], machine: Machine, reserved: Sequence[str] = ()
) -> Iterator[str]:
    """Yield devices of a machine that are given twice, or neither given nor free; ``reserved`` are given to units of
    reservations."""
    given = Counter([*(device for attempt in held for device in attempt.devices), *reserved])
    free = [device for ids in machine.devices.values() for device in ids]
    idle = [device for device, is_idle in machine.withheld.items() if is_idle]
    busy = set(state.nodes[machine.name].busy) & set(machine.device_places)
    if busy != set(machine.withheld) or busy & set(free):
        yield f"devices {sorted(busy)} of {machine.name} are busy, {sorted(machine.withheld)} withheld, {free} free"
    yield from (f"device {d} of {machine.name} is allocated {n} times" for d, n in given.items() if n > 1)
    if sorted([*given, *free, *idle]) != sorted(machine.device_places):
        yield f"devices of {machine.name} do not add up: {sorted(given)} given, {free} free"
    for attempt in held:
        demand = state.demand(state.jobs[attempt.job_id])
        variants = {machine.device_places.get(device, (None, 0))[0] for device in attempt.devices}
        if len(attempt.devices) != demand.device_count or len(variants) > 1:
            yield f"{attempt.attempt_id} requested {demand.device_count} devices of a kind and has {attempt.devices}"


def _reserved_machines(state: State) -> Iterator[str]:
    """Yield differences between a reservation's pool and its units: what attempts leave of them, open unless one is
    leaving."""
    for row in state.reservations.values():
        pool = state.reservation_pools.get(row.id)
        if (pool is None) is not (row.phase is ReservationState.ENDED):
            yield f"reservation {row.id} is {row.phase.value}, and has a pool: {pool is not None}"
        if pool is None:
            continue
        for name in {**pool.machines, **{node: None for unit in row.units for node in unit.nodes}}:
            if name not in pool.machines or name not in state.nodes:
                yield f"reservation {row.id} has a unit on {name}, and no machine of it"
            else:
                yield from _reserved_machine(state, row, pool.machines[name], state.nodes[name])


def _reserved_machine(state: State, row: ReservationRow, machine: Machine, node: Node) -> Iterator[str]:
    units = [unit for unit in row.units if node.name in unit.nodes]
    hosts = [(row.demand_of(unit), host) for unit in units for host in unit.hosts if host.node == node.name]
    here = (state.attempts[attempt_id] for attempt_id in state.on_node[node.name])
    held = [attempt for attempt in here if state.jobs[attempt.job_id].spec.reservation_id == row.id]
    used = [state.share_of(attempt) for attempt in held]
    free = (
        sum(demand.cpu_milli for demand, _ in hosts) - sum(demand.cpu_milli for demand in used),
        sum(demand.memory_bytes for demand, _ in hosts) - sum(demand.memory_bytes for demand in used),
        sum(demand.disk_bytes for demand, _ in hosts) - sum(demand.disk_bytes for demand in used),
    )
    if min(free) < 0:
        yield f"reservation {row.id} allocates more of {node.name} than it holds: {free} left"
    if free != (machine.cpu_milli, machine.memory_bytes, machine.disk_bytes) or machine.attempts != len(held):
        yield f"the pool of reservation {row.id} differs on {node.name}"
    if machine.is_open != (bool(units) and node.is_schedulable and not any(unit.leaving for unit in units)):
        yield f"the pool of reservation {row.id} has {node.name} open={machine.is_open}"
    if machine.ports is not state.pool.machines[node.name].ports:
        yield f"reservation {row.id} has ports of its own on {node.name}"
    if sorted(machine.device_places) != sorted(device for _, host in hosts for device in host.devices):
        yield f"reservation {row.id} has other devices on {node.name} than its units"
    yield from devices_add_up(state, held, machine)


def _held_as_promised(state: State) -> Iterator[str]:
    """Yield reservations with partial units, too many units, or missing units that are not in the queue."""
    for row in state.reservations.values():
        staying, spec = len(row.staying_units), row.spec
        if staying > spec.max_units:
            yield f"reservation {row.id} holds {staying} of at most {spec.max_units} units"
        if row.phase is ReservationState.WAITING and staying:
            yield f"reservation {row.id} waits for its minimum, and holds {staying} units"
        if row.phase is ReservationState.HELD and staying < spec.min_units:
            yield f"reservation {row.id} is held with {staying} of {spec.min_units} units"
        if row.phase is ReservationState.DEGRADED and staying >= spec.min_units:
            yield f"reservation {row.id} is degraded with {staying} of {spec.min_units} units"
        for unit in row.units:
            if not unit.leaving and len(unit.hosts) != spec.hosts:
                yield f"unit {unit.number} of {row.id} has {len(unit.hosts)} of {spec.hosts} hosts"
        if len({unit.number for unit in row.units}) < len(row.units):
            yield f"reservation {row.id} has two units of one number"
        yield from _waits(state, row)


def _waits(state: State, row: ReservationRow) -> Iterator[str]:
    wanted = state.reservation_applicant(row)
    for applicant_id in (f"reservation:{row.id}", f"growth:{row.id}"):
        known = state.queue.applicants.get(applicant_id)
        expected = wanted if wanted is not None and wanted.id == applicant_id else None
        if known != expected:
            yield f"reservation {row.id} waits as {known}, expected {expected}"


def _reservations_end(state: State) -> Iterator[str]:
    """Yield ended reservations with jobs or idle units, and reservations whose owner has ended."""
    for row in state.reservations.values():
        inside = state.jobs_inside.get(row.id, {})
        if row.phase is ReservationState.ENDED and (row.units or inside):
            yield f"reservation {row.id} has ended with {len(row.units)} units and jobs {list(inside)}"
        if row.phase is ReservationState.CLOSING and any(state.jobs[job_id].stop_cause is None for job_id in inside):
            yield f"reservation {row.id} is being released, and a job in it continues"
        if row.phase is ReservationState.CLOSING and not (
            row.units or inside or state.reservation_pools[row.id].machines
        ):
            yield f"reservation {row.id} is being released, and nothing of it is left"
        if row.is_closed or not row.owner:
            continue
        session = state.sessions.get(row.owner)
        if not state.is_attempt_living(row.owner) and (session is None or session.is_ending):
            yield f"reservation {row.id} continues without its owner {row.owner}"


def _inside_only(state: State) -> Iterator[str]:
    """Yield living jobs in reservations that have ended."""
    for job in state.jobs.values():
        name = job.spec.reservation_id
        if name and job.phase is not JobPhase.ENDED and name not in state.reservation_pools:
            yield f"{job.job_id} is in reservation {name}, which has ended"


RESERVATION_RULES: tuple[Callable[[State], Iterator[str]], ...] = (
    _reserved_machines,
    _held_as_promised,
    _reservations_end,
    _inside_only,
)
RESERVATION_RULES_OF_CHANGES = (_held_as_promised,)
"""Rules about what a step does, whose violations the next step may hide."""
