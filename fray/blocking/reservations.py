"""Reservations, for sync code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from fray.api.reservation import Reservation as NativeReservation
from fray.api.reservation import ReservationApi
from fray.api.reservation import ReservationEvents as Changes
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import BlockingContext, Portal
from fray.blocking.jobs import Job, job_list
from fray.model.reservations import ReservationConfig, ReservationEvent, ReservationId, ReservationInfo


class Reservation:
    """Handle of one reservation. As `fray.Reservation`."""

    def __init__(self, portal: Portal, reservation: NativeReservation) -> None:
        self._portal, self._native = portal, reservation

    @property
    def id(self) -> ReservationId:
        """Id of the reservation: ``reservation_id=`` of a launch, here and in every other process."""
        return self._native.id

    @property
    def info(self) -> ReservationInfo:
        """Latest state known here."""
        return self._native.info

    @property
    def expires_at(self) -> float:
        """Time of its expiry, in seconds since the epoch."""
        return self._native.expires_at

    wait_held = make_blocking(NativeReservation.wait_held)
    wait_units = make_blocking(NativeReservation.wait_units)
    wait_ended = make_blocking(NativeReservation.wait_ended)

    def changes(self, since: int | None = None) -> ReservationEvents:
        """Return its events: ``for change in reservation.changes()``. As `fray.Reservation.changes`."""
        return ReservationEvents(self._portal, self._portal.run(lambda: self._native.changes(since)))

    launch = make_blocking(NativeReservation.launch, Job)
    keep = make_blocking(NativeReservation.keep, job_list)
    renew = make_blocking(NativeReservation.renew)
    release = make_blocking(NativeReservation.release)

    def __repr__(self) -> str:
        return repr(self._native)


class ReservationEvents:
    """Events of one reservation: see `Reservation.changes`."""

    def __init__(self, portal: Portal, changes: Changes) -> None:
        self._portal, self._changes = portal, changes

    def __iter__(self) -> Iterator[ReservationEvent]:
        return self

    def __next__(self) -> ReservationEvent:
        """Return the next event. Raises ConnectionFailed as in `fray`."""
        try:
            return self._portal.call(self._changes.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None


class ReservationContext:
    """Context manager that `Cluster.open_reservation` returns."""

    def __init__(self, portal: Portal, manager: AbstractAsyncContextManager[NativeReservation]) -> None:
        self._portal = portal
        self._context: BlockingContext[NativeReservation] = BlockingContext(portal, manager)

    def __enter__(self) -> Reservation:
        return Reservation(self._portal, self._context.enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.leave(error)


class ReservationMixin:
    """Part of `fray.blocking.Cluster` about reservations."""

    _portal: Portal
    _native: Any

    create_reservation = make_blocking(ReservationApi.create_reservation)
    get_reservation = make_blocking(ReservationApi.get_reservation)
    release_reservation = make_blocking(ReservationApi.release_reservation)
    renew_reservation = make_blocking(ReservationApi.renew_reservation)
    list_reservations = make_blocking(ReservationApi.list_reservations)
    follow_reservation = make_blocking(ReservationApi.follow_reservation, Reservation)

    def open_reservation(self, config: ReservationConfig, *, wait_limit_s: float | None = None) -> ReservationContext:
        """Open a reservation for a block: ``with cluster.open_reservation(config) as reservation``. The block starts
        when the minimum is held; the reservation is renewed while it is open, and released at its end. As
        `fray.Cluster.open_reservation`.
        """
        return ReservationContext(self._portal, self._native.open_reservation(config, wait_limit_s=wait_limit_s))
