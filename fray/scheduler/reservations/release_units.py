"""Release of units by reservations: which units are idle, which jobs are ended for it, and after what notice.

Idle units are released at once. A unit in use stays for the ``notice_s`` of its reservation; then the jobs that are in
the way are ended as `EndReason.PREEMPTED`, whole and with their termination, the last started first. A reservation that
loses all of its units (`revoke_reservation`) waits for its minimum again.
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
"""Seconds for which a reservation does not grow after a release; or twice the longest notice, if that is longer."""
REVOCATIONS_KEPT = 15
"""Number of seizures that are remembered, beside the last one."""

# Jobs to end


def is_idle(state: Tables, reservation: ReservationRow, unit: ReservedUnit) -> bool:
    """Return whether nothing that runs in the reservation needs the unit."""
    pool = state.reservation_pools[reservation.id]
    demand = reservation.demand_of(unit)
    return all(is_share_free(pool.machines[host.node], demand, host) for host in unit.hosts)


def is_share_free(machine: Machine, demand: Demand, host: Host) -> bool:
    """Return whether the host's share is free on the machine, with its very devices."""
    return (
        machine.cpu_milli >= demand.cpu_milli
        and machine.memory_bytes >= demand.memory_bytes
        and machine.disk_bytes >= demand.disk_bytes
        and all(_is_free(machine, device) for device in host.devices)
    )


def _is_free(machine: Machine, device: str) -> bool:
    return machine.withheld.get(device, device in machine.devices[machine.device_places[device][0]])


def jobs_to_end(state: State, reservation: ReservationRow, unit: ReservedUnit) -> tuple[JobId, ...]:
    """Return jobs whose end makes the unit idle: those on its devices, and more on its machines as necessary."""
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
        share = shares.setdefault(attempt.job_id, [0, 0, 0])
        for index, amount in enumerate(_amounts(state.share_of(attempt))):
            share[index] += amount
        if devices.intersection(attempt.devices):
            holds[attempt.job_id] = None
    found: dict[JobId, None] = {}
    # Devices cannot be exchanged: the jobs on the unit's own devices must end. CPU and memory of all units of a machine
    # are one amount, so that for these the cheapest jobs are chosen.
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
    """Return what must become free there for all units that are released."""
    lacks = [-machine.cpu_milli, -machine.memory_bytes, -machine.disk_bytes]
    for unit in going:
        count = sum(host.node == node for host in unit.hosts)
        for index, amount in enumerate(_amounts(reservation.demand_of(unit))):
            lacks[index] += amount * count
    return lacks


def _cost(state: State, job: JobRow, is_chosen: bool) -> tuple[object, ...]:
    """Return the sort key of a job; the least is ended first: ending jobs, then later bands, then the last started."""
    # What ends anyway frees its share without further cost.
    ends = is_chosen or job.phase in (JobPhase.CLOSING, JobPhase.ENDED)
    begun = max((attempt.placed_at for attempt in state.members(job)), default=0.0)
    return not ends, -job.band.rank, -begun, -job.order


# Releasing


def release_unit(state: State, out: EffectBuffer, reservation: ReservationRow, unit: ReservedUnit) -> None:
    """Return an idle unit to the cluster."""
    text, nodes = unit.reason, unit.nodes
    state.drop_unit(reservation, unit)
    if not reservation.is_closed and not unit.lost:
        record_event(state, out, reservation, ReservationEventKind.SHRUNK, text, unit=unit, nodes=nodes)
    state.reservation_changed(reservation)


def request_release(
    state: State,
    out: EffectBuffer,
    reservation: ReservationRow,
    unit: ReservedUnit,
    why: str,
    pause_s: float = REGROW_S,
) -> bool:
    """Release a unit that is needed elsewhere; return whether it was idle, so that it is free now.

    Args:
        pause_s: seconds for which the reservation does not grow: else it would take the same unit again.
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
    # Whatever started on it during the notice would be ended after seconds.
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
    """End the jobs that are still in the way after the notice."""
    unit.leaves_at = None
    if is_idle(state, reservation, unit):
        return
    # Chosen again: jobs may have ended during the notice, so that fewer have to end now.
    unit.jobs_to_end = jobs_to_end(state, reservation, unit)
    why = f"reservation {reservation.id} gave up unit {unit.number} on {', '.join(unit.nodes)}: {unit.reason}"
    for job_id in unit.jobs_to_end:
        preempt_job(state, out, state.jobs[job_id], why)


def revoke_reservation(state: State, out: EffectBuffer, reservation: ReservationRow, why: str) -> None:
    """Seize a preemptible reservation; it waits for its minimum again, and its jobs wait for machines.

    Idle units are free when this returns; the others follow after their notice.
    """
    record_event(state, out, reservation, ReservationEventKind.PREEMPTED, why, notice_s=reservation.spec.notice_s)
    reservation.revoked_at = (*reservation.revoked_at[-REVOCATIONS_KEPT:], state.now)
    reservation.phase, reservation.queued_at = ReservationState.WAITING, state.now
    for unit in reservation.staying_units:
        request_release(state, out, reservation, unit, why)
    _wait_again(state, reservation)


def _wait_again(state: State, reservation: ReservationRow) -> None:
    if not reservation.spec.min_units:
        reservation.phase = ReservationState.HELD  # its minimum is zero
    state.reservation_changed(reservation)
