"""Reservations: machines that are held for jobs that come later.

A reservation waits for its minimum as a gang does: all units at once or none. From then on it holds them, and grows one
unit at a time towards its maximum with what no other applicant of its band can use. What it holds beyond its minimum it
releases when others need it (`reclaim_surplus`, `release_units`). A lost machine takes its unit with it, and what is
missing of the minimum waits in the queue with the order of the reservation. It ends when it is released, when its time
to live has expired, or with its owner: then its jobs are ended, and each unit is released once it is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from fray.errors import FrayError, InvalidRequest, NeverSchedulable
from fray.model.ids import JobId, NodeName, SessionId
from fray.model.messages.client import Done, Role
from fray.model.policy.priority import Band
from fray.model.reservations import (
    EXPIRY_NOTICE_S,
    ReservationEventKind,
    ReservationId,
    ReservationSpec,
    ReservationState,
    check_reservation,
)
from fray.model.specs import EndReason
from fray.model.text import plural
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import ReservationReleased, ReservationRenewed, ReservationRequested
from fray.scheduler.history import reservation_record
from fray.scheduler.jobs.queries import session_text
from fray.scheduler.jobs.transitions import stop_job
from fray.scheduler.pool.pool import fits_when_empty
from fray.scheduler.pool.requests import MemberPlacement, Placement
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.reasons import demand_text
from fray.scheduler.reservations.events import record_event
from fray.scheduler.reservations.release_units import end_unit_jobs, is_idle, release_unit
from fray.scheduler.state.known_capacity import all_machines
from fray.scheduler.state.reservation_rows import Host, ReservationRow, ReservedUnit
from fray.scheduler.state.state import State

ENDED_KEPT = 1_000
"""Ended reservations on record."""
LIVING_LIMIT = 10_000

# Requests ------------------------------------------------------------------------------------------------------------


def on_reservation_requested(state: State, event: ReservationRequested, out: EffectBuffer) -> None:
    """Accept a reservation, or refuse it with the reason; a repeated request gets the reply of the first."""
    try:
        _create(state, event, out)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
    else:
        out.reply_reservation(event.session, event.ref, event.spec.reservation_id)


def _create(state: State, event: ReservationRequested, out: EffectBuffer) -> None:
    session = state.open_session(event.session)
    spec = event.spec if event.spec.namespace else evolve(event.spec, namespace=session.namespace)
    known = state.reservations.get(spec.reservation_id)
    # A repeated request, as after a reconnection, gets the reservation of the first one.
    if known is not None:
        _check_same(known.spec, spec)
        return
    owner = session.owner if session.role is not Role.TOOL else ""
    _check(state, spec, owner)
    # A detached reservation outlives the one that requested it.
    owner = "" if spec.detached else owner
    parent = state.jobs[state.attempts[session.attempt_id].job_id] if session.attempt_id else None
    reservation = ReservationRow(
        spec=spec,
        order=state.next_order(),
        owner=owner,
        root=(session.session if parent is None else parent.root) if owner else "",
        created_by=session.session,
        created_at=state.now,
        queued_at=state.now,
        expires_at=state.now + spec.ttl_s,
        band=spec.band or (parent.band if parent is not None else Band.INTERACTIVE),
        # Without a minimum there is nothing to wait for: it is held at once, and grows.
        phase=ReservationState.WAITING if spec.min_units else ReservationState.HELD,
        held_at=None if spec.min_units else state.now,
    )
    state.add_reservation(reservation)
    out.reservation_changed(reservation.id)
    units = f"{spec.min_units} to {spec.max_units} units of {demand_text(spec.demand)}"
    by = f"{owner or session.session}" + (f" of {spec.user}" if spec.user else "")
    out.log_event(reservation.id, "created", f"by {by}: {units}")


def _check_same(known: ReservationSpec, spec: ReservationSpec) -> None:
    # A renewal may have changed the stored time to live.
    if evolve(known, ttl_s=spec.ttl_s, user=spec.user) != spec:
        raise InvalidRequest(
            f"reservation id {spec.reservation_id!r} belongs to a different request: create this one under another id"
        )


def _check(state: State, spec: ReservationSpec, owner: str) -> None:
    check_reservation(spec)
    if not owner and not spec.detached:
        raise InvalidRequest(f"reservation {spec.name!r}: a tool owns nothing, so it must be detached=True")
    allowed = state.policy.user(spec.user).bands
    if spec.band is not None and spec.band not in allowed:
        raise InvalidRequest(
            f"reservation {spec.name!r}: band={spec.band.value!r} is not for this user by this cluster's policy, only "
            f"{', '.join(repr(band.value) for band in allowed)}"
        )
    if len(state.reservation_pools) >= LIVING_LIMIT:
        raise InvalidRequest(f"the cluster holds its limit of {LIVING_LIMIT} reservations; release some first")
    if state.knows_all_machines and spec.min_units:
        members = spec.min_units * spec.hosts
        capacities = list(all_machines(state, members).values())
        if not any(fits_when_empty(demand, members, capacities) for demand in (spec.demand, *spec.alternatives)):
            needs = f"{members} times {demand_text(spec.demand)}"
            raise NeverSchedulable(
                f"reservation {spec.name!r} can never be held here: it needs {needs}, and "
                f"all {len(capacities)} machines together hold fewer",
                name=spec.name,
            )


def on_reservation_renewed(state: State, event: ReservationRenewed, out: EffectBuffer) -> None:
    """Restart its time to live."""
    try:
        reservation = state.open_reservation(event.reservation_id)
        spec = reservation.spec if event.ttl_s is None else evolve(reservation.spec, ttl_s=event.ttl_s)
        # Checked on a copy: a renewal that is refused must not change the row.
        check_reservation(spec)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    reservation.spec, reservation.expires_at = spec, state.now + spec.ttl_s
    if reservation.warned:
        reservation.warned = False
        record_event(state, out, reservation, ReservationEventKind.RENEWED, f"for {reservation.spec.ttl_s:g} s")
    elif event.ttl_s is not None or event.session != reservation.created_by:
        # A driver renews its own again and again, which is not worth a line.
        text = f"for {reservation.spec.ttl_s:g} s by {session_text(state, event.session)}"
        out.log_event(reservation.id, ReservationEventKind.RENEWED.value, text)
    out.reservation_changed(reservation.id)
    state.reservation_changed(reservation)
    out.reply_reservation(event.session, event.ref, reservation.id)


def on_reservation_released(state: State, event: ReservationReleased, out: EffectBuffer) -> None:
    """Release a reservation on request; the reply comes at once. An ended one is not changed."""
    try:
        reservation = state.find_reservation(event.reservation_id)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    close_reservation(state, out, reservation, event.reason, EndReason.STOPPED, session_text(state, event.session))
    out.reply(event.session, event.ref, Done())


# Granting


def apply_grant(state: State, out: EffectBuffer, applicant: Applicant, placed: Sequence[Placement]) -> None:
    """Add the units for its minimum, or one more; the cluster's pool has already placed them."""
    reservation = state.reservations[applicant.id.partition(":")[2]]
    hosts = reservation.spec.hosts
    grants = placed[0].grants
    units = [
        _unit(state, reservation, grants[at : at + hosts], placed[0].choice) for at in range(0, len(grants), hosts)
    ]
    if reservation.phase is ReservationState.WAITING:
        reservation.phase, reservation.held_at = ReservationState.HELD, reservation.held_at or state.now
        # The time to live runs from here: a long wait for the minimum would use it up.
        reservation.expires_at, reservation.warned = state.now + reservation.spec.ttl_s, False
        nodes = tuple(dict.fromkeys(node for unit in units for node in unit.nodes))
        text = f"{plural(len(units), 'unit')} on {', '.join(nodes)}"
        record_event(state, out, reservation, ReservationEventKind.HELD, text, nodes=nodes)
    else:
        for unit in units:
            record_event(state, out, reservation, ReservationEventKind.GROWN, unit=unit)
    if len(reservation.staying_units) >= reservation.spec.min_units:
        reservation.phase = ReservationState.HELD
    state.reservation_changed(reservation)
    # Only what waits inside can use the new units; no other applicant has to be tried again.
    state.queue.retry_inside(reservation.id)


def _unit(state: State, reservation: ReservationRow, grants: Sequence[MemberPlacement], choice: int) -> ReservedUnit:
    reservation.last_unit += 1
    hosts = tuple(Host(grant.node, grant.devices) for grant in grants)
    unit = ReservedUnit(number=reservation.last_unit, hosts=hosts, choice=choice)
    state.add_unit(reservation, unit)
    return unit


def jobs_inside_on_node(state: State, name: NodeName) -> dict[ReservationId, tuple[JobId, ...]]:
    """Return the running jobs on the units of a machine, by reservation."""
    found: dict[ReservationId, tuple[JobId, ...]] = {}
    for reservation_id in state.reservations_on.get(name, ()):
        jobs = (attempt.job_id for attempt in state.attempts_inside(reservation_id, name))
        found[reservation_id] = tuple(dict.fromkeys(jobs))
    return found


def drop_node_units(
    state: State, out: EffectBuffer, name: NodeName, why: str, ran: dict[ReservationId, tuple[JobId, ...]]
) -> None:
    """Drop the units of a machine that is gone, and with it all that ``ran`` there."""
    for reservation_id in list(state.reservations_on.get(name, ())):
        reservation = state.reservations[reservation_id]
        for unit in [unit for unit in reservation.units if name in unit.nodes]:
            _lose(state, out, reservation, unit, name, why, ran.get(reservation_id, ()))
        _short(state, reservation)
        state.reservation_changed(reservation)


def _lose(
    state: State,
    out: EffectBuffer,
    reservation: ReservationRow,
    unit: ReservedUnit,
    name: NodeName,
    why: str,
    ran: tuple[JobId, ...],
) -> None:
    """Release the rest of a slice that has lost a host, as soon as nothing runs there."""
    if not reservation.is_closed:
        record_event(state, out, reservation, ReservationEventKind.LOST, why, unit=unit, jobs=ran)
    # A slice without one of its hosts serves no job. Its other hosts are returned when they are idle, as they may still
    # run processes that are being ended.
    unit.leaving, unit.lost, unit.reason = True, True, why
    state.drop_unit(reservation, unit, only=name)
    if unit.hosts:
        state.close_unit_machines(reservation, unit)
        end_unit_jobs(state, out, reservation, unit)


def release_cordoned_units(state: State, out: EffectBuffer, name: NodeName, why: str) -> None:
    """Release the units of a machine that is drained as soon as nothing runs on them; replacements for the minimum are
    queued."""
    for reservation_id in list(state.reservations_on.get(name, ())):
        reservation = state.reservations[reservation_id]
        for unit in [unit for unit in reservation.staying_units if name in unit.nodes]:
            unit.leaving, unit.reason = True, why
            record_event(state, out, reservation, ReservationEventKind.SHRINKING, why, unit=unit)
            state.close_unit_machines(reservation, unit)
        _short(state, reservation)
        state.reservation_changed(reservation)


def _short(state: State, reservation: ReservationRow) -> None:
    """Queue a request for what is missing of its minimum, if anything is."""
    is_short = len(reservation.staying_units) < reservation.spec.min_units
    if reservation.phase is ReservationState.HELD and is_short:
        # The applicant has the order of the reservation itself, so that it comes before later requests.
        reservation.phase, reservation.queued_at = ReservationState.DEGRADED, state.now


# Ending --------------------------------------------------------------------------------------------------------------


def close_reservation(
    state: State, out: EffectBuffer, reservation: ReservationRow, why: str, cause: EndReason, by: str = ""
) -> None:
    """Close a reservation: its jobs are ended with their termination, and `expire_and_release` releases idle units."""
    if reservation.is_closed:
        return
    reservation.phase, reservation.reason, reservation.ended_by = ReservationState.CLOSING, why, by or why
    reservation.stop_cause = cause
    for unit in reservation.units:
        # Notices do not matter any more: all jobs inside are ended now, each with its termination.
        unit.leaves_at = None
    state.reservation_changed(reservation)
    state.pool.version += 1  # what it held against others may fit now
    record_event(
        state,
        out,
        reservation,
        ReservationEventKind.CLOSING,
        why,
        jobs=tuple(state.jobs_inside.get(reservation.id, ())),
    )
    for job_id in list(state.jobs_inside.get(reservation.id, ())):
        stop_job(state, out, state.jobs[job_id], cause, f"its reservation {reservation.id} ended: {why}", by)


def close_owned_reservations(
    state: State, out: EffectBuffer, owner: str, why: str, session: SessionId | None = None
) -> None:
    """Close reservations whose owner has ended; with ``session``, only those that this session created."""
    for reservation_id in list(state.reservations_by_owner.get(owner, ())):
        reservation = state.reservations[reservation_id]
        if session is None or reservation.created_by == session:
            close_reservation(state, out, reservation, why, EndReason.OWNER_ENDED)


def expire_and_release(state: State, out: EffectBuffer) -> None:
    """Close reservations of ended owners, release idle units and end closed reservations, after each event."""
    for attempt_id in out.ended_attempts:
        if attempt_id in state.reservations_by_owner:
            close_owned_reservations(state, out, attempt_id, f"its owner {attempt_id} ended")
    for reservation_id in list(state.releasing):
        _settle(state, out, state.reservations[reservation_id])


def _settle(state: State, out: EffectBuffer, reservation: ReservationRow) -> None:
    for unit in list(reservation.units):
        if (unit.leaving or reservation.is_closed) and is_idle(state, reservation, unit):
            release_unit(state, out, reservation, unit)
    if not reservation.is_closed:
        return
    # Attempts that take nothing need no unit: their machine stays in the pool until they have ended.
    pool = state.reservation_pools[reservation.id]
    if not reservation.units and not pool.machines and not state.jobs_inside.get(reservation.id):
        _end(state, out, reservation)


def _end(state: State, out: EffectBuffer, reservation: ReservationRow) -> None:
    reservation.phase, reservation.ended_at = ReservationState.ENDED, state.now
    record_event(state, out, reservation, ReservationEventKind.ENDED, reservation.reason)
    state.reservation_changed(reservation)
    out.record(reservation_record(reservation))
    while len(state.ended_reservations) > min(ENDED_KEPT, state.config.finished_limit):
        state.drop_reservation(state.reservations[next(iter(state.ended_reservations))])


# Timers


def on_timer_reservation(state: State, out: EffectBuffer, reservation_id: ReservationId) -> None:
    """Handle the end of a notice, of a pause of growth, or of its time to live."""
    reservation = state.reservations.get(reservation_id)
    if reservation is not None:
        _due(state, out, reservation)
        state.reservation_changed(reservation)


def _due(state: State, out: EffectBuffer, reservation: ReservationRow) -> None:
    for unit in list(reservation.units):
        if unit.leaves_at is not None and unit.leaves_at <= state.now:
            end_unit_jobs(state, out, reservation, unit)
    if reservation.grow_not_before <= state.now:
        reservation.grow_not_before = 0.0
    if reservation.is_closed or reservation.warns_at > state.now:
        return
    if not reservation.warned:
        _warn(state, out, reservation)
    if reservation.expires_at <= state.now:
        waited = "" if reservation.held_at is not None else " while it waited"
        close_reservation(state, out, reservation, f"it expired{waited}: it was not renewed", EndReason.STOPPED)


def _warn(state: State, out: EffectBuffer, reservation: ReservationRow) -> None:
    reservation.warned = True
    left_s = max(0.0, reservation.expires_at - state.now)
    jobs = tuple(state.jobs_inside.get(reservation.id, ()))
    text = f"in {left_s:.0f} s, unless it is renewed"
    record_event(state, out, reservation, ReservationEventKind.EXPIRING, text, jobs=jobs, notice_s=left_s)
    for job_id in jobs:
        out.log_event(job_id, "reservation expiring", f"{reservation.id} ends {text}")


def on_controller_start(state: State) -> None:
    """Extend all reservations to their warning time: clients could not renew them while the controller was away."""
    grace_s = EXPIRY_NOTICE_S + state.config.driver_grace_s
    for reservation_id in state.reservation_pools:
        reservation = state.reservations[reservation_id]
        least = state.now + min(reservation.spec.ttl_s, grace_s)
        if not reservation.is_closed and reservation.expires_at < least:
            reservation.expires_at, reservation.warned = least, False
            state.reservation_changed(reservation)
