"""Tracker of the reservations this process creates and follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from fray.errors import FrayError
from fray.model.messages.client import CreateReservation, Reservations, WatchReservation
from fray.model.reservations import ReservationId, ReservationInfo, ReservationSpec, ReservationState
from fray.net.codec import Bytes
from fray.runtime.controller_client.request import SendRequest


class ReservationRecord:
    """Last known state of one reservation; ``changed`` is set, and replaced, at each change."""

    def __init__(self, info: ReservationInfo) -> None:
        self.info = info
        self.changed = trio.Event()
        self.lost: FrayError | None = None
        """Error set when the session has ended, or the controller does not have the reservation any more."""

    @property
    def has_ended(self) -> bool:
        """Return whether no more changes will come."""
        return self.lost is not None or self.info.state is ReservationState.ENDED

    def update(self, info: ReservationInfo) -> None:
        if self.lost is None:
            self.info = info
            self._wake()

    def lose(self, error: FrayError) -> None:
        if not self.has_ended:
            self.lost = error
            self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class ReservationTracker:
    """Records of the reservations of one session."""

    def __init__(self, send: SendRequest) -> None:
        self._send = send
        # Not weak, unlike jobs: reservations are few, and a change must not be missed between two waits.
        self._records: dict[ReservationId, ReservationRecord] = {}

    async def create(self, spec: ReservationSpec) -> ReservationRecord:
        """Create a reservation and return its record. Raises any error of the controller."""
        await self._send(CreateReservation(spec=spec), on_answer=self._apply_reply)
        return self._records[spec.reservation_id]

    async def watch(self, reservation_id: ReservationId) -> ReservationRecord:
        """Follow a reservation and return its record. Raises NoSuchReservation."""
        known = self._records.get(reservation_id)
        # A lost record is final for its holders; a new watch begins with another record.
        if known is None or known.lost is not None:
            self._records.pop(reservation_id, None)
            message = WatchReservation(reservation_id=reservation_id)
            await self._send(message, on_answer=self._apply_reply)
        return self._records[reservation_id]

    def on_reservation_changed(self, info: ReservationInfo) -> None:
        record = self._records.get(info.reservation_id)
        if record is not None:
            record.update(info)

    def lose_all(self, error: FrayError) -> None:
        for record in self._records.values():
            record.lose(error)

    async def resubscribe(self) -> None:
        """Subscribe again after a reset: the controller has dropped the subscriptions."""
        for name, record in list(self._records.items()):
            if record.has_ended:
                continue
            try:
                await self._send(WatchReservation(reservation_id=name), on_answer=self._apply_reply)
            # The reservation may have been forgotten; each waits for its own news, so the others continue.
            except FrayError as error:
                record.lose(error)

    def _apply_reply(self, reply: Any, blobs: Sequence[Bytes]) -> None:
        assert isinstance(reply, Reservations)
        for info in reply.reservations:
            record = self._records.get(info.reservation_id)
            if record is None:
                self._records[info.reservation_id] = ReservationRecord(info)
            else:
                record.update(info)
