"""How reservations give units back: which of them are idle, whose jobs end for that, and after what notice.

The law. Idle units go at once. A unit in use stays for the ``notice_s`` of its reservation; then the jobs that have to
end for it are ended as `Cause.PREEMPTED`, whole and by their ladders, the latest begun first. Whoever loses all of its
units (`seize`) waits for its minimum again.
"""

from __future__ import annotations

from fray.model.ids import JobId, NodeName
from fray.model.reservations import ReservationEventKind, ReservationState
from fray.model.resources import Demand
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.transitions import preempt_job
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.pool.pool import Machine
from fray.scheduler.reservations.events import record_event
from fray.scheduler.state.reservation_rows import Host, ReservationRow, ReservedUnit
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import Tables

REGROW_S = 1.0
"""After a reservation was asked for something it does not grow for so long, or for twice the longest notice."""
REVOCATIONS_KEPT = 15
"""Times that are remembered, beside the last one."""

# Which jobs ----------------------------------------------------------------------------------------------------------


def is_idle(state: Tables, reservation: ReservationRow, unit: ReservedUnit) -> bool:
    """Nothing that runs in the reservation needs it."""
    pool = state.reservation_pools[reservation.id]
    demand = reservation.demand_of(unit)
    return all(is_share_free(pool.machines[host.node], demand, host) for host in unit.hosts)


def is_share_free(machine: Machine, demand: Demand, host: Host) -> bool:
    """It is free there, down to the very devices."""
    return (
        machine.cpu_milli >= demand.cpu_milli
        and machine.memory_bytes >= demand.memory_bytes
        and machine.disk_bytes >= demand.disk_bytes
        and all(_is_free(machine, device) for device in host.devices)
    )


def _is_free(machine: Machine, device: str) -> bool:
    return machine.withheld.get(device, device in machine.devices[machine.device_places[device][0]])


def jobs_to_end(state: State, reservation: ReservationRow, unit: ReservedUnit) -> tuple[JobId, ...]:
    """Jobs whose end makes the unit idle: those on its devices, and on its machines as many more as it takes."""
    chosen: dict[JobId, None] = {}
    for node in unit.nodes:
        chosen |= _victims_on(state, reservation, unit, node, chosen)
    return tuple(chosen)


def _victims_on(
    state: State, reservation: ReservationRow, unit: ReservedUnit, node: NodeName, chosen: dict[JobId, None]
) -> dict[JobId, None]:
    going = [other for other in reservation.units if (other.leaving or other is unit) and node in other.nodes]
    devices = {device for other in going for host in other.hosts if host.node == node for device in host.devices}
    lacks = _lacks(state.reservation_pools[reservation.id].machines[node], reservation, going, node)
    shares: dict[JobId, list[int]] = {}
    holds: dict[JobId, None] = {}
    for attempt in state.attempts_inside(reservation.id, node):
        demand = state.demand(state.jobs[attempt.job_id])
        share = shares.setdefault(attempt.job_id, [0, 0, 0])
        for index, amount in enumerate(_amounts(demand)):
            share[index] += amount
        if devices.intersection(attempt.devices):
            holds[attempt.job_id] = None
    found: dict[JobId, None] = {}
    ordered = sorted(shares, key=lambda job_id: _cost(state, state.jobs[job_id], job_id in holds or job_id in chosen))
    for job_id in ordered:
        needed = any(lack > 0 and have > 0 for lack, have in zip(lacks, shares[job_id], strict=True))
        if job_id in holds or job_id in chosen or needed:
            found[job_id] = None
            lacks = [lack - have for lack, have in zip(lacks, shares[job_id], strict=True)]
    return found


def _amounts(demand: Demand) -> tuple[int, int, int]:
    return demand.cpu_milli, demand.memory_bytes, demand.disk_bytes


def _lacks(machine: Machine, reservation: ReservationRow, going: list[ReservedUnit], node: NodeName) -> list[int]:
    """What must become free there for all that is going."""
    lacks = [-machine.cpu_milli, -machine.memory_bytes, -machine.disk_bytes]
    for unit in going:
        count = sum(host.node == node for host in unit.hosts)
        for index, amount in enumerate(_amounts(reservation.demand_of(unit))):
            lacks[index] += amount * count
    return lacks


def _cost(state: State, job: JobRow, is_chosen: bool) -> tuple[object, ...]:
    """The least is ended first: what ends anyway, then later bands, then what was begun last."""
    ends = is_chosen or job.phase in (JobPhase.CLOSING, JobPhase.ENDED)
    begun = max((attempt.placed_at for attempt in state.members(job)), default=0.0)
    return not ends, -job.band.rank, -begun, -job.order


# Giving back ---------------------------------------------------------------------------------------------------------


def release_unit(state: State, out: EffectBuffer, reservation: ReservationRow, unit: ReservedUnit) -> None:
    """An idle unit is the fleet's again."""
    text, number, nodes = unit.reason, unit, unit.nodes
    state.drop_unit(reservation, unit)
    if not reservation.is_closed and not unit.lost:
        record_event(state, out, reservation, ReservationEventKind.SHRUNK, text, unit=number, nodes=nodes)
    state.reservation_changed(reservation)


def request_release(
    state: State,
    out: EffectBuffer,
    reservation: ReservationRow,
    unit: ReservedUnit,
    why: str,
    pause_s: float = REGROW_S,
) -> bool:
    """It is wanted elsewhere; True: it was idle, and is free now.

    Args:
        pause_s: so long the reservation does not grow: else it would take what it gives, to be asked for it again.
    """
    unit.reason = why
    reservation.grow_not_before = max(reservation.grow_not_before, state.now + pause_s)
    if is_idle(state, reservation, unit):
        unit.leaving = True
        release_unit(state, out, reservation, unit)
        return True
    notice_s = reservation.spec.notice_s
    unit.leaving, unit.jobs_to_end = True, jobs_to_end(state, reservation, unit)
    unit.leaves_at = state.now + notice_s
    state.close_unit_machines(reservation, unit)
    record_event(
        state,
        out,
        reservation,
        ReservationEventKind.SHRINKING,
        why,
        unit=unit,
        jobs=unit.jobs_to_end,
        notice_s=notice_s,
    )
    for job_id in unit.jobs_to_end:
        text = f"its unit {unit.number} of reservation {reservation.id} is given back in {notice_s:g} s: {why}"
        out.log_event(job_id, "unit leaves", text)
    if not notice_s:
        end_unit_jobs(state, out, reservation, unit)
    state.reservation_changed(reservation)
    return False


def end_unit_jobs(state: State, out: EffectBuffer, reservation: ReservationRow, unit: ReservedUnit) -> None:
    """The notice is over: whoever is still in the way is ended."""
    unit.leaves_at = None
    if is_idle(state, reservation, unit):
        return
    unit.jobs_to_end = jobs_to_end(state, reservation, unit)
    why = f"reservation {reservation.id} gave up unit {unit.number} on {', '.join(unit.nodes)}: {unit.reason}"
    for job_id in unit.jobs_to_end:
        preempt_job(state, out, state.jobs[job_id], why)


def revoke_reservation(state: State, out: EffectBuffer, reservation: ReservationRow, why: str) -> None:
    """All of it is taken; it waits for its minimum again, and so does what is in it. For `preemptible` ones.

    Whatever is idle is free when this returns; the rest follows after the notice.
    """
    record_event(state, out, reservation, ReservationEventKind.PREEMPTED, why, notice_s=reservation.spec.notice_s)
    reservation.revoked_at = (*reservation.revoked_at[-REVOCATIONS_KEPT:], state.now)
    reservation.phase, reservation.queued_at = ReservationState.WAITING, state.now
    for unit in reservation.staying_units:
        request_release(state, out, reservation, unit, why)
    _wait_again(state, reservation)


def _wait_again(state: State, reservation: ReservationRow) -> None:
    if not reservation.spec.min_units:
        reservation.phase = ReservationState.HELD  # it was owed nothing
    state.reservation_changed(reservation)
