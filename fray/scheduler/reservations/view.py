"""Views of reservations for clients: what each holds, what it waits for, and why."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.ids import Namespace
from fray.model.reservations import ReservationId, ReservationInfo, ReservationState, UnitInfo
from fray.model.text import list_text
from fray.scheduler.reasons import demand_text
from fray.scheduler.state.reservation_rows import ReservationRow
from fray.scheduler.state.state import State

JOBS_SHOWN = 4


def reservation_info(state: State, reservation_id: ReservationId) -> ReservationInfo:
    """Return a reservation for clients.

    Raises:
        NoSuchReservation: it is not on record.
    """
    row = state.find_reservation(reservation_id)
    spec = row.spec
    return ReservationInfo(
        reservation_id=row.id,
        demand=spec.demand,
        jobs=tuple(state.jobs_inside.get(row.id, ())),
        expires_at=row.expires_at,
        state=row.phase,
        name=spec.name,
        namespace=spec.namespace,
        user=spec.user,
        owner=row.owner,
        band=row.band,
        priority=spec.priority,
        preemptible=spec.preemptible,
        ttl_s=spec.ttl_s,
        notice_s=spec.notice_s,
        hosts=spec.hosts,
        min_units=spec.min_units,
        max_units=spec.max_units,
        units=tuple(UnitInfo(number=u.number, nodes=u.nodes, devices=u.devices, leaving=u.leaving) for u in row.units),
        reason=reservation_reason(state, row),
        events=row.events,
        created_at=row.created_at,
        held_at=row.held_at,
        ended_at=row.ended_at,
    )


def list_reservations(state: State, namespace: Namespace | None, ended: bool = False) -> tuple[ReservationInfo, ...]:
    """Return reservations of one namespace, or of all, oldest first."""
    rows = [row for row in state.reservations.values() if namespace in (None, row.spec.namespace)]
    return tuple(reservation_info(state, row.id) for row in rows if ended or row.phase is not ReservationState.ENDED)


# Reasons


def reservation_reason(state: State, row: ReservationRow) -> str:
    """Return in one line what it holds and what it waits for, or why it ends."""
    if row.is_closed:
        return row.reason
    spec = row.spec
    many = f"{spec.min_units}" if spec.min_units == spec.max_units else f"{spec.min_units} to {spec.max_units}"
    leaving = len(row.units) - len(row.staying_units)
    are = "is" if leaving == 1 else "are"
    text = f"holds {len(row.staying_units)} of {many} units" + (
        f", {leaving} more {are} being given back" if leaving else ""
    )
    return f"{text}{_next(state, row)}"


def _next(state: State, row: ReservationRow) -> str:
    waits = state.reservation_applicant(row)
    if waits is None:
        return ""
    spec = row.spec
    is_first = row.phase is ReservationState.WAITING
    what = f"its minimum of {spec.min_units}" if is_first else "the next one"
    hosts = f"{spec.hosts} machines of one slice, each with " if spec.hosts > 1 else ""
    each = " each" if is_first and spec.min_units > 1 and spec.hosts == 1 else ""
    text = f"; {what} needs {hosts}{demand_text(spec.demand)}{each}"
    if waits.id not in state.queue:
        return text
    return f"{text}; number {state.queue.count_ahead(waits.id) + 1} of {len(state.queue)} in the queue"


def explain_reservation(state: State, reservation_id: ReservationId) -> str:
    """Return a page about a reservation for people.

    Raises:
        NoSuchReservation: it is not on record.
    """
    row = state.find_reservation(reservation_id)
    return "\n".join(_page(state, row))


def _page(state: State, row: ReservationRow) -> Iterator[str]:
    yield f"{row.id} is {row.phase.value}: {reservation_reason(state, row)}"
    if row.phase is ReservationState.ENDED:
        return
    left_s = max(0.0, row.expires_at - state.now)
    yield f"expires in {left_s:.0f} s unless it is renewed (each renewal gives it {row.spec.ttl_s:g} s)"
    for unit in row.units:
        gone = f", being given back: {unit.reason}" if unit.leaving else ""
        yield f"  unit {unit.number} on {', '.join(unit.nodes)}{gone}"
    jobs = list(state.jobs_inside.get(row.id, ()))
    yield f"jobs in it: {list_text(jobs, JOBS_SHOWN) or 'none'}"
