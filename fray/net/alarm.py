"""Alarm: a wait for a time that may be changed meanwhile."""

from __future__ import annotations

import trio


class Alarm:
    """One wait until ``deadline``, on Trio's clock.

    A class of its own for simulations, in which most waits are of this kind: they have one without a cancel scope.
    """

    def __init__(self, deadline: float) -> None:
        self._scope = trio.CancelScope(deadline=deadline)

    @property
    def deadline(self) -> float:
        """Time at which the wait ends; may be set before it and during it."""
        return self._scope.deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._scope.deadline = deadline

    async def wait(self, lot: trio.lowlevel.ParkingLot | None = None) -> None:
        """Wait until the deadline, or until the task is unparked from ``lot``."""
        with self._scope:
            if lot is None:
                await trio.sleep_forever()
            else:
                await lot.park()
