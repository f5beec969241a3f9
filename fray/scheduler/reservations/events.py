"""Numbered events of reservations, stored in their rows and written to the event log."""

from __future__ import annotations

from fray.model.ids import JobId, NodeName
from fray.model.reservations import EVENTS_LIMIT, ReservationEvent, ReservationEventKind
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.state.reservation_rows import ReservationRow, ReservedUnit
from fray.scheduler.state.tables import Tables


def record_event(
    state: Tables,
    out: EffectBuffer,
    reservation: ReservationRow,
    kind: ReservationEventKind,
    text: str = "",
    *,
    unit: ReservedUnit | None = None,
    nodes: tuple[NodeName, ...] = (),
    jobs: tuple[JobId, ...] = (),
    notice_s: float = 0.0,
) -> None:
    """Record an event of a reservation."""
    reservation.last_event += 1
    change = ReservationEvent(
        number=reservation.last_event,
        kind=kind,
        time=state.now,
        unit=unit.number if unit is not None else None,
        nodes=nodes or (unit.nodes if unit is not None else ()),
        jobs=jobs,
        notice_s=notice_s,
        text=text,
    )
    # The row is written whole with each change, and sent to each watcher. A follower that missed more is notified of
    # the gap.
    reservation.events = (*reservation.events[1 - EVENTS_LIMIT :], change)
    out.log_event(reservation.id, kind.value, _line(change))
    out.reservation_changed(reservation.id)


def _line(change: ReservationEvent) -> str:
    parts = [f"unit {change.unit} on {', '.join(change.nodes)}" if change.unit is not None else "", change.text]
    return ": ".join(part for part in parts if part)
